"""Recordings that torch.profiler makes here: of a script as the guide has it, and of our own runtime."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from experiments.doors.ingest import recorded_run
from runtime.step.annotations import annotated
from tests.command_line import accept
from tests.test_ingest import planned
from workbench.schedule.action import COMPUTE, Pass
from workbench.trace_files.ingest import files_of, ingest, read_ranks

NUM_MICROBATCHES = 3


def record(path: Path, *, named: bool, with_stack: bool = False) -> None:
    """Two steps of three microbatches, recorded by a schedule as users do."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=1, warmup=1, active=2, repeat=1),
        on_trace_ready=lambda done: done.export_chrome_trace(str(path)),
        with_stack=with_stack,
    ) as profiler:
        for _ in range(4):
            for microbatch in range(NUM_MICROBATCHES):
                batch = torch.randn(32, 64)
                if named:
                    with record_function(f"PP:0F{microbatch}"):
                        loss = model(batch).mean()
                    with record_function(f"PP:0B{microbatch}"):
                        loss.backward()
                else:
                    model(batch).mean().backward()
            optimizer.step()
            profiler.step()


@pytest.mark.parametrize("packed", ["", ".gz"])
@pytest.mark.parametrize("named", [True, False])
def test_a_script_is_read_by_its_names_or_its_modules(tmp_path, named, packed):
    path = tmp_path / f"rank0.json{packed}"
    record(path, named=named, with_stack=not named)
    steps = ingest(read_ranks([path]))
    assert len(steps) == 2
    for step in steps:
        wanted = [f"0{kind}{number}" for number in range(NUM_MICROBATCHES) for kind in "FB"]
        assert [str(action) for action in step.order(0)] == [*wanted, "STEP"]
        assert all(span.end_s > span.start_s >= 0 for span in step.spans)
        assert dict(step.details)["passes found by"] == ("annotations" if named else "module ranges")
        assert dict(step.details)["device"] == "cpu"


def test_a_recording_without_names_or_modules_says_what_to_add(tmp_path):
    record(tmp_path / "rank0.json", named=False)
    with pytest.raises(
        ValueError, match=r"no passes in it; name them: with torch\.profiler\.record_function"
    ):
        ingest(read_ranks(files_of([tmp_path])))


@pytest.mark.parametrize("named", [True, False])
def test_forwards_without_backwards_are_a_warning(tmp_path, named):
    """DDP annotates its forward alone."""
    model, path = torch.nn.Linear(8, 8), tmp_path / "rank0.json"
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        with record_function("DistributedDataParallel.forward"):
            loss = model(torch.randn(4, 8)).sum()
        with record_function("backward") if named else nullcontext():
            loss.backward()
        with record_function("PP:STEP"):
            pass
    profiler.export_chrome_trace(str(path))
    said = " ".join(accept("ingest", str(path)).stderr.split())
    warned = "warning: no backward is named in these recordings" in said
    assert warned is not named
    assert ("record_function(f'PP:{stage}B{microbatch}')" in said) is not named


def test_our_own_run_comes_back_as_it_ran(tmp_path):
    """Four gloo processes: every rank's passes in their order, and the step as long as we measured it."""
    plan, _ = planned("cornstarch")
    own = recorded_run(plan, tmp_path)
    steps = ingest(read_ranks(files_of([tmp_path])), plan=plan)
    assert len(steps) == 2  # the first, which is not timed, and the second
    got = steps[1]
    assert got.plan_hash == own.plan_hash
    for rank in plan.ranks:
        assert got.order(rank) == own.order(rank)
    assert got.iteration_s == pytest.approx(own.iteration_s, rel=0.02, abs=2e-3)
    kinds = (*COMPUTE, Pass.STEP)
    assert {(s.rank, s.action) for s in got.spans} == {
        (s.rank, s.action) for s in own.spans if s.action.kind in kinds
    }


def test_nothing_is_named_without_a_profiler():
    """The runtime's ranges cost a check where nobody records."""
    with annotated("0F0") as found:
        assert found is None
    with profile(activities=[ProfilerActivity.CPU]) as profiler, annotated("0F0"):
        pass
    assert [event.name for event in profiler.events()].count("PP:0F0") == 1
