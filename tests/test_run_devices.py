"""Commands that are told a device: what they refuse, and what they say of the device they had."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from experiments.fidelity import run as suite
from experiments.fidelity.cases import text_work
from experiments.fidelity.work import LLM, UNMEASURED, plan_of, this_machine
from tests.command_line import accept, answered, refuse
from workbench.cost.profile import ideal_profile, write_profile
from workbench.plan.codec import write_plan
from workbench.trace_json import read_trace, write_trace

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
