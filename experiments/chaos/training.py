"""Rounds of training: `run`, torchrun, `elastic`, saves, and runs that resume from a save."""

import json
import random
import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from experiments.chaos.disk import fill, make_room, small_disk
from experiments.chaos.fault import INJECTED, OF_WORKERS, Fault, inflict, strike
from experiments.chaos.findings import Expectations, Expected, Findings, ends, num_wrong
from experiments.chaos.model import ELASTIC_STEPS, NODES, RUN_STEPS, elastic_losses, run_losses
from experiments.chaos.processes import (
    children,
    end_all,
    grandchildren,
    left_after,
    marked,
    until,
    wait_for_some,
)
from experiments.chaos.room import Program, Room, workbench
from experiments.chaos.saves import losses, named, whole
from runtime.state.checkpoint import Begin
from workbench.stopped import is_stopped

GONE_S = 2.0  # that processes may outlive their supervisor
NOTICED_S = 5.0  # within which a stopped process is
BEGUN_S, ENDED_S = 240.0, 240.0
LATEST_S = 1.5  # after the first save, or the start
SEARCH_S = 5.0  # that a worker is looked for
DISK_BYTES = 6 * 2**20
SAVE_EVERY = 2  # steps; a save that was begun before the fault says nothing of recovery
WAIT_S = 60  # of any single wait of what trains, on a machine that is busy with others too

