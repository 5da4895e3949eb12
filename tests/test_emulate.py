"""One process that does all ranks' actions one at a time computes what the ranks compute."""

import json
import threading
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from runtime.batches import SyntheticSource
from runtime.baton import Baton, Runner
from runtime.emulate import emulate, no_exchange_s, weight_bytes
from runtime.emulate_order import legal_order, ranks_of
from runtime.emulate_times import Absences, OwnWork, composed_s, median_work, own_work
from runtime.failure import RankError
from runtime.launch import run_lowered
from runtime.optimizer import OptimizerSettings
from runtime.pool import Pool
from runtime.rank_job import Collect, RunSettings
from runtime.reference import reference_step
from runtime.shared_mesh import Exchange
from runtime.stage_module import StageModule, build_stage_module
from sim.engine import simulate
from tests import strategies
from tests.plans import disjoint_plan
from tests.test_cli import JOB, accept, refuse
from tests.test_context_parallel_step import plan_of as context_parallel_plan
from tests.test_expert_plan import moe_plan
from tests.test_parity import CUTS, SEED, assert_parity, mixed
from tests.test_tensor_parallel import ONE, Degrees, encoders, laid_out
from tests.test_tensor_sequence import dealt_out
from tests.tiny_valm import tiny_batch
from workbench.commands.emulation import compose
from workbench.cost.profile import load_profile
from workbench.graph.model_graph import ModelGraph
from workbench.graph.trainable import Trainable, with_trainable
from workbench.plan.lower import lower
from workbench.plan.plan import ModuleSettings, Plan, Precision, Program, Recompute, Settings
from workbench.schedule.action import COMPUTE, STEP, parse_action
from workbench.trace import Executor
from workbench.trace_json import dumps, loads, read_trace

SETTINGS = RunSettings(seed=SEED, precision=Precision.FLOAT64, collect=Collect.STATE, timeout_s=30.0)
REPLICATED = {"vision": (5,), "audio": (4,), "llm": (2, 4)}
PLANS = {
    "everything": lambda: disjoint_plan(mixed("everything"), tiny_batch(), CUTS),
    "projectors": lambda: disjoint_plan(mixed("projectors"), tiny_batch(), CUTS),
    "tied": lambda: disjoint_plan(mixed("llm", tied=True), tiny_batch(), CUTS),
    "two replicas": lambda: disjoint_plan(mixed("vision-frozen"), tiny_batch(), REPLICATED, replicas=2),
    "context parallel": lambda: context_parallel_plan("everything", "ee"),
    "recompute": lambda: recomputed(context_parallel_plan("everything", "mp")),
    "tensor parallel": lambda: laid_out(encoders(tied=True), SHARED_WEIGHTS),
    "divided tokens": lambda: dealt_out(laid_out(encoders(), SHARED_TOKENS)),
    "half frozen": lambda: laid_out(half_frozen(), SHARED_WEIGHTS),
    "experts": lambda: moe_plan(tp=2, cp=2, ep=4),
}
SHARED_WEIGHTS: dict[str, Degrees] = {"image": (1, 1, 1, 2), "audio": ONE, "llm": (1, 2, 1, 2)}
SHARED_TOKENS: dict[str, Degrees] = {"image": (1, 1, 1, 2), "audio": ONE, "llm": (1, 1, 2, 2)}


def half_frozen() -> ModelGraph:
    """A frozen weight of which every member has another part is stored once a part."""
    model = encoders()
    modules = tuple(
        with_trainable(module, Trainable.NONE) if module.name == "llm" else module for module in model.modules
    )
    return replace(model, modules=modules)


def recomputed(plan: Plan) -> Plan:
    names = [module.name for module in plan.model.modules]
    modules = tuple(ModuleSettings(module=name, recompute=Recompute.FULL) for name in names)
    return replace(plan, settings=Settings(precision=Precision.FLOAT64, modules=modules))


