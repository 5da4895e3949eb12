"""Options, devices and refusals of runs."""

import argparse
import os
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from experiments.fidelity import run as suite
from experiments.fidelity.cases import text_work
from experiments.fidelity.work import LLM, UNMEASURED, plan_of, this_machine
from runtime import launch
from runtime.run_settings import RunSettings
from tests.command_line import JOB, accept, answered, refuse
from workbench.cli.app import COMMANDS
from workbench.cli.options import with_flags_of
from workbench.cost.profile import ideal_profile, write_profile
from workbench.job.device import Device
from workbench.job.run_options import RunOptions, StepOptions, add_arguments, flags_of
from workbench.plan.codec import read_plan, write_plan
from workbench.plan.plan import Precision
from workbench.plan.runnable import refusal_to_run
from workbench.trace_json import read_trace, write_trace

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
    "learning_rate": ("2e-5", 2e-5),
    "rate_warmup": ("8", 8),
    "rate_decay": ("9", 9),
    "weight_decay": ("0.1", 0.1),
    "clip_norm": ("1.5", 1.5),
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


NO_GPU = "device cuda|sees no GPU here|want cpu"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a plan of one rank and a profile of a CPU; no GPU is to be seen."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    work = text_work()
    one = plan_of(
        replace(work, batch=work.batch[:2]), this_machine(UNMEASURED, 1), {LLM: ((8, (0,)),)}, samples=(1, 1)
    )
    write_plan(one, tmp_path / "plan.json")
    write_profile(replace(ideal_profile("mine"), device="cpu"), tmp_path / "mine.json")
    return tmp_path


def test_a_gpu_that_is_not_there_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = folder / "plan.json"
    refuse("run", plan, "--emulate", "--device", "cuda", words=NO_GPU, folder=folder)
    calibrate = ("calibrate", "--device", "cuda", "-o", folder / "p.json")
    refuse(*calibrate, words=NO_GPU, folder=folder)
    assert suite.main(["--device", "cuda", "--out", str(folder / "suite")]) == 2
    assert capsys.readouterr().err.startswith("error: device cuda: torch ")
    assert not (folder / "suite").exists()


def test_processes_of_this_machine_have_no_gpu(folder: Path) -> None:
    words = "--local starts processes on the CPU|--emulate --device cuda"
    refuse("run", folder / "plan.json", "--local", "--device", "cuda", words=words, folder=folder)


def test_a_profile_of_another_device_is_one_line(folder: Path) -> None:
    command = ("run", folder / "plan.json", "--emulate", "--device", "cpu", "--profile")
    refuse(*command, "H100", words="profile 'H100' is of device 'H100', this runs on 'cpu'", folder=folder)
    accept(*command, folder / "mine.json")


def test_more_than_the_device_holds_is_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.emulation.memory.capacity_of", lambda device: 2**20)
    words = "emulation holds all 1 ranks on one device|cpu has 0.000977 GiB"
    refuse("run", folder / "plan.json", "--emulate", words=words, folder=folder)


def test_the_peak_of_one_rank_stands_beside_the_predicted_one(folder: Path) -> None:
    command = ("run", folder / "plan.json", "--emulate", "--repetitions", "1")
    assert "peak memory: predicted " in accept(*command).stdout
    peak = answered(*command)["peak_memory"]
    assert peak["rank"] == 0
    assert 0 < peak["measured_bytes"] <= peak["predicted_bytes"]
    assert peak["error"] == pytest.approx(peak["predicted_bytes"] / peak["measured_bytes"] - 1)


def test_traces_of_another_device_are_not_compared(folder: Path) -> None:
    plan, simulated, executed = folder / "plan.json", folder / "sim.json", folder / "run.json"
    accept("simulate", plan, "--profile", folder / "mine.json", "--trace", simulated)
    accept("run", plan, "--emulate", "--repetitions", "1", "--trace", executed)
    accept("compare", simulated, executed)
    accept("compare", simulated, executed, "--device", "cpu")
    both = ("compare", simulated, executed, "--device")
    refuse(*both, "cuda", words="sim.json|is of device 'cpu', want 'cuda'", folder=folder)
    trace = read_trace(executed)
    write_trace(replace(trace, details=()), folder / "old.json")
    words = "old.json|emulated trace does not say of which device it is, want 'cpu'"
    refuse("compare", simulated, folder / "old.json", "--device", "cpu", words=words, folder=folder)
    write_trace(replace(trace, details=(("device", "H100"),)), folder / "gpu.json")
    words = "sim.json|is of device 'cpu', want 'H100'"
    refuse("compare", simulated, folder / "gpu.json", "--device", "cuda", words=words, folder=folder)


MODEL = "bert-large"  # in no configuration of transformers that the runtime reads
WARNING = "can be simulated, not run: "


def drafted(folder: Path, model: str) -> Path:
    job = folder / "job.yaml"
    accept("init", model, "--gpus", "8xH100", "-o", job)
    return job


def test_a_draft_of_a_model_without_layers_in_the_runtime_says_so(tmp_path: Path) -> None:
    words = ("init", MODEL, "--gpus", "8xH100", "-o", tmp_path / "job.yaml")
    assert f"plans of this job {WARNING}module" in accept(*words).output
    (refusal,) = answered(*words)["run_refusals"]
    assert refusal.startswith("module 'llm' has no source")


@pytest.mark.parametrize("command", ["plan", "search"])
def test_a_plan_that_cannot_run_says_why(tmp_path: Path, command: str) -> None:
    output = tmp_path / "plan.json"
    done = accept(command, drafted(tmp_path, MODEL), "-o", output)
    refusal = refusal_to_run(read_plan(output))
    assert refusal
    assert f"this plan {WARNING}{refusal}" in " ".join(done.output.split())


def test_plan_gives_machines_the_reason_or_none(tmp_path: Path) -> None:
    output = tmp_path / "plan.json"
    job = drafted(tmp_path, MODEL)
    assert "has no source" in answered("plan", job, "-o", output)["run_refusal"]
    job.write_text(JOB)
    runnable = answered("plan", job, "-o", output)
    assert runnable["run_refusal"] is None
    assert refusal_to_run(read_plan(output)) == ""
