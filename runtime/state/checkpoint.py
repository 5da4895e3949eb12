"""Asynchronous checkpoints of a run: a forked process writes a snapshot while training continues."""

import gc
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import torch
from torch import Tensor, nn

from runtime.state.checkpoint_files import (
    KEPT,
    STAMP,
    Identity,
    Whole,
    clear_parts,
    drop_rank,
    finish,
    finished,
    latest_whole,
    part_folder,
    rank_folder,
    refuse_taken,
    step_of,
)
from runtime.state.rank_state import RankNotes, notes_from
from runtime.state.save_folder import check_folder, check_space, give_back, take
from runtime.state.tensor_files import keys_in, read_tensors, write_tensors
from runtime.step.muon import first_state
from runtime.world.failure import RankError, death_of
from workbench.stopped import StopWatch
from workbench.supervised import Parent, as_parent, end_with
from workbench.termination import ended_by_default, forking

RANDOM = "random/torch"
ERRORS = 3  # file descriptor of the pipe for errors, after the standard ones
MOST_TEXT = 2000  # bytes of an error
LOOK_EVERY_S = 0.005
MOST_FILES = 65_536  # descriptors that a forked process checks in order to close them

Live = Callable[[], Mapping[str, Tensor]]
Named = Iterable[tuple[tuple[str, str], nn.Parameter]]


class Begin(Enum):
    """Where a run with checkpoints starts."""

    ANEW = "anew"  # without checkpoints in the folder
    LATEST = "latest"  # latest complete one, if any


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoints:
    """Where and how often a run saves, and where it starts.

    Args:
        folder: of all checkpoints of the run.
        every: number of steps between saves; the last step is also saved.
        begin: what was asked for.
        start: to resume from; None: the run's own weights.
        data: of the run, as `Identity.data`.
    """

    folder: Path
    every: int
    begin: Begin = Begin.ANEW
    start: Whole | None = None
    data: str | None = None

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"a checkpoint every {self.every} steps: want at least 1")

    @property
    def warning(self) -> str | None:
        """That there is nothing to resume from, or newer but torn checkpoints; None: neither."""
        if self.start is None:
            text = f"{self.folder} holds no checkpoint: the run starts at its first step"
            return text if self.begin is Begin.LATEST else None
        if not self.start.torn:
            return None
        return f"{'; '.join(self.start.torn)}; resuming from {self.start.folder}"

    @property
    def num_taken(self) -> int:
        """Steps before the start."""
        return 0 if self.start is None else self.start.step

    @property
    def next_try(self) -> str:
        """How a run that failed goes on."""
        if present := finished(self.folder):
            return f"--resume continues after step {step_of(present[-1])}"
        return f"{self.folder} holds no checkpoint yet, so it has to start again"

    def check(self, repetitions: int, num_steps: int) -> None:
        """Raise ValueError where a run of that many steps cannot be saved, or is already complete."""
        if repetitions != 1:
            raise ValueError(f"checkpoints are of one run: want repetitions 1, got {repetitions}")
        if self.start is not None and self.start.step >= num_steps:
            raise ValueError(
                f"{self.start.folder} has seen {self.start.step} steps already, the run has {num_steps}: "
                "want more steps"
            )


