"""Sharded parameters: instances, ranks of a stage, and what is refused."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from sim.step.engine import simulate
from tests.plans import LINK, sample, two_encoders
from tests.test_fsdp import IN_TWO, sharded_parameters
from tests.test_fsdp_plan import A40, CUTS, NAMES, actions, batch_of, fsdp_job, of_layers
from tests.test_parity import mixed
from tests.test_sim_sweep import assert_equal_times
from tests.tiny_valm import tiny_batch
from workbench.cost.collectives import all_reduce_s, reduce_scatter_s
from workbench.cost.hardware import Cluster, Link, Node, uniform
from workbench.cost.model import CostModel
from workbench.cost.profile import ideal_profile
from workbench.job.job import Job
from workbench.job.module_layout import ModuleLayout
from workbench.plan.check import check
from workbench.plan.deadlock import check_deadlock
from workbench.plan.lower import lower
from workbench.plan.parameter_shards import shard_units
from workbench.plan.plan import ModuleSettings, Plan, Precision, Program, Sharding
from workbench.planner.layout_choice import Mode
from workbench.planner.layout_search import fastest_layout
from workbench.schedule.action import Action, Pass
from workbench.schedule.choice import Schedule, ScheduleKind
from workbench.schedule.sharded import waits_of
from workbench.strategies import fsdp
from workbench.strategies.registry import PLANNERS
from workbench.timing.accept import accept
from workbench.timing.price import price


def test_sums_over_instances_stand_behind_the_next_layer_s_reduction() -> None:
    """Two instances of two ranks, three layers, one microbatch each: nothing waits for a sum but STEP."""
    plan = of_layers(3, replicas=4, num_samples=4, instances=2)
    first, second, third = (stage.id for stage in plan.chain["llm", 0])
    kinds = (Pass.B, Pass.REDUCE_SCATTER, Pass.REDUCE_GRAD, Pass.STEP)
    told = " ".join(str(a) for a in plan.program[0] if a.kind in kinds)
    assert told == (
        f"{third}B0 {third}REDUCE_SCATTER0 {second}B0 {second}REDUCE_SCATTER1 {third}REDUCE_GRAD "
        f"{first}B0 {first}REDUCE_SCATTER1 {second}REDUCE_GRAD {first}REDUCE_GRAD STEP"
    )
    waits = waits_of(plan.program[0])
    assert waits[Action(third, Pass.REDUCE_GRAD)] == (Action(third, Pass.REDUCE_SCATTER, 0),)
    assert Action(third, Pass.REDUCE_SCATTER, 0) in waits[Action(first, Pass.B, 0)]


@pytest.mark.parametrize("num_layers", [2, 5])
def test_sums_over_instances_hide_but_for_the_last(num_layers: int) -> None:
    """L layers of passes of 1 s: each sum follows its reduction, beside the backward of the layer before."""
    plan = of_layers(num_layers, replicas=4, num_samples=4, instances=2)
    lowered = lower(plan)
    seconds = {
        Pass.ALL_GATHER: 0.25,
        Pass.F: 1.0,
        Pass.B: 1.0,
        Pass.REDUCE_SCATTER: 0.5,
        Pass.REDUCE_GRAD: 0.125,
    }

    def duration_s(action: Action) -> float:
        return seconds.get(action.kind, 0.0)

    assert assert_equal_times(lowered, duration_s) == 0.25 + 2 * num_layers + 0.5 + 0.125


def test_sums_over_instances_are_all_reduces_of_parts() -> None:
    plan = of_layers(2, replicas=4, num_samples=4, instances=2)
    prices = price(lower(plan), CostModel(ideal_profile(flop_per_s=1e12)))
    stage = plan.chain["llm", 0][0].id
    assert prices.duration_s(Action(stage, Pass.REDUCE_GRAD)) == all_reduce_s(32 * 4, 2, LINK)
    assert prices.duration_s(Action(stage, Pass.REDUCE_SCATTER, 1)) == reduce_scatter_s(64 * 4, 2, LINK)


def two_nodes(uplink_bytes_per_s: float) -> Job:
    """Eight samples on two nodes of two ranks."""
    node = Node(device="A40", num_ranks=2, memory_bytes=2**34)
    near = Link(name="near", bytes_per_s=50e9, latency_s=1e-6)
    far = Link(name="far", bytes_per_s=uplink_bytes_per_s, latency_s=1e-5)
    return replace(fsdp_job(1), cluster=Cluster(name="two", nodes=(node, node), intra=near, inter=far))


def test_instances_stay_in_a_node_where_the_link_between_is_slow() -> None:
    """The formula says what is simulated, and which of the two is faster on all ranks."""
    layouts = tuple(ModuleLayout(module=name, dp=4) for name in ("vision", "llm"))
    job = replace(two_nodes(1e8), layouts=layouts)
    simulated = {}
    for strategy, mode in (("fsdp", Mode.SHARDED), ("hsdp", Mode.HYBRID)):
        plan = PLANNERS[strategy](job, A40)
        lowered, _ = accept(plan)
        prices = price(lowered, A40)
        simulated[mode] = simulate(lowered, prices.duration_s, step_s=prices.step_s).iteration_s
        samples = len(plan.microbatches[0].items)
        formula = fastest_layout(replace(job, microbatch_samples=samples), A40, mode).step.step_s
        assert simulated[mode] == pytest.approx(formula, rel=0.05)
        assert {module.instances for module in plan.settings.modules} == {1 if mode is Mode.SHARDED else 2}
    assert simulated[Mode.HYBRID] < simulated[Mode.SHARDED]


def test_two_ranks_are_no_two_instances() -> None:
    with pytest.raises(ValueError, match="no hybrid layout"):
        PLANNERS["hsdp"](fsdp_job(1, num_ranks=2), A40)


MODES = {"fsdp": Mode.SHARDED, "hsdp": Mode.HYBRID}


def simulated_s(plan: Plan) -> float:
    lowered, _ = accept(plan)
    prices = price(lowered, A40)
    return simulate(lowered, prices.duration_s, step_s=prices.step_s).iteration_s


def job_of(num_samples: int, num_ranks: int, cp: int = 1) -> Job:
    """Layouts say only how many ranks share a sample."""
    job = fsdp_job(1, num_ranks=num_ranks)
    layouts = tuple(ModuleLayout(module=name, cp=cp) for name in ("vision", "llm") if cp > 1)
    return replace(job, batch=tiny_batch((1,) * num_samples, (0,) * num_samples), layouts=layouts)


def steps_of_all(job: Job, strategy: str) -> Iterator[float]:
    """The best step of every microbatch size on every number of ranks from two on: brute force."""
    for num_ranks in range(2, job.usable_ranks + 1):
        for samples in range(1, len(job.batch) + 1):
            sized = replace(job, microbatch_samples=samples)
            try:
                yield fsdp.fastest_of_size(sized, A40, MODES[strategy], num_ranks=num_ranks)[0]
            except ValueError:
                continue


@pytest.mark.parametrize("strategy", MODES)
@pytest.mark.parametrize(
    ("num_samples", "num_ranks", "cp"),
    [
        pytest.param(10, 8, 1, id="10-of-8"),
        pytest.param(6, 4, 2, id="cp"),
        pytest.param(12, 7, 1, id="12-of-7"),
    ],
)
def test_no_microbatch_and_no_part_of_the_ranks_is_faster(
    strategy: str, num_samples: int, num_ranks: int, cp: int
) -> None:
    """10 samples on 8 ranks: 5 replicas take one microbatch of 2 each, where 10 // 8 would be two of 1."""
    job = job_of(num_samples, num_ranks, cp)
    plan = PLANNERS[strategy](job, A40)
    assert simulated_s(plan) == pytest.approx(min(steps_of_all(job, strategy)), rel=0.05)
    samples = max(len(m.items) for m in plan.microbatches if m.module == "llm")
    ours_s, _ = fsdp.fastest_of_size(
        replace(job, microbatch_samples=samples), A40, MODES[strategy], num_ranks=len(plan.ranks)
    )
    assert ours_s == min(steps_of_all(job, strategy))


