"""The program `workbench`: every command by its name; a command's module is imported when it is called."""

from dataclasses import dataclass
from importlib import import_module, metadata
from typing import Annotated, Any

import typer
from typer.core import TyperCommand
from typer.main import get_command

from workbench.cli.console import OneLineErrors
from workbench.cli.extras import DISTRIBUTION, missing_text
from workbench.cli.table_format import lists
from workbench.collector import collector_paused


@dataclass(frozen=True, slots=True)
class Command:
    """A command that is listed before it is imported.

    Args:
        module: of `workbench.cli`.
        function: in it, or a program of several commands.
        summary: the first paragraph of its help.
        lists: whether it prints tables and so takes `--format`; commands of a program say it themselves.
    """

    module: str
    function: str
    summary: str
    lists: bool = True

    @collector_paused(many=10_000)
    def load(self, name: str) -> Any:
        """The command itself."""
        found = getattr(import_module(f"workbench.cli.{self.module}"), self.function)
        if not isinstance(found, typer.Typer):
            alone = typer.Typer(add_completion=False)
            alone.command(name)(lists(found) if self.lists else found)
            found = alone
        return get_command(found)


COMMANDS = {
    "init": Command(
        "starting",
        "init_command",
        "Write a job file for a model: a composite one is taken apart into encoders, projectors and LLM.",
    ),
    "plan": Command("planning", "plan_command", "Turn a job into a plan."),
    "search": Command(
        "search",
        "search_command",
        "Plan a job with every strategy, and with every schedule asked for; simulate all plans "
        "and rank them.",
    ),
    "size": Command(
        "sizing",
        "size_command",
        "Say how many GPUs of the job's kind a training wants, and which plan, for a deadline or a budget.",
    ),
    "check": Command(
        "planning",
        "check_command",
        "Say whether a plan is sound, fits and cannot deadlock; show its stages and programs.",
    ),
    "explain": Command(
        "explaining",
        "explain_command",
        "Say why a step takes as long as it does, and which changes would make it shorter.",
    ),
    "diff": Command(
        "explaining",
        "diff_command",
        "Say what differs between two plans, and where the difference of their steps comes from.",
    ),
    "layout": Command(
        "layouts",
        "layout_command",
        "Show a job's layouts in another system's words, or take them from a file in such words.",
        lists=False,
    ),
    "export": Command(
        "exporting",
        "export_command",
        "Write a plan as a folder that launches under another training system.",
    ),
    "schema": Command(
        "schemas",
        "schema_command",
        "Print the JSON Schema of job, profile or plan files, by which editors complete and check them.",
        lists=False,
    ),
    "models": Command(
        "models",
        "models_command",
        "List the model families: what can be planned, what can run, and why the rest cannot.",
    ),
    "simulate": Command("executing", "simulate_command", "Predict what one step of a plan takes."),
    "run": Command("executing", "run_command", "Run steps of a plan for real."),
    "predict": Command(
        "predicting",
        "predict_command",
        "Price language models, one a row of a CSV file.",
    ),
    "templates": Command(
        "resilience",
        "templates_command",
        "Show the pipelines that a job can be cut into, and its throughput on every number of nodes.",
    ),
    "failures": Command(
        "resilience",
        "failures_command",
        "Say how much training a job gets on nodes that come and go: pipeline templates against restarts.",
    ),
    "elastic": Command(
        "elastic",
        "elastic_command",
        "Train for real on nodes that are killed, warned and join, and say before what a step will take.",
    ),
    "compare": Command(
        "executing",
        "compare_command",
        "Hold a simulated trace against the executed ones of the same plan.",
    ),
    "ingest": Command(
        "ingesting",
        "ingest_command",
        "Take in what other tools recorded of a job: traces, link speeds, kernel times, memory.",
    ),
    "trace": Command(
        "ingesting",
        "trace_command",
        "Write a trace in the format of another tool; Perfetto opens trace files as they are.",
        lists=False,
    ),
    "calibrate": Command("measuring", "calibrate_command", "Measure this machine and write its profile."),
    "profile": Command("profiles", "app", "Profiles of devices: made from a data sheet, shown, checked."),
    "report": Command(
        "measuring",
        "report_command",
        "Write one self-contained HTML page about a folder of plans and traces.",
        lists=False,
    ),
    "reproduce": Command(
        "measuring",
        "reproduce_command",
        "Rerun experiments and hold them against what the papers printed.",
        lists=False,
    ),
    "demo": Command(
        "measuring",
        "demo_command",
        "Do the main job on this machine: calibrate, plan, predict, run, compare, report.",
    ),
    "checkpoint": Command("checkpoints", "app", "Take over saves of the format before this one."),
    "preprocess": Command("preprocessing", "app", "Prepare images apart from training: serve, produce, run."),
}


class Commands(OneLineErrors):
    """The group of all commands: listed by their summaries, loaded when one is called."""

    def __init__(self, **settings: Any) -> None:
        listed = {name: TyperCommand(name=name, short_help=each.summary) for name, each in COMMANDS.items()}
        super().__init__(**(settings | {"commands": listed}))

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """The command that the arguments name, and the arguments left for it."""
        name, _, rest = super().resolve_command(ctx, args)
        return name, COMMANDS[args[0]].load(args[0]), rest

    def invoke(self, ctx: Any) -> Any:
        """Run the command that is named; ValueError where it needs a package that an extra brings."""
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:
            text = missing_text(ctx.invoked_subcommand or ctx.info_name, error)
            if text is None:
                raise
            raise ValueError(text) from error


def _say_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"{DISTRIBUTION} {metadata.version(DISTRIBUTION)}")
        raise typer.Exit


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Plan multimodal training, simulate the plan, run it, and hold one against the other.",
)


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="say the version and end", callback=_say_version, is_eager=True)
    ] = False,
) -> None:
    pass


def main() -> None:
    """Entry point of the console script."""
    app(prog_name="workbench")
