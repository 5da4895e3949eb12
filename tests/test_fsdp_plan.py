"""Shared-out weights in a plan: rounds that all replicas agree on, what they cost, what is refused."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.step.engine import simulate
from tests.layout_jobs import vision_language
from tests.plans import LINK, chain_module, cluster, sample, two_encoders
from tests.test_fsdp import ALL_ON_ONE, IN_TWO, sharded_parameters
from tests.test_parity import mixed
from tests.test_sim_sweep import assert_equal_times
from tests.tiny_valm import tiny_batch
from workbench.cost.collectives import all_gather_s, reduce_scatter_s
from workbench.cost.model import CostModel
from workbench.cost.profile import CollectiveTable, MachineLink, Table, ideal_profile, load_profile
from workbench.data.sample import Sample
from workbench.job.job import Job
from workbench.job.module_layout import ModuleLayout
from workbench.memory.account import peak_bytes
from workbench.model.model_graph import ModelGraph, connect
from workbench.plan.lower import lower
from workbench.plan.plan import Plan, Precision, Settings, Sharding
from workbench.planner.layout_choice import Mode
from workbench.planner.layout_search import fastest_layout
from workbench.schedule.action import COMPUTE, FSDP, STEP, Action, Pass, parse_action
from workbench.schedule.choice import Schedule, ScheduleKind
from workbench.schedule.parts import Programs
from workbench.schedule.sharded import ReshardAfter, waits_of, with_rounds
from workbench.strategies import fsdp
from workbench.strategies.registry import PLANNERS
from workbench.timing.accept import accept
from workbench.timing.price import price

A40 = CostModel(load_profile("A40"))
CUTS = {"vision": ((0, 3),), "audio": ((0, 2),), "llm": ((0, 4),)}
NAMES = ("vision", "audio", "llm")


def actions(text: str) -> tuple[Action, ...]:
    return tuple(map(parse_action, text.split()))


def chain(num_layers: int, *, trainable: bool = True) -> ModelGraph:
    return connect(
        "chain",
        (chain_module("vision", "image", (False,)), chain_module("llm", "text", (trainable,) * num_layers)),
    )


def test_weights_travel_while_the_layer_before_computes() -> None:
    """Two layers and two microbatches: the last layer stays whole between its forward and its backward."""
    programs = {(0, 1): actions("0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1")}
    found = with_rounds(programs, [(0,), (1,)], trained=[0, 1])
    assert found[0, 1] == actions(
        "0ALL_GATHER0 1ALL_GATHER0 0F0 0FREE0 0ALL_GATHER1 1F0 1B0 1FREE0 1REDUCE_SCATTER0 "
        "1ALL_GATHER1 0B0 0F1 0FREE1 0REDUCE_SCATTER1 0ALL_GATHER2 1F1 1B1 1FREE1 1REDUCE_SCATTER1 "
        "0B1 0FREE2 0REDUCE_SCATTER2"
    )


def test_a_replica_without_items_takes_part_in_every_round() -> None:
    """The second replica has no image: it gathers the encoder (stage 2), lets go, and gives zeros."""
    programs = {(0, 1): actions("0F0 1F0 1B0 0B0"), (2, 3): actions("3F0 3B0")}
    found = with_rounds(programs, [(0, 2), (1, 3)], trained=[0, 1, 2, 3])
    assert found[2, 3] == actions(
        "2ALL_GATHER0 3ALL_GATHER0 2FREE0 2ALL_GATHER1 3F0 3B0 3FREE0 3REDUCE_SCATTER0 "
        "2FREE1 2REDUCE_SCATTER1"
    )


@st.composite
def replicas(draw: st.DrawFn) -> tuple[Programs, list[tuple[int, ...]], list[int]]:
    """Up to three replicas of up to three layers, each with passes of its own in any order."""
    num_layers, num_replicas = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    programs: Programs = {}
    for replica in range(num_replicas):
        first = replica * num_layers
        stages = tuple(range(first, first + num_layers))
        passes = draw(st.lists(st.tuples(st.sampled_from(stages), st.sampled_from("FB")), max_size=8))
        made = (Action(stage, Pass(kind), place) for place, (stage, kind) in enumerate(passes))
        programs[stages] = (*made, STEP)
    units = [tuple(layer + num_layers * r for r in range(num_replicas)) for layer in range(num_layers)]
    trained = [stage for unit in units[1:] for stage in unit]
    return programs, units, trained


AT_ONCE = [ReshardAfter.PASS] * 3
ROUNDS = (Pass.ALL_GATHER, Pass.REDUCE_SCATTER)


@given(replicas(), st.just(AT_ONCE) | st.lists(st.sampled_from(ReshardAfter), min_size=3, max_size=3))
def test_rounds_of_any_kind_keep_the_passes_and_agree(
    drawn: tuple[Programs, list[tuple[int, ...]], list[int]], chosen: list[ReshardAfter]
) -> None:
    """Where all layers are freed at once, which is the default, no more than two of them are whole."""
    programs, units, trained = drawn
    result = with_rounds(programs, units, trained, dict(enumerate(chosen)))
    assert chosen != AT_ONCE or with_rounds(programs, units, trained) == result
    unit_of = {stage: number for number, unit in enumerate(units) for stage in unit}
    told = []
    for group, program in result.items():
        assert tuple(a for a in program if a.kind in COMPUTE or a.stage is None) == programs[group]
        number: dict[int | None, int | None] = {}
        whole: set[int | None] = set()
        round_of: dict[Action, tuple[int | None, int | None]] = {}
        for action in program:
            if action.kind is Pass.ALL_GATHER:
                assert action.stage not in whole
                whole.add(action.stage)
                number[action.stage] = action.microbatch
            elif action.kind is Pass.FREE:
                whole.remove(action.stage)
            elif action.kind in COMPUTE:
                assert action.stage in whole
                round_of[action] = action.stage, number[action.stage]
            assert chosen != AT_ONCE or len(whole) <= 2
        assert not whole
        reduced = {(a.stage, a.microbatch) for a in program if a.kind is Pass.REDUCE_SCATTER}
        for action, its_round in round_of.items():
            if action.kind is Pass.B and action.stage in trained:
                assert its_round in reduced
            if chosen[unit_of[action.stage or 0]] is ReshardAfter.STEP:
                assert its_round[1] == 0
        told.append([(unit_of[a.stage or 0], a.kind, a.microbatch) for a in program if a.kind in ROUNDS])
    assert all(other == told[0] for other in told)


def test_at_most_two_gradients_are_whole() -> None:
    """Behind a reduce-scatter the next action waits for the one before it; STEP waits for all."""
    program = actions(
        "0ALL_GATHER0 0B0 0FREE0 0REDUCE_SCATTER0 0ALL_GATHER1 0B1 0FREE1 0REDUCE_SCATTER1 STEP"
    )
    waits = waits_of(program)
    assert waits[Action(0, Pass.B, 1)] == actions("0ALL_GATHER1")
    assert waits[STEP] == tuple(action for action in program if action.kind in FSDP)
    three = waits_of((*program[:-1], *actions("0ALL_GATHER2 0F2 STEP")))
    assert three[Action(0, Pass.F, 2)] == actions("0ALL_GATHER2 0REDUCE_SCATTER0")


def timed(plan: Plan, gather_s: float, pass_s: float, scatter_s: float) -> float:
    """The engine's iteration, after holding the sweep to it."""
    seconds = {Pass.ALL_GATHER: gather_s, Pass.REDUCE_SCATTER: scatter_s, Pass.F: pass_s, Pass.B: pass_s}
    lowered = lower(plan)

    def duration_s(action: Action) -> float:
        return seconds.get(action.kind, 0.0)

    return assert_equal_times(lowered, duration_s)