def checkpoints_in(
    folder: Path, every: int, begin: Begin, identity: Identity, *, num_bytes: int = 0
) -> Checkpoints:
    """Settings of a run that saves into a folder, which its first rank creates.

    Args:
        num_bytes: approximate size of one checkpoint.

    Raises:
        ValueError: checkpoints that are torn, of another run, or in the way; a folder that is a checkpoint,
            used by another process, not writable, or without enough space.
    """
    if (folder / STAMP).is_file():
        raise ValueError(f"{folder} is a checkpoint itself: want the folder that holds it, {folder.parent}")
    check_folder(folder)
    present_bytes = sum(
        path.stat().st_size for checkpoint in finished(folder) for path in checkpoint.rglob("*")
    )
    check_space(folder, (KEPT + 1) * num_bytes - present_bytes)  # the kept ones, and one being written
    if begin is Begin.ANEW:
        refuse_taken(folder)
        return Checkpoints(folder=folder, every=every, data=identity.data)
    start = latest_whole(folder, identity)
    return Checkpoints(folder=folder, every=every, begin=begin, start=start, data=identity.data)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Child:
    """A save in progress; `pipe` carries its error."""

    process: int
    step: int
    deadline: float
    pipe: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """Tensors that this rank holds like another one, which writes them.

    Args:
        writer: the other rank.
        kinds: first parts of the tensors' names.
    """

    writer: int
    kinds: tuple[str, ...]

    def among(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Those of some tensors that the other rank writes."""
        return {key: tensor for key, tensor in tensors.items() if key.partition("/")[0] in self.kinds}


def live_tensors(named: Named, optimizer: torch.optim.Optimizer | None) -> dict[str, Tensor]:
    """All weights, the optimizer's copies of them, and its state.

    What it updates in place, as a view of weights that are named, has no second name. An optimizer before its
    first step gets its initial state, so that there are tensors to read into.
    """
    tensors = {f"weight/{module}/{name}": weight.detach() for (module, name), weight in named}
    stored = {weight.untyped_storage().data_ptr() for weight in tensors.values()}
    if optimizer is None:
        return tensors
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in enumerate(parameters):
        if not optimizer.state[parameter]:
            optimizer.state[parameter] |= first_state(optimizer, parameter)
        if parameter.untyped_storage().data_ptr() not in stored:
            tensors[f"optimizer/{number}/value"] = parameter.detach()
        for name, value in optimizer.state[parameter].items():
            tensors[f"optimizer/{number}/{name}"] = value
    return tensors


class RankCheckpoints:
    """One rank's part of all checkpoints of a run.

    A save forks this process: the child has the tensors of that moment, independent of later steps, and
    writes them. So a step is delayed only by the fork, and by a previous save that is still running. The
    first rank's child waits for the others and gives the checkpoint its name. The first rank owns the folder.
    Differs: torch's `async_save` with processes starts an interpreter per rank that forms a world of its own
    and waits for it up to half an hour, and pool workers may not start one; its variant with threads competes
    for the training process's interpreter lock.

    Args:
        settings: None: no saves, and the run starts from its own weights.
        identity: of what is saved; None without settings.
        shared: what another rank writes for this one, too.
        timeout_s: of each save, from its start.

    Raises:
        ValueError: another process owns the folder.
    """

    def __init__(
        self,
        settings: Checkpoints | None,
        identity: Identity | None,
        rank: int,
        *,
        shared: Shared | None = None,
        timeout_s: float,
    ) -> None:
        self._settings, self._identity, self._shared = settings, identity, shared
        self._rank, self._timeout_s = rank, timeout_s
        self._is_writer = identity is not None and rank == identity.ranks[0]
        if settings is not None and self._is_writer:
            take(settings.folder)
            clear_parts(settings.folder)  # other ranks save only after a step, which waits for this rank
        self._child: _Child | None = None
        self.stalls_s: list[float] = []  # one per save

    def resume(self, live: Live, losses: list[float]) -> int:
        """Load the tensors from which the run starts; returns the number of steps already taken.

        Args:
            live: tensors that a step changes.
            losses: extended by this rank's part of the losses of those steps.

        Raises:
            ValueError: a tensor that is missing or of another shape.
        """
        if self._settings is None or self._settings.start is None:
            return 0
        whole, tensors = self._settings.start, live()
        host = {key: tensor.cpu() for key, tensor in tensors.items()}  # no copy on the CPU
        host[RANDOM] = torch.get_rng_state()
        folder = rank_folder(whole.folder, self._rank)
        shared = {} if self._shared is None else self._shared.among(host)
        absent = shared.keys() - keys_in(folder)  # none in checkpoints of earlier versions
        if self._shared is not None and absent:
            written = rank_folder(whole.folder, self._shared.writer)
            read_tensors(written, {key: host[key] for key in absent})
        own = {key: tensor for key, tensor in host.items() if key not in absent}
        notes = notes_from(read_tensors(folder, own).about, where=folder)
        for key, tensor in tensors.items():
            tensor.copy_(host[key])
        torch.set_rng_state(host[RANDOM])
        random.setstate(notes.python_random)
        losses += notes.losses
        return whole.step

    def after_step(self, step: int, live: Live, losses: Sequence[float], *, is_last: bool) -> None:
        """Start a save if one is due after that many steps; training may continue at once.

        Raises:
            RankError: the previous save failed, or did not end in time.
        """
        if self._settings is None or (step % self._settings.every and not is_last):
            return
        start_s = time.perf_counter()
        self.wait()
        folder = self._settings.folder
        tensors = live()
        shared = {} if self._shared is None else self._shared.among(tensors)
        host = {key: tensor.cpu() for key, tensor in tensors.items() if key not in shared}
        host[RANDOM] = torch.get_rng_state()
        notes = RankNotes(losses=tuple(losses), python_random=random.getstate())
        parent, (pipe, far_end) = as_parent(), os.pipe()
        with forking():
            child = os.fork()
            if child == 0:
                os.dup2(far_end, ERRORS)
                self._write(parent, folder, step, host, notes)
        os.close(far_end)
        deadline = time.monotonic() + self._timeout_s
        self._child = _Child(process=child, step=step, deadline=deadline, pipe=pipe)
        self.stalls_s.append(time.perf_counter() - start_s)

    def wait(self) -> None:
        """Wait for the current save.

        Raises:
            RankError: it failed, is stopped by a signal, or did not end in time; then it is killed.
        """
        if self._child is None:
            return
        child, self._child = self._child, None
        watch, is_stopped = StopWatch(), False
        while (ended := os.waitpid(child.process, os.WNOHANG))[0] == 0:
            is_stopped = bool(watch.stopped((child.process,)))
            if is_stopped or time.monotonic() >= child.deadline:
                break
            time.sleep(LOOK_EVERY_S)
        save = f"rank {self._rank}: the checkpoint after step {child.step}"
        if ended[0] == 0:
            _kill(child.process)
            drop_rank(self._folder, child.step, self._rank)
            if is_stopped:
                raise RankError(f"{save} was stopped by a signal and not continued")
            raise RankError(f"{save} is not done after {self._timeout_s:g} s")
        text = os.read(child.pipe, MOST_TEXT).decode()
        os.close(child.pipe)
        if code := os.waitstatus_to_exitcode(ended[1]):
            drop_rank(self._folder, child.step, self._rank)
            raise RankError(f"{save} failed: {text or death_of(self._rank, code).describe('its process')}")

    def close(self) -> None:
        """End and remove a save that is still running after a failure, and release the folder."""
        if self._child is not None:
            _kill(self._child.process)
            drop_rank(self._folder, self._child.step, self._rank)
            self._child = None
        if self._is_writer:
            give_back(self._folder)

    @property
    def _folder(self) -> Path:
        assert self._settings is not None, "only with settings"
        return self._settings.folder

    def _write(
        self, parent: Parent, root: Path, step: int, host: Mapping[str, Tensor], notes: RankNotes
    ) -> None:
        """Run the child. It skips the parent's cleanup, and never returns."""
        folder = rank_folder(part_folder(root, step), self._rank)
        code = 1
        try:
            gc.disable()
            gc.freeze()  # the parent's objects must not close file descriptors that are reused here
            os.closerange(ERRORS + 1, min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], MOST_FILES))
            end_with(parent)
            ended_by_default()
            write_tensors(folder, host, notes.as_json())
            if self._is_writer:
                assert self._identity is not None, "the writer's"
                finish(root, step, self._identity, self._timeout_s)
            code = 0
        except BaseException as error:
            drop_rank(root, step, self._rank)
            text = " ".join(str(error).split()) or type(error).__name__
            os.write(ERRORS, text.encode()[:MOST_TEXT])
        finally:
            sys.stderr.flush()
            os._exit(code)


def _kill(child: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
