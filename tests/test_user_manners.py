"""What a new user tripped over: one meaning of nodes, profiles that are cached, folders left alone."""

import json
import shutil
from pathlib import Path

import pytest

from experiments.harness import record
from tests.command_line import JOB, workbench
from workbench.job.job import load_job
from workbench.plan.codec import plan_hash, planned_with, read_plan

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def told(*arguments: object) -> str:
    done = workbench(*arguments)
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With the small job of processes and its profile."""
    for name in ("tiny.yaml", "elastic.yaml", "elastic-cpu.json"):
        shutil.copy(EXAMPLES / name, tmp_path)
    return tmp_path


def test_processes_are_nodes_for_templates_as_for_elastic(folder: Path) -> None:
    """Five ranks of this machine are five nodes of one; or two nodes of two."""
    rates = json.loads(told("templates", folder / "elastic.yaml", "--json"))["samples_per_s"]
    assert max(map(int, rates)) == 5
    done = workbench("templates", folder / "elastic.yaml", "--ranks-per-node", 6)
    assert (done.exit_code, "has 5 ranks: want --ranks-per-node at most that" in done.stderr) == (2, True)
    lost = told("failures", folder / "elastic.yaml", "--leaves-per-node-hour", 1, "--hours", 0.1, "--json")
    assert json.loads(lost)["systems"]["templates"]["samples"] > 0


def test_a_cluster_has_its_own_nodes(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(
        JOB.replace("local: {ranks: 4, cores: 2}", "device: H100\n  nodes: 2\n  ranks_per_node: 2")
    )
    done = workbench("templates", path, "--ranks-per-node", 1)
    assert "--ranks-per-node makes nodes of cluster.local" in done.stderr


def test_simulate_takes_the_profile_that_the_plan_was_made_with(folder: Path) -> None:
    """Of the job or of `--profile`, in the plan's words a path from its own folder."""
    plan, job = folder / "plans" / "plan.json", folder / "tiny.yaml"
    plan.parent.mkdir()
    cpu = folder / "elastic-cpu.json"
    told("plan", job, "--profile", cpu, "-o", plan)
    assert planned_with(plan) == ("../elastic-cpu.json",)
    assert plan_hash(read_plan(plan)) == plan_hash(read_plan(plan))
    implied = json.loads(told("simulate", plan, "--json"))
    assert implied == json.loads(told("simulate", plan, "--profile", cpu, "--json"))
    assert implied != json.loads(told("simulate", plan, "--profile", "A40", "--json"))
    for command in (("explain", plan, "--changes", 0), ("diff", plan, plan)):
        assert told(*command, "--json") == told(*command, "--profile", cpu, "--json")
    told("export", plan, "--to", "torchrun", "-o", folder / "launch")
    cpu.unlink()
    done = workbench("simulate", plan)
    assert (done.exit_code, "../elastic-cpu.json, is not there; want --profile" in done.stderr) == (2, True)


def test_a_plan_copied_without_its_profile_does_not_take_another_file_of_that_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is it told to name a device."""
    told("plan", folder / "tiny.yaml", "--profile", folder / "elastic-cpu.json", "-o", folder / "plan.json")
    assert planned_with(folder / "plan.json") == ("elastic-cpu.json",)
    copied = folder / "elsewhere" / "plan.json"
    copied.parent.mkdir()
    shutil.copy(folder / "plan.json", copied)
    monkeypatch.chdir(folder)
    refused = workbench("simulate", copied)
    assert (refused.exit_code, refused.stderr) == (
        2,
        f"workbench: error: {copied}: the profile that it was made with, elastic-cpu.json, is not there; "
        f"want --profile, or that file at {copied.parent / 'elastic-cpu.json'}\n",
    )
    shutil.copy(folder / "elastic-cpu.json", copied.parent)
    assert told("simulate", copied, "--json") == told("simulate", folder / "plan.json", "--json")


def test_a_plan_that_says_no_profile_is_priced_by_its_device(tmp_path: Path) -> None:
    """Plan files without the key are read as before, and the key changes no hash."""
    path, plan = tmp_path / "job.yaml", tmp_path / "plan.json"
    path.write_text(JOB)
    told("plan", path, "-o", plan)
    document = json.loads(plan.read_text())
    assert document.pop("profile") == "H100"
    bare = tmp_path / "bare.json"
    bare.write_text(json.dumps(document))
    assert planned_with(bare) == ()
    assert read_plan(bare) == read_plan(plan)
    document["profile"] = 3
    bare.write_text(json.dumps(document))
    assert "profile must be a name or a path, or a list of these, got 3" in workbench("simulate", bare).stderr


def test_reproduce_writes_where_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Into `results` of the working directory, and nothing beside the code."""
    monkeypatch.chdir(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in record.RESULTS.rglob("*")}
    assert "are in results" in told("reproduce", "cornstarch_icml/figure1c")
    assert (tmp_path / "results" / "cornstarch_icml_figure1c.json").is_file()
    told("reproduce", "cornstarch_icml/figure1c", "--out", "elsewhere", "--json")
    assert (tmp_path / "elsewhere" / "cornstarch_icml_figure1c.json").is_file()
    assert {path: path.stat().st_mtime_ns for path in record.RESULTS.rglob("*")} == before


def test_the_median_of_two_rows_lies_between_them(tmp_path: Path) -> None:
    rows, out = tmp_path / "rows.csv", tmp_path / "out.csv"
    rows.write_text("hidden,layers,heads,sequence,global_batch,vocab\n64,4,4,32,8,100\n64,9,4,32,8,100\n")
    [row] = json.loads(told("predict", rows, "-o", out, "--format", "json"))
    assert row["median_s"] == pytest.approx((row["fastest_s"] + row["slowest_s"]) / 2, rel=1e-12)
    assert row["fastest_s"] < row["slowest_s"]


def test_a_job_says_sizes_of_its_samples_itself(tmp_path: Path) -> None:
    """As `--sizes` would; a path starts at the job file."""
    rows = [{"text_tokens": 10 + n, "image_width": 32, "image_height": 32} for n in range(4)]
    (tmp_path / "sizes.jsonl").write_text("\n".join(map(json.dumps, rows)))
    fixed = "  fixed: {text_tokens: 16, items: {vision: {each: 1}, audio: {each: 1}}}\n"
    path = tmp_path / "job.yaml"
    path.write_text(JOB.replace(fixed, "  sizes: sizes.jsonl\n"))
    batch = load_job(path).batch
    assert [sum(s.tokens_out for s in sample.segments if s.modality == "text") for sample in batch] == [
        10,
        11,
        12,
        13,
    ]
    path.write_text(JOB.replace(fixed, "  sizes: no-such-corpus\n"))
    with pytest.raises(ValueError, match="'no-such-corpus' is no file and no corpus; the corpora are"):
        load_job(path)


def test_conversations_are_refused_with_what_is_missing(tmp_path: Path) -> None:
    row = {"id": "1", "image": "1.jpg", "conversations": [{"from": "human", "value": "<image>\nWhat?"}]}
    (tmp_path / "llava.jsonl").write_text(json.dumps(row) + "\n")
    job = tmp_path / "job.yaml"
    job.write_text(JOB)
    done = workbench("plan", job, "--sizes", tmp_path / "llava.jsonl", "-o", tmp_path / "p.json")
    assert done.exit_code == 2
    assert "'conversations' is text, whose tokens only a tokenizer can count" in done.stderr
    assert "add columns text_tokens, image_width, image_height" in done.stderr
