"""Muon where ranks hold parts of matrices: weights as in one process; state and time as planned."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import prod
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from experiments.fidelity.memory import measure
from runtime.emulation.emulate import emulate
from runtime.launch import RunResult, run_lowered
from runtime.run_settings import Collect, RunSettings
from runtime.step.flat_part import FlatPart
from runtime.world.pool import Pool
from tests import test_folded_token_shards
from tests.plans import LINK, disjoint_plan
from tests.test_fsdp import IN_TWO, assert_trains_as_one, sharded_parameters
from tests.test_muon import assert_goes_on, by_muon
from tests.test_next_batches import (
    BATCHES,
    FOLLOWING,
    assert_last_step,
    one_process,
    plan_with_owners,
    settings_of,
)
from tests.test_parity import SEED, assert_parity, execute, mixed
from tests.test_sharded_optimizer import WHOLE, on_fewer_ranks, sharded
from tests.test_tensor_parallel import CONFIGS, encoders, laid_out
from tests.tiny_valm import tiny_batch
from workbench.cost.collectives import Collective
from workbench.cost.model import CostModel
from workbench.cost.profile import load_profile
from workbench.memory.account import static_holders
from workbench.model.layer import LayerKind
from workbench.model.muon import muon_matrices, newton_schulz_flop
from workbench.model.trained import num_trained
from workbench.plan.check import check
from workbench.plan.kernels import Kernels
from workbench.plan.lower import lower
from workbench.plan.matrix_pools import matrix_owners, matrix_pools
from workbench.plan.optimizer import Optimizer
from workbench.plan.plan import Plan, Precision, Sharding
from workbench.plan.runnable import check_runnable
from workbench.schedule.action import Pass
from workbench.timing.muon import matrix_bytes, products_s
from workbench.timing.price import price, update_bytes

F64 = Precision.FLOAT64


def replicas_of(count: int, instances: int = 1, *, tied: bool = False) -> Plan:
    """Each replica on one rank, with sharded optimizer state."""
    images, clips = (1, 2, 0, 1), (1, 0, 0, 2)
    plan = disjoint_plan(mixed("everything", tied=tied), tiny_batch(images, clips), WHOLE, replicas=count)
    return by_muon(sharded(on_fewer_ranks(plan, count), instances))


@pytest.mark.parametrize(
    ("count", "instances", "tied"),
    [(2, 1, True), (4, 2, False), (4, 1, False)],
    ids=["tied", "instances", "one-instance"],
)
def test_sharded_state_trains_as_one_process(count: int, instances: int, tied: bool, pool: Pool) -> None:
    plan = replicas_of(count, instances, tied=tied)
    check(plan)
    check_runnable(plan)
    result, reference = execute(plan, pool, clip_norm=0.05)
    assert_parity(plan, result, reference, F64)


@pytest.mark.parametrize(("count", "instances"), [(2, 1), (4, 2)], ids=["two-stages", "instances"])
def test_sharded_parameters_train_as_one_process(count: int, instances: int, pool: Pool) -> None:
    """Every layer a flat tensor of its own, or several; those of two instances summed over both."""
    cuts = IN_TWO if count == 2 else None
    given = {} if cuts is None else {"cuts": cuts}
    batch = tiny_batch((1, 2, 0, 1), (1, 0, 0, 2))
    plan = sharded_parameters(mixed("everything"), batch, replicas=count, instances=instances, **given)
    assert_trains_as_one(by_muon(plan), pool)


def test_context_parallel_ranks_share_the_state(pool: Pool) -> None:
    layouts = {"image": (1, 1, 1, 1), "audio": (1, 1, 1, 1), "llm": (2, 1, 2, 1)}
    plan = by_muon(sharded(laid_out(encoders(CONFIGS["qwen3"]), layouts), modules=("llm",)))
    result, reference = execute(plan, pool, clip_norm=0.01)
    assert_parity(plan, result, reference, F64)


def steps(plan: Plan, pool: Pool, precision: Precision) -> RunResult:
    settings = RunSettings(seed=SEED, precision=precision, steps=3, collect=Collect.STATE, timeout_s=60.0)
    return run_lowered(lower(plan), settings, pool=pool)


@pytest.mark.parametrize("count", [1, 2])
def test_wide_copies_are_updated(count: int, pool: Pool) -> None:
    """Three steps in bfloat16 with float32 copies: parts have the bits of whole copies on two ranks."""
    plan = replicas_of(count)
    settings = replace(plan.settings, precision=Precision.BFLOAT16, optimizer_precision=Precision.FLOAT32)
    plan = replace(plan, settings=settings)
    whole = replace(plan, settings=replace(settings, modules=()))
    adamw = replace(plan, settings=replace(settings, optimizer=Optimizer.ADAMW))
    ours, theirs, others = (steps(each, pool, Precision.BFLOAT16) for each in (plan, whole, adamw))
    assert ours.losses == theirs.losses
    assert ours.losses[0] == others.losses[0]
    assert ours.losses[2] != others.losses[2]
    for mine, other in zip(ours.states, theirs.states, strict=True):
        assert all(torch.equal(mine.weights[key], weight) for key, weight in other.weights.items())


def test_momenta_go_on_over_batches(pool: Pool) -> None:
    """Four steps of other batches, each with an executor of its own, as one process does them."""
    plan = by_muon(sharded(plan_with_owners("everything", cp=2, llm=(3, 3)), modules=("llm",)))
    result = run_lowered(lower(plan), settings_of(4, following=FOLLOWING), pool=pool)
    references = one_process(plan, 4)
    assert result.losses == pytest.approx([reference.loss for reference in references], rel=1e-10)
    assert_last_step(replace(plan, batch=BATCHES[2]), result, references[-1])


def test_an_emulation_does_the_same() -> None:
    settings = RunSettings(seed=SEED, precision=F64, warmup=1, steps=1, collect=Collect.STATE)
    plan = replicas_of(2)
    whole = replace(plan, settings=replace(plan.settings, modules=()))
    ours, theirs = (emulate(lower(each), settings) for each in (plan, whole))
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-12)


def test_a_run_goes_on_from_a_checkpoint_to_the_last_bit(pool: Pool, tmp_path: Path) -> None:
    """Momenta of parts."""
    assert_goes_on(replicas_of(2), pool, tmp_path)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.integers(1, 5))
def test_pieces_are_every_element_once(sizes: Sequence[int], num_ranks: int) -> None:
    """Of all ranks together; an update of a piece is one of the part."""
    weights = [nn.Parameter(torch.zeros(size)) for size in sizes]
    size = -(-sum(sizes) // num_ranks)
    flat = torch.arange(float(size * num_ranks))
    found: list[list[float]] = [[] for _ in sizes]
    for member in range(num_ranks):
        own = nn.Parameter(flat[member * size :][:size].clone())
        part = FlatPart(own=own, held=tuple(weights), ranks=tuple(range(num_ranks)), member=member)
        for number, cut in enumerate(part.cut_weights()):
            assert [stop for _, stop in cut.spans[:-1]] == [start for start, _ in cut.spans[1:]]
            first, last = cut.spans[member]
            assert (cut.piece is None) == (first == last)
            if cut.piece is not None:
                found[number] += cut.piece.tolist()
                cut.piece.data.neg_()
        real = max(0, min(size, sum(sizes) - member * size))
        assert own.tolist() == [
            *(-flat[member * size :][:real]).tolist(),
            *flat[member * size + real :][: size - real].tolist(),
        ]
    edges = [sum(sizes[:number]) for number in range(len(sizes) + 1)]
    assert found == [flat[start:stop].tolist() for start, stop in pairwise(edges)]


@given(
    st.lists(st.tuples(st.integers(1, 64), st.integers(1, 64)), min_size=1, max_size=12), st.integers(1, 5)
)
def test_owners_are_balanced(shapes: list[tuple[int, int]], num_ranks: int) -> None:
    """Within Graham's bound of the mean and the largest; loads do not depend on the order."""

    def loads(ordered: list[tuple[int, int]]) -> list[int]:
        owners = matrix_owners(ordered, num_ranks)
        flop = [newton_schulz_flop(shape) for shape in ordered]
        return [sum(f for f, o in zip(flop, owners, strict=True) if o == rank) for rank in range(num_ranks)]

    found = loads(shapes)
    largest = max(map(newton_schulz_flop, shapes))
    assert max(found) <= sum(found) / num_ranks + largest
    assert loads(shapes[::-1]) == found


