"""Kept results of searches: found again for the same question alone, bounded, and never trusted blindly."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import Result

from tests.command_line import accept
from workbench.cost.execution import Execution
from workbench.cost.model import CostModel
from workbench.cost.profile import load_profile
from workbench.job.job import load_job
from workbench.search import kept_results
from workbench.search.kept_results import Kept, KeptResults, result_key

KEPT = Kept(record={"job": "a", "candidates": []}, best_plan="{}")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "multimodal-workbench" / "search"


def search(job: Path, *flags: object) -> Result:
    arguments = ["search", str(job), "--strategy", "cornstarch", "--json", *map(str, flags)]
    return accept(*arguments)


def test_the_same_search_is_found_again_with_its_plan(job: Path, cache: Path, tmp_path: Path) -> None:
    first = search(job, "-o", tmp_path / "a.json")
    again = search(job, "-o", tmp_path / "b.json")
    assert json.loads(again.stdout) == json.loads(first.stdout)
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    assert ("cached result" in first.stderr, "cached result" in again.stderr) == (False, True)
    [entry] = cache.iterdir()
    assert "cached result" not in search(job, "--no-cache").stderr
    assert list(cache.iterdir()) == [entry]

    entry.write_text(entry.read_text().replace("0.", "1.", 1))
    damaged = search(job)
    assert f"{entry} is damaged and made again: its content does not have its checksum" in damaged.stderr
    assert json.loads(damaged.stdout) == json.loads(first.stdout)
    assert "cached result" in search(job).stderr


def test_whatever_decides_a_search_is_in_its_key(job: Path) -> None:
    found = load_job(job)
    cost = CostModel(load_profile("H100"))
    keys = {
        result_key(found, cost, ("a", "b"), "iteration"),
        result_key(found, cost, ("a",), "iteration"),
        result_key(found, cost, ("a", "b"), "throughput"),
        result_key(replace(found, microbatch_samples=2), cost, ("a", "b"), "iteration"),
        result_key(found, CostModel(load_profile("A40")), ("a", "b"), "iteration"),
        result_key(found, cost.executed(Execution(matmul_rate=0.5)), ("a", "b"), "iteration"),
        result_key(
            found,
            CostModel(load_profile("H100"), beside={"A40": CostModel(load_profile("A40"))}),
            ("a", "b"),
            "iteration",
        ),
    }
    assert len(keys) == 7
    assert result_key(load_job(job), CostModel(load_profile("H100")), ("a", "b"), "iteration") in keys


def test_what_another_version_kept_is_named_and_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    results = KeptResults(tmp_path, said.append)
    results.put("a" * 40, KEPT)
    assert results.get("a" * 40) == KEPT
    monkeypatch.setattr(kept_results, "code_hash", lambda: "another version")
    assert results.get("a" * 40) is None
    assert [line.endswith("is of another version of the workbench: it is made again") for line in said] == [
        True
    ]
    results.put("a" * 40, KEPT)
    assert results.get("a" * 40) == KEPT
    assert len(list(tmp_path.iterdir())) == 1


def test_the_least_recently_used_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = KeptResults(tmp_path, pytest.fail, most=3)
    for number in range(3):
        results.put(f"{number}" * 40, KEPT)
        os.utime(results._path(f"{number}" * 40), ns=(number, number))
    assert results.get("0" * 40) == KEPT  # used: now the youngest
    results.put("3" * 40, KEPT)
    assert [results.get(f"{number}" * 40) is not None for number in range(4)] == [True, False, True, True]
    monkeypatch.setattr(kept_results, "MOST_TOTAL_BYTES", 10)
    results.put("4" * 40, KEPT)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["", "no checksum", "a\n{}"])
def test_damaged_entries_are_named_and_count_as_none(tmp_path: Path, text: str) -> None:
    said: list[str] = []
    results = KeptResults(tmp_path, said.append)
    results.put("a" * 40, KEPT)
    [entry] = tmp_path.iterdir()
    entry.write_text(text)
    assert results.get("a" * 40) is None
    assert [line.split(" is damaged")[0] for line in said] == [str(entry)]


def test_a_folder_that_cannot_be_written_costs_the_entry_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said: list[str] = []
    KeptResults(tmp_path / "file" / "below", said.append).put("a" * 40, KEPT)
    assert len(said) == 1
    assert said[0].startswith("the result is not kept: ")
