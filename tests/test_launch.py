"""Runs as users start them: traces, spreads, order, torchrun, and what bad input gets."""

import math
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from runtime import launch
from runtime.launch import main, place_in_program, run_local
from runtime.run_settings import Collect, RunSettings
from runtime.state.weights_export import part_folder
from runtime.step.timing import (
    Notes,
    assemble,
    check_order,
    iteration_spread,
    spread_of,
)
from runtime.world.cores import cores_of
from runtime.world.pool import Pool
from tests.plans import disjoint_plan
from tests.tiny_valm import tiny_batch, tiny_valm
from workbench.model.model_graph import ModelGraph
from workbench.model.trainable import Trainable
from workbench.plan.codec import plan_hash, write_plan
from workbench.plan.lower import lower
from workbench.plan.lowered import Route
from workbench.plan.plan import Plan
from workbench.schedule.action import COMPUTE, STEP, Pass, parse_action
from workbench.trace import Executor, Lane, Span, Trace, median_trace
from workbench.trace_json import read_trace

CUTS = {"vision": (5,), "audio": (4,), "llm": (3, 3)}
REPLICATED = {"vision": (5,), "audio": (4,), "llm": (6,)}


@pytest.fixture(scope="module")
def plan() -> Plan:
    return disjoint_plan(tiny_valm(), tiny_batch(), CUTS)


def test_traces_hold_every_action_and_every_message_once(plan: Plan, pool: Pool) -> None:
    result = run_local(plan, RunSettings(steps=2, warmup=1, repetitions=2), pool=pool)
    assert len(result.traces) == 4
    assert len(result.losses) == 3
    lowered = lower(plan)
    for trace in result.traces:
        assert trace.executor is Executor.EXECUTED
        assert trace.plan_hash == plan_hash(plan)
        spans = sorted((span.rank, str(span.action)) for span in trace.spans)
        assert spans == sorted((rank, str(a)) for rank in plan.ranks for a in plan.program[rank])
        travelled = [row.row for row in lowered.transfers if row.route is not Route.LOCAL]
        assert [message.row for message in trace.messages] == travelled
        assert all(0 <= span.start_s <= span.end_s <= trace.iteration_s for span in trace.spans)
        assert all(message.ready_s <= message.start_s <= message.end_s for message in trace.messages)
    assert result.spread.lowest_s <= result.trace.iteration_s <= result.spread.highest_s
    assert dict(result.trace.details)["strategy"] == "test"


def test_consumers_start_after_their_messages(plan: Plan, pool: Pool) -> None:
    trace = run_local(plan, RunSettings(), pool=pool).trace
    lowered = lower(plan)
    ends = {(span.rank, span.action): span.end_s for span in trace.spans}
    starts = {(span.rank, span.action): span.start_s for span in trace.spans}
    for message in trace.messages:
        row = lowered.transfers[message.row]
        assert message.ready_s <= ends[row.source_rank, row.producer]
        assert message.end_s <= starts[row.destination_rank, row.consumer]


def test_reductions_start_together(pool: Pool) -> None:
    plan = disjoint_plan(tiny_valm(), tiny_batch(), REPLICATED, replicas=2)
    trace = run_local(plan, RunSettings(), pool=pool).trace
    reductions = [span for span in trace.spans if span.action.kind is Pass.REDUCE_GRAD]
    assert reductions
    assert all(span.lane is Lane.REDUCE for span in reductions)
    llm = [span for span in reductions if plan.stage[span.action.stage or 0].module == "llm"]
    assert len({span.rank for span in llm}) == 2
    first = {rank: min(s.start_s for s in llm if s.rank == rank) for rank in {s.rank for s in llm}}
    assert len(set(first.values())) == 1


def test_repetitions_start_from_the_same_weights(plan: Plan, pool: Pool) -> None:
    """Equal work gives equal losses to the last bit, whatever the timing."""
    result = run_local(plan, RunSettings(repetitions=3), pool=pool)
    assert len({trace.loss for trace in result.traces}) == 1


def test_other_seed_other_loss(plan: Plan, pool: Pool) -> None:
    one, other = (run_local(plan, RunSettings(seed=seed), pool=pool).losses[0] for seed in (0, 1))
    assert one != other
    assert math.isfinite(one)


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="steps must be 1 to 1,000,000, got 0"):
        RunSettings(steps=0)
    with pytest.raises(ValueError, match="timeout must be > 0 s"):
        RunSettings(timeout_s=0.0)