@pytest.mark.parametrize("instances", [1, 2])
def test_state_is_as_planned(instances: int) -> None:
    """One momentum of matrices, two moments of all others, each once an instance."""
    plan = replicas_of(4, instances)
    plan = replace(plan, settings=replace(plan.settings, kernels=Kernels.EAGER))
    for module in plan.model.modules:
        expected = count = 0
        for layer in module.layers:
            matrices = {each.name for each in muon_matrices(layer)}
            assert bool(matrices) == (layer.kind is LayerKind.BLOCK)
            for parameter in layer.parameters():
                expected += 4 * parameter.num_elements * (1 if parameter.name in matrices else 2)
                count += 1
        held = sum(static_holders(plan, rank)[f"optimizer of {module.name}"] for rank in plan.ranks)
        assert 0 <= held - instances * expected < len(plan.ranks) * count


@pytest.mark.parametrize(
    ("precision", "wide"), [(Precision.FLOAT32, None), (Precision.BFLOAT16, Precision.FLOAT32)]
)
@pytest.mark.parametrize("is_sharded", [False, True])
def test_no_rank_holds_more_than_predicted(
    precision: Precision, wide: Precision | None, is_sharded: bool, pool: Pool
) -> None:
    plan = by_muon(disjoint_plan(mixed("everything"), tiny_batch(), WHOLE, replicas=2))
    plan = sharded(plan) if is_sharded else plan
    how = {"kernels": Kernels.EAGER, "precision": precision, "optimizer_precision": wide}
    plan = replace(plan, settings=replace(plan.settings, **how))
    for row in measure("muon", plan, pool):
        assert 0.8 * row.predicted_bytes <= row.measured_bytes <= row.predicted_bytes, row


