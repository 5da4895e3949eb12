"""The command that writes a plan as a folder that launches under another training system."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from workbench.cli.budgets import budget_s
from workbench.cli.console import print_result
from workbench.cli.options import ExecutionFile, Json, PlanFile, PlanProfile
from workbench.cost.model import CostModel
from workbench.export.export import export
from workbench.export.folder import check_folder, write_folder
from workbench.export.registry import BY_NAME
from workbench.job.machines import under
from workbench.job.matching import cost_of_file
from workbench.plan.codec import read_plan
from workbench.plan.plan import Plan
from workbench.planner.budget import starting_now
from workbench.timing.accept import accept

DEFAULT_BUDGET = "10s"
Target = StrEnum("Target", {name: name for name in BY_NAME})  # type: ignore[misc]
"""Names of the target systems, from the registry; its members are unknown to type checkers."""


class SimulatedPrices:
    """Step times of plans by the simulator."""

    def __init__(self, cost: CostModel) -> None:
        self.cost = cost

    def step_s(self, plan: Plan) -> float:
        """Seconds of a step; ValueError for an invalid plan or one that does not fit in memory."""
        from sim.predict import predict

        return predict(*accept(plan), self.cost).iteration_s


def export_command(
    plan: PlanFile,
    to: Annotated[Target, typer.Option(help="target system")],
    output: Annotated[Path, typer.Option("-o", "--output", help="folder to write", metavar="DIR")],
    profile: PlanProfile = None,
    execution: ExecutionFile = None,
    budget: Annotated[
        str, typer.Option(help="time for planning what a refusal names as nearest")
    ] = DEFAULT_BUDGET,
    as_json: Json = False,
) -> None:
    """Export a plan as a folder that launches under another training system.

    The folder has arguments or configuration, environment, an sbatch script, a note on the container, and a
    README that lists each difference between plan and system with its predicted cost.
    """
    time_s = budget_s(budget, "export")
    check_folder(output)
    parsed_plan = read_plan(plan)
    prices = SimulatedPrices(under(cost_of_file(plan, parsed_plan, profile), execution))
    files = export(parsed_plan, BY_NAME[to], prices, starting_now(time_s))
    write_folder(files, output)
    print_result(
        {"folder": str(output), "target": to.value, "files": sorted(files)},
        f"written to {output}: {', '.join(sorted(files))}",
        f"start it with: bash {output}/launch.sh",
        as_json=as_json,
    )