def batch_of(num_samples: int) -> list[Sample]:
    return [sample(index, images=0, sounds=0) for index in range(num_samples)]


def of_layers(num_layers: int, replicas: int, num_samples: int, instances: int = 1) -> Plan:
    """One frozen layer of an encoder, which nobody shards, then the layers of the LLM."""
    cuts = {"vision": ((0, 1),), "llm": ((0, num_layers),)}
    return sharded_parameters(
        chain(num_layers),
        batch_of(num_samples),
        replicas=replicas,
        cuts=cuts,
        modules=("llm",),
        instances=instances,
    )


@pytest.mark.parametrize("num_layers", [2, 5])
def test_hidden_gathers_cost_only_the_first(num_layers: int) -> None:
    """L layers: 2L passes; the first gather and the last reduction have nothing to hide behind."""
    plan = of_layers(num_layers, replicas=2, num_samples=2)
    assert timed(plan, 0.25, 1.0, 0.5) == 0.25 + 2 * num_layers + 0.5


@pytest.mark.parametrize("num_layers", [2, 5])
def test_slow_gathers_and_reductions_follow_each_other(num_layers: int) -> None:
    """L layers: forwards gather L times, backwards L - 1 times, reductions L times, all on one lane."""
    plan = of_layers(num_layers, replicas=2, num_samples=2)
    assert timed(plan, 4.0, 1.0, 8.0) == 4.0 * (2 * num_layers - 1) + 8.0 * num_layers