def test_microbatches_divide_the_share_of_a_replica_of_several_ranks() -> None:
    """Two ranks of four share each of six samples: a replica has three, and takes them at once."""
    layouts = tuple(ModuleLayout(module=name, cp=2, dp=2) for name in ("vision", "llm"))
    plan = PLANNERS["fsdp"](replace(job_of(6, 4), layouts=layouts), A40)
    assert len(plan.replicas("llm")) == 2
    assert {len(m.items) for m in plan.microbatches} == {3}


def test_a_node_alone_is_taken_where_the_link_to_the_next_is_slow() -> None:
    """On four ranks of two nodes gathers take longer than all passes of a node's two."""
    plan = PLANNERS["fsdp"](two_nodes(1e8), A40)
    assert plan.ranks == (0, 1)
    whole = fsdp.fastest_of_size(replace(two_nodes(1e8), microbatch_samples=2), A40)[1]
    assert simulated_s(plan) < simulated_s(whole)


@pytest.mark.parametrize("wide", [None, Precision.FLOAT32])
@pytest.mark.parametrize(("mode", "num_ranks"), [(Mode.SHARDED, 5), (Mode.SHARDED, 8), (Mode.HYBRID, 6)])
def test_the_formula_knows_nodes_in_part_and_wide_gradients(
    wide: Precision | None, mode: Mode, num_ranks: int
) -> None:
    """One rank of five on the second node of four; an instance over two; gradients of twice the bytes."""
    node = Node(device="A40", num_ranks=4, memory_bytes=2**34, num_cards=4)
    near = Link(name="near", bytes_per_s=4e9, latency_s=1e-6)
    far = Link(name="far", bytes_per_s=1e9, latency_s=1e-6)
    job = job_of(num_ranks * 2, 8)
    job = replace(
        job,
        cluster=uniform("two", node, num_nodes=2, intra=near, inter=far),
        microbatch_samples=2,
        settings=replace(job.settings, precision=Precision.BFLOAT16, optimizer_precision=wide),
    )
    formula_s, plan = fsdp.fastest_of_size(job, A40, mode, num_ranks=num_ranks)
    assert len(plan.ranks) == num_ranks
    assert simulated_s(plan) == pytest.approx(formula_s, rel=0.05)


