"""The command `search` with other objectives than a step: what it prints, keeps and refuses."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from typer.testing import Result

from tests.command_line import workbench
from tests.plans import disjoint_plan, sample, two_encoders
from workbench.report.search_tables import memory_of_fullest
from workbench.search.joint.question import Question
from workbench.strategies.registry import PLANNERS
from workbench.units import wanted_memory_bytes

FEW = tuple(f"--strategy={name}" for name in ("cornstarch", "dip", "megatron-homogeneous"))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def search(job: Path, *flags: object) -> Result:
    return workbench("search", str(job), *flags)


def test_batches_are_in_the_record_the_table_and_the_picture(job: Path, tmp_path: Path) -> None:
    flags = (*FEW, "--batches", 2, "--over", "worst", "--json")
    done = search(job, *flags, "--pareto", tmp_path / "plans.png")
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
    assert "cached result" in search(job, *flags).stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--batches", 0), "--batches must be >= 1, got 0"),
        (("--budget", "0"), "want --budget > 0, got 0; nearest: 1s"),
        (("--over", "p95"), "--over p95 needs several batches; want --batches"),
        (("--deadline", "1h"), "--deadline is for --objective dollars, got iteration"),
        (("--objective", "dollars"), "--objective dollars: want one of --steps and --tokens"),
        (("--objective", "dollars", "--steps", 1), "wants cluster.dollars_per_gpu_hour"),
        (
            ("--objective", "goodput"),
            "--objective goodput: want one of --mtbf, --leaves-per-node-hour and --failures",
        ),
        (
            ("--objective", "goodput", "--mtbf", "often"),
            "--mtbf: want a duration > 0 such as 60s, 90m, 12h, 3d or 2w, got 'often'",
        ),
        (("--objective", "goodput", "--failures", "nowhere.csv"), "nowhere.csv"),
        (("--joint", "--ranks", 4), "--joint already searches what --ranks sets"),
        (("--joint", "--strategy", "dip"), "--joint already searches what --strategy sets"),
        (("--joint", "--pareto", "plans.svg"), "want a picture named .png or .pdf, got '.svg'"),
        (("--pareto", "plans.svg"), "want a picture named .png or .pdf, got '.svg'"),
    ],
)
def test_contradictions_are_one_line(job: Path, flags: tuple[object, ...], message: str) -> None:
    done = search(job, *flags)
    assert done.exit_code == 2
    [line] = done.stderr.splitlines()
    assert message in line


def test_what_a_budget_stopped_is_said_and_not_kept(job: Path, tmp_path: Path) -> None:
    """A layout search reports before its first layout is priced, and so has no plan."""
    layoutless = tmp_path / "open.yaml"
    layoutless.write_text(yaml.safe_dump(yaml.safe_load(job.read_text()) | {"layouts": {}}))
    flags = ("--strategy", "megatron-homogeneous", "--strategy", "cornstarch")
    stopped = search(layoutless, *flags, "--budget", "0.001s", "--json")
    rows = json.loads(stopped.stdout.splitlines()[-1])["candidates"]
    assert {row["strategy"]: row.get("stopped", False) for row in rows}["megatron-homogeneous"]
    whole = search(layoutless, *flags, "--budget", "60s", "--json")
    assert "cached result" not in whole.stderr
    rows = json.loads(whole.stdout.splitlines()[-1])["candidates"]
    assert not any(row.get("stopped") for row in rows)
    assert "cached result" in search(layoutless, *flags).stderr


def test_a_job_that_fits_nowhere_names_the_plan_that_lacks_least(job: Path, tmp_path: Path) -> None:
    tight = tmp_path / "tight.yaml"
    tight.write_text(job.read_text().replace("memory_gib: 1\n", "memory_gib: 0.0001\n"))
    done = search(tight)
    assert done.exit_code == 2
    [line] = done.stderr.splitlines()
    [nearest] = re.findall("nearest: ([a-z-]+): ", line)
    alone = {name: search(tight, "--strategy", name).stderr for name in PLANNERS}
    wanted = {name: wanted_memory_bytes(text) for name, text in alone.items()}
    assert wanted[nearest] == min(each for each in wanted.values() if each is not None) < wanted["dip"]
    assert alone[nearest] == done.stderr


def test_named_strategies_alone_are_tried_on_the_ranks_that_are_asked_for(priced: Path) -> None:
    """Ranks that nobody asked for are not idle, and one plan of several tries is warned about once."""
    tries = ("--objective", "dollars", "--steps", 9, "--deadline", "9h", "--ranks", 2, "--ranks", 4)
    done = search(priced, "--strategy", "megatron-homogeneous", "--strategy", "fsdp", *tries, "--json")
    record = json.loads(done.stdout.splitlines()[-1])
    names = {each["strategy"] for each in record["candidates"]}
    assert {name.partition(" on ")[0].partition(",")[0] for name in names} == {"megatron-homogeneous", "fsdp"}
    assert len(names) == 8
    used = {each["strategy"]: each["ranks"] for each in record["candidates"] if "refusal" not in each}
    assert any(name.endswith("on 2") and ranks == 2 for name, ranks in used.items())
    assert len(set(record["warnings"])) == len(record["warnings"])
    assert not any("of 4 ranks idle" in line and "max_ranks: 2" in line for line in record["warnings"])
    assert " tries have a plan" in search(priced, "--strategy", "megatron-homogeneous", "--ranks", 4).output


@pytest.fixture
def priced(job: Path) -> Path:
    text = job.read_text()
    job.write_text(text.replace("cluster:\n", "cluster:\n  dollars_per_gpu_hour: 2.0\n", 1))
    return job


def test_a_joint_search_for_money_begins_with_the_plans_of_a_search_for_money(
    priced: Path, tmp_path: Path
) -> None:
    flags = ("--objective", "dollars-per-sample", "--json", "--no-cache")
    single = json.loads(search(priced, *flags).stdout.splitlines()[-1])
    values = {each["strategy"]: each["value"] for each in single["candidates"] if "value" in each}
    log, picture = tmp_path / "log.jsonl", tmp_path / "plans.png"
    done = search(priced, *flags, "--joint", "--candidates", 5, "--log", log, "--pareto", picture)
    assert done.exit_code == 0, done.output
    record = json.loads(done.stdout.splitlines()[-1])
    starts = {each["strategy"]: each["value"] for each in record["starts"] if "value" in each}
    whole = {name: value for name, value in values.items() if " on " not in name}
    assert len(whole) > 10
    assert {name: starts[name] for name in whole} == whole
    assert 0 < record["lower_bound_value"] <= record["joint_value"] <= min(values.values())
    assert picture.read_bytes().startswith(b"\x89PNG")
    named = {each["strategy"]: each for each in record["plans"]}
    assert named["joint"]["value"] == record["joint_value"]
    assert "joint" in record["front"], "no plan has fewer dollars"
    assert set(whole) <= set(named)
    logged = {number: json.loads(line) for number, line in enumerate(log.read_text().splitlines())}
    judged = {int(name.split()[-1]) for name in named if name.startswith("joint, candidate")}
    assert all(named[f"joint, candidate {each}"]["value"] == logged[each]["value"] for each in judged)
    held = {each["strategy"] for each in record["plans"] if each["strategy"].startswith("joint, held")}
    assert judged or held
    best = tmp_path / "best.json"
    told = search(priced, *flags[:2], "--joint", "--replay", log, "-o", best)
    assert told.stdout.splitlines()[-1] == f"best plan written to {best}"
    assert best.exists()
    again = search(priced, *flags, "--joint", "--replay", log)
    assert json.loads(again.stdout.splitlines()[-1])["value"] == record["joint_value"]
    other = search(priced, "--joint", "--replay", log)
    assert other.exit_code == 2
    assert "the objective" in other.stderr


@pytest.mark.parametrize("objective", ["throughput", "dollars-per-sample", "dollars"])
def test_objectives_that_count_ranks_agree_where_all_have_one_price(priced: Path, objective: str) -> None:
    """A whole training without a deadline, a sample and a rank's second: the same order."""
    flags = ("--steps", 1000) if objective == "dollars" else ()
    done = search(priced, *FEW, "--objective", objective, *flags, "--json", "--no-cache")
    found = [each for each in json.loads(done.stdout.splitlines()[-1])["candidates"] if "ranks" in each]
    all_of_them = max(each["ranks"] for each in found)
    assert any(each["strategy"].endswith(f" on {all_of_them // 2}") for each in found)
    rank_s = [each["ranks"] * each["iteration_s"] for each in found]
    assert rank_s == pytest.approx(sorted(rank_s), rel=1e-12)
    assert found[0]["ranks"] < all_of_them


