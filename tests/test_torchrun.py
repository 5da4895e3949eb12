"""A rank killed under torchrun ends all of them, and is named as the cause."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from runtime.world.last_words import let_first_speak
from tests.plans import disjoint_plan
from tests.test_checkpoint_attacks import files_of_at_most
from tests.tiny_valm import tiny_batch, tiny_valm
from workbench.plan.codec import write_plan
from workbench.termination import Ended, ending_by_signal

LIMIT_S = 30.0
CUTS = {"vision": (5,), "audio": (4,), "llm": (6,)}


def start(*arguments: object) -> "subprocess.Popen[str]":
    """Three ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"]
    return subprocess.Popen(
        [*command, "-m", "runtime.launch", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[1],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def process_of(rank: int, launcher: int) -> int:
    """Process id of a rank, by the environment that its launcher gave it."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            environment = (path / "environ").read_bytes().split(b"\0")
        except (OSError, ValueError):
            continue
        if parent == launcher and f"RANK={rank}".encode() in environment:
            return int(path.name)
    raise AssertionError(f"launcher {launcher} has no rank {rank}")


@pytest.mark.skipif(not Path("/proc/self/stat").is_file(), reason="finds the ranks by /proc")
def test_a_killed_rank_ends_all_and_is_named(tmp_path: Path) -> None:
    write_plan(disjoint_plan(tiny_valm(), tiny_batch(), CUTS), tmp_path / "plan.json")
    files = ("--trace", tmp_path / "run.json", "--export", tmp_path / "out")
    with start(tmp_path / "plan.json", "--steps", 100_000, *files) as launcher:
        assert launcher.stderr is not None
        told = ""
        while "running 100000 steps on 3 ranks" not in told:
            line = launcher.stderr.readline()
            assert line, told
            told += line
        time.sleep(1.5)  # some hundred steps
        ranks = [process_of(rank, launcher.pid) for rank in range(3)]
        os.kill(ranks[2], signal.SIGKILL)
        killed = time.monotonic()
        _, told = launcher.communicate(timeout=60)
    assert time.monotonic() - killed < LIMIT_S
    assert launcher.returncode != 0
    cause = told[told.index("Root Cause") :]
    assert "rank      : 2" in cause
    assert "Signal 9 (SIGKILL)" in cause
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)
    assert not (tmp_path / "run.json").exists()
    assert not (tmp_path / "out").exists()


def test_an_export_that_cannot_be_written_is_a_line_of_each_rank(tmp_path: Path) -> None:
    """Those that wait for the results say so, too, without a traceback of their own."""
    write_plan(disjoint_plan(tiny_valm(), tiny_batch(), CUTS), tmp_path / "plan.json")
    with files_of_at_most(2_000), start(tmp_path / "plan.json", "--export", tmp_path / "out") as launcher:
        _, told = launcher.communicate(timeout=60)
    assert launcher.returncode != 0
    assert "cannot be written: Error while serializing: I/O error: File too large" in told
    assert "]: Traceback" not in told  # torch begins a rank's lines with its number
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        pytest.param(("nowhere.json",), "No such file or directory: 'nowhere.json'", id="plan"),
        pytest.param(("nowhere.json", "--steps", "x"), "argument --steps: invalid int value: 'x'", id="flag"),
    ],
)
def test_input_that_all_ranks_refuse_is_said_once(arguments: tuple[str, ...], line: str) -> None:
    with start(*arguments) as launcher:
        _, told = launcher.communicate(timeout=60)
    assert launcher.returncode != 0
    assert told.count(line) == 1
    assert told.count("usage: ") <= 1
    assert "ended by SIGTERM" not in told
    assert "rank      : 0" in told[told.index("Root Cause") :]


def test_a_rank_whose_input_alone_is_refused_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """After the wait; the launcher's signal in it is not worth a line."""
    let_first_speak({"LOCAL_RANK": "1"}, wait_s=0.0)
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
    with pytest.raises(SystemExit) as ended:
        wait_for_first()
    assert ended.value.code == 128 + signal.SIGTERM
    assert not isinstance(ended.value, Ended)  # which would say that it was ended
    assert capsys.readouterr().err == ""


def wait_for_first() -> None:
    with ending_by_signal():
        let_first_speak({"LOCAL_RANK": "1"}, wait_s=60.0)


def test_why_a_rank_ends_is_said_where_its_files_may_not_grow(tmp_path):
    text = (
        "import resource as r; from runtime.world.last_words import say_last;"
        "_, hard = r.getrlimit(r.RLIMIT_FSIZE);"
        "r.setrlimit(r.RLIMIT_FSIZE, (0, hard)); say_last('error: File too large')"
    )
    said = tmp_path / "said"
    with said.open("wb") as file:  # unbuffered, as torchrun starts ranks
        done = subprocess.run([sys.executable, "-u", "-c", text], stderr=file, check=False)
    assert done.returncode == 0
    assert said.read_text() == "error: File too large\n"