def overlapping() -> Plan:
    """Replica 1 has its head on the rank of replica 0's: the table's two units share one rank of two."""
    plan = sharded_parameters(mixed("llm", tied=True), tiny_batch(), replicas=2, cuts=IN_TWO)
    heads = plan.stages_on[3]
    return replace(plan, stages=tuple(replace(s, ranks=((0,),)) if s in heads else s for s in plan.stages))


MODULES = tuple(ModuleSettings(module=name, sharding=Sharding.PARAMETERS) for name in NAMES)


def unlike() -> Plan:
    """Two replicas of the LLM, cut unlike each other."""
    plan = sharded_parameters(two_encoders(), [sample(0), sample(1)], replicas=2, cuts=CUTS, modules=())
    first, second = (next(s for s in plan.chain["llm", replica]) for replica in (0, 1))
    halves = (replace(second, layers=(0, 2)), replace(second, id=99, layers=(2, 4)))
    stages = (*(s for s in plan.stages if s != second), *halves)
    assert first.layers == (0, 4)
    return with_parameters(replace(plan, stages=stages))


def with_parameters(plan: Plan, **llm: int) -> Plan:
    modules = (*MODULES[:2], replace(MODULES[2], **llm))
    return replace(plan, settings=replace(plan.settings, modules=modules))


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        pytest.param(
            unlike,
            r"'llm' shards its weights, so all 2 replicas of an instance are cut alike",
            id="unlike",
        ),
        pytest.param(
            lambda: with_parameters(
                sharded_parameters(two_encoders(), [sample(0), sample(1)], replicas=2, cuts=CUTS), instances=3
            ),
            r"'llm': instances .* must divide its 2 replicas, got 3; nearest: 2",
            id="instances",
        ),
        pytest.param(
            lambda: with_parameters(
                sharded_parameters(two_encoders(), [sample(0), sample(1)], replicas=2, cuts=CUTS), instances=2
            ),
            r"one rank holds them alone; nearest: sharding 'none'",
            id="instances-of-one",
        ),
        pytest.param(
            lambda: with_parameters(
                sharded_parameters(two_encoders(), batch_of(4), replicas=4, cuts=CUTS, modules=()),
                instances=2,
            ),
            r"its 2 instances add up gradients layer by layer, want one layer a stage, got \[0, 4\)",
            id="instances-of-many-layers",
        ),
        pytest.param(
            lambda: sharded_parameters(two_encoders(), [sample(0)], replicas=1, cuts=CUTS),
            r"one rank holds them alone; nearest: sharding 'none'",
            id="alone",
        ),
        pytest.param(
            overlapping,
            r"tied between stages \d+ and \d+, which have some of their ranks in common; want all or none",
            id="tied-askew",
        ),
        pytest.param(
            lambda: sharded_parameters(
                two_encoders(llm=(True,) * 4),
                [sample(0), sample(1)],
                replicas=2,
                cuts=CUTS,
                schedule=Schedule(kind=ScheduleKind.ZB_H1),
            ),
            r"has whole backwards; want a schedule without I and W",
            id="split-backward",
        ),
    ],
)
def test_what_cannot_be_sharded_is_named(plan, why) -> None:
    with pytest.raises(ValueError, match=why):
        shard_units(plan())


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        pytest.param(
            "{0}FREE0", "", r"{1}\w+ of a stage whose weights.*want round 1 here|ALL_GATHER1.*want", id="kept"
        ),
        pytest.param(
            "{0}ALL_GATHER0 ", "", r"want F or B, between ALL_GATHER|want .*ALL_GATHER", id="never-gathered"
        ),
        pytest.param(
            "{0}REDUCE_SCATTER1", "", r"want round 2|REDUCE_SCATTER1 is missing", id="never-reduced"
        ),
        pytest.param(
            "{0}FREE0", "{0}OFFLOAD", r"OFFLOAD of stage {0}: sharded weights stay on the", id="to-the-host"
        ),
    ],
)
def test_programs_that_break_a_round_are_refused(old: str, new: str, why: str) -> None:
    plan = of_layers(2, replicas=2, num_samples=4)
    stage = plan.chain["llm", 0][0].id
    first, *others = plan.programs
    text = " ".join(map(str, first.actions))
    assert old.format(stage) in text
    broken = Program(
        ranks=first.ranks, actions=actions(text.replace(old.format(stage), new.format(stage), 1))
    )
    with pytest.raises(ValueError, match=why.format(stage, stage)):
        check(replace(plan, programs=(broken, *others)))


