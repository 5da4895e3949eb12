"""Supervisors that are killed: nothing of theirs runs two seconds later, and their temporary folders go."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from runtime.data.scenes import make
from runtime.world.owner import Owner, this_process
from runtime.world.scratch import MARK, ScratchFolder, sweep
from tests.command_line import JOB, accept
from tests.free_port import free_port
from tests.waiting import PATIENCE_S, eventually

GONE_S = 2.0
ASKED_S = 25.0  # to end by a signal: its agent would kill them after 30 s
BEGUN_S = 300.0  # only what hangs takes longer
CLI = (sys.executable, "-c", "from workbench.cli.app import main; main()")


@dataclass(frozen=True, slots=True)
class Tree:
    """A supervisor and everything that it has started, and its folder for temporary ones."""

    process: "subprocess.Popen[str]"
    scratch: Path

    def descendants(self) -> frozenset[int]:
        return descendants_of(self.process.pid)

    def folders(self) -> list[str]:
        """Its own; torch's launcher and torch's compiler make some as well."""
        return [path.name for path in self.scratch.iterdir() if not path.name.startswith("torch")]


def parents() -> dict[int, int]:
    """Process -> its parent, of all that run."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] not in "ZX":
            found[int(stat.parent.name)] = int(fields[1])
    return found


def descendants_of(pid: int) -> frozenset[int]:
    known, found = parents(), {pid}
    while more := {child for child, parent in known.items() if parent in found} - found:
        found |= more
    return frozenset(found - {pid})


