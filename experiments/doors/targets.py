"""Checks exported folders with the systems they are for, in separate environments.

The packages are fetched once into the user's cache, apart from the project's environment, which provides
torch alone. Where the package index does not answer, nothing is checked, and the result says so.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.harness.foreign import answer

PROGRAM = Path(__file__).parent / "foreign" / "check_folders.py"
ON_HOST = PROGRAM.with_name("on_host.py")
CACHE = Path.home() / ".cache" / "multimodal-workbench" / "export-targets"
LONGEST_S = 900
TORCHTITAN = (
    "torchtitan==0.3.0",
    "spmd_types==0.2.3",
    "torch_checkpointing==0.1.1",
    "torchdata==0.11.0",
    "tyro==1.0.17",
    "docstring_parser==0.18.0",
    "typeguard==4.6.0",
    "shtab==1.13.0",
    "einops==0.8.2",
    "datasets==5.2.0",
    "multiprocess==0.70.19",
    "dill==0.4.1",
    "xxhash==4.1.0",
    "aiohttp==3.14.5",
    "tensorboard==2.21.0",
    "protobuf",
    "absl-py",
    "grpcio",
    "pandas",
    "pyarrow",
    "pillow",
)
WHEELS = ("megatron-core==0.19.2", "megatron-bridge==0.6.2")  # for Python 3.12, read as files
CHECKED = ("megatron", "megatron-bridge", "torchtitan")


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """An exported folder.

    Args:
        files: texts by name.
        ranks: processes that it starts.
    """

    files: Mapping[str, str]
    ranks: int


def fetched(cache: Path = CACHE) -> Path | None:
    """The folder of the systems' packages; None where the package index does not have them.

    Everything is fetched to a temporary name and renamed, so that an existing folder is complete.
    """
    done = cache / f"packages-{sys.implementation.cache_tag}"  # some are compiled for this version of Python
    if done.exists():
        return done
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as temporary:
        installed, wheels = Path(temporary) / "packages", Path(temporary) / "wheels"
        titan = [*_pip("install"), "--no-deps", "--target", str(installed / "torchtitan"), *TORCHTITAN]
        no_dependencies = [*_pip("download"), "--no-deps", "--only-binary=:all:", "--python-version", "3.12"]
        for command in (titan, [*no_dependencies, "--dest", str(wheels), *WHEELS]):
            if subprocess.run(command, capture_output=True, timeout=LONGEST_S, check=False).returncode:
                return None
        for wheel in wheels.glob("*.whl"):
            with zipfile.ZipFile(wheel) as file:
                file.extractall(installed / wheel.name.split("-")[0])
        if not done.exists():
            installed.rename(done)
    return done


def _pip(action: str) -> list[str]:
    return [sys.executable, "-m", "pip", action, "--quiet", "--disable-pip-version-check"]


def refusals(target: str, folders: Sequence[Folder], packages: Path) -> list[str | None]:
    """For each folder the reason why the system refuses it, or None.

    Raises:
        ValueError: the check itself cannot run.
    """
    request = {
        "target": target,
        "bridge": str(_bridge(packages)),
        "folders": [
            {"files": dict(folder.files), "ranks": folder.ranks, "arguments": _arguments(folder)}
            for folder in folders
        ],
    }
    answers: list[str | None] = answer(
        [sys.executable, str(PROGRAM)],
        failure=f"{target}: the check cannot run",
        limit_s=LONGEST_S,
        asked=json.dumps(request),
        environment=_environment(target, packages),
    )
    return answers


def bridge_adapters(folder: Folder, packages: Path) -> dict[str, dict[str, Any]]:
    """Target -> shapes of A and B that Megatron-Bridge puts beside it in each block, and how far its result
    is from (alpha / rank) (x A^T) B^T; the model is on one rank.

    Raises:
        ValueError: it cannot be built; the line that says why.
    """
    adapters: dict[str, dict[str, Any]] = answer(
        [sys.executable, str(PROGRAM.with_name("adapters.py")), str(_bridge(packages))],
        failure="no adapters",
        limit_s=LONGEST_S,
        asked=folder.files["tables.json"],
        environment=_environment("megatron-bridge", packages) | {"OMP_NUM_THREADS": "1"},
    )
    return adapters


def _bridge(packages: Path) -> Path:
    return packages / "megatron_bridge" / "megatron" / "bridge"


def _environment(target: str, packages: Path) -> dict[str, str]:
    """The environment of a process with the target's packages; Megatron's also use torchtitan's."""
    package_names = ["torchtitan"] if target == "torchtitan" else ["megatron_core", "torchtitan"]
    return os.environ | {"PYTHONPATH": os.pathsep.join(str(packages / package) for package in package_names)}


def trained(folder: Folder, packages: Path, steps: int) -> list[float]:
    """Losses of a Megatron folder's program on gloo, where the CPU answers for CUDA.

    Raises:
        ValueError: it fails; the line that says why.
    """
    with tempfile.TemporaryDirectory() as index:
        for name, text in folder.files.items():
            (Path(index) / name).write_text(text)
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        done = subprocess.run(
            [*torchrun, str(folder.ranks), str(ON_HOST), "train.py", "--steps", str(steps)],
            cwd=index,
            capture_output=True,
            text=True,
            timeout=LONGEST_S,
            check=False,
            env=_environment("megatron", packages) | {"OMP_NUM_THREADS": "1"},
        )
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if re.match(r"\[rank\d+\]: \w*Error", line)]
        raise ValueError(f"megatron cannot run it: {(errors or done.stderr.splitlines() or ['no word'])[0]}")
    return [float(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("step ")]


def _arguments(folder: Folder) -> list[str]:
    """The arguments that the folder's shell script passes to Megatron's program."""
    return shell_arguments(folder.files) if "arguments.sh" in folder.files else []


def shell_arguments(files: Mapping[str, str]) -> list[str]:
    """The words of the arrays ARGUMENTS and DATA, as read by a shell."""
    script = "\n".join((files["arguments.sh"], files["data.sh"]))
    done = subprocess.run(
        ["bash", "-c", script + '\nprintf "%s\\0" "${ARGUMENTS[@]}" "${DATA[@]}"'],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout.split("\0")[:-1]
