"""Checkpoints from somebody else, two writers of one folder, and disks that are full."""

import json
import os
import pickle
import re
import resource
import subprocess
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from runtime.launch import run_lowered
from runtime.state import save_folder
from runtime.state.checkpoint import Begin, checkpoints_in
from runtime.state.checkpoint_files import (
    Whole,
    check_whole,
    clear_parts,
    finished,
    latest_whole,
    part_folder,
)
from runtime.state.save_folder import LOCK, check_space, give_back, refuse_writer, take
from runtime.state.tensor_files import TornError, read_manifest, read_tensors, write_tensors
from runtime.world.owner import Owner, this_process
from runtime.world.pool import Pool, WorldFailed
from tests.command_line import accept, workbench
from tests.test_checkpoint import assert_same, copied, identity, lowered, saved, saving
from workbench.plan.codec import write_plan

__all__ = ["lowered", "saved"]  # fixtures


class Runs:
    """A pickle that makes a file when it is loaded."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self._mark,))


def in_old_format(whole: Path, to: Path) -> Path:
    """A checkpoint as torch's distributed checkpoints hold it, and as its stamps were written."""
    folder = to / whole.name
    stamp = json.loads((whole / "stamp.json").read_text())
    for rank in stamp["ranks"]:
        source, target = (each / f"rank-{rank:05}" for each in (whole, folder))
        about = read_manifest(source).about
        losses = [float.fromhex(loss) for loss in about["losses"]]
        tensors = load_file(source / "tensors.safetensors")
        with pytest.warns(UserWarning, match=r"torch\.distributed is disabled"):
            save(tensors, storage_writer=FileSystemWriter(target / "tensors"), no_dist=True)
        note_sums(target, {"losses": losses, "python_random": about["python_random"]})
    del stamp["manifests"]
    (folder / "stamp.json").write_text(json.dumps(stamp))
    return folder


def note_sums(rank: Path, about: object) -> None:
    files = {
        path.name: [path.stat().st_size, zlib.crc32(path.read_bytes())]
        for path in (rank / "tensors").iterdir()
    }
    (rank / "rank.json").write_text(json.dumps({"files": files, "about": about}))


def test_a_pickle_in_a_checkpoint_is_never_run(lowered, pool, saved, tmp_path):
    old = in_old_format(saved[0] / "step-0000000005", tmp_path)
    mark, rank = tmp_path / "ran", old / "rank-00000"
    about = json.loads((rank / "rank.json").read_text())["about"]
    (rank / "tensors" / ".metadata").write_bytes(pickle.dumps(Runs(mark)))
    note_sums(rank, about)
    with pytest.raises((ValueError, WorldFailed)):
        run_lowered(lowered, saving(tmp_path, Whole(folder=old, step=4)), pool=pool)
    assert not mark.exists()
    with pytest.raises(ValueError, match=r"of the earlier format, .*: workbench checkpoint import OLD NEW"):
        latest_whole(tmp_path, identity(lowered))
    assert not mark.exists()


def test_the_earlier_format_is_imported_by_those_who_trust_it(lowered, pool, saved, tmp_path):
    folder, result = saved
    in_old_format(folder / "step-0000000003", tmp_path / "old")
    command = ["checkpoint", "import", str(tmp_path / "old"), str(tmp_path / "new")]
    refused = workbench(*command)
    assert refused.exit_code == 2
    assert "want --trust" in refused.output
    accept(*command, "--trust")
    whole = latest_whole(tmp_path / "new", identity(lowered))
    assert_same(result, run_lowered(lowered, saving(tmp_path / "new", whole), pool=pool))
    again = workbench(*command, "--trust")
    assert "is not empty; want a new folder" in again.output


def test_tensors_are_safetensors_with_their_sums_and_kinds(tmp_path):
    tensors = {
        "scalar": torch.tensor(3.0),
        "bits": torch.tensor([True, False, True]),
        "half": torch.arange(7, dtype=torch.bfloat16),
        "turned": torch.arange(6.0).reshape(2, 3).T,
        "none": torch.empty(0, 4),
        "large": torch.arange(2**19, dtype=torch.float64),  # several chunks
    }
    write_tensors(tmp_path / "new", tensors, {"note": "x"})
    found = load_file(tmp_path / "new" / "tensors.safetensors")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[key], tensors[key]) for key in tensors)
    filled = {key: torch.zeros_like(tensor) for key, tensor in tensors.items()}
    assert read_tensors(tmp_path / "new", filled).about == {"note": "x"}
    assert all(torch.equal(filled[key], tensors[key]) for key in tensors)
    with pytest.raises(ValueError, match=r"'scalar' is F32 \[\], want F64 \[\]"):
        read_tensors(tmp_path / "new", {"scalar": torch.zeros((), dtype=torch.float64)})
    with pytest.raises(ValueError, match="has no tensor 'other'"):
        read_tensors(tmp_path / "new", {"other": torch.zeros(1)})


