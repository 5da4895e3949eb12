"""Goodput and dollars: closed forms against the failure simulator, ways to recover, deadlines."""

import math
import statistics
from contextlib import suppress
from dataclasses import replace

import pytest

from sim.failures.goodput import system_of, useful_samples_per_s
from sim.failures.simulate import simulate_failures
from sim.judge import executors_of
from sim.predict import predict, step_s
from tests.test_next_batches import job_of
from tests.test_strategies import CLUSTER, cost
from workbench.cost.hardware import uniform
from workbench.elastic.availability import Availability, Change, NodeEvent, Rates, random_trace
from workbench.job.device_pools import Aim
from workbench.memory.checkpoint_bytes import checkpoint_bytes
from workbench.plan.check import check
from workbench.plan.plan import Plan, Sharding
from workbench.report.search_tables import search_record, search_table
from workbench.schedule.choice import Schedule, ScheduleKind, usual
from workbench.search.drive import for_seconds_too, search, with_ranks
from workbench.search.objectives.fewer_nodes import (
    num_nodes,
    num_pipelines,
    with_pipelines,
)
from workbench.search.objectives.goodput import Goodput
from workbench.search.objectives.money import TrainingDollars, steps_for
from workbench.search.objectives.objective import Objective
from workbench.search.objectives.options import ObjectiveOptions, judge_for
from workbench.search.objectives.recovery import Recovering, Recovery, RecoveryCosts, daly_s
from workbench.search.objectives.step_times import OwnBatch, PassedOverError
from workbench.search.objectives.template_plans import NAME as TEMPLATES
from workbench.search.objectives.template_plans import TemplatePlanner
from workbench.strategies import fsdp
from workbench.strategies.registry import PLANNERS
from workbench.timing.accept import accept

STEP_S, SAVE_S, RESTART_S, MTBF_S = 1.0, 20.0, 30.0, 3600.0


def restarts(every: int) -> Recovery:
    """One node does it all."""
    return Recovery(
        kind=Recovering.CHECKPOINT,
        samples_per_s=(0.0, 8.0),
        samples_per_step=8,
        recover_s=RESTART_S,
        checkpoint_every=every,
        save_s=SAVE_S,
    )


def losses(seed: int, hours: float) -> Availability:
    """A node is lost at exponential times, and there again after a microsecond."""
    rates = Rates(leaves_per_node_h=3600 / MTBF_S, joins_per_missing_h=3.6e9)
    return random_trace(1, rates, hours * 3600, seed)


def share(every: int, traces: list[Availability], until_s: float) -> float:
    return statistics.fmean(
        useful_samples_per_s(restarts(every), trace, until_s) * STEP_S / 8 for trace in traces
    )


def useful_share(work_s: float, save_s: float, restart_s: float, mtbf_s: float) -> float:
    """Share of wall time spent on useful work: Daly 2006, equation 20, inverted."""
    return work_s / (mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1((work_s + save_s) / mtbf_s))


