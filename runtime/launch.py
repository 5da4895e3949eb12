"""Executes a plan on real processes: gloo processes of this machine, or under torchrun."""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from runtime.data.batches import DataSource, SyntheticSource
from runtime.data.planned import data_read
from runtime.next_plan import Rule
from runtime.preprocess.source import following_of, source_of
from runtime.rank_job import Build, run_rank
from runtime.rank_report import RankReport, RankState
from runtime.run_settings import Collect, RunSettings
from runtime.state.checkpoint import Begin, Checkpoints, checkpoints_in
from runtime.state.checkpoint_files import clear_parts, identity_of
from runtime.state.save_folder import clear_after_writer
from runtime.state.weights_export import check_export, exporting
from runtime.step.note_details import details_of
from runtime.step.optimizer import optimizer_of
from runtime.step.stage_module import build_stage_module
from runtime.step.timing import Spread, assemble, iteration_spread
from runtime.step_plans import Planning
from runtime.world.allocator import keep_freed_memory
from runtime.world.device import CPU, kind_of_device, launched_device
from runtime.world.failure import RankError, first_line
from runtime.world.heartbeats import heartbeats_of
from runtime.world.last_words import FIRST_SPEAKS_S, SAME_ARGUMENTS_S, first_speaks, let_first_speak, say_last
from runtime.world.local_world import join_launched
from runtime.world.neighbours import Neighbours, owners_of_all
from runtime.world.pool import Place, Pool
from workbench.float_sum import float_sum
from workbench.job.job import load_job
from workbench.job.machines import cost_of
from workbench.job.run_options import RunOptions, add_arguments
from workbench.memory.checkpoint_bytes import checkpoint_bytes
from workbench.model.checkpoint import check_weights
from workbench.plain_text import plain
from workbench.plan.codec import plan_hash, read_plan
from workbench.plan.lower import lower
from workbench.plan.lowered import Lowered
from workbench.plan.plan import Plan
from workbench.plan.runnable import check_runnable
from workbench.strategies.next_step import NextStep
from workbench.termination import Ended, ending_by_signal, leave
from workbench.timing.accept import accept
from workbench.timing.provenance import DEVICE
from workbench.trace import Trace, median_trace
from workbench.trace_json import write_trace
from workbench.whole_file import check_writable

BAD_INPUT = 2  # exit code
ECHO_GRACE_S = 5.0  # wait of a rank that lost a peer, for torchrun to find out which one died

HELPS = {
    "trace": "trace file, written by the first rank",
    "repetitions": "number of runs, each from fresh weights",
    "checkpoint": "folder that all ranks can see, to save checkpoints to",
    "device": "device of every rank; default: a GPU if there is one",
}  # unlike those of `workbench run`

