"""A backward in two passes: the same gradients, less held in between, in any legal order."""

import gc
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from runtime.step.activations import Allocations
from runtime.step.weight_gradient import SplitBackward
from runtime.world.pool import Pool
from tests.plans import disjoint_plan
from tests.split_programs import Order, split, weights_anywhere, weights_last, weights_last_reversed
from tests.test_context_parallel_step import plan_of, with_owners
from tests.test_parity import CUTS, MIXES, assert_same, mixed, on_ranks
from tests.tiny_valm import tiny_batch
from workbench.plan.plan import ModuleSettings, Plan, Precision, Recompute, Settings

F64 = torch.float64


class Mixture(nn.Module):
    """Every operator that is taken apart, one weight used twice, one table read without its module."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6, padding_idx=3)
        self.sound = nn.Conv1d(6, 6, kernel_size=3, stride=2, padding=1)
        self.pixels = nn.Conv2d(1, 2, kernel_size=2, stride=2, padding="valid", bias=False)
        self.odd = nn.Conv1d(6, 6, kernel_size=3, padding="same")
        self.norm = nn.LayerNorm(6)
        self.twice = nn.Linear(6, 6)
        self.frozen = nn.Linear(6, 6)
        self.head = nn.Linear(6, 5, bias=False)
        self.frozen.requires_grad_(False)

    def inner(self, x: Tensor) -> Tensor:
        x = x + self.twice(functional.gelu(self.norm(x)))
        return self.frozen(functional.gelu(self.twice(x)))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        x = self.sound((x + self.table(ids) + self.table.weight[:8])[None].transpose(1, 2))
        x = self.odd(x)[0].t()
        x = torch.cat([x, functional.pad(self.pixels(x[None, None])[0, 0], (0, 3))])
        x = checkpoint(self.inner, x, use_reentrant=False)
        return self.head(x)


def mixture() -> tuple[Mixture, Tensor, Tensor]:
    torch.manual_seed(5)
    return Mixture().to(F64), torch.randn(8, 6, dtype=F64), torch.tensor([1, 3, 3, 0, 10, 1, 2, 4])


def gradients_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def assert_close(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert (ours[name] - gradient).norm() <= 1e-12 * gradient.norm(), name


@pytest.mark.parametrize("whole_second", [False, True], ids=["both-split", "second-whole"])
def test_two_microbatches_in_any_order_give_autograds_gradients(whole_second: bool) -> None:
    module, x, ids = mixture()
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    for index, leaf in enumerate(inputs):
        module(leaf, ids.roll(index)).square().sum().backward()
    expected, passed_on = gradients_of(module), [leaf.grad for leaf in inputs]

    module, x, ids = mixture()
    parted = SplitBackward(module)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    outputs = [module(leaf, ids.roll(index)) for index, leaf in enumerate(inputs)]
    with parted.leaving() as first:
        outputs[0].backward(2 * outputs[0].detach())
    assert module.head.weight.grad is None
    if whole_second:
        outputs[1].backward(2 * outputs[1].detach())
    else:
        with parted.leaving() as work:
            outputs[1].backward(2 * outputs[1].detach())
        work.run()
    for leaf, gradient in zip(inputs, passed_on, strict=True):
        assert torch.allclose(leaf.grad, gradient, rtol=1e-13, atol=0)
    assert module.head.weight.grad is not None
    first.run()
    assert len(first) == 0
    assert_close(gradients_of(module), expected)


def test_a_module_without_an_input_that_asks_still_trains() -> None:
    module, x, ids = mixture()
    module(x, ids).sum().backward()
    expected = gradients_of(module)
    module, x, ids = mixture()
    parted = SplitBackward(module)
    output = module(x, ids)
    with parted.leaving() as work:
        output.backward(torch.ones_like(output))
    work.run()
    assert_close(gradients_of(module), expected)


def test_frozen_modules_leave_nothing() -> None:
    module, x, ids = mixture()
    module.requires_grad_(False)
    parted = SplitBackward(module)
    leaf = x.requires_grad_()
    output = module(leaf, ids)
    with parted.leaving() as work:
        output.backward(torch.ones_like(output))
    assert len(work) == 0
    assert leaf.grad is not None
    with torch.no_grad():
        assert not module(leaf, ids).requires_grad


def test_between_the_passes_only_inputs_and_output_gradients_are_held() -> None:
    """A gated block: of what autograd kept, norms and activations are given back after I."""
    width, tokens = 64, 512
    torch.manual_seed(1)
    norm, gate, up = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
    down = nn.Linear(2 * width, width)
    module = nn.ModuleList([norm, gate, up, down])
    parted = SplitBackward(module)
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    of_token = tokens * width * 4
    gc.collect()
    with Allocations(module.parameters()) as memory:
        still = memory.num_bytes
        x = torch.randn(tokens, width, requires_grad=True)
        normed = norm(x)
        output = x + down(functional.silu(gate(normed)) * up(normed))
        with parted.leaving() as work:
            output.backward(torch.ones_like(output))
        del x, normed, output
        held = memory.num_bytes - still
        # Read: the normed once for gate and up, the product; written: gate, up, down.
        assert held == of_token * (1 + 2 + 2 + 2 + 1)
        assert held == sum({t.data_ptr(): t.nbytes for t in work.tensors}.values())
        work.run()
        assert memory.num_bytes == still


ORDERS: dict[str, Order] = {
    "adjacent": lambda passes: passes,
    "weights-last": weights_last,
    "weights-last-reversed": weights_last_reversed,
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("mix", ["projectors-and-llm", "everything"])
def test_one_pipeline(mix: str, order: str, pool: Pool) -> None:
    assert_same(split(disjoint_plan(mixed(mix), tiny_batch(), CUTS), ORDERS[order]), pool)


@pytest.mark.parametrize("seed", range(4))
def test_weights_anywhere_behind_their_inputs(seed: int, pool: Pool) -> None:
    plan = disjoint_plan(mixed([*MIXES][seed]), tiny_batch(), CUTS)
    assert_same(split(plan, weights_anywhere(seed)), pool)


RECOMPUTED = Settings(
    precision=Precision.FLOAT32,
    modules=tuple(
        ModuleSettings(module=name, recompute=Recompute.FULL) for name in ("vision", "audio", "llm")
    ),
)


def two_replicas() -> Plan:
    cuts = {"vision": (5,), "audio": (4,), "llm": (3, 3)}
    return disjoint_plan(mixed("everything", tied=True), tiny_batch(), cuts, replicas=2)


def recomputed() -> Plan:
    return replace(disjoint_plan(mixed("everything"), tiny_batch(), CUTS), settings=RECOMPUTED)


OTHERS: dict[str, Callable[[], Plan]] = {
    "tied-and-replicated": two_replicas,
    "recomputed": recomputed,
    "stages-that-share-ranks": lambda: on_ranks(
        mixed("projectors-and-llm"), tiny_batch(), encoders=2, llm=(3, 3)
    ),
    "one-rank": lambda: on_ranks(mixed("everything", tied=True), tiny_batch(), encoders=1, llm=(6,)),
    "context-parallel": lambda: with_owners(plan_of("everything", "mp"), "zigzag"),
    "context-parallel-recomputed": lambda: replace(
        with_owners(plan_of("projectors-and-llm", "ee"), "lpt"), settings=RECOMPUTED
    ),
    "missing-modalities": lambda: disjoint_plan(
        mixed("everything"), tiny_batch((1, 0, 1, 0), (0, 1, 0, 1)), CUTS
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_layouts(name: str, pool: Pool) -> None:
    assert_same(split(OTHERS[name](), weights_anywhere(7)), pool)
