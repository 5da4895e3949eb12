"""Planners for commands: each strategy's best plans are judged by the simulator, or by its own estimate."""

from collections.abc import Collection
from enum import StrEnum
from typing import Annotated

import typer

from workbench.planner.judged import JudgedBy, judged
from workbench.planner.strategy_spec import Planner
from workbench.strategies.registry import BY_NAME

Strategy = StrEnum("Strategy", {name: name for name in BY_NAME})  # type: ignore[misc]
"""Names of the strategies, from the registry; its members are unknown to type checkers."""

JudgeFlag = Annotated[
    JudgedBy,
    typer.Option(
        "--judge",
        help="what chooses among the best plans of a strategy: the simulator, or the strategy's estimate, "
        "as published",
    ),
]


def planners_by(judge: JudgedBy, names: Collection[str]) -> dict[str, Planner]:
    """Planners of these strategies; the simulator or their own estimate chooses among their best plans."""
    if judge is JudgedBy.PLANNER:
        return {name: BY_NAME[name].planner for name in names}
    from sim.predict import candidate_s

    return {name: judged(BY_NAME[name], candidate_s) for name in names}