Progress = Callable[[int, int, float], None]  # (steps done, total, loss)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """Result of an executed plan.

    Args:
        traces: one per timed step, by repetition; of a long run the last `MOST_TIMED`.
        losses: of every step of the first repetition, including warm-up.
        states: per rank, where they were collected.
        plans: of these steps, where further batches follow the first.
        plannings: how the plan of every timed step was obtained.
        save_stalls_s: by how long each checkpoint delayed the slowest rank.
    """

    traces: tuple[Trace, ...]
    losses: tuple[float, ...]
    states: tuple[RankState, ...] = ()
    plans: tuple[Lowered, ...] = ()
    plannings: tuple[Planning, ...] = ()
    save_stalls_s: tuple[float, ...] = ()

    @property
    def trace(self) -> Trace:
        """The trace of the step with the median iteration time."""
        return median_trace(self.traces)

    @property
    def spread(self) -> Spread:
        """Spread of the iteration time over all timed steps."""
        return iteration_spread(self.traces)


def run_local(
    plan: Plan,
    settings: RunSettings,
    *,
    pool: Pool | None = None,
    progress: Progress | None = None,
) -> RunResult:
    """Run a plan on processes of this machine, one per rank; see `run_lowered`."""
    return run_lowered(lower(plan), settings, pool=pool, progress=progress)


def run_lowered(
    lowered: Lowered,
    settings: RunSettings,
    *,
    source: DataSource | None = None,
    pool: Pool | None = None,
    build: Build = build_stage_module,
    progress: Progress | None = None,
) -> RunResult:
    """Run a lowered plan on gloo processes, each with `settings.threads` torch threads.

    Args:
        lowered: the plan.
        settings: of the run.
        source: data; None: synthetic, from the seed.
        pool: workers; None: forked for this run and ended after it.
        build: builds the modules of stages.
        progress: called with (steps done, total, loss) after every step, warm-up and resumed ones counted.

    Raises:
        ValueError: the plan, the weights, the data or the folder to export to were refused.
        WorldFailed: a rank died or raised; all ranks have ended, and the message names the cause.
    """
    ranks = lowered.plan.ranks
    data = source or SyntheticSource(settings.seed)
    steps = settings.repetitions * (settings.warmup + settings.steps)
    taken = 0 if settings.checkpoints is None else settings.checkpoints.num_taken
    on_loss = None if progress is None else StepLosses(len(ranks), steps, progress, num_taken=taken)
    with (
        _parts_cleared(settings.checkpoints),
        Pool(len(ranks)) if pool is None else nullcontext(pool) as workers,
        exporting(settings.export, lowered.plan.model, settings.weights, dtype=settings.dtype(lowered.plan)),
    ):
        reports = workers.run(
            run_rank,
            len(ranks),
            lowered,
            settings,
            data,
            build,
            timeout_s=settings.timeout_s * (1 + steps),
            wait_s=settings.timeout_s,
            where=partial(_place, lowered, settings),
            on_message=on_loss,
        )
    return result_of(lowered, reports, settings)


@contextmanager
def _parts_cleared(saves: Checkpoints | None) -> Iterator[None]:
    """Context of processes that save: partial checkpoints are removed when they fail."""
    try:
        yield
    except BaseException:
        if saves is not None:
            clear_after_writer(saves.folder, clear_parts)
        raise


class StepLosses:
    """Sums the ranks' parts of each step's loss, and reports it; `num_taken` steps were taken before."""

    def __init__(self, num_ranks: int, num_steps: int, progress: Progress, *, num_taken: int = 0) -> None:
        self._parts: list[list[float]] = [[] for _ in range(num_ranks)]
        self._num_steps, self._num_taken = num_steps, num_taken
        self._progress = progress

    def __call__(self, process: int, part: float) -> None:
        self._parts[process].append(part)
        done = len(self._parts[process])
        if min(map(len, self._parts)) == done:
            self._progress(
                self._num_taken + done, self._num_steps, float_sum(parts[done - 1] for parts in self._parts)
            )


def _place(lowered: Lowered, settings: RunSettings, process: int, position: int) -> str:
    """As `place_in_program`; programs of other batches are not known here, so their actions have no name."""
    if not settings.following.batches or position < 0:
        return place_in_program(lowered, process, position)
    return f"rank {lowered.plan.ranks[process]} at action {position + 1} of its step"


def place_in_program(lowered: Lowered, process: int, position: int) -> str:
    """Position for error messages, such as `rank 2 at 1F0 (action 3 of 12)`."""
    rank = lowered.plan.ranks[process]
    program = lowered.plan.program.get(rank, ())
    if not 0 <= position < len(program):
        return f"rank {rank} before its first action"
    return f"rank {rank} at {program[position]} (action {position + 1} of {len(program)})"


def result_of(
    lowered: Lowered, reports: Sequence[RankReport], settings: RunSettings, device: torch.device = CPU
) -> RunResult:
    """Combine all ranks' reports into one result; the traces' details describe the run."""
    details = (
        (DEVICE, kind_of_device(device)),
        ("dtype", str(settings.dtype(lowered.plan)).removeprefix("torch.")),
        ("seed", str(settings.seed)),
        ("strategy", lowered.plan.strategy),
        ("threads_per_rank", str(settings.threads)),
        ("torch", torch.__version__),
    )
    first = next((report for report in reports if report.plans), reports[0])
    by_step = list(zip(*(report.notes for report in reports), strict=True))
    plans = first.plans or (lowered,) * len(by_step)
    return RunResult(
        traces=tuple(
            assemble(step, plan_hash(step.plan), notes, details=(*details, *details_of(notes)))
            for step, notes in zip(plans, by_step, strict=True)
        ),
        losses=tuple(
            float_sum(losses) for losses in zip(*(report.losses for report in reports), strict=True)
        ),
        states=tuple(report.state for report in reports if report.state is not None),
        plans=first.plans,
        plannings=first.plannings,
        save_stalls_s=tuple(map(max, zip(*(report.save_stalls_s for report in reports), strict=True))),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of `torchrun ... -m runtime.launch plan.json`; returns the exit code."""
    arguments_ = _parse(arguments)
    try:
        with ending_by_signal():
            return _launch(arguments_)
    except Ended as ended:
        say_last(f"ended by {ended.name}")
        raise


