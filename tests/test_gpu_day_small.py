"""The whole campaign from end to end on the CPU, and what its plans refuse."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from experiments.gpu_day import beside
from experiments.gpu_day.campaign import PARTS, Extent, Session
from experiments.gpu_day.jobs import judged, rehearsed
from experiments.gpu_day.plans import measure
from experiments.gpu_day.predictions import JUDGED, PREDICTED, read_predictions
from experiments.gpu_day.profile import HEADER, LAYERS
from experiments.gpu_day.profile import main as profile_main
from experiments.gpu_day.store import PREDICTIONS, read_rows, write_rows
from workbench.cost.profile import load_profile
from workbench.plan.codec import plan_hash

WAIT_S = 400.0
NULL = ("flex_forward_min", "flex_backward_min", "cudnn_causal_min")
GIVEN = ("mean_error", "worst_error", "tau", "memory_error")


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, object]]:
    """Its folder, and what it printed."""
    folder = tmp_path_factory.mktemp("gpu") / "day"
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "experiments.gpu_day",
            "--out",
            str(folder),
            *["--device", "cpu", "--small", "--json"],
        ],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
        timeout=WAIT_S,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder, json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def copied(campaign, tmp_path) -> Session:
    """The campaign's rows in a folder to change."""
    shutil.copytree(campaign[0], tmp_path / "day")
    return Session("cpu", Extent.SMALL, tmp_path / "day")


def test_all_parts_are_done(campaign):
    found = campaign[1]
    assert (found["parts_done"], found["parts_failed"]) == (len(PARTS), 0)
    assert found["extent"] == "small"
    assert found["seconds"] > 0


def test_what_a_cpu_cannot_show_is_null(campaign):
    found = campaign[1]
    assert [found[name] for name in NULL] == [None] * len(NULL)
    assert all(isinstance(found[name], float) for name in GIVEN)
    assert found["plans_judged"] >= 8
    assert found["memory_error"] <= 0.03


def test_files_are_few_and_small(campaign):
    files = [path for path in campaign[0].rglob("*") if path.is_file()]
    assert len(files) <= 8
    assert max(path.stat().st_size for path in files) < 16 * 2**20


def test_four_plans_are_rehearsed_and_others_judged(campaign):
    session = Session("cpu", Extent.SMALL, campaign[0])
    rehearsals = {plan_hash(named.plan) for named in rehearsed(session)}
    others = {plan_hash(named.plan) for named in judged(session)}
    assert len(rehearsals) == 4
    assert len(others) >= 8
    assert not rehearsals & others


def test_the_full_campaign_has_the_same_plans_and_more():
    tiny, full = (Session("cpu", extent, Path()) for extent in (Extent.SMALL, Extent.FULL))
    assert len(rehearsed(full)) == len(rehearsed(tiny)) == 4
    assert len(judged(full)) > len(judged(tiny))
    assert len({named.name for named in (*rehearsed(full), *judged(full))}) == 4 + len(judged(full))
    for named in judged(full):
        assert len(named.plan.ranks) <= 4
        assert len(named.plan.batch) == 8
        tokens = {part.modality: 0 for part in named.plan.batch[0].segments}
        for part in named.plan.batch[0].segments:
            tokens[part.modality] += part.tokens_out
        assert tokens == {"text": 1024, "image": 729, "audio": 1500}


def test_predictions_were_written_before_any_judged_plan_ran(campaign):
    folder, _ = campaign
    rows = list(read_rows(folder / "plans.jsonl").values())
    places = {row.key: index for index, row in enumerate(rows)}
    digest = rows[places[PREDICTED]].values["digest"]
    predicted = {one.plan_hash: one.predicted_s for one in read_predictions(folder, digest).plans}
    runs = [row for row in rows if row.values["kind"] == JUDGED]
    assert {row.values["plan_hash"] for row in runs} == set(predicted)
    for row in runs:
        assert places[row.key] > places[PREDICTED]
        assert row.values["digest"] == digest
        assert row.values["predicted_s"] == predicted[row.values["plan_hash"]]


def a_judged_key(session: Session) -> str:
    rows = read_rows(session.folder / "plans.jsonl")
    return next(key for key, row in rows.items() if row.values["kind"] == JUDGED)


def test_no_plan_is_judged_without_its_predictions(copied):
    (copied.folder / PREDICTIONS).unlink()
    with pytest.raises(ValueError, match="predictions are missing"):
        measure(copied, a_judged_key(copied))


def test_no_plan_is_judged_by_predictions_that_were_changed(copied):
    path = copied.folder / PREDICTIONS
    content = json.loads(path.read_text())
    content["plans"][0]["predicted_s"] *= 1.01
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="changed after they were written"):
        measure(copied, a_judged_key(copied))


def test_nothing_is_predicted_before_all_rehearsals(copied):
    rows = read_rows(copied.folder / "plans.jsonl")
    rehearsal = next(key for key, row in rows.items() if row.values["kind"] == "rehearsal")
    del rows[rehearsal]
    write_rows(copied.folder / "plans.jsonl", "plans", rows.values())
    with pytest.raises(ValueError, match="nothing is predicted"):
        measure(copied, PREDICTED)


def test_a_profile_of_another_device_is_refused(copied):
    rows = read_rows(copied.folder / f"{LAYERS}.jsonl")
    rows[HEADER].values["device"] = "H100"
    write_rows(copied.folder / f"{LAYERS}.jsonl", LAYERS, rows.values())
    with pytest.raises(ValueError, match="is of device 'H100', this runs on 'cpu'"):
        measure(copied, a_judged_key(copied))


def test_the_profile_of_the_rows_can_be_written(campaign, tmp_path, capsys):
    path = tmp_path / "machine.json"
    assert profile_main([str(campaign[0]), "-o", str(path)]) == 0
    profile = load_profile(path)
    assert profile.device == "cpu"
    assert profile.layers
    assert dict(profile.overheads_s)
    assert profile_main([str(tmp_path), "-o", str(path)]) == 2
    assert "run --only layers" in capsys.readouterr().err


def test_parts_without_a_clock_are_measured_side_by_side(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(beside, "KEPT", {"correctness": 2})
    monkeypatch.setattr(beside, "COMPILED", {})
    said = ["--out", str(tmp_path / "day"), "--device", "cpu", "--small"]
    assert beside.main(said) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]["correctness"] == 2
    assert beside.main(said) == 2
    assert "holds rows already; want a new folder" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_what_one_of_several_processes_refuses_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(beside, "KEPT", {"alone": 1})
    monkeypatch.setattr(beside, "COMPILED", {})
    assert beside.main(["--out", str(tmp_path / "day"), "--device", "cuda"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: alone-1: device cuda: ")


def test_a_process_that_does_not_end_is_named_and_the_others_rows_stay(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(beside, "KEPT", {"correctness": 1})
    monkeypatch.setattr(beside, "COMPILED", {"kernels": 1})
    monkeypatch.setattr(beside, "GRACE_S", 0.0)
    monkeypatch.setattr(beside, "command", _sleeps)
    said = ["--out", str(tmp_path / "day"), "--device", "cpu", "--small", "--limit", "10"]
    assert beside.main(said) == 1
    captured = capsys.readouterr()
    assert "correctness-1: ended, 0 s behind its limit; its rows stay" in captured.err
    assert "correctness  " in captured.out


def _sleeps(*_: object) -> list[str]:
    return [sys.executable, "-c", "import time; time.sleep(100)"]
