"""A process next to the first rank that plans and lowers the next batch while a step runs."""

import pickle
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import IO, Any

from workbench.data.sample import Sample
from workbench.plan.following import next_plan
from workbench.plan.lowered import Lowered
from workbench.plan.lru_cache import CLEAR_EVERY, clear_caches
from workbench.plan.plan import Plan
from workbench.stopped import LOOK_EVERY_S, StopWatch
from workbench.supervised import as_arguments, as_parent, end_with, from_arguments, same_imports
from workbench.termination import uninterrupted
from workbench.timing.accept import accept

HEADER_BYTES = 8
Rule = Callable[[Plan, Sequence[Sample]], Plan]
"""A plan of some batch, and the next batch: its plan, on the same stages; can be pickled."""
FAR_SIDE = "import sys; from runtime.next_plan import main; sys.exit(main(sys.argv[1:]))"


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """The answer for one batch, with times on the machine's monotonic clock.

    Args:
        lowered: the accepted plan of the batch; None where it was refused.
        refusal: why, in one line; empty otherwise.
        start_s, end_s: when planning, checks and lowering began and ended.
    """

    lowered: Lowered | None
    refusal: str
    start_s: float
    end_s: float


class Planner:
    """The rank's side: request the plan of a batch, and fetch it later.

    The other side is a separate interpreter without torch, so planning does not hold the interpreter lock of
    the process that issues a rank's kernels.

    Args:
        plan: of the first batch.
        rule: by which the next one is planned.
    """

    def __init__(self, plan: Plan, *, rule: Rule = next_plan) -> None:
        with uninterrupted():
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", FAR_SIDE, *as_arguments(as_parent())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=same_imports(),
            )
        self._requests: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._talk, self._listen)]
        for thread in self._threads:
            thread.start()
        self._requests.put((plan, rule))

    def ask(self, batch: Sequence[Sample]) -> None:
        """Start planning a batch without waiting. Answers are in the order of requests."""
        self._requests.put(tuple(batch))

    def fetch(self, timeout_s: float) -> bytes:
        """The next answer, a pickled `Planned`, as it is to be sent to the other ranks.

        Raises:
            ValueError: no answer in time, or the process has ended, or is stopped by a signal.
        """
        deadline, watch = time.monotonic() + timeout_s, StopWatch()
        while True:
            try:
                answer = self._answers.get(timeout=min(max(0.0, deadline - time.monotonic()), LOOK_EVERY_S))
                break
            except queue.Empty:
                if watch.stopped((self._process.pid,)):
                    reason = "was stopped by a signal and not continued"
                    raise ValueError(f"planner of the next batch {reason}") from None
                if time.monotonic() >= deadline:
                    reason = f"no plan within {timeout_s:g} s"
                    raise ValueError(f"planner of the next batch: {reason}") from None
        if answer is None:
            raise ValueError(f"planner of the next batch ended with exit code {self._process.wait(1.0)}")
        return answer

    def close(self) -> None:
        """End the process."""
        self._requests.put(None)
        self._process.kill()
        self._process.wait()
        for thread in self._threads:
            thread.join()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):  # requests that it never read
                pipe.close()

    def _talk(self) -> None:
        """Send requests from a thread: one may exceed the pipe's capacity while the other side starts."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, which the listener reports
            for request in iter(self._requests.get, None):
                _write(self._process.stdin, pickle.dumps(request))

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for answer in iter(partial(_read, self._process.stdout), None):
            self._answers.put(answer)
        self._answers.put(None)


def planned(message: bytes) -> Planned:
    """Unpickle a message of `Planner.fetch`."""
    answer = pickle.loads(message)
    assert isinstance(answer, Planned)
    return answer


def answer_for(plan: Plan, batch: Sequence[Sample], rule: Rule) -> Planned:
    """Plan, check and lower one batch; a refusal is an answer too."""
    start_s = time.perf_counter()
    try:
        lowered, _ = accept(rule(plan, batch))
    except ValueError as error:
        refusal = " ".join(str(error).split())
        return Planned(lowered=None, refusal=refusal, start_s=start_s, end_s=time.perf_counter())
    return Planned(lowered=lowered, refusal="", start_s=start_s, end_s=time.perf_counter())


def _write(pipe: IO[bytes], content: bytes) -> None:
    pipe.write(len(content).to_bytes(HEADER_BYTES, "big") + content)
    pipe.flush()


def _read(pipe: IO[bytes]) -> bytes | None:
    """One message; None at the end."""
    header = pipe.read(HEADER_BYTES)
    if len(header) < HEADER_BYTES:
        return None
    return pipe.read(int.from_bytes(header, "big"))


def main(arguments: Sequence[str]) -> int:
    """Entry point of the other side: answers every batch on stdin until stdin or the parent ends."""
    end_with(from_arguments(arguments))
    first = _read(sys.stdin.buffer)
    assert first is not None, "the plan comes first"
    plan, rule = pickle.loads(first)
    for number, message in enumerate(iter(partial(_read, sys.stdin.buffer), None)):
        if number % CLEAR_EVERY == 0:
            clear_caches()
        batch: Any = pickle.loads(message)
        _write(sys.stdout.buffer, pickle.dumps(answer_for(plan, batch, rule)))
    return 0
