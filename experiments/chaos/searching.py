"""Rounds of `workbench search`, alone and with workers: the plan file is absent, or whole and equal."""

import random
import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from experiments.chaos.disk import fill, make_room, small_disk
from experiments.chaos.fault import INJECTED, OF_WORKERS, Fault, strike
from experiments.chaos.findings import Expectations, Findings, ends
from experiments.chaos.processes import children, end_all, left_after, until
from experiments.chaos.room import Program, Room, room, workbench
from workbench.stopped import is_stopped

ENDED_S, LATEST_S, GONE_S = 240.0, 3.0, 2.0
DISK_BYTES = 2**20
EXPECTED: Expectations = {
    Fault.KILL_SUPERVISOR: ends(-9),
    Fault.TERM_SUPERVISOR: ends(143, words="ended by SIGTERM"),
    Fault.PAUSE_SUPERVISOR: ends(0),
    Fault.SECOND_SUPERVISOR: ends(0),
    Fault.CLOCK_JUMPS: ends(0),
    Fault.FULL_DISK: ends(2, words="No space left on device"),
    Fault.FILE_SIZE: ends(2, words="File too large"),
    Fault.NO_DESCRIPTORS: ends(2, words="Too many open files"),
}
OF_SEVERAL: Expectations = {
    **{fault: EXPECTED[fault] for fault in EXPECTED if fault not in OF_WORKERS},
    **dict.fromkeys((Fault.KILL_WORKER, Fault.TERM_WORKER, Fault.STOP_WORKER, Fault.PAUSE_WORKER), ends(0)),
}
JOINTLY = ("--joint", "--candidates", 12, "--workers", 2)
BEGUN_S, NOTICED_S = 60.0, 5.0


@dataclass(frozen=True)
class Searching:
    """A search for a job: over all strategies, or jointly with workers.

    Args:
        options: options of the command.
    """

    job: Path
    options: tuple[object, ...] = ()

    @property
    def expected(self) -> Expectations:
        return OF_SEVERAL if self.options else EXPECTED

    @property
    def faults(self) -> tuple[Fault, ...]:
        return tuple(self.expected)

    @cached_property
    def best(self) -> bytes:
        """The plan that an undisturbed search finds."""
        with room("search") as index:
            program = self._start(index, "undisturbed", None, "")
            if program.process.wait(ENDED_S):
                raise RuntimeError(program.stderr_text)
            return self._plan(index).read_bytes()

    def play(self, room: Room, fault: Fault, seed: str, rng: random.Random) -> Findings:
        """Play a round; the fault comes while it starts, searches or writes."""
        findings, best = Findings(), self.best
        with ExitStack() as stack:
            if fault is Fault.FULL_DISK:
                stack.enter_context(small_disk(self._plan(room).parent, DISK_BYTES))
            program = self._start(room, "first", fault, seed)
            if self.options:
                until(lambda: len(children(room.mark, program.pid)) > 1, BEGUN_S)
            time.sleep(rng.uniform(0, LATEST_S))
            start_s = time.monotonic()
            stopped = self._hurt(room, fault, seed, rng, program, findings)
            if stopped is not None and until(lambda: not is_stopped(stopped), 2 * NOTICED_S):
                findings.noticed_s = time.monotonic() - start_s
            findings.late_notices += stopped is not None and (findings.noticed_s or ENDED_S) > NOTICED_S
            self._await(room, program, findings)
            findings.code, findings.said = program.process.returncode, program.last_line[:300]
            if program.process.returncode:
                findings.hold(program, self.expected[fault])
            plan = self._plan(room)
            findings.wrong_losses += plan.exists() and plan.read_bytes() != best
            if fault is Fault.FULL_DISK:
                make_room(plan.parent)
            again = self._start(room, "again", None, "")
            self._await(room, again, findings)
            findings.hold(again, ends(0), prefix="again: ")
            findings.recovery_s = time.monotonic() - start_s
            findings.wrong_losses += not plan.exists() or plan.read_bytes() != best
            findings.leftover_files += room.left_over()
        return findings

    def _hurt(
        self, room: Room, fault: Fault, seed: str, rng: random.Random, program: Program, findings: Findings
    ) -> int | None:
        """Inflict the fault; returns the process that is stopped, or None."""
        if fault is Fault.FULL_DISK:
            fill(self._plan(room).parent)
        elif fault is Fault.SECOND_SUPERVISOR:
            second = self._start(room, "second", None, seed)
            second.process.wait(ENDED_S)
            findings.hold(second, ends(0), prefix="second: ")
        elif fault not in INJECTED and program.process.poll() is None:
            workers = children(room.mark, program.pid) if fault in OF_WORKERS and self.options else []
            return strike(fault, rng.choice(workers or [program.pid]), rng)
        return None

    def _await(self, room: Room, program: Program, findings: Findings) -> None:
        program.process.wait(ENDED_S)
        findings.orphans += [orphan.command[:200] for orphan in left_after(room.mark, GONE_S)]
        end_all(room.mark)

    def _start(self, room: Room, name: str, fault: Fault | None, seed: str) -> Program:
        self._plan(room).parent.mkdir(exist_ok=True)
        words = ("search", self.job, "-o", self._plan(room), "--json", *self.options)
        return room.start(name, *workbench(fault, seed, *words))

    def _plan(self, room: Room) -> Path:
        return room.folder / "disk" / "best.json"