def test_a_slow_replica_holds_up_the_others() -> None:
    """Each layer is a rendezvous: the fast rank computes nothing ahead of the slow one."""
    plan = of_layers(3, replicas=2, num_samples=2)
    lowered = lower(plan)
    slow = {stage.id for stage in plan.stages if stage.replica == 1}
    trace = simulate(lowered, lambda a: (2.0 if a.stage in slow else 1.0) if a.kind in COMPUTE else 0.0)
    assert trace.iteration_s == 12.0
    last = max(span.start_s for span in trace.spans if span.rank == 0 and span.action.kind is Pass.B)
    assert last == 8.0  # when the slow rank lets go of what the fast one waits for


@pytest.mark.parametrize("instances", [1, 2])
@pytest.mark.parametrize("cuts", [ALL_ON_ONE, IN_TWO], ids=["one-stage", "two-stages"])
def test_sweep_equals_engine_where_replicas_differ(
    cuts: dict[str, Sequence[tuple[int, int]]], instances: int
) -> None:
    replicas = 2 * instances
    plan = sharded_parameters(
        mixed("everything"), tiny_batch(), replicas=replicas, cuts=cuts, instances=instances
    )
    lowered, _ = accept(plan)
    prices = price(lowered, A40)
    assert_equal_times(lowered, prices.duration_s, prices.step_s)
    assert_equal_times(lowered, lambda action: 1.0 + (action.stage or 0) % 3)


def test_rounds_cost_gathers_and_reduce_scatters() -> None:
    model = two_encoders(vision=(False, False, True), audio=(False, True), llm=(True,) * 4)
    plan = sharded_parameters(model, [sample(0), sample(1)], replicas=2, cuts=CUTS)
    prices = price(lower(plan), CostModel(ideal_profile(flop_per_s=1e12)))
    frozen, trained = plan.chain["vision", 0][0].id, plan.chain["llm", 0][0].id
    gather_s, scatter_s = all_gather_s(64 * 4, 2, LINK), reduce_scatter_s(64 * 4, 2, LINK)
    assert prices.duration_s(Action(frozen, Pass.ALL_GATHER, 0)) == gather_s
    assert prices.duration_s(Action(trained, Pass.ALL_GATHER, 0)) == gather_s
    rounds = [a for a in plan.program[0] if a.kind is Pass.REDUCE_SCATTER]
    assert frozen not in {action.stage for action in rounds}
    assert {prices.duration_s(action) for action in rounds} == {scatter_s}


def test_rounds_cost_what_was_measured_of_sharded_parameters() -> None:
    """In place of a bare collective's time; what passes and sums take longer in a pipeline is not theirs."""
    model = two_encoders(vision=(False, False, True), audio=(False, True), llm=(True,) * 4)
    plan = sharded_parameters(model, [sample(0), sample(1)], replicas=2, cuts=CUTS)
    rates = {"all_gather": 1e9, "reduce_scatter": 1e9, "parameters_gather": 64e6, "parameters_scatter": 32e6}
    wire = MachineLink(
        scope="intra",
        name="wire",
        bytes_per_s=LINK.bytes_per_s,
        latency_s=LINK.latency_s,
        measured=True,
        source="",
    )
    tables = tuple(
        CollectiveTable(
            collective=name,
            scope="intra",
            table=Table(axes=("num_ranks", "bytes"), points=((2.0, 64.0, rate), (2.0, 2.0**20, rate))),
        )
        for name, rate in rates.items()
    )
    profile = replace(
        ideal_profile(flop_per_s=1e12),
        links=(wire,),
        collectives=tables,
        in_pipeline=(("ALL_GATHER", 2.0), ("REDUCE_GRAD", 3.0)),
    )
    stage = plan.chain["llm", 0][0].id
    prices = price(lower(plan), CostModel(profile))
    assert prices.duration_s(Action(stage, Pass.ALL_GATHER, 0)) == pytest.approx(64 * 4 / 64e6)
    last = next(a for a in plan.program[0] if a.kind is Pass.REDUCE_SCATTER and a.stage == stage)
    assert prices.duration_s(last) == pytest.approx(64 * 4 / 32e6)