Command = Callable[[Room, Fault | None, str, Begin], tuple[object, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """A program that trains and saves.

    Args:
        command: from (room, injection, seed, start).
        workers: (mark, supervisor) -> processes that a fault may hit.
        expected: expected ends by fault.
        second: the expected end of a second supervisor of the same folder.
        losses_from: losses by step, from the output of a round's programs.
        begun: a folder of saves to resume from; None: start afresh, with the fault after the first save.
    """

    command: Command
    workers: Callable[[str, int], list[int]]
    expected: Expectations
    second: Expected
    losses_from: Callable[[Room, list[Program]], dict[int, float]]
    undisturbed: tuple[float, ...]
    begun: Path | None = None

    @property
    def faults(self) -> tuple[Fault, ...]:
        return tuple(self.expected)

    def play(self, room: Room, fault: Fault, seed: str, rng: random.Random) -> Findings:
        """Play a round: start, inflict, wait, judge, restart until all steps are done, judge."""
        findings = Findings()
        with ExitStack() as stack:
            if fault is Fault.FULL_DISK:
                stack.enter_context(small_disk(room.saves.parent, DISK_BYTES))
            if self.begun is not None:
                shutil.copytree(self.begun, room.saves)
            begin = Begin.ANEW if self.begun is None else Begin.LATEST
            program = room.start("first", *self.command(room, fault, seed, begin))
            if self.begun is None:
                until(lambda: named(room.saves) > 0 or program.process.poll() is not None, BEGUN_S)
            time.sleep(rng.uniform(0, LATEST_S if self.begun is None else 2 * LATEST_S))
            noted, start_s = named(room.saves), time.monotonic()
            target = self._hurt(room, fault, seed, rng, program, findings)
            self._await(room, program, noted, start_s, target, findings)
            if program.process.returncode:
                findings.hold(program, self.expected[fault])
            findings.code, findings.said = program.process.returncode, program.last_line[:300]
            if fault is Fault.FULL_DISK:
                make_room(room.saves.parent)
            programs = [program, *self._go_on(room, program, noted, start_s, findings)]
            self._judge(room, noted, programs, findings)
        return findings

    def _hurt(
        self,
        room: Room,
        fault: Fault,
        seed: str,
        rng: random.Random,
        program: Program,
        findings: Findings,
    ) -> int | None:
        """Inflict the fault; returns the process that is stopped, or None."""
        if fault in INJECTED or program.process.poll() is not None:
            return None
        if fault is Fault.KILL_ALL:
            for pid in marked(room.mark):
                inflict(Fault.KILL_WORKER, pid, rng)
        elif fault is Fault.FULL_DISK:
            fill(room.saves.parent)
        elif fault is Fault.SECOND_SUPERVISOR:
            second = room.start("second", *self.command(room, fault, seed, Begin.LATEST))
            second.process.wait(ENDED_S)
            findings.hold(second, self.second, prefix="second: ")
        elif fault not in OF_WORKERS:
            return strike(fault, program.pid, rng)
        else:
            workers = wait_for_some(lambda: self.workers(room.mark, program.pid), SEARCH_S)
            if workers:
                return strike(fault, rng.choice(workers), rng)
        return None

    def _await(
        self,
        room: Room,
        program: Program,
        noted: int,
        start_s: float,
        stopped: int | None,
        findings: Findings,
    ) -> None:
        """Wait for the program's end; one that does not end is killed, and counts as unexplained."""

        def has_ended() -> bool:
            now_s = time.monotonic() - start_s
            if findings.recovery_s is None and named(room.saves) > noted + SAVE_EVERY:
                findings.recovery_s = now_s
            if stopped is not None and findings.noticed_s is None and not is_stopped(stopped):
                findings.noticed_s = now_s
            return program.process.poll() is not None

        if not until(has_ended, ENDED_S):
            findings.unnamed_causes.append(f"not ended after {ENDED_S:g} s: {program.last_line:.300}")
            end_all(room.mark)
            program.process.wait(GONE_S)
        findings.late_notices += findings.noticed_s is not None and findings.noticed_s > NOTICED_S
        findings.orphans += [orphan.command[:200] for orphan in left_after(room.mark, GONE_S)]
        end_all(room.mark)

    def _go_on(
        self, room: Room, program: Program, noted: int, start_s: float, findings: Findings
    ) -> list[Program]:
        """Restart it where it has not done all steps."""
        if program.process.returncode == 0:
            return []
        findings.recovery_s, noted = None, named(room.saves)
        again = room.start("again", *self.command(room, None, "", Begin.LATEST))
        self._await(room, again, noted, start_s, None, findings)
        findings.hold(again, ends(0), prefix="again: ")
        return [again]

    def _judge(self, room: Room, noted: int, programs: list[Program], findings: Findings) -> None:
        latest = whole(room.saves)
        findings.lost_steps += max(0, noted - (latest.step if latest else 0))
        losses_by_step = self.losses_from(room, programs)
        findings.wrong_losses += num_wrong(losses_by_step, self.undisturbed)
        findings.lost_steps += sum(
            step not in losses_by_step for step in range(len(self.undisturbed)) if step >= noted
        )
        findings.leftover_files += room.left_over()


def run_command(plan: Path) -> Command:
    """`workbench run` on two ranks."""
    options = ("run", plan, "--local", "--warmup", 0, *_saving(RUN_STEPS))

    def words(room: Room, fault: Fault | None, seed: str, begin: Begin) -> tuple[object, ...]:
        resumes = ("--resume",) if begin is Begin.LATEST else ()
        return workbench(fault, seed, *options, "--checkpoint", room.saves, *resumes)

    return words


def torchrun_command(plan: Path) -> Command:
    """`runtime.launch` under torchrun."""
    launcher = ("torchrun", "--nproc-per-node", 2, "-m")

    def words(room: Room, fault: Fault | None, seed: str, begin: Begin) -> tuple[object, ...]:
        before = (
            ("experiments.chaos.injected", fault, seed, "launch")
            if fault in INJECTED
            else ("runtime.launch",)
        )
        resumes = ("--resume",) if begin is Begin.LATEST else ()
        options = (plan, *_saving(RUN_STEPS), "--checkpoint", room.saves, *resumes)
        return (*launcher, *before, *options)

    return words


def elastic_command(job: Path) -> Command:
    """`workbench elastic` on three nodes of a rank."""
    arguments = ("elastic", job, "--nodes", NODES, "--faults", 1, "--json", *_saving(ELASTIC_STEPS))

    def words(room: Room, fault: Fault | None, seed: str, begin: Begin) -> tuple[object, ...]:
        resumes = ("--resume", room.saves) if begin is Begin.LATEST and named(room.saves) else ()
        return workbench(fault, seed, *arguments, "--checkpoint", room.saves, *resumes)

    return words


def _saving(steps: int) -> tuple[object, ...]:
    return ("--steps", steps, "--checkpoint-every", SAVE_EVERY, "--timeout", WAIT_S)


def of_saves(room: Room, programs: list[Program]) -> dict[int, float]:
    """Losses of all steps up to the last whole save, from that save."""
    del programs
    latest = whole(room.saves)
    return {} if latest is None else losses(latest)


def of_records(room: Room, programs: list[Program]) -> dict[int, float]:
    """Losses that elastic training printed; empty for a killed one."""
    del room
    lines = [program.printed.splitlines()[-1:] for program in programs]
    records = [json.loads(line) for last in lines for line in last if line.startswith("{")]
    return {step["step"]: step["loss"] for record in records for step in record["steps"]}


TAKEN = (
    "is being written to by process|has seen .* steps already|steps are taken|are taken already"
    "|another training has removed it since it was read"
)
SURVIVED = dict.fromkeys(
    (
        Fault.PAUSE_WORKER,
        Fault.PAUSE_SUPERVISOR,
        Fault.SLOW_DISK,
        Fault.CLOCK_JUMPS,
        Fault.SECOND_SUPERVISOR,
    ),
    ends(0),
)
KILLED = dict.fromkeys((Fault.KILL_SUPERVISOR, Fault.KILL_ALL), ends(-9))
OF_DISK = {
    Fault.FULL_DISK: ends(2, words="No space left on device"),
    Fault.FILE_SIZE: ends(2, words="File too large"),
    Fault.NO_DESCRIPTORS: ends(2, words="Too many open files"),
}
RUN: Expectations = {
    **SURVIVED,
    **KILLED,
    **OF_DISK,
    Fault.KILL_WORKER: ends(2, words="killed by SIGKILL"),
    Fault.TERM_WORKER: ends(2, words="killed by SIGTERM"),
    Fault.STOP_WORKER: ends(2, words="stopped by a signal and not continued"),
    Fault.TERM_SUPERVISOR: ends(143, words="ended by SIGTERM"),
}
TORCHRUN: Expectations = {
    **SURVIVED,
    **KILLED,
    Fault.KILL_WORKER: ends(1, words=r"Signal 9 \(SIGKILL\)", is_last=False),
    Fault.TERM_WORKER: ends(1, words="SIGTERM", is_last=False),
    Fault.STOP_WORKER: ends(1, words="stopped by a signal and not continued", is_last=False),
    Fault.TERM_SUPERVISOR: ends(1, 143, words="SIGTERM|signal: 15", is_last=False),
    **{fault: ends(1, words=each.words, is_last=False) for fault, each in OF_DISK.items()},
}
ELASTIC: Expectations = {
    **SURVIVED,
    **KILLED,
    **OF_DISK,
    Fault.KILL_WORKER: ends(0),
    Fault.TERM_WORKER: ends(0),
    Fault.STOP_WORKER: ends(0),
    Fault.TERM_SUPERVISOR: ends(143, words="interrupted after .* steps; progress after"),
}
SAVE: Expectations = {
    **OF_DISK,
    Fault.PAUSE_WORKER: ends(0),
    Fault.SLOW_DISK: ends(0),
    Fault.KILL_WORKER: ends(2, words="the checkpoint after step .* killed by SIGKILL"),
    Fault.TERM_WORKER: ends(2, words="the checkpoint after step .* killed by SIGTERM"),
    Fault.STOP_WORKER: ends(2, words="the checkpoint after step .* was stopped by a signal"),
}
RESUME: Expectations = {
    **KILLED,
    Fault.KILL_WORKER: RUN[Fault.KILL_WORKER],
    Fault.STOP_WORKER: RUN[Fault.STOP_WORKER],
    Fault.PAUSE_WORKER: ends(0),
    Fault.PAUSE_SUPERVISOR: ends(0),
    Fault.CLOCK_JUMPS: ends(0),
    Fault.SLOW_DISK: ends(0),
    Fault.SECOND_SUPERVISOR: ends(0),
    Fault.TERM_SUPERVISOR: RUN[Fault.TERM_SUPERVISOR],
}


def trainers(plan: Path, job: Path, begun: Path) -> dict[str, Trainer]:
    """All trainers, by name."""
    run = Trainer(
        command=run_command(plan),
        workers=children,
        expected=RUN,
        second=ends(2, words=TAKEN),
        losses_from=of_saves,
        undisturbed=run_losses(plan),
    )
    elastic = replace(
        run,
        command=elastic_command(job),
        expected=ELASTIC,
        losses_from=of_records,
        undisturbed=elastic_losses(job),
    )
    torchrun = replace(
        run,
        command=torchrun_command(plan),
        expected=TORCHRUN,
        second=ends(1, words=TAKEN, is_last=False),
    )
    return {
        "run": run,
        "torchrun": torchrun,
        "elastic": elastic,
        "checkpoint": replace(run, workers=grandchildren, expected=SAVE),
        "resume": replace(run, expected=RESUME, begun=begun),
    }
