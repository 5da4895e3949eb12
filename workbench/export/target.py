"""A training system that plans are taken to: what it can say of a plan, and the files that say it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from workbench.export.approximation import Approximation, Change, Way
from workbench.plan.plan import Plan

Files = Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How a folder of the target starts.

    Args:
        program: what stands behind torchrun's own arguments, as a line of shell.
        environment: variables, each with the reason why it is set.
        container: what the image must have, in sentences.
        before: lines of shell in front of torchrun.
    """

    program: str
    container: str
    environment: Mapping[str, tuple[str, str]]
    before: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One system.

    Args:
        name: as it is typed.
        system: as its makers call it, with the version that the words are of.
        summary: what the folder holds, in one line.
        refuses: the first part of a plan that it cannot say at all; None: it can say the plan.
        changes: what it does otherwise than a plan that it can say, in the order in which that is priced.
        ways: to plans that it can say.
        files: its own, by name.
        launch: how they are started.
    """

    name: str
    system: str
    summary: str
    refuses: Callable[[Plan], str | None]
    changes: Callable[[Plan], Sequence[Change]]
    ways: Sequence[Way]
    files: Callable[[Approximation], Files]
    launch: Callable[[Approximation], Launch]
    is_exact: bool = False
    """Whether the folder runs the plan itself: nothing of it differs."""
