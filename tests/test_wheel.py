"""The wheel, and commands on machines with few packages."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import pytest

from workbench.cli.extras import EXTRAS

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("workbench", "sim", "runtime", "experiments")
INSTALL_S, COMMAND_S, ANSWER_S = 500, 200, 60
MOST_BYTES = 800e6  # of all packages; with the extras it is 3 GB
LLAVA = {
    "model_type": "llava",
    "image_token_index": 32000,
    "text_config": {"model_type": "llama", "vocab_size": 32064},
    "vision_config": {
        "model_type": "clip_vision_model",
        "hidden_size": 1024,
        "image_size": 336,
        "intermediate_size": 4096,
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "patch_size": 14,
    },
}


def test_extras_are_those_of_the_project() -> None:
    """A command that lacks a package names the extra that brings it."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra, packages in EXTRAS.items():
        assert set(packages.values()) == {line.split(">")[0] for line in declared[extra]}


def ran(*command: str | Path, cwd: Path, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Without what this process was told of where modules are."""
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=timeout_s, check=False, env=clean
    )


@dataclass(frozen=True)
class Installed:
    """The planner in an environment of its own, and an empty folder to work in."""

    bin: Path
    folder: Path

    def workbench(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        began_s = perf_counter()
        done = ran(self.bin / "workbench", *arguments, cwd=self.folder, timeout_s=COMMAND_S)
        sys.stdout.write(f"workbench {arguments[0]}: {perf_counter() - began_s:.1f} s\n")
        return done

    def accepted(self, *arguments: str | Path) -> str:
        done = self.workbench(*arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip")
    patience = ("--retries", "1", "--timeout", "15")  # an index that answers nothing is given up in time
    asked = (*pip, "download", "-q", "--no-deps", *patience, "-d", folder / "asked", "setuptools>=77")
    if ran(*asked, cwd=folder, timeout_s=ANSWER_S).returncode != 0:
        pytest.skip("no package index answers: the wheel was not installed into a clean environment")
    source = folder / "source"
    for package in PACKAGES:
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    built = ran(*pip, "wheel", "-q", "--no-deps", "-w", folder, source, cwd=folder, timeout_s=INSTALL_S)
    assert built.returncode == 0, built.stderr
    [wheel] = folder.glob("*.whl")
    environment = folder / "environment"
    made = ran(sys.executable, "-m", "venv", environment, cwd=folder, timeout_s=INSTALL_S)
    assert made.returncode == 0, made.stderr
    began_s = perf_counter()
    done = ran(
        environment / "bin" / "python",
        *("-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", wheel),
        cwd=folder,
        timeout_s=INSTALL_S,
    )
    assert done.returncode == 0, done.stderr
    num_bytes = sum(file.stat().st_size for file in environment.rglob("*") if file.is_file())
    sys.stdout.write(
        f"wheel {wheel.stat().st_size / 1e6:.1f} MB, installed with what it needs {num_bytes / 1e6:.0f} MB "
        f"in {perf_counter() - began_s:.0f} s\n"
    )
    assert num_bytes < MOST_BYTES
    empty = folder / "empty"
    empty.mkdir()
    return Installed(bin=environment / "bin", folder=empty)


def test_the_wheel_plans_without_a_framework(installed: Installed) -> None:
    """From a model's name to a simulated plan, in a folder that holds nothing else."""
    listed = ran(installed.bin / "python", "-m", "pip", "list", cwd=installed.folder, timeout_s=COMMAND_S)
    names = {line.split()[0] for line in listed.stdout.splitlines()}
    assert names & {name for packages in EXTRAS.values() for name in packages.values()} == set()

    (installed.folder / "config.json").write_text(json.dumps(LLAVA))
    installed.accepted("init", "config.json", "--gpus", "8xH100", "-o", "job.yaml")
    shutil.copy(ROOT / "examples" / "tiny.yaml", installed.folder)
    installed.accepted("plan", "tiny.yaml", "--profile", "A40", "-o", "plan.json")
    installed.accepted("check", "plan.json", "--job", "tiny.yaml")
    simulate = ("simulate", "plan.json", "--profile", "A40", "--trace", "trace.json", "--json")
    predicted = installed.accepted(*simulate)
    assert json.loads(predicted)["plan_hash"] in installed.accepted(
        "plan", "tiny.yaml", "--profile", "A40", "-o", "again.json", "--json"
    )
    found = json.loads(installed.accepted("search", "tiny.yaml", "--profile", "A40", "--json"))
    assert found["candidates"][0]["iteration_s"] > 0
    installed.accepted("report", ".", "-o", "report.html")
    assert "data-timeline" in (installed.folder / "report.html").read_text()
    installed.accepted("layout", "tiny.yaml")
    assert "JobSpec" in installed.accepted("schema", "job")
    installed.accepted("export", "plan.json", "--to", "torchrun", "-o", "launch")
    assert "launch.sh" in {file.name for file in (installed.folder / "launch").iterdir()}
    installed.accepted("explain", "plan.json", "--changes", "0")
    assert "llava" in installed.accepted("models")
    assert "H200" in installed.accepted("profile", "show", "H200")
    assert installed.accepted("--version").startswith("multimodal-workbench ")


@pytest.mark.parametrize(
    ("command", "needs"),
    [
        (("run", "plan.json", "--local"), "torch: pip install 'multimodal-workbench[run]'"),
        (("reproduce", "all"), "matplotlib: pip install 'multimodal-workbench[report]'"),
    ],
)
def test_a_missing_extra_is_one_line(installed: Installed, command: tuple[str, ...], needs: str) -> None:
    done = installed.workbench(*command)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"workbench: error: {command[0]} needs {needs}\n"


LACKING = ("pydantic", "pydantic_core", "annotated_types", "typing_inspection", "simpy", "zmq")
SCRIPT = f"""
import sys

sys.modules.update(dict.fromkeys({LACKING!r}))  # importing these raises
import runtime.measure.layers
import runtime.measure.operators
import runtime.measure.microbench
import workbench.calibrate.measurement
from pathlib import Path
from workbench.calibrate.fit import fit
from workbench.cost.execution import Execution, load_execution, write_execution
from workbench.cost.model import CostModel
from workbench.cost.profile import ideal_profile, load_profile, write_profile
from workbench.plan.codec import dumps, loads

folder = Path(sys.argv[1])
write_profile(ideal_profile("here"), folder / "profile.json")
assert load_profile(folder / "profile.json") == ideal_profile("here")
write_execution(Execution(), folder / "execution.json")
assert load_execution(folder / "execution.json") == Execution()
CostModel(load_profile("H100"))
"""


def test_rows_profiles_and_plans_need_no_more_than_a_machine_of_torch_has(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