def test_rounds_in_another_order_deadlock() -> None:
    """Two replicas that gather two layers in opposite orders wait for each other."""
    plan = of_layers(2, replicas=2, num_samples=2)
    first, second = plan.programs
    swapped = list(second.actions)
    place = [i for i, a in enumerate(swapped) if a.kind is Pass.ALL_GATHER][:2]
    swapped[place[0]], swapped[place[1]] = swapped[place[1]], swapped[place[0]]
    broken = replace(plan, programs=(first, Program(ranks=second.ranks, actions=tuple(swapped))))
    with pytest.raises(ValueError, match=r"deadlock.*\n.*ALL_GATHER0 of all replicas"):
        check_deadlock(lower(broken))


def test_rounds_of_whole_weights_are_refused_by_all_who_read_a_plan() -> None:
    """By the check, and by the task graph and the price of a plan that nobody checked."""
    plan = of_layers(2, replicas=2, num_samples=2)
    whole = replace(plan, settings=replace(plan.settings, modules=()))
    message = "ALL_GATHER0.*weights.* not sharded"
    with pytest.raises(ValueError, match=message):
        check(whole)
    lowered = lower(whole)
    with pytest.raises(ValueError, match=message):
        lowered.tasks  # noqa: B018
    with pytest.raises(ValueError, match=message):
        price(lowered, A40)
