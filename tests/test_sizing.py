"""How many GPUs a training wants: arithmetic by hand, clusters that grow, and the command."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import Result

from tests.command_line import JOB, workbench
from workbench.cost.profile import load_profile
from workbench.job.job import Job, load_job
from workbench.job.module_layout import ModuleLayout
from workbench.report.tables import mebibytes
from workbench.search.sizing import Goal, Training, answer, gpu_counts, num_steps, on_gpus, sized
from workbench.units import duration_s, time_limit_s

CLUSTER = "device: H100\n  nodes: 1\n  ranks_per_node: 2\n  dollars_per_gpu_hour: 2.0\n  memory_gib: 80"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """One node of two GPUs, with a price."""
    path = tmp_path / "job.yaml"
    cluster = JOB.replace("local: {ranks: 4, cores: 2}\n  memory_gib: 1", CLUSTER)
    path.write_text(cluster.partition("layouts:")[0] + "precision: float32\nprofile: H100\n")
    return path


@pytest.fixture
def job(path: Path) -> Job:
    return load_job(path)


def size(path: Path, *flags: object) -> Result:
    return workbench("size", str(path), *flags)


def training(
    gpus: int, iteration_s: float | None, used: int | None = None, price: float | None = 3.6
) -> Training:
    """1,000 steps."""
    record = {"iteration_s": iteration_s, "ranks": used or gpus, "interval_80": None}
    is_planned = iteration_s is not None
    return Training(
        gpus=gpus, steps=1000, record=record if is_planned else None, refusal="no", dollars_per_gpu_hour=price
    )


def test_a_training_takes_its_steps_times_the_plans_step() -> None:
    """And costs the GPUs that the plan uses, not those that there are."""
    found = training(8, 3.6, used=4)
    assert found.seconds == pytest.approx(3600)
    assert found.dollars == pytest.approx(4 * 3.6)
    assert training(8, 1.0, price=None).dollars is None
    assert training(8, None).seconds == math.inf


def test_the_fewest_gpus_that_meet_a_deadline_are_chosen() -> None:
    times = {1: 8.0, 2: 4.5, 4: 2.5, 8: 1.5}
    goal = Goal(tokens=1, deadline_s=3000)
    found = sized(goal, iter(times), lambda gpus: training(gpus, times[gpus]))
    assert [each.gpus for each in found] == [1, 2, 4]  # eight are not tried
    assert answer(goal, found) == found[-1]
    tight = Goal(tokens=1, deadline_s=3000, budget_dollars=9.9)  # four GPUs cost 10
    assert answer(tight, found) is None


def test_within_a_budget_the_fastest_is_chosen() -> None:
    """8, 9, 10 and 12 dollars; what comes after the first that is too dear is not tried."""
    times = {1: 8.0, 2: 4.5, 4: 2.5, 8: 1.5, 16: 1.4}
    goal = Goal(tokens=1, budget_dollars=11)
    found = sized(goal, iter(times), lambda gpus: training(gpus, times[gpus]))
    assert [each.gpus for each in found] == [1, 2, 4, 8]
    chosen = answer(goal, found)
    assert chosen is not None
    assert chosen.gpus == 4


def test_more_gpus_may_be_the_cheaper_ones() -> None:
    """What is too dear for want of memory: 18 dollars on one, 6 on two, 7 on four, 9 on eight."""
    times = {1: 18.0, 2: 3.0, 4: 1.75, 8: 1.125, 16: 1.0}
    within = Goal(tokens=1, budget_dollars=8)
    found = sized(within, iter(times), lambda gpus: training(gpus, times[gpus]))
    assert [each.gpus for each in found] == [1, 2, 4, 8]
    assert answer(within, found) == found[2]
    in_time_too = Goal(tokens=1, budget_dollars=8, deadline_s=20000)
    found = sized(in_time_too, iter(times), lambda gpus: training(gpus, times[gpus]))
    assert answer(in_time_too, found) == found[-1]
    assert found[-1].gpus == 2


def test_a_number_that_divides_badly_ends_nothing() -> None:
    """Five GPUs are used as four; eight are tried, and found."""
    times = {1: 8.0, 2: 4.5, 3: 3.2, 4: 2.5, 5: 2.5, 6: 2.2, 7: 2.2, 8: 1.5}
    for goal in (Goal(tokens=1, deadline_s=2000), Goal(tokens=1, budget_dollars=1e6)):
        found = sized(goal, iter(times), lambda gpus: training(gpus, times[gpus]))
        assert answer(goal, found) == found[-1]
        assert found[-1].gpus == 8


def test_more_gpus_are_tried_while_none_fits_and_no_more_when_they_do_not_help() -> None:
    times = {1: None, 2: None, 4: 5.0, 8: 5.0, 16: 1.0}
    found = sized(Goal(tokens=1, deadline_s=1), iter(times), lambda gpus: training(gpus, times[gpus]))
    assert [each.gpus for each in found] == [1, 2, 4, 8]


@pytest.mark.parametrize(
    ("text", "seconds"), [("90m", 5400), ("12h", 43200), ("1.5d", 129600), ("2w", 1209600)]
)
def test_durations(text: str, seconds: float) -> None:
    assert duration_s(text, "--deadline") == seconds


@pytest.mark.parametrize("text", ["", "3", "0", "0s", "nan", "d", "-1d", "3 days", "1e3d"])
def test_other_durations_are_refused(text: str) -> None:
    with pytest.raises(
        ValueError, match=r"^--budget: want a duration > 0 such as 60s, 90m, 12h, 3d or 2w, got "
    ):
        duration_s(text, "--budget")


@pytest.mark.parametrize(
    ("text", "seconds"), [("0", 0), ("20", 20), (" 2.5 ", 2.5), ("20s", 20), ("2m", 120)]
)
def test_a_time_limit_without_a_unit_is_in_seconds(text: str, seconds: float) -> None:
    assert time_limit_s(text, "--budget") == seconds


@pytest.mark.parametrize("text", ["", "-1", "0s", "nan", "inf", "1e3", "20 s"])
def test_other_time_limits_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^--budget: want a duration > 0 such as 60s"):
        time_limit_s(text, "--budget")


def test_steps_hold_all_tokens(job: Job) -> None:
    per_step = sum(sample.num_tokens for sample in job.batch)
    assert num_steps(job, Goal(tokens=per_step)) == 1
    assert num_steps(job, Goal(tokens=per_step * 10 + 1)) == 11
    assert num_steps(job, Goal(samples=10 * len(job.batch) + 1)) == 11
    with pytest.raises(ValueError, match="want one of --tokens and --samples"):
        Goal(deadline_s=1.0)


def test_clusters_grow_by_whole_nodes_with_the_profiles_link(job: Job) -> None:
    """The card of a job of one node is not the link inside it."""
    assert list(gpu_counts(job, 16)) == [2, 4, 8, 16]
    two = on_gpus(job, 8).cluster
    assert ([node.num_ranks for node in two.nodes], two.num_ranks) == ([2] * 4, 8)
    link = load_profile("H100").machine_link("inter").link
    assert (two.inter, two.intra) == (link, job.cluster.intra)
    assert two.nodes[0].num_cards == (load_profile("H100").machine_link("inter").per_node or 2)
    assert on_gpus(job, 1).cluster.num_ranks == 1
    named = replace(job, cluster=replace(job.cluster, inter=replace(job.cluster.inter, bytes_per_s=1.0)))
    assert on_gpus(named, 4).cluster.inter.bytes_per_s == 1.0
    with pytest.raises(ValueError, match="5 GPUs make no whole nodes of 2; nearest: 4"):
        on_gpus(job, 5)


@pytest.mark.parametrize(("count", "replicas"), [(1, 1), (2, 1), (4, 2), (8, 4), (32, 16), (64, 16)])
def test_replicas_keep_their_gpus_while_the_batch_has_samples(job: Job, count: int, replicas: int) -> None:
    batch = tuple(replace(job.batch[0], id=number) for number in range(16))
    on_two = replace(job, batch=batch, replicas=1)
    assert on_gpus(on_two, count).replicas == replicas
    assert on_gpus(replace(on_two, batch=batch[:12]), 32).replicas == 12
    stated = replace(on_two, layouts=(ModuleLayout(module="llm", dp=2),))
    assert on_gpus(stated, count).replicas == 1


def test_processes_are_no_gpus(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    with pytest.raises(ValueError, match="want a cluster of one device with nodes and ranks_per_node"):
        on_gpus(load_job(path), 2)


def test_the_command_answers_first(path: Path) -> None:
    """The answer equals the arithmetic on what a search of the same size says; found again without one."""
    flags = ("--tokens", 1e9, "--strategy", "fsdp", "--strategy", "cornstarch", "--gpus", 1, "--gpus", 2)
    done = size(path, *flags, "--deadline", "2w", "--json")
    assert done.exit_code == 0, done.output
    record = json.loads(done.stdout)
    assert record["gpus"] == record["tried"][-1]["gpus"]
    [*_, last] = record["tried"]
    steps = math.ceil(1e9 / sum(sample.num_tokens for sample in load_job(path).batch))
    assert last["training_s"] == steps * last["plan"]["iteration_s"]
    assert last["dollars"] == pytest.approx(last["training_s"] / 3600 * 2.0 * last["plan"]["ranks"])
    shown = size(path, *flags, "--deadline", "2w")
    assert shown.stdout.startswith(f"{last['plan']['ranks']} GPUs: strategy {last['plan']['strategy']}, ")
    assert "cached result" in shown.stderr
    fullest = str(mebibytes(last["plan"]["peak_bytes"]))
    assert any(f" {fullest} " in line for line in shown.stdout.splitlines())


def test_samples_may_be_written_with_an_exponent(path: Path) -> None:
    flags = ("--strategy", "fsdp", "--gpus", 2, "--deadline", "2w", "--json")
    short, long = (size(path, "--samples", number, *flags).stdout for number in ("1e3", "1000"))
    assert json.loads(short) == json.loads(long)


def test_where_nothing_does_it_the_nearest_is_said(path: Path) -> None:
    done = size(path, "--tokens", 1e15, "--strategy", "fsdp", "--gpus", 2, "--deadline", "1m")
    assert done.exit_code == 1
    assert done.stdout.startswith("no number of GPUs tried (2) is enough; nearest: 2 GPUs, strategy fsdp, ")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--tokens", 1e9), "want --deadline, --budget-dollars or both"),
        (("--tokens", 0, "--deadline", "3d"), "size: want tokens > 0 and finite, got 0"),
        (("--tokens", "inf", "--deadline", "3d"), "size: want tokens > 0 and finite, got inf"),
        (
            ("--tokens", 1e9, "--budget-dollars", -2),
            "size: want budget_dollars > 0 and finite, got -2",
        ),
        (
            ("--samples", 2.5, "--deadline", "3d"),
            "want --samples as a whole number such as 2000000 or 2e6, got 2.5",
        ),
        (("--samples", "inf", "--deadline", "3d"), "want --samples as a whole number such as"),
        (("--tokens", 1e9, "--deadline", "soon"), "--deadline: want a duration > 0 such as 60s, 90m"),
        (("--tokens", 1e9, "--deadline", "3d", "--gpus", 3), "3 GPUs make no whole nodes of 2; nearest: 4"),
    ],
)
def test_bad_goals_are_one_line(path: Path, flags: tuple[object, ...], message: str) -> None:
    done = size(path, *flags)
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert message in done.stderr


def test_a_budget_wants_a_price(path: Path) -> None:
    path.write_text(path.read_text().replace("  dollars_per_gpu_hour: 2.0\n", ""))
    done = size(path, "--tokens", 1e9, "--budget-dollars", 100)
    assert "--budget-dollars wants cluster.dollars_per_gpu_hour" in done.stderr


def test_a_budget_ends_planning_for_every_number_of_gpus(path: Path) -> None:
    """Each strategy hands over its best plan so far, or has none in time."""
    flags = ("--samples", "2e6", "--deadline", "52w", "--gpus", "1", "--gpus", "2", "--no-cache", "--json")
    whole, hurried = (size(path, *flags, *budget) for budget in ((), ("--budget", "0.001s")))
    assert json.loads(whole.stdout)["tried"]
    assert "stopped by --budget" not in whole.stderr
    assert "1 GPUs: stopped by --budget, with the best plan so far: " in hurried.stderr
    refused = size(path, *flags, "--budget", "0")
    assert refused.exit_code == 2
    assert "size: want --budget > 0, got 0; nearest: 1s" in refused.stderr
