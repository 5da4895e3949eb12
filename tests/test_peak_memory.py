"""A plan's predicted peak beside the measured one: by tensors on a CPU, by the allocator on a GPU."""

import pytest
import torch

from experiments.fidelity.cases import image_work, text_work
from experiments.fidelity.work import LLM, UNMEASURED, Work, plan_of, this_machine
from runtime.emulation.peak_memory import PeakMemory, peak_memory
from runtime.run_settings import RunSettings
from runtime.step.activations import Allocations, AllocatorBytes, watch
from workbench.plan.plan import Plan
from workbench.timing.accept import accept

GPU = torch.device("cuda", 0)


def one_rank_plan(work: Work, **layers: int) -> Plan:
    cuts = {module: ((count, (0,)),) for module, count in layers.items()}
    return plan_of(work, this_machine(UNMEASURED, 1), cuts, samples=(1,) * len(work.batch))


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(one_rank_plan(text_work(), llm=8), id="text"),
        pytest.param(one_rank_plan(image_work("everything"), vision=6, llm=6), id="images"),
        pytest.param(one_rank_plan(image_work("projector"), vision=6, llm=6), id="frozen"),
    ],
)
def test_the_account_holds_for_one_rank(plan: Plan) -> None:
    """Never more than predicted, and within the 3 % that runs on several ranks are held to."""
    peak = peak_memory(accept(plan)[0], RunSettings())
    assert 0 < peak.measured_bytes <= peak.predicted_bytes
    assert 0 <= peak.error <= 0.03


def test_error_is_predicted_over_measured() -> None:
    assert PeakMemory(rank=0, predicted_bytes=110, measured_bytes=100).error == pytest.approx(0.1)


def test_several_ranks_share_one_allocator() -> None:
    work = text_work()
    plan = plan_of(work, this_machine(UNMEASURED, 2), {LLM: ((4, (0,)), (4, (1,)))}, samples=(1,) * 8)
    with pytest.raises(ValueError, match="plans of one rank, got 2 ranks"):
        peak_memory(accept(plan)[0], RunSettings())


class Allocator:
    """What torch says of a GPU's memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, held: int) -> None:
        self.held = self.most = held
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: self.held)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: self.most)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", self.reset)

    def reset(self, device: torch.device) -> None:
        assert device == GPU
        self.most = self.held

    def take(self, num_bytes: int) -> None:
        self.held += num_bytes
        self.most = max(self.most, self.held)


def test_a_gpus_allocator_counts_the_step_and_not_its_data(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.zeros(25)  # 100 bytes
    allocator = Allocator(monkeypatch, held=100)
    memory = watch([weight, weight.view(5, 5)], GPU)
    assert isinstance(memory, AllocatorBytes)
    allocator.take(1000)  # the step's data, made before it begins
    allocator.take(5000)
    allocator.take(-5000)  # a peak before the step
    with memory:
        assert memory.num_bytes == 100
        allocator.take(40)  # activations
        allocator.take(-30)
        memory.resize(7)  # the allocator has seen it already
        assert memory.take_peak().num_bytes == 140
        assert memory.take_peak().num_bytes == memory.num_bytes == 110
    allocator.take(90)  # what the first step leaves: an optimizer's state
    with memory:
        assert memory.take_peak().num_bytes == 200


def test_a_cpu_counts_tensors() -> None:
    assert isinstance(watch([], torch.device("cpu")), Allocations)