def test_a_joint_search_by_other_objectives_ends_at_a_gap_and_is_kept(priced: Path) -> None:
    flags = ("--objective", "dollars-per-sample", "--joint", "--json")
    done = search(priced, *flags, "--gap", "99.99%")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout.splitlines()[-1])["gap"] <= 0.9999
    again = search(priced, *flags, "--gap", "99.99%")
    assert "cached result" in again.stderr
    assert again.stdout.splitlines()[-1] == done.stdout.splitlines()[-1]


def test_an_ablation_by_another_objective(priced: Path) -> None:
    flags = ("--objective", "dollars-per-sample", "--joint", "--candidates", 1, "--ablate", "cornstarch")
    done = search(priced, *flags, "--json")
    assert done.exit_code == 0, done.output
    record = json.loads(done.stdout.splitlines()[-1])
    assert [row["open"][0] for row in record["rows"][:-1]] == [question.value for question in Question]
    assert all(0 < row["value"] <= record["before_value"] for row in record["rows"])


def test_a_joint_search_where_nodes_fail_begins_with_templates_too(job: Path) -> None:
    flags = ("--objective", "goodput", "--mtbf", "6h", "--joint", "--candidates", 1, "--json")
    record = json.loads(search(job, *flags).stdout.splitlines()[-1])
    assert "templates" in {each["strategy"] for each in record["starts"]}


