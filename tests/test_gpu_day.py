"""The campaign of a GPU: what is measured again, what stays, who is named, and when it stops."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from experiments.gpu_day import drive as driving
from experiments.gpu_day.__main__ import main
from experiments.gpu_day.campaign import PARTS, Extent, Part, Session
from experiments.gpu_day.drive import Choice, Deadline, Here, drive
from experiments.gpu_day.store import Store, StoredRow, read_rows
from experiments.gpu_day.worker import CellError, HungError, Worker
from experiments.harness import reads
from experiments.harness.reads import sources_hash, sources_of
from tests.gpu_day_parts import KEYS, LOG

TESTED = Part("tested", "tests.gpu_day_parts", "what its keys say")
STEADY = Part("steady", "tests.gpu_day_more_parts", "goes well")
LATER = Part("later", "tests.gpu_day_more_parts", "starts from others' rows", needs=("tested",))


@pytest.fixture
def out(tmp_path: Path) -> Path:
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


def run(*arguments: object, parts: tuple[Part, ...] = (TESTED, STEADY)) -> int:
    return main(["--device", "cpu", "--json", *map(str, arguments)], parts, "tests.gpu_day_parts")


def ask(out: Path, *keys: str) -> None:
    (out / "keys").write_text("\n".join(keys))


def measured(out: Path) -> list[str]:
    return (out / LOG).read_text().splitlines()


def said(capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    """The JSON object of the last line."""
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_a_call_measures_every_cell_and_says_so(out, capsys):
    assert run("--out", out) == 0
    found = said(capsys)
    assert (found["parts_done"], found["parts_failed"]) == (2, 0)
    assert found["rows"] == {"tested": 2, "steady": 1}
    assert all(found[name] is None for name in ("flex_forward_min", "tau", "memory_error", "plans_judged"))
    rows = read_rows(out / "tested.jsonl")
    assert [rows[key].values for key in KEYS] == [{"key": key} for key in KEYS]
    assert {row.device_name for row in rows.values()} == {"a test's device"}


def test_progress_has_the_best_so_far_and_the_time_left(out, capsys, monkeypatch):
    monkeypatch.setattr(driving, "QUIET_S", 0.0)
    assert run("--out", out, "--limit", 100) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if " tested 2/2 " in line]
    assert len(lines) == 1
    assert "s left]" in lines[0]
    assert "best so far note of ok second (ok second)" in lines[0]


def test_what_needs_more_gpus_is_missing(out, capsys):
    run("--out", out)
    text = capsys.readouterr().out
    assert text.count("MISSING ") == len(json.loads(text.splitlines()[-1])["missing"]) > 0


@pytest.mark.parametrize(
    ("key", "why"),
    [
        ("refuses", "it is refused in two lines"),
        ("raises", "RuntimeError: it broke"),
        ("dies", "killed by SIGKILL"),
        ("hangs", "not done after 2 s"),
    ],
)
def test_a_cell_that_fails_names_itself_and_takes_nothing_with_it(key, why, out, capsys):
    ask(out, "ok first", key, "ok last")
    assert run("--out", out) == 1
    found = said(capsys)
    assert found["failures"] == [f"tested: {key}: {why}"]
    assert (found["parts_done"], found["parts_failed"]) == (1, 1)
    rows = read_rows(out / "tested.jsonl")
    assert rows["ok last"].values == {"key": "ok last"}
    assert (rows[key].values, rows[key].error) == (None, why)


def test_a_part_is_given_up_when_three_cells_in_a_row_break(out, capsys):
    ask(out, "dies 1", "ok", *(f"raises {number}" for number in range(2, 9)))
    assert run("--out", out) == 1
    assert len(said(capsys)["failures"]) == 4
    assert measured(out) == ["dies 1", "ok", "raises 2", "raises 3", "raises 4"]


def test_refusals_break_nothing(out, capsys):
    ask(out, *(f"refuses {number}" for number in range(6)), "ok")
    assert run("--out", out) == 1
    assert len(said(capsys)["failures"]) == 6
    assert measured(out)[-1] == "ok"


def test_a_part_without_cells_to_tell_names_itself(out, capsys):
    broken = Part("broken", "tests.interpreter", "has no cells")
    assert run("--out", out, parts=(broken, STEADY)) == 1
    found = said(capsys)
    assert found["failures"][0].startswith("broken: AttributeError")
    assert found["rows"]["steady"] == 1


def test_a_later_call_goes_on_in_another_folder(out, tmp_path, capsys):
    ask(out, "ok first", "raises", "ok last")
    assert run("--out", out) == 1
    second = tmp_path / "second"
    second.mkdir()
    ask(second, "ok first", "raises", "ok last", "ok new")
    assert run("--out", second, "--from", out) == 1
    assert measured(second) == ["raises", "ok new"]
    assert list(read_rows(second / "tested.jsonl")) == ["ok first", "raises", "ok last", "ok new"]
    assert said(capsys)["rows"] == {"tested": 3, "steady": 1}


def test_one_part_alone_leaves_the_rows_of_others(out, capsys):
    assert run("--out", out) == 0
    assert run("--out", out, "--from", out, "--only", "steady") == 0
    assert measured(out) == list(KEYS)
    assert said(capsys)["parts_done"] == 2


def test_only_cells_with_a_word_are_measured(out, capsys):
    ask(out, "ok red", "ok green", "ok blue")
    assert run("--out", out, "--only", "tested", "--cells", "red", "blue") == 0
    assert measured(out) == ["ok red", "ok blue"]
    assert said(capsys)["parts_done"] == 0


def test_shares_of_a_part_are_all_of_it(tmp_path):
    keys = [f"ok {number}" for number in range(5)]
    folders = [tmp_path / str(number) for number in (1, 2)]
    for folder in folders:
        folder.mkdir()
        ask(folder, *keys)
        assert run("--out", folder, "--only", "tested", "--share", f"{folder.name}/2") == 0
    assert [measured(folder) for folder in folders] == [keys[::2], keys[1::2]]


def test_rows_of_several_folders_come_together(out, tmp_path, capsys):
    folders = [tmp_path / word for word in ("red", "blue")]
    for folder in folders:
        folder.mkdir()
        ask(folder, "ok red", "ok blue")
        assert run("--out", folder, "--only", "tested", "--cells", folder.name) == 0
    ask(out, "ok red", "ok blue")
    assert run("--out", out, "--from", *folders, "--only", "tested", "steady") == 0
    assert not (out / LOG).exists()
    assert said(capsys)["rows"] == {"tested": 2, "steady": 1}


def test_rows_of_other_sources_are_measured_again_and_others_stay(out, capsys):
    assert run("--out", out) == 0
    steady = (out / "steady.jsonl").read_text()
    stamp = read_rows(out / "tested.jsonl")[KEYS[0]].stamp
    text = (out / "tested.jsonl").read_text()
    (out / "tested.jsonl").write_text(text.replace(stamp, "0" * 64))
    assert run("--out", out, "--from", out) == 0
    assert measured(out) == [*KEYS, *KEYS]
    assert {row.stamp for row in read_rows(out / "tested.jsonl").values()} == {stamp}
    assert (out / "steady.jsonl").read_text() == steady


def test_rows_of_other_sources_do_not_count(out, capsys):
    assert run("--out", out) == 0
    stamp = read_rows(out / "tested.jsonl")[KEYS[0]].stamp
    text = (out / "tested.jsonl").read_text()
    (out / "tested.jsonl").write_text(text.replace(stamp, "0" * 64, 1))
    assert run("--out", out, "--from", out, "--only", "steady") == 0
    assert said(capsys)["rows"] == {"tested": 1, "steady": 1}


def test_a_part_starts_anew_when_the_rows_that_it_needs_change(out):
    parts = (TESTED, LATER)
    assert run("--out", out, parts=parts) == 0
    before = read_rows(out / "later.jsonl")["always"]
    assert run("--out", out, "--from", out, parts=parts) == 0
    assert read_rows(out / "later.jsonl")["always"] == before
    ask(out, *KEYS, "ok third")
    assert run("--out", out, "--from", out, parts=parts) == 0
    assert read_rows(out / "later.jsonl")["always"].stamp != before.stamp


def test_a_part_does_not_start_from_rows_of_other_sources(out, capsys):
    parts = (TESTED, LATER)
    assert run("--out", out, parts=parts) == 0
    stamp = read_rows(out / "tested.jsonl")[KEYS[0]].stamp
    text = (out / "tested.jsonl").read_text()
    (out / "tested.jsonl").write_text(text.replace(stamp, "0" * 64, 1))
    capsys.readouterr()
    assert run("--out", out, "--from", out, "--only", "later", parts=parts) == 1
    why = "rows of tested are of other sources or software; want --only tested first"
    assert said(capsys)["failures"] == [f"later: {why}"]
    assert run("--out", out, "--from", out, parts=parts) == 0


def test_rows_of_cells_that_are_no_more_are_dropped(out):
    ask(out, "ok old", "ok both")
    assert run("--out", out) == 0
    ask(out, "ok both", "ok new")
    assert run("--out", out, "--from", out) == 0
    assert list(read_rows(out / "tested.jsonl")) == ["ok both", "ok new"]


def test_the_extent_is_part_of_what_decides_a_row(out):
    assert run("--out", out, "--small") == 0
    assert run("--out", out, "--from", out) == 0
    assert measured(out) == [*KEYS, *KEYS]


@dataclass(frozen=True, slots=True)
class Counted(Deadline):
    """One whose time left follows from how many cells have begun, on however slow a machine."""

    lefts_s: tuple[float, ...] = ()
    log: Path = Path()

    def left_s(self) -> float:
        return self.lefts_s[len(self.log.read_text().splitlines()) if self.log.exists() else 0]


def test_it_stops_between_cells_before_the_limit(out, monkeypatch):
    monkeypatch.setattr(driving, "LEAST_S", 150.0)
    ask(out, *(f"ok {number}" for number in range(9)))
    states = driven(out, Counted(lefts_s=(450.0, 350.0, 250.0, 150.0, 50.0), log=out / LOG))
    assert states["tested"].num_done == len(measured(out)) == 4
    assert states["tested"].failures == ()


def test_a_cell_that_took_longer_than_there_is_time_is_left_out(out, monkeypatch):
    """By its row of other sources: those after it are measured all the same."""
    monkeypatch.setattr(driving, "LEAST_S", 0.1)
    keys = ["ok first", "ok long", "ok last"]
    ask(out, *keys)
    store = Store(out)
    for key in keys:
        took_s = 100.0 if key == "ok long" else 0.1
        store.put(
            "tested", StoredRow(key=key, stamp="", device_name="", versions={}, date="", seconds=took_s)
        )
    states = driven(out, Deadline(20.0), store=store)
    assert measured(out) == ["ok first", "ok last"]
    assert (states["tested"].num_cells, states["tested"].num_done) == (3, 2)


def test_the_limit_ends_a_cell_without_blame(out, monkeypatch):
    """The second would sleep for ten minutes, has two seconds, and of the call there is one left."""
    monkeypatch.setattr(driving, "LEAST_S", 0.1)
    ask(out, "ok first", "hangs")
    states = driven(out, Counted(lefts_s=(100.0, 1.0, 0.0), log=out / LOG))
    assert (states["tested"].num_done, states["tested"].failures) == (1, ())


def driven(out: Path, deadline: Deadline, store: Store | None = None):
    here = Here(device_name="a test's device", versions={}, extent=Extent.FULL)
    with Worker(Session("cpu", Extent.FULL, out)) as worker:
        worker.call("tests.gpu_day_parts", "facts", timeout_s=30.0)  # its start does not count
        return drive(
            (TESTED,),
            Choice((TESTED,)),
            worker,
            store or Store(out),
            here,
            deadline,
            lambda line: None,
        )


def test_an_ended_cell_leaves_no_process(tmp_path):
    with Worker(Session("cpu", Extent.FULL, tmp_path)) as worker:
        driver = dict(worker.call("tests.gpu_day_parts", "facts", timeout_s=30.0)["versions"])["driver"]
        with pytest.raises(HungError):
            worker.call("tests.gpu_day_parts", "measure", "hangs", timeout_s=0.5)
        with pytest.raises(ProcessLookupError):
            os.kill(int(driver), 0)
        with pytest.raises(CellError, match="ModuleNotFoundError"):
            worker.call("tests.no_such_module", "measure", timeout_s=30.0)


# ---- bad input: one line, exit code 2 ----


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert run(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert len(lines) == 1
    return lines[0]


def test_an_unknown_part_is_refused_with_the_nearest(out, capsys):
    line = refused(capsys, "--out", out, "--only", "teste")
    assert line == "error: part 'teste': want one of tested, steady; nearest: tested"


def test_cuda_without_a_device_is_refused(out, capsys):
    assert main(["--out", str(out)], (TESTED,), "tests.gpu_day_parts") == 2
    assert capsys.readouterr().err == "error: device cuda: there is none\n"


@pytest.mark.parametrize("share", ["0/2", "3/2", "2", "a/b", "1/"])
def test_a_share_that_is_none_is_refused(share, out, capsys):
    assert "--share: want I/N with 1 <= I <= N" in refused(capsys, "--out", out, "--share", share)


def test_a_limit_that_lets_nothing_start_is_refused(out, capsys):
    assert "--limit: want at least 10 s, got 3" in refused(capsys, "--out", out, "--limit", 3)


def test_rows_are_not_written_over_unasked(out, capsys):
    assert run("--out", out) == 0
    capsys.readouterr()
    assert "holds rows of tested already" in refused(capsys, "--out", out)


def test_from_must_be_a_folder_with_rows(out, tmp_path, capsys):
    assert "there is none" in refused(capsys, "--out", out, "--from", tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "has no tested.jsonl" in refused(capsys, "--out", out, "--from", tmp_path / "empty")
    (tmp_path / "file").write_text("")
    assert "want a folder" in refused(capsys, "--out", tmp_path / "file")


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ('"format_version": 1', '"format_version": 2', "format version 2, want 1"),
        ('"format": "multimodal', '"format": "another', "want rows of a GPU day"),
        ("a test's device", "NVIDIA H100 80GB HBM3", "rows of another device: NVIDIA H100 80GB HBM3"),
        ('"seconds": ', '"minutes": ', "tested.jsonl:2: want the fields of a row"),
        ('{"key"', '["key"', "tested.jsonl:2: not JSON"),
    ],
)
def test_rows_of_another_format_or_device_and_damaged_ones_are_refused(old, new, why, out, tmp_path, capsys):
    assert run("--out", out, "--only", "tested") == 0
    capsys.readouterr()
    text = (out / "tested.jsonl").read_text()
    assert old in text
    (out / "tested.jsonl").write_text(text.replace(old, new))
    line = refused(capsys, "--out", tmp_path / "second", "--from", out)
    assert why in line
    assert not (tmp_path / "second").exists()


# ---- sources ----


def test_sources_are_a_module_and_all_of_ours_that_it_imports(tmp_path, monkeypatch):
    monkeypatch.setattr(reads, "ROOT", tmp_path)
    for name, text in {
        "experiments/__init__.py": "",
        "experiments/part.py": "import torch\nfrom runtime.deep import kernel\nimport experiments.beside\n",
        "experiments/beside.py": "from runtime import deep\n",
        "experiments/unrelated.py": "",
        "runtime/deep/__init__.py": "",
        "runtime/deep/kernel.py": "import workbench.units as units\n",
        "workbench/units.py": "GB = 1\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = {str(path.relative_to(tmp_path)) for path in sources_of("experiments.part")}
    assert found == {
        "experiments/__init__.py",
        "experiments/part.py",
        "experiments/beside.py",
        "runtime/deep/__init__.py",
        "runtime/deep/kernel.py",
        "workbench/units.py",
    }
    before = sources_hash("experiments.part")
    (tmp_path / "experiments/unrelated.py").write_text("changed = True\n")
    assert sources_hash("experiments.part") == before
    (tmp_path / "workbench/units.py").write_text("GB = 2\n")
    assert sources_hash("experiments.part") == before, "a file counts as it was when it was first read"
    reads._module.cache_clear()
    assert sources_hash("experiments.part") != before


def test_parts_come_after_those_that_they_need_and_fit_into_eight_files():
    names = [part.name for part in PARTS]
    for part in PARTS:
        assert all(names.index(needed) < names.index(part.name) for needed in part.needs)
    assert len({f"{name}.jsonl" for name in names}) + 1 <= 8  # and the predictions
