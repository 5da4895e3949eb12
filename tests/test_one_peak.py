"""A plan has one peak of memory: what it is accepted by and a timeline shows, no less than a rank holds."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from runtime.launch import run_lowered
from runtime.run_settings import Collect, RunSettings
from runtime.world.pool import Pool
from sim.predict import predict
from sim.step.engine import simulate
from tests.test_fsdp import sharded_parameters
from tests.test_parity import SEED, mixed
from tests.tiny_valm import tiny_batch
from workbench.cost.model import CostModel
from workbench.cost.profile import load_profile
from workbench.memory.account import memory_table
from workbench.memory.account import peak_bytes as planned_peak_bytes
from workbench.metrics import peak_bytes
from workbench.plan.kernels import Kernels
from workbench.plan.lower import lower
from workbench.plan.parameter_shards import sharded_stages, stages_reduced_once
from workbench.plan.plan import Plan
from workbench.schedule.action import COMPUTE, REDUCTIONS, Action, Pass
from workbench.schedule.sharded import ReshardAfter, waits_of
from workbench.timing.accept import accept

KINDS: dict[str, Callable[[], Plan]] = {
    "sharded": lambda: sharded_parameters(mixed("llm"), tiny_batch(), replicas=2),
    "instances": lambda: sharded_parameters(mixed("llm"), tiny_batch(), replicas=4, instances=2),
    "once": lambda: sharded_parameters(
        mixed("llm"), tiny_batch(), replicas=4, instances=2, reshard_after=ReshardAfter.STEP
    ),
    "sums": lambda: sharded_parameters(mixed("everything"), tiny_batch(), replicas=2, modules=()),
}


def random_durations(slower: float) -> Callable[[Action], float]:
    """Of passes up to 1 s, of all else up to `slower` s."""
    draw = random.Random(SEED)
    return lambda action: draw.random() * (1.0 if action.kind in COMPUTE else slower)


@pytest.mark.parametrize("kind", KINDS)
def test_the_peak_does_not_depend_on_how_long_anything_takes(kind: str) -> None:
    """Exchanges at once, or ended long behind the passes beside them."""
    lowered = lower(KINDS[kind]())
    table = memory_table(lowered)
    for slower in (0.0, 0.1, 1.0, 10.0, 100.0):
        trace = simulate(lowered, random_durations(slower), memory=table)
        assert peak_bytes(trace) == planned_peak_bytes(lowered, table)
        times_s = [(sample.rank, sample.time_s) for sample in trace.memory]
        assert times_s == sorted(times_s)


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_is_accepted_up_to_the_peak_that_its_prediction_shows(kind: str) -> None:
    plan, cost = KINDS[kind](), CostModel(load_profile("H100"))
    most = max(peak_bytes(predict(*accept(plan), cost)).values())
    for memory_bytes in (most, most - 1):
        nodes = tuple(replace(node, memory_bytes=memory_bytes) for node in plan.cluster.nodes)
        given_less = replace(plan, cluster=replace(plan.cluster, nodes=nodes))
        if memory_bytes == most:
            assert max(peak_bytes(predict(*accept(given_less), cost)).values()) == most
            continue
        with pytest.raises(ValueError, match=rf"want memory_gib >= [0-9.e-]+ \({most:,} bytes\)"):
            accept(given_less)


@pytest.mark.parametrize("kind", ["sharded", "instances", "once"])
def test_whole_gradients_stay_until_the_first_action_that_waits_for_them(kind: str) -> None:
    """Told by `waits_of`, action by action: what a rank gives back between passes are they, and no more.

    Sums over instances of what is reduced once wait beside the passes: when they start is not known.
    """
    plan = KINDS[kind]()
    once = stages_reduced_once(plan)
    table, units = memory_table(lower(plan)), sharded_stages(plan)
    for rank in plan.ranks:
        program, released = plan.program[rank], table.released_bytes[rank]
        waits, expected = waits_of(program, once), dict.fromkeys(range(len(program)), 0)
        first: dict[Action, int] = {}
        for place, action in enumerate(program):
            for exchange in (
                () if action.kind in REDUCTIONS and action.stage in once else waits.get(action, ())
            ):
                first.setdefault(exchange, place)
        seen: set[int | None] = set()
        for action in (each for each in program if each.kind is Pass.REDUCE_SCATTER):
            unit = units[action.stage or 0]
            sizes = sum(map(unit.padded, unit.trained)), sum(map(unit.part, unit.trained))
            given = sizes[0] + (sizes[1] if action.stage in seen else 0)  # a first part becomes the sum
            expected[first[action] - 1] += given * plan.settings.gradient_bytes
            seen.add(action.stage)
        for place, action in enumerate(program):
            if action.kind is Pass.ALL_GATHER:
                assert released[place] == expected[place], f"rank {rank} in {action}"
            elif expected[place]:
                assert released[place] >= expected[place], f"rank {rank} in {action}"


def test_a_rank_holds_no_more_than_its_account_between_any_two_passes(pool: Pool) -> None:
    """Not the step's peak alone. Gradients of the step before still lie there at the first pass."""
    plan = sharded_parameters(
        mixed("everything"), tiny_batch((0,) * 8, (0,) * 8), replicas=4, kernels=Kernels.EAGER
    )
    lowered = lower(plan)
    settings = RunSettings(seed=SEED, warmup=1, timeout_s=30.0, collect=Collect.MEMORY)
    (trace,) = run_lowered(lowered, settings, pool=pool).traces
    table = memory_table(lowered)
    for rank in plan.ranks:
        heights = [sample.num_bytes for sample in trace.memory if sample.rank == rank][::2]
        held = most = table.static_bytes[rank]
        program, lines = (
            plan.program[rank],
            zip(table.acquired_bytes[rank], table.released_bytes[rank], strict=True),
        )
        expected = []
        for action, (taken, released) in zip(program, lines, strict=True):
            held += taken
            most = max(most, held)
            held -= released
            if action.kind in (*COMPUTE, Pass.FREE, Pass.STEP):
                expected.append((str(action), most))
                most = held
        assert len(heights) == len(expected)
        for measured, (action, predicted) in list(zip(heights, expected, strict=True))[1:]:
            assert measured <= predicted, f"rank {rank} up to {action}: {measured}, predicted {predicted}"
