"""A training system as a target of exports: what it can express of a plan, and its files."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from workbench.export.approximation import Alternative, Approximation, Change
from workbench.export.trained import Trained
from workbench.plan.plan import Plan

Files = Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How a folder of the target is launched.

    Args:
        program: shell words after torchrun's own arguments.
        environment: variables, each with the reason why it is set.
        container: requirements of the image, in sentences.
        training: what it trains on and how long as it is, and how to give it data, weights and steps.
        before: shell lines before torchrun.
    """

    program: str
    container: str
    environment: Mapping[str, tuple[str, str]]
    training: str
    before: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One training system.

    Args:
        name: as it is typed.
        system: its official name, with the version that the export is for.
        summary: content of the folder, in one line.
        lacks: returns the first part of what a job trains that it cannot express under any layouts.
        refuses: returns the first part of a plan that it cannot express at all; None: there is none.
        changes: returns what it does differently from a plan that it can express, in the order of pricing.
        alternatives: ways to derive plans that it can express.
        files: its own files, by name.
        launch: how they are launched.
        is_exact: whether the folder runs the plan itself, without differences.
    """

    name: str
    system: str
    summary: str
    lacks: Callable[[Trained], str | None]
    refuses: Callable[[Plan], str | None]
    changes: Callable[[Plan], Sequence[Change]]
    alternatives: Sequence[Alternative]
    files: Callable[[Approximation], Files]
    launch: Callable[[Approximation], Launch]
    is_exact: bool = False
