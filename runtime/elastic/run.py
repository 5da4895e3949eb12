"""Runs an elastic training while its nodes are killed, warned and started, and keeps what it went through."""

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from math import inf
from pathlib import Path

from runtime.elastic.history import ElasticFailed, Reshaped, StepDone
from runtime.elastic.job import ElasticJob, Reduction
from runtime.elastic.nodes import Nodes
from runtime.elastic.orders import Moment
from runtime.elastic.progress import STAMP, Progress, clear_unfinished, read_progress, unfinished_saves
from runtime.elastic.step_data import StepData
from runtime.elastic.training import ElasticTraining
from runtime.state.save_folder import written_alone
from runtime.state.tensor_files import TornError, read_stamp
from runtime.world.busy_cores import BusyCores, CoreWatch, process_seconds
from workbench.elastic.reconfigure import CannotContinueError
from workbench.elastic.step_events import AtStep, StepEvents
from workbench.plan.plan import Sharding
from workbench.strategies.elastic_templates import ElasticTemplates
from workbench.termination import noting

NUM_SAVES = 2  # on the disk at a time: the last one, and the one that is being written
UNSAVED = "progress was not saved"
SHORTEST_STEP_S = 60.0  # that a step may take before its ranks are said to hang
LOOK_EVERY_S = 0.0005
PASSES = (Moment.FORWARD, Moment.BACKWARD)
CONNECTING = (Moment.GROUPS,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What happened.

    Args:
        steps, changes: as training kept them, times on the machine's monotonic clock.
        killed_s: when each node got its SIGKILL, on the same clock.
        refusal: why training stopped early; None where it did not.
        signal: that asked it to stop.
        saved: progress, where it was asked for and could be.
        core_s: core seconds of all ranks and this process, by step, from the vote before to its own; of
            steps in which the ranks stayed the same.
        cores: that were busy meanwhile; None where the system does not say.
    """

    steps: tuple[StepDone, ...]
    changes: tuple[Reshaped, ...]
    killed_s: Mapping[str, float]
    refusal: str | None
    signal: signal.Signals | None
    saved: Progress | None
    core_s: Mapping[int, float] = field(default_factory=dict)
    cores: BusyCores | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """Where progress goes: a folder for a save, named by its step; `every` steps, and when training ends."""

    folder: Path
    every: int | None = None

    def __post_init__(self) -> None:
        if self.every is not None and self.every < 1:
            raise ValueError(f"elastic: want a save every 1 step or more, got {self.every}")

    def place(self, step: int) -> Path:
        """A folder that is not there yet."""
        names = (f"step{step}", *(f"step{step}.{number}" for number in range(2, 1000)))
        return next(path for name in names if not (path := self.folder / name).exists())


def elastic_job(
    found: ElasticTemplates, data: StepData, *, seed: int, wait_s: float, num_cores: int
) -> ElasticJob:
    """What the runtime trains.

    Gradients are summed layer by layer, beside the backward, only where every rank has a core of its own,
    or where weights are sharded: then in rounds, which the plan itself tells.

    Raises:
        ValueError: what ElasticJob refuses.
    """
    specification = found.planned.specification
    num_ranks = specification.num_nodes * found.job.cluster.nodes[0].num_ranks
    is_apart = num_ranks <= num_cores or found.sharding is not Sharding.NONE
    return ElasticJob(
        model=found.job.model,
        chain=found.chain,
        templates=found.planned,
        batch=data.batch,
        source=data.source,
        data=data.name,
        samples_per_microbatch=found.job.microbatch_samples,
        sum_s=found.sum_s,
        sharding=found.sharding,
        seed=seed,
        precision=found.job.settings.precision,
        reduction=Reduction.LAYERWISE if is_apart else Reduction.AFTER_BACKWARD,
        wait_s=wait_s,
        step_s=max(SHORTEST_STEP_S, 2 * wait_s),
    )


def latest_progress(job: ElasticJob, folder: Path, warn: Callable[[str], None]) -> Progress:
    """The furthest whole save of a folder, or the one that the folder is.

    Args:
        warn: called for every torn save that is passed over.

    Raises:
        ValueError: there is none, all are torn, or it is of another model.
    """
    if (folder / STAMP).is_file():
        return read_progress(job, folder)
    saves = sorted((*(path.parent for path in folder.glob(f"*/{STAMP}")), *unfinished_saves(folder)))
    if not saves:
        raise ValueError(f"{folder}: no whole save in it; want a folder that --checkpoint wrote")
    torn: list[str] = []
    for save in sorted(saves, key=_step_of, reverse=True):
        try:
            progress = read_progress(job, save)
        except TornError as error:
            torn.append(str(error))
            continue
        for reason in torn:
            warn(f"{reason}; passed over, going on from {save.name} with step {progress.step + 1}")
        return progress
    raise TornError("; ".join(torn))


def _step_of(save: Path) -> float:
    """That a save says it is of; infinity where it says nothing, for it may be the furthest."""
    try:
        step = read_stamp(save / STAMP).get("step")
    except TornError:
        return inf
    return step if isinstance(step, int) else inf


def run_elastic(
    job: ElasticJob,
    events: StepEvents,
    steps: int,
    *,
    start: Progress | None,
    saving: Saving | None,
    tell: Callable[[ElasticTraining], None],
    warn: Callable[[str], None],
) -> Ran:
    """Train until so many steps were taken, a refusal, or a signal; all processes have ended then.

    A first SIGINT or SIGTERM lets the step end and saves; a second one raises KeyboardInterrupt.

    Args:
        tell: called after every step.
        warn: called where progress could not be saved and training goes on.

    Raises:
        ValueError: the folder is another training's, or the progress to go on from is gone.
    """
    refusal, log, watch = None, _Log(saving), CoreWatch()
    with (
        nullcontext() if saving is None else _saved_alone(saving.folder, start),
        noting(signal.SIGINT, signal.SIGTERM) as asked,
        ElasticTraining(job, events.start, start=start) as training,
    ):
        try:
            while training.step < steps and not asked:
                _take_step(training, events.at(training.step), log.killed_s)
                log.note(training)
                tell(training)
                if saving is not None and saving.every and training.step % saving.every == 0:
                    unsaved = log.save(training)
                    if unsaved is not None:
                        warn(f"after {training.step} steps {unsaved}; training goes on")
        except (CannotContinueError, ElasticFailed) as error:
            refusal = str(error)
        unsaved = log.save(training) if training.steps else None
        if refusal is not None and saving is None and training.steps:
            unsaved = f"{UNSAVED}: no --checkpoint folder was given"
        if unsaved is not None:
            refusal = unsaved if refusal is None else f"{refusal}; {unsaved}"
    return Ran(
        steps=tuple(training.steps),
        changes=tuple(training.changes),
        killed_s=log.killed_s,
        refusal=refusal,
        signal=asked[0] if asked else None,
        saved=log.saved,
        core_s=log.core_s,
        cores=watch.busy(),
    )


@contextmanager
def _saved_alone(folder: Path, start: Progress | None) -> Iterator[None]:
    """Around a training that saves there; what one before it did not finish is removed.

    Raises:
        ValueError: the one before it has gone on from `start`, and removed it, since that was read.
    """
    with written_alone(folder):
        if start is not None and not (start.folder / STAMP).is_file():
            raise ValueError(
                f"{start.folder}: another training has removed it since it was read; "
                "want --resume of a later save"
            )
        clear_unfinished(folder)
        yield


@dataclass(slots=True)
class _Log:
    """What is kept beside the history of a training."""

    saving: Saving | None
    killed_s: dict[str, float] = field(default_factory=dict)
    saved: Progress | None = None
    core_s: dict[int, float] = field(default_factory=dict)
    _used_s: dict[int, float] = field(default_factory=dict)

    def note(self, training: ElasticTraining) -> None:
        """After a step: what it took of the cores."""
        ranks = [each for node in training.layout.nodes for each in training.nodes.process_ids(node)]
        now_s = process_seconds((os.getpid(), *ranks))
        if now_s and now_s.keys() == self._used_s.keys():
            self.core_s[training.step - 1] = sum(now_s.values()) - sum(self._used_s.values())
        self._used_s = now_s

    def save(self, training: ElasticTraining) -> str | None:
        """Progress, where it is asked for and new; then the save before it, of this run, is deleted.

        Returns:
            Why it could not be saved: a node may be gone that training has not missed yet.
        """
        before = self.saved
        if self.saving is None or (before is not None and before.step == training.step):
            return None
        folder = self.saving.place(training.step)
        try:
            self.saved = training.save(folder)
        except (ElasticFailed, OSError) as error:
            return f"{UNSAVED}: {error}"
        if before is not None:
            shutil.rmtree(before.folder)
        return None


class NodeKiller(threading.Thread):
    """Kills nodes while they compute, from outside, as soon as the first victim is in a pass, or at the end.

    All processes of its victims die at once.

    Where this thread gets its turn only after the victim's vote, the step counts: the next one is cut off.

    Args:
        nodes: of the training.
        victims: the first is watched, so it should be one that works.
        in_recovery: victims of the recovery from that, when the first of them connects to the others left.
    """

    def __init__(self, nodes: Nodes, victims: Sequence[str], in_recovery: Sequence[str] = ()) -> None:
        super().__init__(name="node-killer", daemon=True)
        self._nodes, self._victims, self._in_recovery = nodes, victims, in_recovery
        self._is_over, self._is_given_up = threading.Event(), threading.Event()
        self.killed_s: dict[str, float] = {}

    def run(self) -> None:
        """Wait, then kill."""
        self._kill_when(self._victims, PASSES)
        if self._in_recovery:
            self._kill_when(self._in_recovery, CONNECTING)

    def give_up(self) -> None:
        """Spare those who have not been killed yet, and return when that is sure."""
        self._is_given_up.set()
        self.end()

    def end(self) -> None:
        """Kill those who never computed while the step lasted, and return when it is done."""
        self._is_over.set()
        self.join()

    def _kill_when(self, victims: Sequence[str], moments: Collection[Moment]) -> None:
        while not any(moment in moments for moment in self._nodes.moments(victims[0])):
            if self._is_over.wait(LOOK_EVERY_S):
                break
        for victim in () if self._is_given_up.is_set() else victims:
            self._kill(victim)

    def _kill(self, victim: str) -> None:
        for process in self._nodes.process_ids(victim):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
                self.killed_s.setdefault(victim, time.monotonic())


def _take_step(training: ElasticTraining, now: AtStep, killed_s: dict[str, float]) -> None:
    at_work = training.layout.nodes
    training.join(now.joins)
    training.nodes.end([node for node in now.warned if node not in at_work])  # they only waited for room
    training.warn([node for node in now.warned if node in at_work])
    if not now.killed:
        training.train(training.step + 1)
        return
    victims, in_recovery = (
        sorted(nodes, key=lambda node: node not in at_work)  # the first is watched
        for nodes in (now.killed, now.killed_in_recovery)
    )
    killer = NodeKiller(training.nodes, victims, in_recovery)
    killer.start()
    try:
        training.train(training.step + 1)
        killer.end()
    finally:
        killer.give_up()  # where training stopped, others may still have something to save
        killed_s.update(killer.killed_s)
