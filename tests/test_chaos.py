"""Chaos in short: its checks find what they should, and a few rounds are clean."""

import json
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from experiments.chaos import saves
from experiments.chaos.__main__ import kept_rounds, write_record
from experiments.chaos.fault import Fault, limit
from experiments.chaos.findings import Findings, ends, num_wrong
from experiments.chaos.forked import MARK, MARK_LENGTH, Forked
from experiments.chaos.processes import end_all, is_killed, left_after, marked
from experiments.chaos.proxy import Manners, Proxy
from experiments.chaos.room import Program, Room
from experiments.chaos.rounds import Played, summary
from runtime.state.checkpoint_files import Identity, finish, part_folder, rank_folder
from runtime.state.rank_state import RankNotes
from runtime.state.tensor_files import write_tensors
from tests.waiting import PATIENCE_S, eventually

ROOT = Path(__file__).parents[1]
ROUNDS = 2


def test_a_few_rounds_are_clean(tmp_path):
    words = ("--rounds", ROUNDS, "--seed", 3, "--json", "--out", tmp_path / "chaos.json")
    words += ("--component", "preprocess")
    done = subprocess.run(
        [sys.executable, "-m", "experiments.chaos", *map(str, words)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(done.stdout.splitlines()[-1])
    assert record["rounds"] == record["clean"] == ROUNDS
    counts = ("orphans", "lost_steps", "wrong_losses", "unnamed_causes", "leftover_files")
    assert [record[key] for key in counts] == [0] * len(counts)
    assert len(json.loads((tmp_path / "chaos.json").read_text())["all"]) == ROUNDS


def test_marked_processes_are_found_however_they_were_started():
    mark = "a" * MARK_LENGTH
    text = "import os, time; os.fork(); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", text], env=os.environ | {MARK: mark}):
        assert eventually(lambda: len(marked(mark)) == 2)
        assert len(left_after(mark, 0.1)) == 2
        end_all(mark)
        assert marked(mark) == {}


def test_who_is_killed_already_is_told_from_who_lives_on():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert not is_killed(process.pid)
        process.kill()
        process.wait()
        assert is_killed(process.pid)


def test_rounds_are_kept_for_the_same_draws_alone(tmp_path):
    out = tmp_path / "chaos.json"
    found = Findings(code=2, said="killed", orphans=["one"], recovery_s=2.0)
    played = Played(number=3, component="run", fault=Fault.KILL_WORKER, seconds=1.0, findings=found)
    asked = {"device": "a", "seed": 0}
    assert kept_rounds(out, asked) == []
    write_record(out, asked, [played])
    assert kept_rounds(out, asked) == [played]
    assert kept_rounds(out, asked, ["run"]) == []
    with pytest.raises(ValueError, match=r"its seed is 0, want 1 to resume"):
        kept_rounds(out, asked | {"seed": 1})


def test_left_over_files_are_found_and_foreign_ones_are_not(tmp_path):
    room = Room(tmp_path, "b" * MARK_LENGTH)
    room.scratch.mkdir()
    room.saves.mkdir(parents=True)
    assert room.left_over() == []
    (room.scratch / "torchelastic_x").mkdir()
    saved(room.saves, 2)
    assert room.left_over() == []
    for left in (room.scratch / "ranks-x", room.saves / "step-0000000004.part", room.saves / "step6"):
        left.mkdir()
    for left in (room.saves / "writer.json", room.saves / ".best.json.7.tmp"):
        left.write_text("")
    assert room.left_over() == [
        "disk/saves/.best.json.7.tmp",
        "disk/saves/step-0000000004.part",
        "disk/saves/step6",
        "disk/saves/writer.json",
        "tmp/ranks-x",
    ]


def saved(root: Path, step: int) -> Path:
    """As a run of two ranks saves."""
    identity = Identity(plan_hash="p", dtype="d", seed=0, ranks=(0, 1))
    for rank in identity.ranks:
        notes = RankNotes(losses=(1.5,) * step, python_random=(3, (0,) * 625, None))
        write_tensors(rank_folder(part_folder(root, step), rank), {"w": torch.ones(3, 2)}, notes.as_json())
    return finish(root, step, identity, 1.0)


