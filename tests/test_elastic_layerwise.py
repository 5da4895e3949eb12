"""Layer-wise sums: each starts when its layer is whole and its turn has come, and none is left out."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from experiments.oobleck.chaos_job import batch, elastic_job
from runtime.elastic.job import ElasticJob, plan_step
from runtime.elastic.layerwise import LayerwiseGradients, last_backwards
from runtime.elastic.replan import start_layout
from runtime.elastic.world import build
from runtime.step.stage_module import StageModule
from runtime.step.timing import Recorder
from runtime.world.clock import HOST
from workbench.plan.lower import lower
from workbench.plan.lowered import Lowered
from workbench.schedule.action import Action, Pass, parse_action


class Started:
    """A sum that has ended."""

    def wait(self, timeout: object = None) -> None:
        pass

    def get_future(self) -> Any:
        return SimpleNamespace(add_done_callback=lambda call: call(None))


class _Visit(torch.autograd.Function):
    """Notes the backward's passing by."""

    @staticmethod
    def forward(context: Any, total: torch.Tensor, seen: list[int], sums: list[torch.Tensor]) -> torch.Tensor:
        context.seen, context.sums = seen, sums
        return total.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        context.seen.append(len(context.sums))
        return gradient, None, None


class Watched:
    """One rank of two replicas, without its peer: the groups whose sums were started, in order."""

    def __init__(self) -> None:
        job: ElasticJob = elastic_job(2)
        plan = plan_step(job, start_layout(job, ("a", "b")), batch(0))
        self.lowered: Lowered = lower(plan)
        self.module: StageModule = build(job, plan, plan.stages_on[0][0])
        self.sums: list[torch.Tensor] = []
        mesh: Any = SimpleNamespace(rank=0, clock=HOST, start_all_reduce=self._start)
        self.gradients = LayerwiseGradients(self.lowered, mesh, [self.module], recorder=Recorder(0))

    def _start(self, bucket: torch.Tensor, ranks: tuple[int, ...]) -> Started:
        assert ranks == (0, 1)
        self.sums.append(bucket)
        return Started()

    def pass_back(self, *layers: int) -> list[int]:
        """One backward that comes to layers in this order; how many sums had started at each of them.

        Every gradient is the layer's number + 1, from the embedding and from the head for the shared one.
        """
        seen: list[int] = []
        total = torch.zeros((), requires_grad=True)
        for layer in reversed(layers):
            weights = list(self.module.layers[layer].parameters())
            total = _Visit.apply(
                total + (layer + 1) * sum(weight.sum() for weight in weights), seen, self.sums
            )
        total.backward()
        return seen

    def reduce(self) -> None:
        self.gradients.reduce(Action(0, Pass.REDUCE_GRAD))


@pytest.fixture
def watched() -> Watched:
    return Watched()


def test_a_layer_is_summed_before_the_layers_in_front_of_it_have_gradients(watched):
    watched.gradients.watch(0)
    assert watched.pass_back(*range(7, -1, -1)) == list(range(8))  # the shared table last, with the embedding
    assert len(watched.sums) == len(watched.lowered.groups) == 8
    watched.reduce()
    assert len(watched.sums) == 8  # nothing twice
    watched.gradients.finish()
    assert {float(w.grad.mean()) for w in watched.module.layers[3].parameters()} == {4.0}


def test_sums_start_in_the_order_of_the_plan_whatever_is_whole_first(watched):
    watched.gradients.watch(0)
    assert watched.pass_back(*range(8)) == [0] * 8
    sizes = [group.num_elements for group in watched.lowered.groups]
    assert [len(bucket) for bucket in watched.sums] == sizes


def test_backwards_before_the_last_start_nothing_and_hooks_go_with_the_step(watched):
    watched.pass_back(*range(7, -1, -1))
    assert watched.sums == []
    watched.gradients.watch(0)
    watched.pass_back(7)
    watched.reduce()
    watched.gradients.finish()
    assert len(watched.sums) == len(watched.lowered.groups)
    watched.pass_back(*range(7, -1, -1))
    assert len(watched.sums) == len(watched.lowered.groups)


def test_layers_that_the_last_microbatch_did_not_reach_follow_with_the_reduction(watched):
    watched.gradients.watch(0)
    watched.pass_back(7, 6)
    assert len(watched.sums) == 2
    watched.reduce()
    assert len(watched.sums) == len(watched.lowered.groups)
    watched.gradients.finish()
    assert all(not w.grad.any() for w in watched.module.layers[1].parameters())


def test_the_last_backward_of_a_stage_is_the_one_after_which_its_gradients_are_whole():
    def program(text: str) -> tuple[Action, ...]:
        return tuple(map(parse_action, text.split()))

    assert last_backwards(program("0F0 0F1 0B0 0B1 0REDUCE_GRAD STEP")) == {3: 0}
    assert last_backwards(program("0F0 1F0 1B0 0B0 1REDUCE_GRAD 0REDUCE_GRAD STEP")) == {2: 1, 3: 0}
    assert last_backwards(program("0F0 0I0 0W0 1F0 1B0 STEP")) == {4: 1}
    assert last_backwards(program("0F0 STEP")) == {}