@contextmanager
def begun(command: tuple[object, ...], scratch: Path, has_begun: Callable[[], bool]) -> Iterator[Tree]:
    """A command at work, in a session of its own."""
    scratch.mkdir()
    process = subprocess.Popen(
        [str(word) for word in command],
        env=os.environ | {"TMPDIR": str(scratch), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process:
        try:
            assert eventually(lambda: has_begun() or process.poll() is not None, BEGUN_S)
            assert process.poll() is None, process.communicate()[1]
            yield Tree(process, scratch)
        finally:
            for pid in (*descendants_of(process.pid), process.pid):
                with suppress(ProcessLookupError):  # its own parent may end it meanwhile
                    if process.poll() is None:
                        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def two_ranks(tmp_path: Path) -> Path:
    """A plan of no more ranks than can wait for each other: each imports torch for itself under torchrun."""
    job, plan = tmp_path / "job.yaml", tmp_path / "plan.json"
    job.write_text(JOB)
    accept("plan", job, "--strategy", "encoders-replicated", "-o", plan)
    return plan


@contextmanager
def running(plan: Path, *launcher: object) -> Iterator[Tree]:
    """Ranks that have written a checkpoint and go on."""
    saves = plan.with_name("saves")
    rest = (plan, "--steps", 100_000, "--checkpoint", saves, "--checkpoint-every", 1)
    command = (*launcher, *rest) if launcher else (*CLI, "run", *rest, "--local")
    with begun(command, plan.with_name("scratch"), lambda: bool(list(saves.glob("step-*[0-9]")))) as tree:
        assert len(tree.descendants()) >= 2
        yield tree


@contextmanager
def torchrun(plan: Path) -> Iterator[Tree]:
    launcher = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", 2)
    with running(plan, *launcher, "--master-port", free_port(), "-m", "runtime.launch") as tree:
        yield tree


@contextmanager
def elastic(job: Path) -> Iterator[Tree]:
    saves = job.with_name("saves")
    rest = ("elastic", job, "--nodes", 2, "--steps", 100_000, "--checkpoint", saves, "--checkpoint-every", 1)
    with begun((*CLI, *rest), job.with_name("scratch"), lambda: bool(list(saves.glob("*/*.json")))) as tree:
        yield tree


@contextmanager
def served(folder: Path) -> Iterator[Tree]:
    """A server whose producers are there."""
    make(folder / "data", num_samples=8, seed=0, kinds=("image",))
    scratch = folder / "scratch"
    rest = ("preprocess", "serve", folder / "data", "--image-px", 32, "--patch-px", 8, "--producers", 2)

    def is_there() -> bool:
        ours = [pid for pid in parents() if str(scratch).encode() in environment_of(pid)]
        return sum(b"preprocess.producer" in command_of(pid) and heeds_its_parent(pid) for pid in ours) == 2

    with begun((*CLI, *rest), scratch, is_there) as tree:
        yield tree


def heeds_its_parent(pid: int) -> bool:
    """Whether it watches for its parent's end: one that still imports does not."""
    with suppress(OSError):
        return any("pidfd" in str(file.readlink()) for file in Path(f"/proc/{pid}/fd").iterdir())
    return False


def environment_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def ranks_of(pid: int) -> list[int]:
    """The processes that it has forked itself: helpers run commands of their own, and ranks fork writers.

    A writer of a checkpoint is no rank: one that is stopped between its fork and its first line can't yet
    know that it has to end with its parent.
    """
    command = command_of(pid)
    return sorted(
        child for child, parent in parents().items() if parent == pid and command_of(child) == command
    )


def all_gone(pids: frozenset[int]) -> bool:
    return not pids & parents().keys()


def killed_alone(tree: Tree) -> None:
    """SIGKILL to the supervisor; what is left after two seconds, and of its folders a little later."""
    started = tree.descendants()
    assert started
    os.kill(tree.process.pid, signal.SIGKILL)
    tree.process.wait()
    assert eventually(lambda: all_gone(started), GONE_S), [command_of(pid) for pid in started]
    assert eventually(lambda: tree.folders() == [], GONE_S), tree.folders()


def test_ranks_of_a_killed_run_are_gone_with_their_folder_the_stopped_one_too(plan):
    with running(plan) as tree:
        os.kill(ranks_of(tree.process.pid)[-1], signal.SIGSTOP)
        killed_alone(tree)


def test_ranks_of_a_killed_launcher_are_gone(two_ranks):
    with torchrun(two_ranks) as tree:
        killed_alone(tree)


def test_nodes_of_a_killed_elastic_training_are_gone_with_their_folder(job):
    with elastic(job) as tree:
        killed_alone(tree)


def test_producers_of_a_killed_server_are_gone(tmp_path):
    with served(tmp_path) as tree:
        killed_alone(tree)


def test_workers_of_a_killed_search_are_gone(job):
    """On the commit before they waited for ever for what to do."""
    options = ("--joint", "--workers", 2, "--candidates", 10**6)
    command = (*CLI, "search", job, *options, "-o", job.with_name("best.json"))

    def has_begun() -> bool:
        ours = descendants_of(os.getpid())
        return sum(b"spawn_main" in command_of(pid) and heeds_its_parent(pid) for pid in ours) == 2

    with begun(command, job.with_name("scratch"), has_begun) as tree:
        killed_alone(tree)


def test_a_run_that_is_asked_to_end_says_how_far_it_came(plan):
    with running(plan) as tree:
        ranks, started = frozenset(ranks_of(tree.process.pid)), tree.descendants()
        os.kill(tree.process.pid, signal.SIGTERM)
        _, said = tree.process.communicate(timeout=PATIENCE_S)
        assert tree.process.returncode == 143
        assert "Traceback" not in said
        assert "workbench: run ended after" in said
        assert "; --resume continues after step " in said
        assert all_gone(ranks)
        assert eventually(lambda: all_gone(started), GONE_S)  # a rank's writer ends when it has a core to
        assert tree.folders() == []
    saves = plan.with_name("saves")
    assert not list(saves.glob("*.part"))
    assert not (saves / "writer.json").exists()
    steps = 1 + max(int(path.name.removeprefix("step-")) for path in saves.glob("step-*"))
    accept("run", plan, "--local", "--checkpoint", saves, "--steps", steps, "--resume")


def test_ranks_under_torchrun_that_are_asked_to_end_do_not_wait_for_each_other(two_ranks):
    with torchrun(two_ranks) as tree:
        started = tree.descendants()
        start_s = time.monotonic()
        os.kill(tree.process.pid, signal.SIGTERM)
        _, said = tree.process.communicate(timeout=PATIENCE_S)
        assert time.monotonic() - start_s < ASKED_S
        assert eventually(lambda: all_gone(started), GONE_S)
        assert "ended by SIGTERM" in said


def test_folders_of_dead_owners_go_with_the_next_start(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    here = this_process()
    dead = Owner(host=here.host, boot=here.boot, space=here.space, pid=here.pid, start=here.start - 1)
    for name, mark in (("ranks-dead", dead.as_json()), ("ranks-mine", here.as_json()), ("ranks-odd", "{")):
        (tmp_path / name).mkdir()
        (tmp_path / name / MARK).write_text(mark)
    (tmp_path / "ranks-other").mkdir()
    (tmp_path / "ranks-link").symlink_to(tmp_path / "ranks-dead")
    assert sweep("ranks-") == (tmp_path / "ranks-dead",)
    with ScratchFolder("ranks-") as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "ranks-link",
        "ranks-mine",
        "ranks-odd",
        "ranks-other",
    ]
