"""The program `workbench`: every command by its name."""

import typer

from workbench.cli import (
    elastic,
    executing,
    layouts,
    measuring,
    models,
    planning,
    predicting,
    preprocessing,
    resilience,
)
from workbench.cli.console import OneLineErrors

app = typer.Typer(
    cls=OneLineErrors,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Plan multimodal training, simulate the plan, run it, and hold one against the other.",
)
app.command("plan")(planning.plan_command)
app.command("search")(planning.search_command)
app.command("check")(planning.check_command)
app.command("layout")(layouts.layout_command)
app.command("models")(models.models_command)
app.command("simulate")(executing.simulate_command)
app.command("run")(executing.run_command)
app.command("predict", help=predicting.PREDICT_HELP)(predicting.predict_command)
app.command("templates")(resilience.templates_command)
app.command("failures")(resilience.failures_command)
app.command("elastic")(elastic.elastic_command)
app.command("compare")(executing.compare_command)
app.command("calibrate")(measuring.calibrate_command)
app.command("report")(measuring.report_command)
app.command("reproduce")(measuring.reproduce_command)
app.command("demo")(measuring.demo_command)
app.add_typer(preprocessing.app, name="preprocess")


def main() -> None:
    """Entry point of the console script."""
    app(prog_name="workbench")
