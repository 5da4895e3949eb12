"""Runs an elastic training while nodes are killed, warned and started, and records its history."""

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
from runtime.elastic.orders import Moment, Ready, Vote
from runtime.elastic.progress import STAMP, Progress, clear_unfinished, read_progress, unfinished_saves
from runtime.elastic.step_data import StepData
from runtime.elastic.training import ElasticTraining
from runtime.state.save_folder import written_alone
from runtime.state.tensor_files import TornError, read_stamp
from runtime.world.busy_cores import BusyCores, CoreWatch, process_seconds
from workbench.elastic.reconfigure import CannotContinueError
from workbench.elastic.step_events import AtStep, StepEvents
from workbench.float_sum import float_sum
from workbench.plan.plan import Sharding
from workbench.strategies.elastic_templates import ElasticTemplates
from workbench.termination import noting

NUM_SAVES = 2  # on disk at a time: the last one, and the one being written
UNSAVED = "progress was not saved"
SHORTEST_STEP_S = 60.0  # minimum time limit of a step, after which ranks count as hanging
LOOK_EVERY_S = 0.0005
PASSES = (Moment.FORWARD, Moment.BACKWARD)
CONNECTING = (Moment.GROUPS,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """Result of a run.

    Args:
        steps, changes: history of the training, with times on the machine's monotonic clock.
        killed_s: node -> time of its SIGKILL, on the same clock.
        refusal: why training stopped early; None where it did not.
        signal: that stopped it.
        saved: the last save, if any.
        core_s: step -> core seconds of all ranks and this process, from the previous vote to its own; for
            steps in which the ranks did not change.
        cores: busy cores during the run; None where the system does not report them.
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
    """Where and when to save: a folder named after its step, after `every` steps and when training ends."""

    folder: Path
    every: int | None = None

    def __post_init__(self) -> None:
        if self.every is not None and self.every < 1:
            raise ValueError(f"elastic: want a save every 1 step or more, got {self.every}")

    def place(self, step: int) -> Path:
        """The path of a new folder."""
        names = (f"step{step}", *(f"step{step}.{number}" for number in range(2, 1000)))
        return next(path for name in names if not (path := self.folder / name).exists())


def elastic_job(
    templates: ElasticTemplates, data: StepData, *, seed: int, wait_s: float, num_cores: int
) -> ElasticJob:
    """The elastic job of these templates.

    Gradients are summed layer by layer, overlapping the backward, only where every rank has a core of its
    own, or where parameters are sharded, by the reduce-scatters of the plan.

    Raises:
        ValueError: as `ElasticJob`, or a module with adapters.
    """
    for module in templates.job.model.modules:
        if any(layer.has_adapters for layer in module.layers):
            raise ValueError(
                f"module {module.name!r}: lora is not trained through failures; want a job without lora, or "
                "`workbench run`"
            )
    specification = templates.planned.specification
    num_ranks = specification.num_nodes * templates.job.cluster.nodes[0].num_ranks
    is_apart = num_ranks <= num_cores or templates.sharding is not Sharding.NONE
    return ElasticJob(
        model=templates.job.model,
        chain=templates.chain,
        templates=templates.planned,
        batch=data.batch,
        source=data.source,
        data=data.name,
        samples_per_microbatch=templates.job.microbatch_samples,
        sum_s=templates.sum_s,
        sharding=templates.sharding,
        seed=seed,
        precision=templates.job.settings.precision,
        reduction=Reduction.LAYERWISE if is_apart else Reduction.AFTER_BACKWARD,
        wait_s=wait_s,
        step_s=max(SHORTEST_STEP_S, 2 * wait_s),
    )


def latest_progress(job: ElasticJob, folder: Path, warn: Callable[[str], None]) -> Progress:
    """The complete save with the most steps in a folder, or the folder itself if it is a save.

    Args:
        warn: called for every torn save that is skipped.

    Raises:
        ValueError: there is none, all are torn, or it belongs to another model.
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
            warn(f"{reason}; skipped, resuming from {save.name} with step {progress.step + 1}")
        return progress
    raise TornError("; ".join(torn))


def _step_of(save: Path) -> float:
    """Step of a save by its stamp; infinity where it is unreadable, for it may be the last one."""
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
    """Train until `steps` steps are taken, a refusal, or a signal; then all processes have ended.

    The first SIGINT or SIGTERM lets the step end and saves; a second one ends at once, see `noting`.

    Args:
        tell: called after every step.
        warn: called where a save failed and training continues.

    Raises:
        ValueError: the folder belongs to another training, or the save to resume from is gone.
    """
    refusal, log, watch = None, _Log(saving), CoreWatch()
    with (
        nullcontext() if saving is None else _saved_alone(saving.folder, start),
        noting(signal.SIGINT, signal.SIGTERM) as signals,
        ElasticTraining(job, events.start, start=start) as training,
    ):
        try:
            while training.step < steps and not signals:
                _take_step(training, events.at(training.step), log.killed_s)
                log.note(training)
                tell(training)
                if saving is not None and saving.every and training.step % saving.every == 0:
                    unsaved = log.save(training)
                    if unsaved is not None:
                        warn(f"after {training.step} steps {unsaved}; training continues")
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
        signal=signals[0] if signals else None,
        saved=log.saved,
        core_s=log.core_s,
        cores=watch.busy(),
    )


