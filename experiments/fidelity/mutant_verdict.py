"""Verdicts on what a plan does, and the reductions' part of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from workbench.plan.lowered import GradientGroup


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


def check_lanes(issued: Mapping[int, Sequence[tuple[int, float]]], groups: Sequence[GradientGroup]) -> None:
    """Stalled unless every rank's reductions, in issue order, find all their ranks at them.

    Args:
        issued: rank -> (group, what it brought) in the order in which it came to them.
    """
    queues = {rank: [i for i, _ in found if len(groups[i].ranks) > 1] for rank, found in issued.items()}
    while any(queues.values()):
        heads = {rank: queue[0] for rank, queue in queues.items() if queue}
        able = [
            index
            for index in sorted(set(heads.values()))
            if all(heads.get(rank) == index for rank in groups[index].ranks)
        ]
        if not able:
            raise Stalled(f"gradient groups wait for each other: {heads}")
        for index in able:
            for rank in groups[index].ranks:
                queues[rank].pop(0)
