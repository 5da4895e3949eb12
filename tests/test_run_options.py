"""Options of a run: one dataclass makes the flags of both entry points (`UPDATE_GOLDEN=1`: anew)."""

import argparse
import os
from dataclasses import fields
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from runtime import launch
from runtime.run_settings import RunSettings
from workbench.cli.app import COMMANDS
from workbench.cli.options import with_flags_of
from workbench.job.device import Device
from workbench.job.run_options import RunOptions, StepOptions, add_arguments, flags_of
from workbench.plan.plan import Precision

GOLDEN = Path(__file__).parent / "golden"
RUN_ALONE = {"--local", "--emulate", "--profile", "--json", "--format"}  # of the command alone


def options_of_run() -> list[typer.core.TyperOption]:
    run = COMMANDS["run"].load("run")
    return [each for each in run.get_params(typer.Context(run)) if isinstance(each, typer.core.TyperOption)]


def compared(name: str, text: str) -> None:
    path = GOLDEN / name
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text(), f"{path.name} differs; UPDATE_GOLDEN=1 writes it anew"


def test_flags_of_the_command_are_those_in_the_file():
    lines = [f"{' '.join(each.opts)} default {each.default}: {each.help}" for each in options_of_run()]
    compared("flags_run.txt", "\n".join(lines) + "\n")


def test_help_of_the_launcher_is_that_in_the_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit):
        launch.main(["--help"])
    compared("help_launch.txt", capsys.readouterr().out)


def test_both_entry_points_take_the_same_options():
    run = {name for each in options_of_run() for name in each.opts} - {"--help"}
    assert run - RUN_ALONE == {flag.name for flag in flags_of(RunOptions)}
    said = ["plan.json"]
    for flag in flags_of(RunOptions):
        said += [flag.name] if flag.type is bool else [flag.name, VALUES[flag.field][0]]
    parser = argparse.ArgumentParser()
    parser.add_argument("plan")
    add_arguments(parser, RunOptions)
    launched = vars(parser.parse_args(said))
    launched.pop("plan")
    taken: list[RunOptions] = []
    program = typer.Typer()

    @program.command()
    @with_flags_of(RunOptions)
    def command(plan: str, *, options: RunOptions) -> None:
        assert plan == "plan.json"
        taken.append(options)

    result = CliRunner().invoke(program, said)
    assert result.exit_code == 0, result.output
    assert taken == [RunOptions(**launched)]
    assert launched == {name: value for name, (_, value) in VALUES.items()}


VALUES = {
    "trace": ("t.json", Path("t.json")),
    "steps": ("3", 3),
    "repetitions": ("2", 2),
    "warmup": ("4", 4),
    "seed": ("5", 5),
    "weights": ("w", Path("w")),
    "export": ("e", Path("e")),
    "data": ("d", "d"),
    "data_keys": ("k", Path("k")),
    "next_samples": ("", True),
    "job": ("j", Path("j")),
    "checkpoint": ("c", Path("c")),
    "checkpoint_every": ("6", 6),
    "resume": ("", True),
    "timeout_s": ("7.5", 7.5),
    "precision": ("float64", Precision.FLOAT64),
    "watch_memory": ("", True),
    "device": ("cpu", Device.CPU),
}  # of every option, as it is typed and as it is understood


def test_what_is_not_said_is_the_default_that_the_command_names():
    taken: list[RunOptions] = []
    program = typer.Typer()

    @program.command()
    @with_flags_of(RunOptions, warmup=1, repetitions=lambda said: 3 if said["often"] else 1)
    def command(*, often: bool = False, options: RunOptions) -> None:
        del often
        taken.append(options)

    for said in ([], ["--often"], ["--often", "--repetitions", "1", "--warmup", "0"]):
        assert CliRunner().invoke(program, said).exit_code == 0
    assert taken == [
        RunOptions(warmup=1, repetitions=1),
        RunOptions(warmup=1, repetitions=3),
        RunOptions(warmup=0, repetitions=1),
    ]


def test_ranks_are_told_what_was_said_of_steps():
    options = RunOptions(**{name: value for name, (_, value) in VALUES.items()})
    settings = RunSettings(**options.of_steps)
    assert [getattr(settings, each.name) for each in fields(StepOptions)] == [*options.of_steps.values()]


@pytest.mark.parametrize("kind", [RunOptions, RunSettings])
@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"steps": 0}, "steps must be 1 to 1,000,000, got 0"),
        ({"warmup": -1}, "warmup must be 0 to 1,000,000, got -1"),
        ({"repetitions": 10**7}, "repetitions must be 1 to 1,000,000, got 10,000,000"),
        ({"timeout_s": float("nan")}, "timeout must be > 0 s and at most a day, got nan"),
    ],
)
def test_numbers_out_of_bounds_are_refused(kind: type[StepOptions], wrong: dict[str, float], words: str):
    with pytest.raises(ValueError, match=words):
        kind(**wrong)