@pytest.mark.parametrize("name", PLANS)
def test_loss_gradients_and_weights_are_those_of_one_process_on_the_whole_batch(name: str):
    plan = PLANS[name]()
    optimizer = OptimizerSettings(clip_norm=0.5)
    torch.set_num_threads(1)
    result = emulate(lower(plan), replace(SETTINGS, optimizer=optimizer))
    reference = reference_step(
        plan, seed=SEED, dtype=torch.float64, source=SyntheticSource(SEED), optimizer=optimizer
    )
    assert_parity(plan, result, reference, Precision.FLOAT64)
    assert set(result.works) == {a for a in plan.program_actions if a.kind in COMPUTE}
    assert set(result.steps_s) == set(plan.ranks)
    assert all(work.own_s > 0 for by_rank in result.works.values() for work in by_rank.values())


@pytest.mark.parametrize("name", ["everything", "two replicas", "context parallel", "tensor parallel"])
def test_every_bit_is_that_of_the_distributed_run(name: str, pool: Pool):
    """Without a sum over more than two ranks: its order is the transport's."""
    lowered = lower(PLANS[name]())
    both = replace(SETTINGS, steps=2)
    emulated, executed = emulate(lowered, both), run_lowered(lowered, both, pool=pool)
    assert emulated.losses == executed.losses
    for ours, theirs in zip(emulated.states, executed.states, strict=True):
        for mine, other in ((ours.gradients, theirs.gradients), (ours.weights, theirs.weights)):
            assert mine.keys() == other.keys()
            assert [key for key in mine if not torch.equal(mine[key], other[key])] == []


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(strategies.plans())
def test_the_order_is_legal_and_complete(plan: Plan):
    lowered = lower(plan)
    order = legal_order(lowered)
    assert order == legal_order(lowered)
    assert sorted(map(str, order)) == sorted(map(str, plan.program_actions))
    place = {action: index for index, action in enumerate(order)}
    for program in plan.programs:
        assert all(place[a] < place[b] for a, b in pairwise(program.actions))
    for row in lowered.transfers:
        assert place[row.producer] < place[row.consumer]


def swapped(plan: Plan, rank: int, first: str, second: str) -> Plan:
    """The rank's program with two actions in each other's place."""
    pair = {parse_action(first): parse_action(second), parse_action(second): parse_action(first)}
    programs = tuple(
        Program(ranks=p.ranks, actions=tuple(pair.get(a, a) for a in p.actions)) if rank in p.ranks else p
        for p in plan.programs
    )
    return replace(plan, programs=programs)


def test_programs_that_cannot_go_on_are_named():
    plan = disjoint_plan(mixed("everything"), tiny_batch(), CUTS)
    last = max(plan.stage)
    with pytest.raises(ValueError, match=rf"cannot go on: .*rank {last} before {last}B0 waits for "):
        legal_order(lower(swapped(plan, last, f"{last}F0", f"{last}B0")))
    lowered = lower(plan)
    row = next(row for row in lowered.transfers if row.source_rank != row.destination_rank)
    circular = replace(row, producer=row.consumer, consumer=row.producer)
    inputs = lowered.inputs | {row.producer: (row.row,)}
    rows = tuple(circular if other is row else other for other in lowered.transfers)
    with pytest.raises(ValueError, match=f"rank {row.source_rank} before {row.producer} waits for"):
        emulate(replace(lowered, transfers=rows, inputs=inputs), SETTINGS)


def test_a_row_that_is_never_sent_is_named():
    """The order is legal, the execution is not: nobody hangs."""
    lowered = lower(disjoint_plan(mixed("everything"), tiny_batch(), CUTS))
    row = next(row for row in lowered.transfers if row.source_rank != row.destination_rank)
    outputs = dict(lowered.outputs)
    outputs[row.producer] = tuple(number for number in outputs[row.producer] if number != row.row)
    with pytest.raises(RankError, match=rf"rank {row.destination_rank} waits for row {row.row} "):
        emulate(replace(lowered, outputs=outputs), SETTINGS)


def test_a_failing_action_names_rank_and_action():
    def build(plan, stage, **how) -> StageModule:
        module = build_stage_module(plan, stage, **how)
        if stage.id == 1:
            module.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(OSError("disk is gone")))
        return module

    plan = disjoint_plan(mixed("everything"), tiny_batch(), CUTS)
    with pytest.raises(RankError, match="rank 1 in 1F0: OSError: disk is gone"):
        emulate(lower(plan), SETTINGS, build=build)