def _launch(options_by_name: dict[str, Any]) -> int:
    wait_s = SAME_ARGUMENTS_S
    try:
        plan, options = options_by_name.pop("plan"), RunOptions(**options_by_name)
        wait_s = min(FIRST_SPEAKS_S, options.timeout_s / 4)
        missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR") if name not in os.environ]
        if missing:
            raise ValueError(
                f"{missing[0]} is not set: start this with torchrun, "
                "e.g. torchrun --standalone --nproc-per-node 4 -m runtime.launch plan.json"
            )
        device = launched_device(options.device)
        lowered, _ = accept(read_plan(plan))
        if options.weights is not None:
            check_weights(options.weights, [module.name for module in lowered.plan.model.modules])
        settings, source = prepare(options, lowered.plan)
        if options.trace is not None:
            check_writable(options.trace)
        if options.export is not None:
            check_export(options.export, lowered.plan.model, options.weights, settings.dtype(lowered.plan))
        result = _run_under_torchrun(lowered, settings, source or SyntheticSource(options.seed), device)
        if result is not None and options.trace is not None:
            write_trace(result.trace, options.trace)
    except (ValueError, OSError, RankError) as error:
        return _refuse(error, wait_s)
    if result is not None:
        for step, loss in enumerate(result.losses, 1):
            timed = "" if step > settings.warmup else " (warm-up)"
            sys.stdout.write(f"step {step}{timed}: loss {loss:.6f}\n")
        sys.stdout.write(f"loss {result.losses[-1]:.6f}, iteration {result.spread.median_s:.6f} s\n")
    return 0


def _refuse(error: Exception, wait_s: float) -> int:
    """Say why the rank ends; returns the exit code. `wait_s` as of `let_first_speak`."""
    if not isinstance(error, RankError) and not dist.is_initialized():  # others wait for it after that
        let_first_speak(os.environ, wait_s)
    say_last(f"error: {plain(str(error))}")
    if isinstance(error, RankError) and error.peers:
        time.sleep(ECHO_GRACE_S)  # torchrun names the process that ends first as the cause
    return BAD_INPUT


def _give_up(reason: str) -> NoReturn:
    """End this process from a thread, while its ranks wait for a silent peer."""
    say_last(f"error: {reason}")
    leave(BAD_INPUT)


def _rule_of(path: Path, plan: Plan) -> Rule:
    """The batching rule of the job file of a plan; ValueError for another job."""
    job = load_job(path)
    for what, mine, its in (("model", plan.model, job.model), ("cluster", plan.cluster, job.cluster)):
        if mine != its:
            raise ValueError(
                f"--job {path}: its {what} is not the plan's; want the job that the plan was made of"
            )
    return NextStep(job=job, cost=cost_of(job, None, None))


