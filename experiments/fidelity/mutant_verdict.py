"""Verdicts on what a plan does."""

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    SAME = "same"
    DEADLOCK = "deadlock"
    OTHER = "other"


class Wrong(Exception):  # noqa: N818  (a verdict, not an error)
    """Something that no execution with the job's meaning does."""


class Stalled(Exception):  # noqa: N818
    """No rank can go on."""


@dataclass(frozen=True, slots=True)
class Judgement:
    verdict: Verdict
    reason: str = ""