def test_a_pipe_in_the_place_of_tensors_is_not_waited_for(tmp_path):
    write_tensors(tmp_path, {"x": torch.zeros(3)})
    for name in ("tensors.safetensors", "tensors.json"):
        (tmp_path / name).unlink()
        os.mkfifo(tmp_path / name)
        with pytest.raises(TornError, match=f"{name}"):
            read_tensors(tmp_path, {"x": torch.zeros(3)})


def test_metadata_of_another_save_makes_a_checkpoint_torn(lowered, saved, tmp_path):
    whole = copied(saved[0], tmp_path)
    other = saved[0] / "step-0000000003" / "rank-00001"
    for path in other.iterdir():
        (whole / "rank-00001" / path.name).write_bytes(path.read_bytes())
    with pytest.raises(TornError, match=r"rank-00001/tensors.json is not what was written"):
        check_whole(whole, identity(lowered))


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 9000,
        b"{}",
        b'{"format": 2}',
        b"\xff",
        b'{"format":1,"bytes":1,"sha256":"x","tensors":{},"about":{}}',
    ],
)
def test_metadata_that_is_none_is_refused_in_one_line(tmp_path, content):
    write_tensors(tmp_path, {"x": torch.zeros(3)})
    (tmp_path / "tensors.json").write_bytes(content)
    with pytest.raises(TornError, match=r"tensors.json cannot be read"):
        read_manifest(tmp_path)