def notes_of(rank: int, actions: str, start_s: float = 0.0) -> Notes:
    spans = tuple(
        Span(rank, Lane.COMPUTE, parse_action(text), start_s + index, start_s + index + 1)
        for index, text in enumerate(actions.split())
    )
    return Notes(
        rank=rank,
        start_s=start_s,
        spans=spans,
        memory=(),
        sent_s={},
        delivered_s={},
        arrived_s={},
        loss_sum=0.5,
    )


def test_leaving_the_plan_is_noticed(plan: Plan) -> None:
    lowered = lower(plan)
    program = [str(action) for action in plan.program[0] if action.kind in COMPUTE]
    check_order(lowered, notes_of(0, " ".join(program)))
    swapped = [program[1], program[0], *program[2:]]
    with pytest.raises(RuntimeError, match=f"rank 0 left the plan at action 0: planned {program[0]}"):
        check_order(lowered, notes_of(0, " ".join(swapped)))
    with pytest.raises(RuntimeError, match="executed nothing more"):
        check_order(lowered, notes_of(0, " ".join(program[:-1])))


def test_time_zero_is_the_first_start() -> None:
    plan = disjoint_plan(
        tiny_valm(), tiny_batch((0, 0), (0, 0)), {"vision": (5,), "audio": (4,), "llm": (6,)}
    )
    trace = assemble(lower(plan), "hash", [notes_of(2, "2F0", 5.25), notes_of(0, "STEP", 5.0)])
    assert [span.start_s for span in trace.spans] == [0.0, 0.25]
    assert trace.loss == 1.0


def test_medians_and_spreads() -> None:
    spread = spread_of([2.0, 1.0, 4.0])
    assert (spread.median_s, spread.lowest_s, spread.highest_s, spread.relative) == (2.0, 1.0, 4.0, 1.5)
    traces = [
        Trace(plan_hash="", executor=Executor.EXECUTED, spans=(Span(0, Lane.COMPUTE, STEP, 0.0, end_s),))
        for end_s in (3.0, 1.0, 2.0, 9.0)
    ]
    assert median_trace(traces).iteration_s == 2.0
    assert iteration_spread(traces).median_s == 2.5
    with pytest.raises(ValueError, match="want at least one duration"):
        spread_of([])


def test_ranks_are_pinned_where_cores_allow() -> None:
    available = os.sched_getaffinity(0)
    pinned = cores_of(len(available))
    assert all(len(cores) == 1 for cores in pinned)
    assert frozenset().union(*pinned) == available
    assert cores_of(len(available) + 1) == [available] * (len(available) + 1)


def test_places_are_named(plan: Plan) -> None:
    lowered = lower(plan)
    assert place_in_program(lowered, 0, 0) == f"rank 0 at 0F0 (action 1 of {len(plan.program[0])})"
    assert place_in_program(lowered, 1, -1) == "rank 1 before its first action"