def test_a_turn_that_does_not_end_is_named():
    ended = []
    baton = Baton(timeout_s=0.2)

    def dawdle(runner: Runner) -> None:
        runner.place = 7
        released.wait(2.0)
        ended.append(runner.rank)

    released = threading.Event()
    baton.start(4, dawdle)
    with pytest.raises(RankError, match=r"rank 4: its turn did not end within 0.2 s \(place 7\)"):
        baton.give(4)
    released.set()
    baton.close()
    assert ended == [4]


def requires_grad(modules: list[StageModule]) -> set[tuple[str, str]]:
    named = ((m.stage.module, name, p) for m in modules for name, p in m.named_weights())
    return {(module, name) for module, name, parameter in named if parameter.requires_grad}


def test_frozen_weights_are_stored_once():
    built: list[StageModule] = []

    def build(plan, stage, **how) -> StageModule:
        built.append(build_stage_module(plan, stage, **how))
        return built[-1]

    plan = disjoint_plan(mixed("projectors"), tiny_batch(), REPLICATED, replicas=2)
    emulate(lower(plan), SETTINGS, build=build)
    places: dict[tuple[str, str], set[int]] = {}
    for module in built:
        for name, parameter in module.named_weights():
            places.setdefault((module.stage.module, name), set()).add(parameter.data_ptr())
    trained = {key for key, found in places.items() if len(found) == 2}
    assert trained == {key for key in places if key in requires_grad(built)}
    assert trained
    layers = [layer for module in plan.model.modules for layer in module.layers]
    sizes = {flag: sum(p.num_elements for x in layers if x.trainable is flag for p in x.parameters())
             for flag in (True, False)}  # fmt: skip
    assert weight_bytes(plan) == (4 * 2 * sizes[True] + sizes[False]) * plan.settings.precision.num_bytes


def test_a_model_larger_than_the_machine_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("runtime.emulate.os.sysconf", lambda name: 100)
    with pytest.raises(ValueError, match="emulation holds the weights of all 5 ranks: want"):
        emulate(lower(PLANS["everything"]()), SETTINGS)


# Times


def test_absences_do_not_count():
    absences = Absences([(1.0, 2.0), (3.0, 3.5), (6.0, 9.0)])
    assert absences.own_s(0.0, 10.0) == pytest.approx(10 - 4.5)
    assert absences.own_s(2.5, 4.0) == pytest.approx(1.0)
    assert absences.own_s(4.0, 5.0) == pytest.approx(1.0)
    assert absences.own_s(2.0, 3.0) == pytest.approx(1.0)


def gather(start_s: float, wait_s: float) -> Exchange:
    return Exchange(kind="all_gather", num_bytes=8, ranks=(0, 1), start_s=start_s, wait_s=(wait_s, wait_s))


def test_own_work_counts_from_the_actions_start():
    absences = Absences([(11.0, 13.0)])
    exchanges = [gather(1.0, 2.0), gather(10.5, 11.0)]
    work = own_work(10.0, 15.0, absences, exchanges, [e.wait_s[0] for e in exchanges])
    assert work == OwnWork(own_s=3.0, exchanges=(gather(0.5, 1.0),))
    slower = OwnWork(own_s=5.0, exchanges=(gather(0.7, 2.0),))
    assert median_work([work, slower]) == OwnWork(own_s=4.0, exchanges=(gather(0.6, 1.5),))


@pytest.mark.parametrize(
    ("exchange_s", "expected_s"),
    [
        pytest.param(0.0, 5.0, id="free: the slower rank comes at 2, then 3 more"),
        pytest.param(1.0, 5.0, id="hidden: the gather runs from 2 to 3, needed at 3"),
        pytest.param(4.0, 8.0, id="exposed: from 2 to 6, then what follows the wait"),
    ],
)
def test_a_collective_starts_when_the_last_rank_comes(exchange_s: float, expected_s: float):
    works = {
        0: OwnWork(own_s=3.0, exchanges=(gather(1.0, 2.0),)),
        1: OwnWork(own_s=5.0, exchanges=(gather(2.0, 3.0),)),
    }
    assert composed_s(works, lambda exchange: exchange_s) == expected_s