def test_a_deadline_that_no_plan_meets_names_the_nearest(priced: Path) -> None:
    flags = ("--objective", "dollars", "--steps", 10**9, "--deadline", "1s")
    done = search(priced, *FEW, *flags, "--ranks", 4)
    assert done.exit_code == 2
    assert "no plan of job" in done.stderr.splitlines()[-1]
    assert "meets the limit; nearest: " in done.stderr.splitlines()[-1]
    assert "the deadline is 1s" in done.stderr.splitlines()[-1]
    done = search(priced, *flags, "--joint", "--candidates", 1)
    assert done.exit_code == 2
    assert re.search(r"meets the limit; nearest: [a-z-]+, layouts open: ", done.stderr.splitlines()[-1])


def test_memory_is_that_of_the_device_of_the_fullest_rank() -> None:
    """The smallest device of any rank was named beside a peak on a larger one."""
    plan = disjoint_plan(two_encoders(), [sample(0)], {"vision": (3,), "audio": (2,), "llm": (4,)})
    small, large = (
        replace(plan.cluster.nodes[0], num_ranks=1, memory_bytes=size) for size in (10**9, 3 * 10**9)
    )
    pooled = replace(plan, cluster=replace(plan.cluster, nodes=(small, large, small)))
    peaks = {0: 5 * 10**8, 1: 2 * 10**9, 2: 4 * 10**8}
    assert memory_of_fullest(pooled, peaks) == 3 * 10**9
    assert memory_of_fullest(pooled, {}) == 10**9
