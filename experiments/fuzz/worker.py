"""Forked workers that judge inputs, and a parent that watches, ends and replaces them."""

import faulthandler
import gc
import multiprocessing as mp
import multiprocessing.connection as mpc
import os
import resource
import tempfile
import time
import traceback
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.sharedctypes import RawArray
from pathlib import Path
from random import Random
from typing import Any

from experiments.fuzz.target import Ending, Judgement, Ready, Target, judged
from workbench.supervised import Parent, as_parent, end_with

HANG_S = 10.0  # by the clock; of a second chance by the cores', as the machine may be busy
PATIENCE = 6  # times that by the clock, of a second chance
MAKE_S = 180.0  # that good inputs may take to make
LOOK_EVERY_S = 0.05
MOST_BYTES = 2 * 2**30  # that taking one input may add to a worker
CHUNK = 100  # inputs that a worker is given at once
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = resource.getpagesize()
MAKING = -1


@dataclass(frozen=True, slots=True)
class Chunk:
    """Inputs of one target, by number."""

    target: str
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class Taken:
    """One input, and its judgement."""

    target: str
    number: int
    judged: Judgement


@dataclass(slots=True)
class _Worker:
    process: Any
    pipe: mpc.Connection
    now: Any  # [number of the input, monotonic seconds of its start, bytes before the first, core seconds]
    chunk: Chunk | None = None


def rng_of(seed: int, target: str, number: int) -> Random:
    """The random generator of an input, the same in every process."""
    return Random(f"{seed}:{target}:{number}")


def taken(
    targets: Mapping[str, Target], chunks: Sequence[Chunk], *, seed: int, num_workers: int
) -> Iterator[Taken]:
    """Yield the judgement of every input of the chunks, as they are done."""
    waiting = list(reversed(chunks))
    with tempfile.TemporaryDirectory(prefix="fuzz-", ignore_cleanup_errors=True) as folder:

        def start() -> _Worker:
            return _started(targets, seed, Path(tempfile.mkdtemp(dir=folder)))

        workers = [start() for _ in range(min(num_workers, len(chunks)))]
        try:
            slow: set[tuple[str, int]] = set()  # inputs that get a second chance: the machine may be busy
            while waiting or any(worker.chunk for worker in workers):
                for worker in workers:
                    if worker.chunk is None and waiting:
                        worker.chunk = waiting.pop()
                        worker.now[0], worker.now[1] = MAKING, time.monotonic()
                        worker.pipe.send(worker.chunk)
                for ready in mpc.wait([each.pipe for each in workers], timeout=LOOK_EVERY_S):
                    yield from _heard(next(each for each in workers if each.pipe is ready))
                for index, worker in enumerate(workers):
                    ending = _ending_of(worker, slow)
                    if ending is None:
                        continue
                    yield from _heard(worker)
                    yield from _buried(worker, ending, waiting, slow)
                    workers[index] = start()
        finally:
            for worker in workers:
                worker.process.kill()
                worker.process.join()


def _heard(worker: _Worker) -> Iterator[Taken]:
    """Yield new judgements of a worker; the end of its process is detected."""
    try:
        while worker.pipe.poll():
            message = worker.pipe.recv()
            if isinstance(message, str):
                raise RuntimeError(message)
            if message is None:
                worker.chunk = None
            else:
                yield message
    except (EOFError, OSError):
        return


def _ending_of(worker: _Worker, slow: Container[tuple[str, int]]) -> Ending | None:
    """Why a worker must be replaced; None: it need not."""
    if not worker.process.is_alive():
        return Ending.NATIVE_CRASH
    if worker.chunk is None:
        return None
    number, since_s = worker.now[0], time.monotonic() - worker.now[1]
    if since_s > (MAKE_S if number == MAKING else HANG_S):
        is_slow = (worker.chunk.target, number) in slow
        if not is_slow or since_s > PATIENCE * HANG_S or _core_s(worker.process.pid) - worker.now[3] > HANG_S:
            return Ending.HANG
    if number != MAKING and _resident_bytes(worker.process.pid) > worker.now[2] + MOST_BYTES:
        return Ending.OVER_2GB
    return None


def _buried(
    worker: _Worker, ending: Ending, waiting: list[Chunk], slow: set[tuple[str, int]]
) -> Iterator[Taken]:
    """End a worker, and give its remaining inputs to another; its current input is a finding."""
    worker.process.kill()
    worker.process.join()
    code, chunk, number = worker.process.exitcode, worker.chunk, int(worker.now[0])
    if chunk is None:
        return
    if number == MAKING:
        raise RuntimeError(f"{chunk.target}: no good inputs were made: {ending}, exit code {code}")
    if ending is Ending.HANG and (chunk.target, number) not in slow:
        slow.add((chunk.target, number))
        waiting.append(Chunk(chunk.target, number, chunk.end))
        return
    text = f"ended by {-code}" if ending is Ending.NATIVE_CRASH else f"{ending}, after {HANG_S:g} s at most"
    yield Taken(chunk.target, number, Judgement(ending, passed_parse=False, text=text))
    if number + 1 < chunk.end:
        waiting.append(Chunk(chunk.target, number + 1, chunk.end))


def _core_s(pid: int) -> float:
    """CPU seconds of all threads of a process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def _resident_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * PAGE_BYTES
    except (OSError, IndexError):
        return 0


def _started(targets: Mapping[str, Target], seed: int, folder: Path) -> _Worker:
    context = mp.get_context("fork")
    here, child_end = context.Pipe()
    now = RawArray("d", 4)
    process = context.Process(
        target=_work, args=(targets, child_end, now, seed, folder, as_parent()), name="fuzz", daemon=True
    )
    process.start()
    child_end.close()
    return _Worker(process=process, pipe=here, now=now)


def _work(
    targets: Mapping[str, Target], pipe: mpc.Connection, now: Any, seed: int, folder: Path, parent: Parent
) -> None:
    """Work on chunks until the parent ends this process."""
    end_with(parent)
    _silence(folder / "said.txt")
    ready_of: dict[str, Ready] = {}
    while True:
        chunk = pipe.recv()
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        if chunk.target not in ready_of:
            try:
                ready_of[chunk.target] = prepared(targets[chunk.target], folder)
            except Exception:
                pipe.send(f"{chunk.target}: no good inputs were made: {traceback.format_exc()}")
                return
            gc.collect()
        now[2] = _resident_bytes(os.getpid())
        _bound_memory()
        for number in range(chunk.first, chunk.end):
            now[1], now[3] = time.monotonic(), time.process_time()
            now[0] = number
            result = one(ready_of[chunk.target], rng_of(seed, chunk.target, number))
            pipe.send(Taken(chunk.target, number, result))
        now[0] = MAKING
        pipe.send(None)


def prepared(target: Target, folder: Path) -> Ready:
    """The target's valid inputs, in a separate folder."""
    target_folder = folder / target.name.replace("/", "-")
    target_folder.mkdir()
    ready = target.make(target_folder)
    judged(ready, ready.good(0))  # what is compiled or imported once is not the first input's to wait for
    return ready


def one(ready: Ready, rng: Random) -> Judgement:
    """Make an input and judge it."""
    return judged(ready, ready.mutant(rng))


def _bound_memory() -> None:
    """Limit the address space beyond the present one: larger requests raise MemoryError."""
    size = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * PAGE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (size + MOST_BYTES, resource.RLIM_INFINITY))


def _silence(path: Path) -> None:
    """Discard output of readers, except for the stack of a crash."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.dup2(null, 2)
    faulthandler.enable(file)