def owner_of(process: "subprocess.Popen[bytes]") -> Owner:
    """Of a process that this one started."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    here = this_process()
    return Owner(host=here.host, boot=here.boot, space=here.space, pid=process.pid, start=int(fields[19]))


def test_a_folder_has_one_writer_until_it_ends(lowered, tmp_path, capsys):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        owner = owner_of(other)
        (tmp_path / LOCK).write_text(owner.as_json())
        with pytest.raises(ValueError, match=rf"to by process {other.pid} on '.*'; want another folder"):
            refuse_writer(tmp_path, wait_s=0.0)
        with pytest.raises(ValueError, match=f"written to by process {other.pid}"):
            take(tmp_path)
        other.kill()
        other.wait()
    refuse_writer(tmp_path, wait_s=0.0)
    take(tmp_path)
    assert f"taken over from process {owner.pid} on" in capsys.readouterr().err
    give_back(tmp_path)
    assert not (tmp_path / LOCK).exists()


def test_of_two_runs_that_begin_at_once_the_second_leaves_the_saves_of_the_first(lowered, tmp_path):
    """Both found the folder free. On the commit before, the second removed what the first was writing."""
    part = part_folder(tmp_path, 3)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as first:
        part.mkdir()
        (tmp_path / LOCK).write_text(owner_of(first).as_json())
        with pytest.raises(ValueError, match=f"is being written to by process {first.pid}"):
            run_lowered(lowered, saving(tmp_path))
        assert part.is_dir()
        assert (tmp_path / LOCK).is_file()


def test_a_folder_that_another_one_writes_to_is_named_whatever_is_in_it(lowered, tmp_path, monkeypatch):
    """It removes saves while these are looked at: on the commit before, one that was gone was named."""
    monkeypatch.setattr(save_folder, "refuse_writer", partial(refuse_writer, wait_s=0.0))
    (tmp_path / "step-0000000003").mkdir()
    (tmp_path / "step-0000000003" / "gone").symlink_to(tmp_path / "nowhere")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        (tmp_path / LOCK).write_text(owner_of(other).as_json())
        with pytest.raises(ValueError, match=f"is being written to by process {other.pid}"):
            checkpoints_in(tmp_path, 2, Begin.LATEST, identity(lowered))


def test_writers_of_other_machines_are_not_taken_for_ended(tmp_path):
    owner = Owner(host="elsewhere", boot="", space="", pid=1, start=0)
    (tmp_path / LOCK).write_text(owner.as_json())
    with pytest.raises(ValueError, match=r"1 on 'elsewhere', which cannot be checked.*remove .*writer.json"):
        refuse_writer(tmp_path, wait_s=0.0)
    (tmp_path / LOCK).write_text('{"host": "\x1b"}')
    with pytest.raises(ValueError, match=r"writer.json: cannot be read"):
        refuse_writer(tmp_path, wait_s=0.0)


def test_what_cannot_be_saved_is_found_before_the_run(lowered, tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "inside"):
        with pytest.raises(ValueError, match=r"saved there: (File exists|Not a directory)"):
            checkpoints_in(folder, 2, Begin.ANEW, identity(lowered))
    with pytest.raises(ValueError, match=r"saves take about .* GiB more, .* GiB are free"):
        check_space(tmp_path, 2**60)
    assert not list(tmp_path.glob("*.part"))


def test_a_run_that_is_refused_creates_no_folder(lowered, tmp_path):
    write_plan(lowered.plan, tmp_path / "plan.json")
    folder = tmp_path / "new" / "saves"
    refused = workbench("run", tmp_path / "plan.json", "--local", "--checkpoint", folder, "--repetitions", 3)
    assert (refused.exit_code, refused.stderr) == (
        2,
        "workbench: error: checkpoints are of one run: want repetitions 1, got 3\n",
    )
    with pytest.raises(ValueError, match=r"saves take about .* GiB more"):
        checkpoints_in(folder, 2, Begin.ANEW, identity(lowered), num_bytes=2**60)
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """As on a disk that is full after so many bytes of a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_ends_the_run_by_name_and_leaves_no_parts(lowered, tmp_path):
    with files_of_at_most(20_000), Pool(3) as pool:
        with pytest.raises(WorldFailed, match=r"checkpoint after step 3 failed: .*File too large") as raised:
            run_lowered(lowered, saving(tmp_path), pool=pool)
        assert "\n" not in str(raised.value)
    clear_parts(tmp_path / "nothing")
    assert finished(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


PICKLES = {
    "experiments/disttrain/checkpoints.py": "between the job's own processes",
    "experiments/fuzz/targets/recordings.py": "writes hostile ones, for the unpickler that finds no class",
    "runtime/elastic/member.py": "orders of the supervisor, over a pipe of its own",
    "runtime/elastic/nodes.py": "the other end",
    "runtime/elastic/forecast.py": "what it makes itself, to time it",
    "runtime/elastic/prepared.py": "changes prepared for the supervisor, in a folder of its own",
    "runtime/elastic/replan.py": "a plan for the own processes, in a folder of their own",
    "runtime/elastic/world.py": "the other end",
    "runtime/frontend/stage.py": "whether a user's function can be sent to the own ranks",
    "runtime/next_plan.py": "between a rank and its planner, over pipes",
    "runtime/step_plans.py": "plans from the first rank to the others",
    "runtime/world/answers.py": "of a pool's workers, over the same pipes",
    "runtime/world/pool.py": "between a pool and its workers, over pipes",
    "workbench/search/joint/workers.py": "between a search and its own workers",
    "workbench/trace_files/memory_snapshot.py": "an unpickler that finds no class and calls nothing",
}
TRUSTED_READER = "runtime/state/import_old.py"


def test_pickles_travel_between_a_runs_own_processes_alone():
    """Nothing else unpickles, and torch's loaders, which do, are in the one command that asks for trust."""
    root = Path(__file__).parents[1]
    found: dict[str, str] = {}
    for folder in ("workbench", "sim", "runtime", "experiments"):
        for path in (root / folder).rglob("*.py"):
            found[str(path.relative_to(root))] = path.read_text(encoding="utf-8")
    users = {
        name
        for name, text in found.items()
        if re.search(r"^\s*(import|from) (c?pickle|dill|joblib)", text, re.M)
    }
    assert users == PICKLES.keys()
    readers = r"torch\.load\(|distributed\.checkpoint|allow_pickle|recv_pyobj|\bmarshal\b|\bshelve\b"
    assert {name for name, text in found.items() if re.search(readers, text)} == {TRUSTED_READER}