def fsdp_job(samples: int, *, num_ranks: int = 4, memory_bytes: int = 2**34) -> Job:
    machines = cluster(num_ranks)
    nodes = tuple(replace(node, memory_bytes=memory_bytes) for node in machines.nodes)
    return Job(
        name="fsdp",
        model=vision_language(),
        cluster=replace(machines, nodes=nodes),
        batch=tiny_batch((1,) * 8, (0,) * 8),
        microbatch_samples=samples,
        settings=Settings(precision=Precision.FLOAT32),
        profile="A40",
    )


def test_the_strategy_shares_out_every_layer_and_trusts_its_formula() -> None:
    """Four ranks, eight samples: one microbatch of two each, and the step model says what is simulated.

    Layouts of four replicas hold it to all ranks: two are faster with layers so small.
    """
    layouts = tuple(ModuleLayout(module=name, dp=4) for name in ("vision", "llm"))
    job = replace(fsdp_job(2), layouts=layouts)
    assert [
        len(m.items) for m in PLANNERS["fsdp"](replace(fsdp_job(1), layouts=layouts), A40).microbatches
    ] == [2] * 8
    plan = PLANNERS["fsdp"](job, A40)
    assert {stage.layers[1] - stage.layers[0] for stage in plan.stages} == {1}
    assert {len(m.items) for m in plan.microbatches} == {2}
    assert {s.sharding for s in plan.settings.modules} == {Sharding.PARAMETERS}
    lowered, _ = accept(plan)
    prices = price(lowered, A40)
    ours_s = simulate(lowered, prices.duration_s, step_s=prices.step_s).iteration_s
    formula = fastest_layout(job, A40, Mode.SHARDED).step.step_s
    assert ours_s == pytest.approx(formula, rel=0.05)


def test_the_strategy_makes_do_with_less_memory() -> None:
    ample, memory = accept(fsdp.plan(fsdp_job(2), A40))
    most = max(peak_bytes(ample, memory).values())
    lowered, memory = accept(fsdp.plan(fsdp_job(2, memory_bytes=most - 1), A40))
    assert max(peak_bytes(lowered, memory).values()) < most
    with pytest.raises(ValueError, match=r"no sharded layout fits: the smallest"):
        fsdp.plan(fsdp_job(2, memory_bytes=10_000), A40)


def test_other_schedules_are_refused() -> None:
    job = replace(fsdp_job(2), schedule=Schedule(kind=ScheduleKind.ZB_H1))
    with pytest.raises(ValueError, match=r"fsdp: a rank does all layers.*nearest: 1f1b"):
        fsdp.plan(job, A40)


@pytest.mark.parametrize("name", ["pp", "tp"])
def test_layouts_that_cut_a_module_are_refused(name: str) -> None:
    job = replace(fsdp_job(2), layouts=(ModuleLayout(module="llm", **{name: 2}),))
    with pytest.raises(
        ValueError, match=f"layers of 'llm' whole, but its layout has {name} 2; nearest: {name} 1"
    ):
        fsdp.plan(job, A40)


def test_modules_with_unequal_cp_are_refused() -> None:
    layouts = (ModuleLayout(module="vision", cp=1), ModuleLayout(module="llm", cp=2))
    with pytest.raises(ValueError, match=r"'vision' has cp 1 and 'llm' cp 2; nearest: cp 1 for both"):
        fsdp.plan(replace(fsdp_job(2), layouts=layouts), A40)