def test_collectives_of_a_group_follow_each_other():
    """Two of 4 s, both started in the first second; the second ends at 1 + 8."""
    one = OwnWork(own_s=2.0, exchanges=(gather(0.5, 1.0), gather(0.9, 1.5)))
    assert composed_s({0: one, 1: one}, lambda exchange: 4.0) == pytest.approx(0.5 + 8.0 + 0.5)
    with pytest.raises(ValueError, match="different numbers of collectives"):
        composed_s({0: one, 1: OwnWork(own_s=1.0)}, lambda exchange: 4.0)


def test_collectives_of_different_groups_hold_up_only_their_own():
    """A 2 x 2 grid: rows meet first, then columns. A slow rank delays its row, then all."""
    row = {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}
    column = {0: (0, 2), 1: (1, 3), 2: (0, 2), 3: (1, 3)}

    def work(rank: int, own_s: float) -> OwnWork:
        first = replace(gather(own_s, own_s), ranks=row[rank])
        return OwnWork(own_s=own_s, exchanges=(first, replace(first, ranks=column[rank])))

    works = {0: work(0, 1.0), 1: work(1, 1.0), 2: work(2, 1.0), 3: work(3, 6.0)}
    cost_s = {ranks: 2.0 if ranks in row.values() else 1.0 for ranks in (*row.values(), *column.values())}
    assert composed_s(works, lambda exchange: cost_s[exchange.ranks]) == 6.0 + 2.0 + 1.0
    alone = {rank: replace(one, exchanges=one.exchanges[:1]) for rank, one in works.items()}
    upper = {rank: alone[rank] for rank in (0, 1)}
    assert composed_s(upper, lambda exchange: cost_s[exchange.ranks]) == 3.0
    assert composed_s(alone, lambda exchange: cost_s[exchange.ranks]) == 8.0


@pytest.mark.parametrize("name", ["everything", "context parallel", "divided tokens"])
def test_the_timeline_is_that_of_the_measured_actions(name: str):
    lowered = lower(PLANS[name]())
    result = emulate(lowered, replace(SETTINGS, collect=Collect.NOTHING, repetitions=3))
    assert result.num_timed == 3
    trace = compose(lowered, result, load_profile("A40"))
    assert trace.executor is Executor.EMULATED
    assert trace.loss == result.losses[-1]
    assert dict(trace.details)["emulated"] == "one action at a time on cpu, median of 3"
    assert loads(dumps(trace)) == trace
    passes_s = {a: s for a, s in result.durations_s(no_exchange_s).items() if a != STEP}
    for span in trace.spans:
        if span.action in passes_s:
            least_s = passes_s[span.action]
            assert span.end_s - span.start_s >= least_s * (1 - 1e-9)
    if name == "everything":
        priced = passes_s | {STEP: 0.0}
        again = simulate(lowered, lambda a: priced.get(a, 0.0), step_s=result.steps_s.__getitem__)
        assert again.spans == trace.spans
    assert {rank for span in trace.spans for rank in [span.rank]} == set(lowered.plan.ranks)
    assert all(ranks_of(lowered, span.action) for span in trace.spans)


# The command


def test_the_command_says_emulated(tmp_path: Path):
    (tmp_path / "job.yaml").write_text(JOB)
    plan, trace = tmp_path / "plan.json", tmp_path / "emulated.json"
    accept("plan", tmp_path / "job.yaml", "-o", plan)
    local = json.loads(accept("run", plan, "--local", "--json").stdout.splitlines()[-1])
    told = accept("run", plan, "--emulate", "--trace", trace)
    assert "emulated, median of 3 steps" in told.stdout
    record = json.loads(accept("run", plan, "--emulate", "--json").stdout.splitlines()[-1])
    assert record["executor"] == "emulated"
    assert record["losses"] == pytest.approx(local["losses"], rel=1e-6)
    assert read_trace(trace).executor is Executor.EMULATED
    accept("report", tmp_path)
    assert "Emulated: actions timed alone" in (tmp_path / "report.html").read_text()
    words = "--local and --emulate exclude each other"
    refuse("run", plan, "--local", "--emulate", words=words, folder=tmp_path)
    refuse("run", plan, "--local", "--profile", "A40", words="gives an emulation its links", folder=tmp_path)