def test_closed_forms_of_the_interval_are_what_the_simulator_finds() -> None:
    """The best of all intervals by brute force is within the noise of Daly's, which beats twice and half."""
    traces = [losses(seed, 400.0) for seed in range(2)]
    until_s = 400.0 * 3600
    daly = round(daly_s(SAVE_S, MTBF_S) / STEP_S)
    tried = {every: share(every, traces, until_s) for every in range(100, 1000, 100)} | {
        daly: share(daly, traces, until_s)
    }
    assert max(tried.values()) - tried[daly] < 0.002
    assert tried[daly] > share(daly // 3, traces, until_s) + 0.01
    assert tried[daly] > share(3 * daly, traces, until_s) + 0.01
    for every in (150, daly, 900):
        expected = useful_share(every * STEP_S, SAVE_S, RESTART_S, MTBF_S)
        assert share(every, traces, until_s) == pytest.approx(expected, abs=0.008)


def test_closed_forms() -> None:
    assert daly_s(50.0, 20.0) == 20.0
    assert daly_s(1e-9, 1.0) == pytest.approx(math.sqrt(2 * 1e-9), rel=1e-4)  # Young 1974
    best = max(range(1, 4000), key=lambda work: useful_share(work, SAVE_S, RESTART_S, MTBF_S))
    assert daly_s(SAVE_S, MTBF_S) == pytest.approx(best, rel=0.01)
    for bad in ((-1.0, 5.0), (1.0, 0.0), (1.0, math.inf)):
        with pytest.raises(ValueError, match="want a mean time between failures"):
            daly_s(*bad)


def test_the_loss_of_a_spare_costs_nothing() -> None:
    """Two nodes work, of which neither is lost; the third comes and goes."""
    events = [NodeEvent(time_s=0.0, change=Change.JOIN, node=name) for name in ("a", "b", "c")]
    for hour in range(1, 20):
        kind = Change.LEAVE if hour % 2 else Change.JOIN
        events.append(NodeEvent(time_s=3600.0 * hour, change=kind, node="c"))
    trace = Availability(name="spare", events=tuple(events))
    system = system_of(replace(restarts(100), samples_per_s=(0.0, 4.0, 8.0, 8.0)))
    run = simulate_failures(system, trace, 72_000.0)
    assert run.num_recoveries == 0
    assert simulate_failures(replace(system, most_nodes=None), trace, 72_000.0).num_recoveries > 10
    with pytest.raises(ValueError, match="want >= 1 node that works, got 0"):
        replace(system, most_nodes=0)


def job(replicas: int = 2):
    """On three nodes of two ranks."""
    node = replace(CLUSTER.nodes[0], num_ranks=2)
    cluster = uniform("three", node, num_nodes=3, intra=CLUSTER.intra, inter=CLUSTER.inter)
    return replace(job_of(0, replicas=replicas), cluster=cluster, max_ranks=None)


def made(name: str, replicas: int = 2):
    return PLANNERS[name](job(replicas), cost(), lambda *_: None)


def useful(measure: Goodput, way: Recovery) -> float:
    return statistics.fmean(useful_samples_per_s(way, trace, measure.until_s) for trace in measure.traces)


@pytest.mark.parametrize("name", ["cornstarch", "entrain", "megatron-homogeneous"])
def test_fewer_pipelines_do_the_whole_batch(name: str) -> None:
    plan = made(name)
    whole = num_pipelines(plan)
    for kept in range(1, whole):
        fewer = with_pipelines(plan, kept, Schedule(), cost())
        check(fewer)
        assert fewer.batch == plan.batch
        assert len(fewer.ranks) == kept * len(plan.ranks) // whole
        assert fewer.ranks == tuple(range(len(fewer.ranks)))
        items = sorted(item for m in fewer.microbatches for row in m.rows for item in row)
        assert items == sorted(item for m in plan.microbatches for row in m.rows for item in row)
    assert with_pipelines(plan, whole, Schedule(), cost()) is plan
    for kept in (0, whole + 1):
        with pytest.raises(ValueError, match=f"pipelines left: want 1 to {whole}, got {kept}"):
            with_pipelines(plan, kept, Schedule(), cost())


def test_templates_are_plans_on_every_number_of_nodes() -> None:
    plan = TemplatePlanner(1)(job(1), cost(), lambda *_: None)
    accept(plan)
    assert (num_nodes(plan), plan.strategy) == (3, TEMPLATES)
    assert num_pipelines(plan) >= 2
    with pytest.raises(ValueError, match="templates: pipelines run 1f1b, got schedule gpipe"):
        TemplatePlanner(1)(replace(job(1), schedule=usual(ScheduleKind.GPIPE)), cost(), lambda *_: None)
    with pytest.raises(ValueError, match="templates: pipelines take all 6 ranks, got max_ranks 5"):
        TemplatePlanner(1)(replace(job(1), max_ranks=5), cost(), lambda *_: None)


def judge(objective=Objective.GOODPUT, on=None, **said):
    return judge_for(
        objective,
        ObjectiveOptions(**said),
        on or job(),
        cost(),
        batches=(),
        seed=0,
        executors=executors_of(cost()),
    )


def test_without_a_loss_goodput_is_throughput() -> None:
    """The first loss is expected after a million years."""
    plan = made("cornstarch")
    own_s = OwnBatch(lambda lowered: step_s(lowered, cost()))(plan).step_s
    found = judge(mtbf="52000000w").judged(plan)
    assert found.figures["useful_samples_per_s"] == pytest.approx(len(plan.batch) / own_s, rel=1e-3)
    assert found.figures["recovery"] == "replicas"
    assert found.value == pytest.approx(own_s / len(plan.batch), rel=1e-3)


def test_the_way_that_gets_furthest_is_chosen() -> None:
    """Where restarts are slow the state of replicas is copied; sharded state has copies in instances."""
    plan = made("cornstarch")
    measure = judge(mtbf="2h", repair="1m", restart="10m").measure
    times = OwnBatch(lambda lowered: step_s(lowered, cost()))(plan)
    found = measure(plan, times, None)
    ways = list(measure.ways(plan, measure.on_nodes(plan, times, None)))
    assert {way.kind for way in ways} == set(Recovering)
    assert found.figures["useful_samples_per_s"] >= max(useful(measure, way) for way in ways)
    assert found.figures["recovery"] == "replicas"

    def kinds(other: Plan) -> set[Recovering]:
        return {way.kind for way in measure.ways(other, measure.on_nodes(other, times, None))}

    modules = tuple(
        replace(plan.settings.of(m.name), sharding=Sharding.OPTIMIZER) for m in plan.model.modules
    )
    assert kinds(replace(plan, settings=replace(plan.settings, modules=modules))) == {Recovering.CHECKPOINT}
    assert kinds(made("fsdp")) == {Recovering.CHECKPOINT}
    assert kinds(made("hsdp")) == set(Recovering)


@pytest.mark.parametrize("strategy", ["cornstarch", "fsdp", "hsdp"])
def test_on_every_number_of_nodes_as_many_pipelines_go_on_as_can(strategy: str) -> None:
    """Held against all numbers of pipelines, for all numbers of nodes that are ever there.

    fsdp is held to all nodes: by itself it takes one, which is faster with layers so small.
    """
    plan = fsdp.fastest_of_size(job(), cost())[1] if strategy == "fsdp" else made(strategy)
    measure = judge(mtbf="2h", repair="10m", restart="10m").measure
    step = OwnBatch(lambda lowered: step_s(lowered, cost()))
    ways = measure.ways(plan, measure.on_nodes(plan, step(plan), None))
    way = next(way for way in ways if way.kind is Recovering.CHECKPOINT)
    every_s: list[tuple[int, float]] = []
    for kept in range(1, num_pipelines(plan) + 1):
        with suppress(ValueError):  # one rank alone shards nothing
            fewer = with_pipelines(plan, kept, job().schedule, cost())
            every_s.append((num_nodes(fewer), step(fewer).step_s))
    there = {count for trace in measure.traces for _, count in trace.num_nodes()}
    for count in there:
        going_s = [seconds for nodes, seconds in every_s if nodes <= count]
        wanted = len(plan.batch) / going_s[-1] if going_s else 0.0
        assert way.samples_per_s[count] == pytest.approx(wanted)
    assert min(there) < num_nodes(plan)


def losing(link_gb_per_s: float, mtbf: str, repair: str):
    """The job over links of that rate between its nodes, and its judge."""
    cluster = job().cluster
    inter = replace(cluster.inter, bytes_per_s=link_gb_per_s * 1e9)
    on = replace(job(), cluster=replace(cluster, inter=inter))
    return on, judge(on=on, mtbf=mtbf, repair=repair, restart="1m")


@pytest.mark.parametrize("link_gb_per_s", [10.0, 1e-4])
@pytest.mark.parametrize(("mtbf", "repair"), [("1h", "10m"), ("2h", "5h"), ("10m", "1m")])
@pytest.mark.parametrize("strategy", ["cornstarch", "fsdp", "hsdp", "megatron-homogeneous"])
def test_no_plan_is_passed_over_whose_value_is_below_the_limit(strategy, mtbf, repair, link_gb_per_s):
    """Held against its value in full, also where fewer nodes are faster than all of them."""
    on, held = losing(link_gb_per_s, mtbf, repair)
    plan = PLANNERS[strategy](on, cost(), lambda *_: None)
    value, times = held.value(plan), held.times(plan, None)
    least = held.measure.least(plan, held.measure.on_nodes(plan, times, None))
    assert 0 < least <= value
    limits = [share * edge for edge in (least, value, times.step_s / len(plan.batch)) for share in (0.9, 1.1)]
    for limit in limits:
        with suppress(PassedOverError):
            assert held.within(plan, limit).value == value
            continue
        assert value >= limit
    with pytest.raises(PassedOverError):
        held.within(plan, 0.9 * min(least, times.step_s / len(plan.batch)))


def test_a_plan_that_is_faster_on_fewer_nodes_is_looked_at() -> None:
    """Its step alone says more than its value is."""
    on, held = losing(1e-4, "2h", "10m")
    plan = PLANNERS["cornstarch"](on, cost(), lambda *_: None)
    value, step_s = held.value(plan), held.times(plan, None).step_s
    assert value < step_s / len(plan.batch)
    assert held.within(plan, 1.01 * value).value == value


def test_the_interval_is_about_the_best_of_all() -> None:
    """One pipeline has nothing but checkpoints; intervals by brute force."""
    plan = made("cornstarch", 1)
    measure = judge(on=job(1), mtbf="30m", storage_gb_per_s=1e-5).measure
    times = OwnBatch(lambda lowered: step_s(lowered, cost()))(plan)
    found = measure(plan, times, None).figures
    ways = list(measure.ways(plan, measure.on_nodes(plan, times, None)))
    tried = {
        every: max(useful(measure, replace(way, checkpoint_every=every)) for way in ways)
        for every in (round(found["checkpoint_every_daly"] * 2.0**power) for power in range(-3, 4))
    }
    assert found["useful_samples_per_s"] >= 0.99 * max(tried.values())
    assert found["useful_samples_per_s"] > 1.02 * min(tried.values())


def test_a_search_for_goodput_ranks_templates_and_strategies() -> None:
    planners = {name: PLANNERS[name] for name in ("cornstarch", "megatron-homogeneous")}
    planners[TEMPLATES] = TemplatePlanner(1)
    held = judge(mtbf="1h")
    found = search(
        job(),
        cost(),
        planners,
        lambda plan: predict(*accept(plan), cost()),
        objective=Objective.GOODPUT,
        judge=held,
    )
    rates = [each.judged.figures["useful_samples_per_s"] for each in found]
    assert rates == sorted(rates, reverse=True)
    record = search_record("tiny", found, held.asked)
    assert (record["objective"], record["mtbf_s"], record["seed"]) == ("goodput", 3600.0, 0)
    assert "by goodput, a loss every 1h, 5 traces, seed 0" in str(search_table(record).title)
    with pytest.raises(ValueError, match="objective goodput: want a judge"):
        search(job(), cost(), planners, lambda plan: None, objective=Objective.GOODPUT)


def test_checkpoints_hold_all_weights_and_the_state_of_trained_ones() -> None:
    """As `run` writes them: two bytes of a weight, twelve more of a trained one."""
    plan = made("cornstarch")
    elements = {
        trainable: sum(
            parameter.num_elements
            for module in plan.model.modules
            for layer in module.layers
            if layer.trainable is trainable
            for parameter in layer.parameters()
        )
        for trainable in (True, False)
    }
    assert elements[False]
    assert checkpoint_bytes(plan.model, plan.settings) == 14 * elements[True] + 2 * elements[False]


def test_nothing_useful_is_refused_and_so_are_bad_costs(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"goodput: no sample counts on 3 nodes with a loss every 0\.1 s"):
        judge(mtbf="0.1s", repair="10h", storage_gb_per_s=1e-9).judged(made("cornstarch", 1))
    for bad in ({"notice_s": -1.0}, {"storage_bytes_per_s": 0.0}, {"copies": 1}):
        with pytest.raises(ValueError, match="recovery: want times >= 0 s"):
            RecoveryCosts(**bad)
    path = tmp_path / "trace.csv"
    path.write_text("t_s,event,node\n0,add,a\n")
    with pytest.raises(ValueError, match="no node joins or leaves after the start"):
        judge(failures=path)
    path.write_text("t_s,event,node\n0,add,a\n0,add,b\n3600,remove,a\n7200,add,a\n90000,remove,b\n")
    assert judge(failures=path).asked["mtbf_s"] == 86_400.0


def priced():
    return replace(job(), dollars_per_rank_hour=3.6)


def test_the_cheapest_plan_that_meets_the_deadline_is_best() -> None:
    """Of plans on all ranks and on fewer."""
    steps, wanted = 1_000_000, priced()
    planners = with_ranks({"cornstarch": PLANNERS["cornstarch"]}, [6, 4, 3])
    plans = {
        name: each(replace(wanted, replicas=1), cost(), lambda *_: None) for name, each in planners.items()
    }

    def searched(**said):
        return search(
            wanted,
            cost(),
            {name: lambda *_, plan=plan: plan for name, plan in plans.items()},
            lambda plan: predict(*accept(plan), cost()),
            objective=Objective.TRAINING,
            judge=judge(Objective.TRAINING, wanted, steps=steps, **said),
        )

    free = searched()
    for each in free:
        hours = steps * each.step_s / 3600
        assert each.judged.figures["dollars"] == pytest.approx(3.6 * hours * len(each.plan.ranks))
        assert each.judged.figures["idle_gpus"] == 6 - len(each.plan.ranks)
    dollars = [each.judged.value for each in free]
    assert dollars == sorted(dollars)
    hours = sorted(each.judged.figures["training_s"] / 3600 for each in free)
    assert hours[0] < hours[-1]
    held = searched(deadline=f"{(hours[0] + hours[-1]) / 2:.6f}h")
    in_time = [each for each in held if not each.judged.misses]
    assert in_time == list(held[: len(in_time)])
    assert 0 < len(in_time) < len(held)
    late = [each.judged.value for each in held[len(in_time) :]]
    assert late == sorted(late)
    assert "1,000,000 steps take" in held[-1].judged.misses
    with pytest.raises(ValueError, match=r"the deadline is 1s$"):
        judge(Objective.TRAINING, wanted, steps=steps, deadline="1s").value(held[0].plan)
    barely = held[-1].judged.figures["training_s"] * (1 - 1e-6)
    with pytest.raises(ValueError, match=r"steps take [0-9.]+m?s more than ([0-9.]+[hdw]) and .* is \1$"):
        judge(Objective.TRAINING, wanted, steps=steps, deadline=f"{barely}s").value(held[-1].plan)


def test_every_strategy_looks_for_speed_too_where_there_is_a_deadline() -> None:
    aims = []
    tried = for_seconds_too({"spy": lambda job, cost, progress: aims.append(job.aim)})
    for planner in tried.values():
        planner(replace(job(), aim=Aim.DOLLARS), cost(), lambda *_: None)
    assert list(tried) == ["spy", "spy, fastest"]
    assert aims == [Aim.DOLLARS, Aim.SECONDS]


def test_tokens_are_steps() -> None:
    batch = job().batch
    tokens = sum(sample.num_tokens for sample in batch)
    assert steps_for(10 * tokens, (batch,)) == 10
    assert steps_for(10 * tokens + 1, (batch, batch)) == 11
    with pytest.raises(ValueError, match="tokens of a training: want > 0"):
        steps_for(0, (batch,))
    with pytest.raises(ValueError, match="want >= 1 step"):
        TrainingDollars(job=job(), num_steps=0)
    with pytest.raises(ValueError, match=r"dollars want cluster\.dollars_per_gpu_hour"):
        judge(Objective.TRAINING, steps=1).value(made("cornstarch"))
