"""Verdicts on what a plan does."""

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    SAME = "same"
    DEADLOCK = "deadlock"
    OTHER = "other"


class Wrong(Exception):  # noqa: N818  (a verdict, not an error)
    """The execution did something that contradicts the job's meaning."""


class Stalled(Exception):  # noqa: N818
    """No rank can continue."""


@dataclass(frozen=True, slots=True)
class Judgement:
    verdict: Verdict
    reason: str = ""
