"""The findings of a round, and the expected ones."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from experiments.chaos.fault import Fault
from experiments.chaos.room import Program

REL_TOL = 1e-9  # of losses in float64, which ranks sum in another order than one process


@dataclass(frozen=True, slots=True)
class Expected:
    """The expected end of a program: exit codes, and text of its error; "" for no error.

    Args:
        is_last: whether the last line has the text; else any line, as a foreign launcher prints last.
    """

    codes: frozenset[int]
    words: str = ""
    is_last: bool = True

    def reason_against(self, program: Program) -> str | None:
        """Why a program's end is not as expected; None: it is."""
        code = program.process.returncode
        if code not in self.codes:
            return f"exit code {code}, want {sorted(self.codes)}: {program.last_line:.300}"
        text = program.last_line if self.is_last else program.stderr_text
        if "Traceback" in program.stderr_text and self.is_last:
            return f"a traceback: {program.last_line:.300}"
        if not re.search(self.words, text):
            return f"want {self.words!r}, got {program.last_line:.300}"
        return None


def ends(*codes: int, words: str = "", is_last: bool = True) -> Expected:
    return Expected(frozenset(codes), words, is_last)


@dataclass(slots=True)
class Findings:
    """Findings of one round, with lists of what counts against it, so that failures are readable.

    Args:
        code, said: exit code and last line of the program that met the fault.
        recovery_s: from the fault to the next step, batch or result, including a restart.
        noticed_s: from a permanent stop to the process's end by its watcher.
    """

    code: int | None = None
    said: str = ""
    orphans: list[str] = field(default_factory=list)
    lost_steps: int = 0
    wrong_losses: int = 0
    unnamed_causes: list[str] = field(default_factory=list)
    leftover_files: list[str] = field(default_factory=list)
    late_notices: int = 0
    recovery_s: float | None = None
    noticed_s: float | None = None

    @property
    def is_clean(self) -> bool:
        return not (
            self.orphans
            or self.lost_steps
            or self.wrong_losses
            or self.unnamed_causes
            or self.leftover_files
            or self.late_notices
        )

    def hold(self, program: Program, expected: Expected, *, prefix: str = "") -> None:
        """Compare a program's end with the expected one."""
        reason = expected.reason_against(program)
        if reason is not None:
            self.unnamed_causes.append(f"{prefix}{reason}")


Expectations = Mapping[Fault, Expected]


def num_wrong(losses: Mapping[int, float], undisturbed: tuple[float, ...]) -> int:
    """The number of losses, by step, that differ from those of one undisturbed process."""
    return sum(
        not 0 <= step < len(undisturbed) or not abs(loss / undisturbed[step] - 1) <= REL_TOL
        for step, loss in losses.items()
    )
