"""One process that does all ranks' actions one at a time computes what the ranks compute."""

import threading
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from runtime.data.batches import SyntheticSource
from runtime.emulation.emulate import emulate, legal_order
from runtime.emulation.turn import Runner, Turns
from runtime.launch import run_lowered
from runtime.reference import reference_step
from runtime.run_settings import Collect, RunSettings
from runtime.step.optimizer import OptimizerSettings
from runtime.step.stage_module import StageModule, build_stage_module
from runtime.world.failure import RankError
from runtime.world.pool import Pool
from tests import strategies
from tests.command_line import JOB, accept, answered, refuse
from tests.plans import disjoint_plan
from tests.test_context_parallel_step import plan_of as context_parallel_plan
from tests.test_expert_plan import moe_plan
from tests.test_parity import CUTS, SEED, assert_parity, mixed
from tests.test_tensor_parallel import ONE, Degrees, encoders, laid_out
from tests.test_tensor_sequence import sequence_parallel
from tests.tiny_valm import tiny_batch
from tests.waiting import PATIENCE_S, eventually
from workbench.model.model_graph import ModelGraph
from workbench.model.trainable import Trainable, with_trainable
from workbench.plan.lower import lower
from workbench.plan.plan import ModuleSettings, Plan, Precision, Program, Recompute, Settings
from workbench.schedule.action import COMPUTE, parse_action
from workbench.trace import Executor
from workbench.trace_json import read_trace

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
    "divided tokens": lambda: sequence_parallel(laid_out(encoders(), SHARED_TOKENS)),
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
    assert set(result.timings.works) == {a for a in plan.program_actions if a.kind in COMPUTE}
    assert set(result.timings.steps_s) == set(plan.ranks)
    assert all(work.own_s > 0 for by_rank in result.timings.works.values() for work in by_rank.values())


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
    position = {action: index for index, action in enumerate(order)}
    for program in plan.programs:
        assert all(position[a] < position[b] for a, b in pairwise(program.actions))
    for row in lowered.transfers:
        assert position[row.producer] < position[row.consumer]


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
    circular = row._replace(producer=row.consumer, consumer=row.producer)
    inputs = dict(lowered.inputs) | {row.producer: (row.row,)}
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
    turns = Turns(timeout_s=0.2)

    def dawdle(runner: Runner) -> None:
        runner.place = 7
        released.wait(PATIENCE_S)
        ended.append(runner.rank)

    released = threading.Event()
    turns.start(4, dawdle)
    with pytest.raises(RankError, match=r"rank 4: its turn did not end within 0.2 s \(place 7\)"):
        turns.give(4)
    released.set()
    turns.close()
    assert eventually(lambda: ended == [4])  # `close` waits no longer than a turn


# The command


def test_the_command_says_emulated(tmp_path: Path):
    (tmp_path / "job.yaml").write_text(JOB)
    plan, trace = tmp_path / "plan.json", tmp_path / "emulated.json"
    accept("plan", tmp_path / "job.yaml", "-o", plan)
    local = answered("run", plan, "--local")
    told = accept("run", plan, "--emulate", "--trace", trace)
    assert "emulated, median of 3 steps" in told.stdout
    record = answered("run", plan, "--emulate")
    assert record["executor"] == "emulated"
    assert record["losses"] == pytest.approx(local["losses"], rel=1e-6)
    assert read_trace(trace).executor is Executor.EMULATED
    accept("report", tmp_path)
    assert "Emulated: actions timed alone" in (tmp_path / "report.html").read_text()
    words = "--local and --emulate exclude each other"
    refuse("run", plan, "--local", "--emulate", words=words, folder=tmp_path)
    refuse(
        "run", plan, "--local", "--profile", "A40", words="--profile is only for --emulate", folder=tmp_path
    )