def test_outside_torchrun_the_cure_is_named(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    write_plan(plan, tmp_path / "plan.json")
    assert main([str(tmp_path / "plan.json")]) == 2
    assert "start this with torchrun" in capsys.readouterr().err


def torchrun(num_processes: int, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={num_processes}",
    ]
    return subprocess.run(
        [*command, "-m", "runtime.launch", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=Path(__file__).parents[1],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def test_torchrun_runs_the_same_plan(tmp_path: Path, pool: Pool) -> None:
    plan = llm_on(2)
    write_plan(plan, tmp_path / "plan.json")
    files = ("--trace", str(tmp_path / "run.json"), "--export", str(tmp_path / "out"))
    done = torchrun(2, str(tmp_path / "plan.json"), *files, "--seed", "3")
    assert done.returncode == 0, done.stderr
    trace = read_trace(tmp_path / "run.json")
    here = run_local(plan, RunSettings(seed=3, export=tmp_path / "here"), pool=pool)
    assert trace.plan_hash == plan_hash(plan)
    assert trace.loss == here.losses[0]
    assert f"step 1: loss {here.losses[0]:.6f}\n" in done.stdout
    for path in (tmp_path / "here" / "llm").iterdir():
        assert path.read_bytes() == (tmp_path / "out" / "llm" / path.name).read_bytes()
    assert [trace.order(rank) for rank in plan.ranks] == [here.trace.order(rank) for rank in plan.ranks]


def launched_alone(folder: Path, *flags: str) -> None:
    """A process that torchrun would have started as the only one."""
    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "localhost",
        "TORCHELASTIC_ERROR_FILE": str(folder / "0" / "error.json"),
    }
    with (folder / "stderr").open("w") as sys.stderr:
        exit_code = main([str(folder / "plan.json"), "--trace", str(folder / "run.json"), *flags])
    sys.exit(exit_code)


def test_the_wrong_number_of_ranks_is_named(tmp_path: Path) -> None:
    write_plan(llm_on(2), tmp_path / "plan.json")
    process = multiprocessing.get_context("fork").Process(target=launched_alone, args=(tmp_path,))
    process.start()
    process.join(60)
    assert process.exitcode == 2
    assert "error: the plan runs on 2 ranks, got 1 processes" in (tmp_path / "stderr").read_text()
    assert not (tmp_path / "run.json").exists()


def export_with_hosts(folder: Path) -> None:
    """Notes what is done, in turn, where there is another host to hear of."""
    written = folder / "turns"

    @contextmanager
    def exporting(*_: object, **__: object) -> Iterator[None]:
        part_folder(folder / "out").mkdir()
        yield
        note("exports")

    def note(turn: str) -> None:
        with written.open("a") as file:
            file.write(f"{turn}\n")

    beating = SimpleNamespace(leave=lambda: note("leaves"))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(launch, "heartbeats_of", lambda *_: beating)
        patched.setattr(launch, "exporting", exporting)
        launched_alone(folder, "--export", str(folder / "out"))


def test_hosts_that_are_done_are_not_missed_while_the_first_one_writes_its_export(tmp_path: Path) -> None:
    write_plan(llm_on(1), tmp_path / "plan.json")
    process = multiprocessing.get_context("fork").Process(target=export_with_hosts, args=(tmp_path,))
    process.start()
    process.join(60)
    assert process.exitcode == 0, (tmp_path / "stderr").read_text()
    assert (tmp_path / "turns").read_text() == "leaves\nexports\n"


def test_an_export_is_there_before_the_processes_that_trained_are_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that nothing that happens at their end can take it away."""
    there: list[bool] = []

    class Ending(Pool):
        def close(self) -> None:
            there.append((tmp_path / "out").is_dir())
            super().close()

    monkeypatch.setattr(launch, "Pool", Ending)
    run_local(llm_on(1), RunSettings(steps=1, warmup=0, export=tmp_path / "out"))
    assert there == [True]


def llm_on(num_ranks: int) -> Plan:
    alone = ModelGraph(name="llm-alone", modules=(tiny_valm().module("llm"),))
    return disjoint_plan(alone, tiny_batch((0, 0), (0, 0)), {"llm": (6 // num_ranks,) * num_ranks})


def test_watched_memory_grows_with_forwards_and_falls_with_backwards(pool: Pool) -> None:
    plan = disjoint_plan(tiny_valm(llm=Trainable.ALL), tiny_batch(), CUTS)
    result = run_local(plan, RunSettings(steps=2, collect=Collect.MEMORY), pool=pool)
    trace = result.traces[-1]
    for rank in plan.ranks:
        held = [sample.num_bytes for sample in trace.memory if sample.rank == rank]
        spans = [span for span in trace.spans if span.rank == rank]
        forwards = [span for span in spans if span.action.kind is Pass.F]
        backwards = [span for span in spans if span.action.kind is Pass.B]
        assert len(held) == 2 * len(spans)  # each action's height, and what it left
        if backwards and len(forwards) > 1:
            assert held[0] < max(held)
    llm = next(stage for stage in plan.stages if stage.module == "llm")
    module = plan.model.module("llm")
    weights = 4 * sum(module.layers[index].num_parameters for index in range(*llm.layers))
    at_the_end = [sample.num_bytes for sample in trace.memory if sample.rank == llm.flat_ranks[0]][-1]
    sent = [message.num_bytes for message in trace.messages if message.source_rank == llm.flat_ranks[0]]
    # Weight, gradient and two moments; one step counter for each tensor; messages that nobody took yet.
    assert 4 * weights <= at_the_end <= 4 * weights * 1.01 + sum(sent)
    assert sum(sent) < weights / 2  # a fifth copy of the weights would be seen
    assert not run_local(plan, RunSettings(), pool=pool).trace.memory