def prepare(options: RunOptions, plan: Plan) -> tuple[RunSettings, DataSource | None]:
    """Settings of every rank and the data source, from options; source None: synthetic data.

    Raises:
        ValueError: a plan that can only be simulated, or does not fit the options; settings of the optimizer
            out of bounds; data or a server that cannot be read; other data than the plan's; checkpoints that
            are torn, of another run, or in the way.
    """
    check_runnable(plan)
    if options.next_samples and options.data is None:
        raise ValueError("--next-samples takes them from a data folder; want --data FOLDER")
    if options.job is not None and not options.next_samples:
        raise ValueError("--job groups the next samples; want --next-samples")
    if options.resume and options.checkpoint is None:
        raise ValueError("--resume continues from a folder of checkpoints; want --checkpoint FOLDER")
    rule = None if options.job is None else _rule_of(options.job, plan)
    source = source_of(options.data, options.data_keys, plan, timeout_s=options.timeout_s)
    following = following_of(source if options.next_samples else None, plan)
    if rule is not None:
        following = replace(following, rule=rule)
    collect = Collect.MEMORY if options.watch_memory else Collect.NOTHING
    told = options.of_steps | {"optimizer": optimizer_of(options)}
    settings = RunSettings(**told, following=following, collect=collect)
    if options.checkpoint is None:
        return settings, source
    data = data_read(plan, None if source is None else source.records, following)
    identity = identity_of(plan, settings.dtype(plan), options.seed, data=data)
    begin = Begin.LATEST if options.resume else Begin.ANEW
    num_bytes = checkpoint_bytes(plan.model, plan.settings)
    saves = checkpoints_in(options.checkpoint, options.checkpoint_every, begin, identity, num_bytes=num_bytes)
    return replace(settings, checkpoints=saves), source


def _run_under_torchrun(
    lowered: Lowered, settings: RunSettings, source: DataSource, device: torch.device
) -> RunResult | None:
    """Run this process's rank; returns the result on the first one. Objects are always sent by gloo.

    On failure, connections stay open until this process ends: see `main`.
    """
    keep_freed_memory()
    join_launched(os.environ, wait_s=settings.timeout_s, device=device)
    place = Place(dist.get_rank(), dist.get_world_size(), lambda position: None)
    reports: list[RankReport | None] = [None] * place.size
    target = settings.export if place.process == 0 else None
    owners = owners_of_all(place.size)
    neighbours = Neighbours(place.process, owners)
    heartbeats = heartbeats_of(owners, place.process, os.environ, _give_up)
    if place.process == 0:  # lost processes are named from now on
        if settings.checkpoints is not None and settings.checkpoints.warning is not None:
            sys.stderr.write(f"warning: {plain(settings.checkpoints.warning)}\n")
        steps = settings.repetitions * (settings.warmup + settings.steps)
        sys.stderr.write(f"running {steps} steps on {place.size} ranks ({device.type})\n")
    try:
        with exporting(target, lowered.plan.model, settings.weights, dtype=settings.dtype(lowered.plan)):
            _gather(run_rank(place, lowered, settings, source, device=device), reports)
            neighbours.leave()  # all are done, and may end before the first rank has exported
            if heartbeats is not None:
                heartbeats.leave()
    except RankError as error:
        if neighbours.cause is None:
            raise
        raise RankError(f"{error}; {neighbours.cause}", peers=error.peers) from error
    complete = [report for report in reports if report is not None]
    dist.destroy_process_group()
    return result_of(lowered, complete, settings, device) if place.process == 0 else None


def _gather(report: RankReport, reports: list[RankReport | None]) -> None:
    """Fill in the reports of all ranks; RankError where one has ended without a report."""
    try:
        dist.all_gather_object(reports, report)
    except RuntimeError as error:
        raise RankError(f"rank {dist.get_rank()} collecting the results: {first_line(error)}") from error


def _parse(arguments: Sequence[str] | None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(prog="runtime.launch", description=__doc__)
    parser.add_argument("plan", type=Path, help="plan file")
    add_arguments(parser, RunOptions, HELPS)
    with first_speaks(os.environ):
        return vars(parser.parse_args(arguments))


if __name__ == "__main__":
    try:
        leave(main())
    except Ended as ended:
        leave(128 + ended.number)
