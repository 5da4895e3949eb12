"""The program `workbench`: all commands by name. The module of a command is imported when it is called."""

from dataclasses import dataclass
from importlib import import_module, metadata
from typing import Annotated, Any

import typer
from typer.core import TyperCommand
from typer.main import get_command

from workbench.cli.console import OneLineErrors
from workbench.cli.extras import DISTRIBUTION, missing_text
from workbench.cli.table_format import with_format_flag
from workbench.collector import collector_paused


@dataclass(frozen=True, slots=True)
class Command:
    """A command that can be listed without importing its module.

    Args:
        module: name of a module in `workbench.cli`.
        function: name in the module of a command function, or of a typer program with several commands.
        summary: first paragraph of the help.
        has_tables: whether it prints tables and so takes `--format`; commands of a group add it themselves.
    """

    module: str
    function: str
    summary: str
    has_tables: bool = True

    @collector_paused(many=10_000)
    def load(self, name: str) -> Any:
        """Import the module and return the click command."""
        function = getattr(import_module(f"workbench.cli.{self.module}"), self.function)
        if not isinstance(function, typer.Typer):
            program = typer.Typer(add_completion=False)
            program.command(name)(with_format_flag(function) if self.has_tables else function)
            function = program
        return get_command(function)


COMMANDS = {
    "init": Command(
        "starting",
        "init_command",
        "Write a job file for a model. A composite model is split into encoders, projectors and LLM.",
    ),
    "plan": Command("planning", "plan_command", "Make a plan of a job with one strategy."),
    "search": Command(
        "search",
        "search_command",
        "Plan a job with every strategy, simulate the plans and rank them.",
    ),
    "size": Command(
        "sizing",
        "size_command",
        "Find the number of GPUs, and the plan, that a training needs to meet a deadline or budget.",
    ),
    "check": Command(
        "planning",
        "check_command",
        "Check that a plan is valid, fits in memory and cannot deadlock; show stages, memory and programs.",
    ),
    "explain": Command(
        "explaining",
        "explain_command",
        "Explain the step time of a plan, and find changes that make it shorter.",
    ),
    "diff": Command(
        "explaining",
        "diff_command",
        "Compare two plans, and show where the difference of their step times comes from.",
    ),
    "layout": Command(
        "layouts",
        "layout_command",
        "Show the layouts of a job in the notation of another system, or read them from such a file.",
        has_tables=False,
    ),
    "export": Command(
        "exporting",
        "export_command",
        "Export a plan as a folder that launches under another training system.",
    ),
    "schema": Command(
        "schemas",
        "schema_command",
        "Print the JSON Schema of job, profile or plan files, for completion and checks in editors.",
        has_tables=False,
    ),
    "models": Command(
        "models",
        "models_command",
        "List model families: which can be planned, which can run, and why others cannot.",
    ),
    "simulate": Command("executing", "simulate_command", "Predict the step time and memory of a plan."),
    "run": Command("executing", "run_command", "Run steps of a plan on this machine."),
    "predict": Command(
        "predicting",
        "predict_command",
        "Predict time and memory of language-model runs, one per row of a CSV file.",
    ),
    "templates": Command(
        "resilience",
        "templates_command",
        "Show pipeline templates of a job, and its throughput for each number of nodes.",
    ),
    "failures": Command(
        "resilience",
        "failures_command",
        "Predict training progress while nodes fail and return: pipeline templates against restarts.",
    ),
    "elastic": Command(
        "elastic",
        "elastic_command",
        "Train on this machine while nodes are killed, warned or join; predict every layout first.",
    ),
    "compare": Command(
        "executing",
        "compare_command",
        "Compare a simulated trace with executed traces of the same plan.",
    ),
    "ingest": Command(
        "ingesting",
        "ingest_command",
        "Convert recordings of other tools: traces, link speeds, kernel times, memory.",
    ),
    "trace": Command(
        "ingesting",
        "trace_command",
        "Convert a trace to the format of another tool. Perfetto opens trace files directly.",
        has_tables=False,
    ),
    "calibrate": Command("measuring", "calibrate_command", "Measure this machine and write its profile."),
    "profile": Command("profiles", "app", "Create, show and check profiles of devices."),
    "report": Command(
        "measuring",
        "report_command",
        "Write a self-contained HTML page about a folder of plans and traces.",
        has_tables=False,
    ),
    "reproduce": Command(
        "measuring",
        "reproduce_command",
        "Rerun experiments and compare them with the numbers in the papers.",
        has_tables=False,
    ),
    "demo": Command(
        "measuring",
        "demo_command",
        "Run the whole workflow on this machine: calibrate, plan, predict, run, compare, report.",
    ),
    "checkpoint": Command("checkpoints", "app", "Convert checkpoints in the earlier format."),
    "preprocess": Command("preprocessing", "app", "Preprocess images in processes separate from training."),
}


class Commands(OneLineErrors):
    """The group of all commands: listed by their summaries, imported on demand."""

    def __init__(self, **settings: Any) -> None:
        listed = {
            name: TyperCommand(name=name, short_help=command.summary) for name, command in COMMANDS.items()
        }
        super().__init__(**(settings | {"commands": listed}))

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """The name and the command that the arguments start with, and the remaining arguments."""
        name, _, rest = super().resolve_command(ctx, args)
        return name, COMMANDS[args[0]].load(args[0]), rest

    def invoke(self, ctx: Any) -> Any:
        """Run the named command; ValueError if it needs a package of an extra that is not installed."""
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:
            message = missing_text(ctx.invoked_subcommand or ctx.info_name, error)
            if message is None:
                raise
            raise ValueError(message) from error


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"{DISTRIBUTION} {metadata.version(DISTRIBUTION)}")
        raise typer.Exit


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Plan multimodal training, simulate the plan, run it, and compare prediction and run.",
)


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", help="print the version and exit", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    pass


def main() -> None:
    """Entry point of the console script."""
    app(prog_name="workbench")