def test_no_rank_with_sharded_parameters_holds_more_than_predicted(pool: Pool) -> None:
    plan = by_muon(sharded_parameters(mixed("everything"), tiny_batch(), replicas=2, kernels=Kernels.EAGER))
    for row in measure("muon", plan, pool):
        assert 0.95 * row.predicted_bytes <= row.measured_bytes <= row.predicted_bytes, row


def test_a_step_is_priced_as_it_is_executed() -> None:
    """Its own part of everything, the products of the busiest owner, and two exchanges with the owners."""
    plan = by_muon(disjoint_plan(mixed("llm"), tiny_batch((1, 0, 0, 1)), WHOLE, replicas=4))
    plan = sharded(
        replace(plan, settings=replace(plan.settings, precision=Precision.BFLOAT16)), modules=("llm",)
    )
    lowered, cost = lower(plan), CostModel(load_profile("a40"))
    (shared,) = matrix_pools(plan)
    shapes = [m.shape for layer in plan.model.module("llm").layers for m in muon_matrices(layer)]
    owned: list[list[tuple[int, ...]]] = [[] for _ in shared.ranks]
    for shape, owner in zip(shapes, matrix_owners(shapes, 4), strict=True):
        owned[owner].append(shape)
    busiest_s = max(sum(products_s(shape, plan.settings, cost) for shape in each) for each in owned)
    elements = sum(map(prod, shapes))
    most_bytes = 2 * max(sum(map(prod, each)) for each in owned)  # in bfloat16
    others = num_trained(plan.model.module("llm").layers) - elements
    update_s = cost.update_s(others / 4 * update_bytes(plan.settings, cost))
    update_s += busiest_s + cost.update_s(elements / 4 * (matrix_bytes(plan.settings) + 4 * 2))
    exchange_s = cost.between_ranks_s(Collective.ALL_TO_ALL, most_bytes, 4, LINK)
    gathers = [group for group in lowered.groups if group.weights[0].module == "llm"]
    gathers_s = sum(cost.between_ranks_s(Collective.ALL_GATHER, 2 * g.num_elements, 4, LINK) for g in gathers)
    factor, overhead_s = cost.profile.pipeline_factor(Pass.STEP), cost.profile.overhead_s(Pass.STEP)
    assert shared.ranks == gathers[0].ranks
    for rank in shared.ranks:
        step_s = price(lowered, cost).step_s(rank)
        assert step_s == pytest.approx(overhead_s + gathers_s + 2 * exchange_s + factor * update_s)


@pytest.mark.parametrize("level", [Sharding.NONE, Sharding.OPTIMIZER, Sharding.PARAMETERS])
def test_equal_replicas_are_judged_as_the_whole(level: Sharding) -> None:
    """One of four is simulated, and its ranks wait for owners in the others."""
    plan = by_muon(test_folded_token_shards.sharded(sharding=level))
    assert {len(each.ranks) for each in matrix_pools(plan)} == ({1} if level is Sharding.NONE else {8})
    assert test_folded_token_shards.holds(plan) == 1