def test_saves_are_read_without_the_code_that_wrote_them(tmp_path):
    assert (saves.named(tmp_path), saves.whole(tmp_path)) == (0, None)
    saved(tmp_path, 2)
    last = saved(tmp_path, 4)
    assert saves.named(tmp_path) == 4
    assert saves.whole(tmp_path) == saves.Save(last, 4)
    assert saves.losses(saves.Save(last, 4)) == dict.fromkeys(range(4), 3.0)
    file = last / "rank-00001" / "tensors.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert saves.named(tmp_path) == 4
    found = saves.whole(tmp_path)
    assert found is not None
    assert found.step == 2


def test_a_loss_that_is_off_in_the_tenth_digit_or_of_no_step_is_wrong():
    right = (2.0, 1.0)
    assert num_wrong({0: 2.0, 1: 1.0 + 1e-12}, right) == 0
    assert num_wrong({0: 2.0 + 1e-8, 1: float("nan"), 2: 1.0}, right) == 3


def test_a_limit_meets_a_process_that_runs():
    text = "import time; print('begun', flush=True); input(); open('/dev/null')"
    with subprocess.Popen(
        [sys.executable, "-c", text],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        limit(process.pid, resource.RLIMIT_NOFILE, 3)
        _, said = process.communicate("\n")
    assert "Too many open files" in said


@pytest.mark.parametrize(
    ("manners", "sent", "comes"),
    [
        (Manners(), b"one", b"one"),
        (Manners(delay_s=0.3), b"late", b"late"),
        (Manners(is_deaf=True), b"lost", None),
        (Manners(is_cut=True), b"cut", b""),
    ],
)
def test_a_proxy_has_the_manners_it_is_told(manners, sent, comes):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        proxy = Proxy(listener.getsockname()[1])
        threading.Thread(target=echo, args=(listener,), daemon=True).start()
        with socket.create_connection(("127.0.0.1", proxy.port), timeout=PATIENCE_S) as near:
            near.sendall(b"first")
            assert near.recv(5) == b"first"
            behave(proxy, manners)
            near.settimeout(PATIENCE_S if comes is not None else 0.5)
            start_s = time.monotonic()
            if manners.is_cut:
                assert near.recv(5) == b""
            else:
                near.sendall(sent)
                if comes is None:
                    with pytest.raises(TimeoutError):
                        near.recv(5)
                else:
                    assert near.recv(5) == comes
                    assert time.monotonic() - start_s >= 2 * manners.delay_s
        proxy.close()


def behave(proxy: Proxy, manners: Manners) -> None:
    """Give the proxy manners, and return when it has begun a turn with them."""
    turn, has_begun = proxy._turn, threading.Event()

    def noted(now: Manners) -> None:
        if now is manners:
            has_begun.set()
        turn(now)

    proxy._turn = noted  # type: ignore[method-assign]
    proxy.manners = manners
    assert has_begun.wait(PATIENCE_S)


def echo(listener: socket.socket) -> None:
    end, _ = listener.accept()
    with end:
        while piece := end.recv(100):
            end.sendall(piece)


class TestFindings:
    def test_an_end_is_held_against_what_it_should_be(self, tmp_path):
        out, err = tmp_path / "x.out", tmp_path / "x.err"
        err.write_text("first\nworkbench: error: rank 1: killed by SIGKILL\n")
        ended = Forked(0)
        ended.returncode = 2
        program, found = Program(ended, out, err), Findings()
        found.hold(program, ends(2, words="killed by SIGKILL"))
        found.hold(program, ends(2, words="first", is_last=False))
        assert found.is_clean
        found.hold(program, ends(1, words="killed by SIGKILL"))
        found.hold(program, ends(2, words="first"))
        assert len(found.unnamed_causes) == 2
        err.write_text("Traceback (most recent call last):\nOSError: killed by SIGKILL\n")
        found.hold(program, ends(2, words="killed by SIGKILL"))
        assert len(found.unnamed_causes) == 3

    def test_sums_count_what_was_found(self):
        bad = Findings(orphans=["one", "two"], lost_steps=3, wrong_losses=1, recovery_s=2.0)
        rounds = [
            Played(number=number, component="run", fault=Fault.KILL_WORKER, seconds=1.0, findings=found)
            for number, found in enumerate((Findings(recovery_s=1.0), bad))
        ]
        total = summary(rounds)
        assert (total["rounds"], total["clean"], total["orphans"]) == (2, 1, 2)
        assert (total["lost_steps"], total["wrong_losses"], total["unnamed_causes"]) == (3, 1, 0)
        assert total["recovery_p50_s"] == 1.5
        assert total["components"] == {"run": 2}
        assert total["faults"] == {"kill-worker": 2}