@contextmanager
def _saved_alone(folder: Path, start: Progress | None) -> Iterator[None]:
    """Context of a training that saves to the folder; incomplete saves of earlier ones are removed.

    Raises:
        ValueError: an earlier training has continued from `start` and removed it in the meantime.
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
    """Saves and core times of a training, besides its history."""

    saving: Saving | None
    killed_s: dict[str, float] = field(default_factory=dict)
    saved: Progress | None = None
    core_s: dict[int, float] = field(default_factory=dict)
    _used_s: dict[int, float] = field(default_factory=dict)

    def note(self, training: ElasticTraining) -> None:
        """Record the core seconds of the last step."""
        ranks = [each for node in training.layout.nodes for each in training.nodes.process_ids(node)]
        now_s = process_seconds((os.getpid(), *ranks))
        if now_s and now_s.keys() == self._used_s.keys():
            self.core_s[training.step - 1] = float_sum(now_s.values()) - float_sum(self._used_s.values())
        self._used_s = now_s

    def save(self, training: ElasticTraining) -> str | None:
        """Save if requested and new; then delete the previous save of this run.

        Returns:
            Why it could not be saved, such as a lost node that training has not noticed yet.
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
    """Kills nodes from outside, as soon as the first victim is in a pass, or at the end of the step.

    All processes of its victims die at once. If this thread runs only after the pass, it is not too late:
    the victims' votes do not count, and neither does it count that those of a recovery are ready.

    Args:
        nodes: of the training.
        victims: the first one is watched, so it should take part in the step.
        in_recovery: killed during the recovery, when the first of them connects to the remaining nodes.
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

    def start(self) -> None:
        """Begin, before the step."""
        self._nodes.doom(self._victims, Vote)
        super().start()

    def give_up(self) -> None:
        """Stop without killing any more nodes; returns when the thread has ended."""
        self._is_given_up.set()
        self.end()
        self._nodes.spare()

    def end(self) -> None:
        """Kill the remaining victims, and return when that is done."""
        self._is_over.set()
        self.join()

    def _kill_when(self, victims: Sequence[str], moments: Collection[Moment]) -> None:
        first = victims[0]
        while not (
            self._nodes.is_unheard(first) or any(moment in moments for moment in self._nodes.moments(first))
        ):
            if self._is_over.wait(LOOK_EVERY_S):
                break
        self._nodes.doom(self._in_recovery, Ready)
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
    training.nodes.end(
        [node for node in now.warned if node not in at_work]
    )  # they were only waiting for room
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
        killer.give_up()  # where training stopped, other nodes may still have state to save
        killed_s.update(killer.killed_s)
