"""The hint that a search gives where ranks wait for each other and other groups of samples would be even."""

import json
from pathlib import Path

import pytest

from sim.predict import predict_within
from tests.command_line import workbench
from workbench.explain import idle
from workbench.explain.idle import IdleCause, idle_time
from workbench.explain.uneven_ranks import LEAST, uneven_ranks
from workbench.job.job import load_job
from workbench.job.machines import cost_of
from workbench.strategies.registry import PLANNERS
from workbench.timing.accept import accept

RANKS = 4
# Tokens of samples in order of arrival: the long ones come first, and only some are long in every four.
UNEVEN = [4096, 2048, 4096, 2048, 256, 4096, 256, 256, 2048, 256, 256, 256, 256, 256, 256, 256]
VERY_UNEVEN = [8192, 8192, 256, 256, 8192, 256, 4096, *[256] * 5, 4096, *[256] * 5, 4096, 256]
BATCHES = {
    "equal": [1024] * 16,
    "even": [4096, 512, 512, 512] * 4,
    "one sample": [16384] + [128] * 3,  # which no grouping divides
}


def job_file(folder: Path, tokens: list[int]) -> Path:
    job, sizes = folder / "job.yaml", folder / "sizes.jsonl"
    sizes.write_text("".join(json.dumps({"text_tokens": count}) + "\n" for count in tokens))
    made = workbench("init", "llama-3.2-1b", "--gpus", f"{RANKS}xH200", "--samples", len(tokens), "-o", job)
    assert made.exit_code == 0, made.output
    before, _ = job.read_text().split("  fixed:")
    rest = "precision:" + job.read_text().split("precision:", 1)[1]
    job.write_text(f"{before}  sizes: {sizes}\nlayouts: {{llm: {{tp: 1}}}}  # and so cp 1\n{rest}")
    return job


def hint(job_path: Path, strategy: str, best: float = 1.0) -> str | None:
    """For a best plan that takes `best` times as long as this one."""
    job = load_job(job_path)
    cost = cost_of(job, None, None)
    lowered, memory = accept(PLANNERS[strategy](job, cost, lambda *_: None))
    trace = predict_within(lowered, memory, cost)
    line = uneven_ranks(lowered.plan, trace, job, cost, best_s=best * trace.iteration_s)
    if line is not None:
        waited_s = sum(p.seconds for p in idle_time(lowered, trace) if p.cause is IdleCause.RANKS)
        assert f"wait {waited_s / RANKS / trace.iteration_s:.0%} of the step" in line
    return line


def test_uneven_ranks_are_named_with_what_they_wait_and_what_even_groups_save(tmp_path: Path) -> None:
    line = hint(job_file(tmp_path, UNEVEN), "fsdp")
    assert line is not None
    assert line.startswith("fsdp: as samples are unequal, ranks wait ")
    assert "search JOB --joint" in line


@pytest.mark.parametrize("batch", BATCHES)
def test_nothing_is_said_where_groups_are_even_or_cannot_be(batch: str, tmp_path: Path) -> None:
    assert hint(job_file(tmp_path, BATCHES[batch]), "fsdp") is None


def test_nothing_is_said_of_a_plan_far_from_the_best(tmp_path: Path) -> None:
    """Even groups take 23 % off the busiest ranks."""
    job = job_file(tmp_path, UNEVEN)
    assert hint(job, "fsdp", best=0.8) is not None
    assert hint(job, "fsdp", best=0.7) is None


def test_nothing_is_said_of_whole_weights(tmp_path: Path) -> None:
    assert hint(job_file(tmp_path, UNEVEN), "megatron-homogeneous") is None


def test_the_joint_search_does_what_the_hint_of_a_search_says(tmp_path: Path) -> None:
    """With the layout of the plain search."""
    job = job_file(tmp_path, VERY_UNEVEN)
    plain = json.loads(
        workbench("search", job, "--strategy", "fsdp", "--no-cache", "--json").stdout.splitlines()[-1]
    )
    [line] = [line for line in plain["warnings"] if "--joint" in line]
    assert line.startswith("fsdp")
    flags = ("--joint", "--fix", "layout=fsdp", "--candidates", "30", "--no-cache", "--json")
    joint = json.loads(workbench("search", job, *flags).stdout.splitlines()[-1])
    assert joint["joint_s"] < (1 - LEAST) * plain["candidates"][0]["iteration_s"]


def test_an_explanation_says_the_same_also_without_the_job(tmp_path: Path) -> None:
    job, plan = job_file(tmp_path, UNEVEN), tmp_path / "plan.json"
    assert workbench("plan", job, "--strategy", "fsdp", "--judge", "planner", "-o", plan).exit_code == 0
    lines = [
        line
        for flags in ((), ("--job", job))
        for line in workbench("explain", plan, "--changes", 0, *flags).stderr.splitlines()
        if "--joint" in line
    ]
    assert lines == [f"workbench: warning: {hint(job, 'fsdp')}"] * 2


def test_an_explanation_computes_idle_time_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For its table and for the hint."""
    job, plan, computed = job_file(tmp_path, UNEVEN), tmp_path / "plan.json", []
    assert workbench("plan", job, "--strategy", "fsdp", "--judge", "planner", "-o", plan).exit_code == 0
    means_s = idle._mean_s
    monkeypatch.setattr(idle, "_mean_s", lambda times: computed.append(times) or means_s(times))
    shown = workbench("explain", plan, "--changes", "0")
    assert "ranks wait " in shown.stderr
    assert len(computed) == 1
