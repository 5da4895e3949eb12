"""The command `search` with other objectives than a step: what it prints, keeps and refuses."""

import json
from pathlib import Path

import pytest
from typer.testing import Result

from tests.command_line import workbench


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def search(job: Path, *flags: object) -> Result:
    return workbench("search", str(job), *flags)


def test_batches_are_in_the_record_the_table_and_the_picture(job: Path, tmp_path: Path) -> None:
    done = search(job, "--batches", 2, "--over", "worst", "--json", "--pareto", tmp_path / "plans.png")
    assert done.exit_code == 0, done.output
    record = json.loads(done.stdout.splitlines()[-1])
    assert (record["objective"], record["batches"], record["over"], record["seed"]) == (
        "iteration",
        2,
        "worst",
        0,
    )
    planned = [each for each in record["candidates"] if "refusal" not in each]
    for each in planned:
        assert each["value"] == each["step_s"] == max(each["batches_s"])
    assert [each["value"] for each in planned] == sorted(each["value"] for each in planned)
    assert set(record["front"]) <= {each["strategy"] for each in planned}
    assert (tmp_path / "plans.png").read_bytes().startswith(b"\x89PNG")
    assert "found before" in search(job, "--batches", 2, "--over", "worst", "--json").stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--batches", 0), "--batches must be >= 1, got 0"),
        (("--over", "p95"), "--over p95 is about several batches; want --batches"),
        (("--deadline", "1h"), "--deadline is for --objective dollars, got iteration"),
        (("--objective", "dollars"), "--objective dollars: want one of --steps and --tokens"),
        (("--objective", "dollars", "--steps", 1), "wants cluster.dollars_per_gpu_hour"),
        (("--objective", "goodput"), "--objective goodput: want one of --mtbf and --failures"),
        (
            ("--objective", "goodput", "--mtbf", "often"),
            "want a duration such as 60s, 90m, 12h, 3d or 2w, got 'often'",
        ),
        (("--objective", "goodput", "--failures", "nowhere.csv"), "nowhere.csv"),
        (
            ("--joint", "--batches", 1, "--gap", "2%"),
            "--gap is about one step's seconds",
        ),
        (("--joint", "--pareto", "plans.png"), "--joint searches everything itself, got --pareto"),
        (("--pareto", "plans.svg"), "want a picture named .png or .pdf, got '.svg'"),
    ],
)
def test_contradictions_are_one_line(job: Path, flags: tuple[object, ...], message: str) -> None:
    done = search(job, *flags)
    assert done.exit_code == 2
    [line] = done.stderr.splitlines()
    assert message in line


def test_a_deadline_that_no_plan_meets_names_the_nearest(job: Path) -> None:
    text = job.read_text()
    job.write_text(text.replace("cluster:\n", "cluster:\n  dollars_per_gpu_hour: 2.0\n", 1))
    done = search(job, "--objective", "dollars", "--steps", 10**9, "--deadline", "1s", "--ranks", 4)
    assert done.exit_code == 2
    assert "no plan of job" in done.stderr.splitlines()[-1]
    assert "meets the limit; nearest: " in done.stderr.splitlines()[-1]
    assert "the deadline is 1s" in done.stderr.splitlines()[-1]
