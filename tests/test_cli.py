"""The commands from job to comparison, and what they answer to bad input."""

import csv
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from runtime.data.scenes import make
from tests.bench_sizes import CELLS
from tests.command_line import JOB, accept, answered, refuse, workbench
from tests.test_orphans import ranks_of
from tests.waiting import PATIENCE_S, eventually
from workbench.cli.console import MOST_STAGES
from workbench.cli.measuring import calibration_plan
from workbench.cost.profile import load_profile
from workbench.job.job import load_job
from workbench.plan.codec import plan_hash, read_plan, write_plan
from workbench.plan.plan import Precision, Settings
from workbench.report.compare import Group
from workbench.report.explained import MOST_SHOWN
from workbench.report.folder import repetition_paths
from workbench.strategies.registry import BY_NAME, PLANNERS, PRICED
from workbench.trace import Executor
from workbench.trace_json import read_trace, write_trace

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_a_plan_and_a_job_in_each_others_place_are_named(plan: Path) -> None:
    words = "plan.json|format 'multimodal-workbench plan'|want a job file"
    refuse("search", plan, words=words, folder=plan.parent)
    refuse("simulate", plan.with_name("job.yaml"), words="job.yaml|workbench plan", folder=plan.parent)


def test_from_job_to_report(plan: Path):
    """plan, check, simulate, run, compare, report: one plan through all of it."""
    folder = plan.parent
    checked = answered("check", plan, "--job", folder / "job.yaml")

    told = accept("simulate", plan, "--profile", "H100", "--trace", folder / "a.sim.json", "--json")
    simulated = read_trace(folder / "a.sim.json")
    figures = json.loads(told.stdout.splitlines()[-1])
    assert figures["iteration_s"] == simulated.iteration_s
    both = ("plan_hash", "strategy", "peak_bytes")
    assert [checked[name] for name in both] == [figures[name] for name in both]
    assert figures["unmeasured"] == [value for name, value in simulated.details if name == "unmeasured"]
    assert figures["unmeasured"]

    run = accept("run", plan, "--local", "--repetitions", 2, "--trace", folder / "a.run.json", "--json")
    files = [folder / "a.1.run.json", folder / "a.2.run.json"]
    steps = json.loads(run.stdout.splitlines()[-1])["steps"]
    traces = [read_trace(path) for path in files]
    assert [step["iteration_s"] for step in steps] == [trace.iteration_s for trace in traces]
    assert traces[0].loss == traces[1].loss is not None

    compared = accept("compare", folder / "a.sim.json", *files, "--plan", plan, "--json")
    record = json.loads(compared.stdout.splitlines()[-1])
    assert record["plan_hash"] == plan_hash(read_plan(plan))
    assert record["repetitions"] == 2
    assert {row["group"] for row in record["rows"]} >= {Group.KIND, Group.STAGE, Group.TOTAL}
    assert "stage 0: vision" in accept("compare", folder / "a.sim.json", *files, "--plan", plan).stdout

    accept("report", folder)
    assert "<svg" in (folder / "report.html").read_text()


def test_a_plan_by_the_default_strategy_names_the_search(job: Path, tmp_path: Path) -> None:
    line = f"by the default strategy; workbench search {job} ranks all"
    words = ("plan", job, "-o", tmp_path / "plan.json")
    shown = " ".join(accept(*words).output.split())
    assert line in shown
    assert "default strategy" not in accept(*words, "--strategy", "cornstarch").output


# the job has two stages
@pytest.mark.parametrize("strategy", [s for s in PLANNERS if s not in ("fsdp", "hsdp")])
def test_every_strategy_has_a_name_and_is_deterministic(job: Path, strategy: str):
    first, second = job.with_name("1.json"), job.with_name("2.json")
    for path in (first, second):
        accept("plan", job, "--strategy", strategy, "-o", path)
    assert first.read_bytes() == second.read_bytes()
    assert read_plan(first).strategy == strategy
    assert set(PLANNERS) | set(PRICED) == set(BY_NAME)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        pytest.param("samples: 4", "sampels: 4", "'batch.sampels'|did you mean 'samples'", id="unknown-key"),
        pytest.param(
            "profile: H100",
            "profile: H1000",
            "no profile 'H1000'|such as H100|nearest: H100",
            id="unknown-profile",
        ),
        pytest.param("ranks: 4", "ranks: 3", "needs 4 ranks|may use 3", id="ranks-not-there"),
        pytest.param("memory_gib: 1", "memory_gib: 0.001", "rank|GiB", id="does-not-fit"),
    ],
)
def test_bad_jobs(job: Path, old: str, new: str, words: str):
    assert old in JOB
    job.write_text(JOB.replace(old, new))
    refuse("plan", job, "-o", job.with_name("plan.json"), words=words, folder=job.parent)


def test_search_ranks_all_strategies_and_writes_the_best(job: Path, tmp_path: Path):
    best = tmp_path / "best.json"
    record = answered("search", job, "-o", best)
    times = [found["iteration_s"] for found in record["candidates"] if "refusal" not in found]
    assert times == sorted(times)
    assert {found["strategy"] for found in record["candidates"]} == set(PLANNERS)
    assert plan_hash(read_plan(best)) == record["candidates"][0]["plan_hash"]


def test_missing_files(tmp_path: Path):
    refuse("plan", tmp_path / "no.yaml", "-o", tmp_path / "plan.json", words="no.yaml", folder=tmp_path)
    for verb in ("check", "simulate"):
        refuse(verb, tmp_path / "no.json", words="no.json: No such file", folder=tmp_path)
    refuse("run", tmp_path / "no.json", "--local", words="no.json: No such file", folder=tmp_path)
    refuse("report", tmp_path / "no", words="No such file", folder=tmp_path)
    refuse("report", tmp_path, words="at least one plan", folder=tmp_path)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        pytest.param(lambda text: text[: len(text) // 2], "truncated", id="truncated"),
        pytest.param(lambda text: text.replace('"0F0"', '"0F1"', 1), "corrupt", id="edited"),
        pytest.param(lambda text: "", "not JSON", id="empty"),
        pytest.param(lambda text: "{}", "not a plan file", id="another-file"),
        pytest.param(
            lambda text: text.replace('"schema_version": 3', '"schema_version": 99'),
            "99|want 1",
            id="version",
        ),
    ],
)
@pytest.mark.parametrize("verb", [("check",), ("simulate",), ("run", "--local")], ids=lambda verb: verb[0])
def test_bad_plan_files(plan: Path, damage: Callable[[str], str], words: str, verb: tuple[str, ...]):
    plan.write_text(damage(plan.read_text()))
    output = () if verb == ("check",) else ("--trace", plan.with_name("trace.json"))
    refuse(verb[0], plan, *verb[1:], *output, words=f"plan.json|{words}", folder=plan.parent)


def test_plan_for_another_model(plan: Path, job: Path):
    job.write_text(
        JOB.replace("hidden_size: 32, intermediate_size: 64", "hidden_size: 64, intermediate_size: 64")
    )
    refuse("check", plan, "--job", job, words="plan.json|another model|small", folder=job.parent)


def test_ranks_that_are_not_there(plan: Path):
    found = read_plan(plan)
    node = replace(found.cluster.nodes[0], num_ranks=2)
    write_plan(replace(found, cluster=replace(found.cluster, nodes=(node,))), plan)
    for verb in (("check",), ("simulate",), ("run", "--local")):
        refuse(verb[0], plan, *verb[1:], words="rank", folder=plan.parent)


def test_item_in_no_microbatch(plan: Path):
    found = read_plan(plan)
    write_plan(replace(found, microbatches=found.microbatches[1:]), plan)
    refuse("simulate", plan, words=found.microbatches[0].module, folder=plan.parent)


def test_plan_that_does_not_fit(plan: Path):
    found = read_plan(plan)
    node = replace(found.cluster.nodes[0], memory_bytes=2**20)
    write_plan(replace(found, cluster=replace(found.cluster, nodes=(node,))), plan)
    for verb in (("check",), ("simulate", "--profile", "H100"), ("run", "--local")):
        refuse(verb[0], plan, *verb[1:], words="rank|GiB", folder=plan.parent)


def test_no_profile_for_the_device(plan: Path):
    write_plan(read_plan(plan), plan)  # says no more what it was made with
    refuse("simulate", plan, words="device 'cpu'|--profile|calibrate", folder=plan.parent)


def test_run_needs_a_repetition(plan: Path):
    words = "repetitions must be 1 to 1,000,000, got 0"
    refuse("run", plan, "--local", "--repetitions", 0, words=words, folder=plan.parent)


def test_run_on_data_of_another_batch(plan: Path):
    data = plan.with_name("data")
    make(data, num_samples=2, seed=0)
    refuse("run", plan, "--local", "--data", data, words="data|sample", folder=plan.parent)


def test_plan_and_run_on_a_folder_of_data(job: Path):
    data, plan = job.with_name("data"), job.with_name("plan.json")
    make(data, num_samples=6, seed=0)
    refuse("plan", job, "--data", job.parent / "no", "-o", plan, words="no", folder=job.parent)
    accept("plan", job, "--data", data, "-o", plan)
    assert len(read_plan(plan).batch) == 4
    first = accept("run", plan, "--local", "--data", data, "--json").stdout.splitlines()[-1]
    random = accept("run", plan, "--local", "--json").stdout.splitlines()[-1]
    assert json.loads(first)["steps"][0]["loss"] != json.loads(random)["steps"][0]["loss"]


def test_calibrate_measures_what_a_job_is_made_of(job: Path, monkeypatch: pytest.MonkeyPatch):
    """Nothing of this job's own layers is left unmeasured; a second run has nothing left to do."""
    monkeypatch.setattr("runtime.measure.microbench.cell_sizes", lambda device: CELLS)
    monkeypatch.setattr("runtime.measure.wires.BYTES", (2**10, 2**14, 2**18, 2**22))
    rows, profile = job.with_name("rows.jsonl"), job.with_name("cpu.json")
    accept("calibrate", job, "--rows", rows, "-o", profile, "--json")
    measured = rows.read_bytes()
    plan = job.with_name("plan.json")
    accept("plan", job, "--profile", profile, "-o", plan)
    told = answered("simulate", plan, "--profile", profile)
    assert not [cost for cost in told["unmeasured"] if "layer" in cost]

    accept("calibrate", job, "--rows", rows, "-o", profile)
    assert rows.read_bytes() == measured
    assert load_profile(profile).device == "cpu"


@pytest.mark.parametrize("name", ["tiny", "experts", "masks", "cross_attention"])
def test_calibrate_takes_examples_that_run_here(name: str):
    """Also those whose ranks share weights or experts, before any profile says how fast a link is."""
    job = load_job(EXAMPLES / f"{name}.yaml")
    assert {stage.module for stage in calibration_plan(job).stages} == {m.name for m in job.model.modules}


def test_calibrate_refuses_other_devices(job: Path):
    refuse(
        "calibrate", job, "--device", "tpu", "-o", job.with_name("p.json"), words="tpu|cpu", folder=job.parent
    )


def test_run_needs_a_place(plan: Path):
    refuse("run", plan, words="--local|torchrun", folder=plan.parent)


def test_compare_refuses_another_plan(plan: Path, job: Path):
    folder = plan.parent
    accept("simulate", plan, "--profile", "H100", "--trace", folder / "sim.json")
    trace = read_trace(folder / "sim.json")
    write_trace(replace(trace, executor=Executor.EXECUTED), folder / "run.json")
    write_trace(replace(trace, executor=Executor.EXECUTED, plan_hash="f" * 64), folder / "other.json")
    accept("compare", folder / "sim.json", folder / "run.json")
    words = f"{'f' * 16}|{trace.plan_hash[:16]}"
    refuse("compare", folder / "sim.json", folder / "other.json", words=words, folder=folder)

    other = replace(read_plan(plan), settings=Settings(precision=Precision.FLOAT32))
    write_plan(other, folder / "other_plan.json")
    both = (folder / "sim.json", folder / "run.json", "--plan", folder / "other_plan.json")
    refuse("compare", *both, words=f"{plan_hash(other)[:16]}|{trace.plan_hash[:16]}", folder=folder)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("simulat",), "simulat"),
        (("plan", "job.yaml"), "--output"),
        (("plan", "job.yaml", "-o", "p.json", "--strategy", "cornstrach"), "cornstrach|cornstarch"),
        (("reproduce", "no_paper/table1"), "no_paper/table1"),
        (("reproduce", "all", "--since", "HEAD"), "--stored"),
    ],
)
def test_bad_command_lines(arguments: tuple[str, ...], words: str, tmp_path: Path):
    refuse(*arguments, words=words, folder=tmp_path)


def test_bugs_keep_their_traceback(plan: Path, monkeypatch: pytest.MonkeyPatch):
    def broken(path: Path) -> None:
        raise TypeError("a bug")

    monkeypatch.setattr("workbench.cli.planning.read_plan", broken)
    assert isinstance(workbench("check", plan).exception, TypeError)


@pytest.mark.parametrize(
    ("name", "repetitions", "expected"),
    [
        ("run.json", 1, ["run.json"]),
        ("run.json", 2, ["run.1.json", "run.2.json"]),
        ("a.run.json", 2, ["a.1.run.json", "a.2.run.json"]),
        ("trace", 2, ["trace.1", "trace.2"]),
    ],
)
def test_files_of_repetitions(name: str, repetitions: int, expected: list[str]):
    assert [path.name for path in repetition_paths(Path("out") / name, repetitions)] == expected


@pytest.mark.skipif(not Path("/proc/self/stat").is_file(), reason="finds the ranks by /proc")
def test_a_killed_rank_ends_the_run_with_its_cause(plan: Path):
    command = [
        sys.executable,
        "-c",
        "from workbench.cli.app import main; main()",
        "run",
        str(plan),
        "--local",
    ]
    command += ["--warmup", "100000", "--trace", str(plan.with_name("run.json"))]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert eventually(lambda: len(ranks_of(process.pid)) == 4)
        ranks = ranks_of(process.pid)
        os.kill(ranks[-1], signal.SIGKILL)
        out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 2
    # One that is killed while ranks connect is also told by gloo, which logs that at every level.
    (line,) = (line for line in err.splitlines() if "gloo/transport" not in line)
    assert line.startswith("workbench: error: rank ")
    assert "SIGKILL" in line
    assert out == ""
    assert not plan.with_name("run.json").exists()
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)


def test_long_tables_are_folded_and_cut_where_people_read_them(tmp_path: Path) -> None:
    """FSDP has a stage for each layer of each rank: a terminal gets a row for equal ones, a program all."""
    job, plan = tmp_path / "job.yaml", tmp_path / "plan.json"
    accept("init", "llama-3.2-1b", "--gpus", "8xH100", "-o", job)
    words = ("plan", job, "--strategy", "fsdp", "-o", plan)
    shown = accept(*words).output
    num_stages = len(read_plan(plan).stages)
    assert num_stages > MOST_STAGES
    row_of_all = re.compile(r" 0-7 +(\d+\.\.\d+) +0-7 ")
    assert row_of_all.findall(shown) == ["0..0", "1..16", "17..17"]  # table, blocks, head
    assert re.search(r" 1-16 \.\.\. \d+-\d+ .* 16 x 60\.8 M +16 x 60\.8 M ", shown)
    assert "more rows" not in shown
    assert len(workbench(*words, "--format", "csv").stdout.splitlines()) == 1 + num_stages
    checked = accept("check", plan).output
    assert row_of_all.findall(checked) == ["0..0", "1..16", "17..17"]
    assert checked.count(" more") == 1  # actions of one rank for all
    assert "ranks of a row do the same on stages of their own" in checked
    assert workbench("check", plan, "--format", "csv").stdout.count(" STEP\n") == 8


def test_an_explanation_sums_what_is_small_and_shows_no_empty_table(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    accept("init", "llama-3.2-1b", "--gpus", "8xH100", "-o", job)
    text = re.sub(r"fixed:.*", "mixture: {seed: 0, text_tokens: [9, 4000]}", job.read_text())
    text = re.sub(r"samples: \d+", "samples: 16", text)
    job.write_text(f"{text}layouts:\n  llm: {{pp: 8, dp: 1}}\n")
    words = ("explain", job, "--strategy", "megatron-heterogeneous", "--budget", "0")
    assert "the closest are" not in accept(*words).output
    rows = [
        row
        for row in csv.DictReader(workbench(*words, "--format", "csv").stdout.splitlines())
        if row["table"] == "idle time"
    ]
    assert rows[-1]["name"] == "all other causes"
    idle_s = sum(cause["seconds"] for cause in json.loads(workbench(*words, "--json").stdout)["idle"])
    assert sum(float(row["time_s"]) for row in rows) == pytest.approx(idle_s, rel=1e-9)
    assert len(rows) == 1 + MOST_SHOWN


@pytest.mark.parametrize(
    "words",
    [
        "plan job.yaml -o job.yaml",
        "plan job.yaml -o other.json --layout other.json",
        "search job.yaml -o ./job.yaml",
        "simulate plan.json --trace link.json",
        "run plan.json --local --trace plan.json",
        "init config.json --gpus 8xH100 -o config.json",
        "calibrate job.yaml -o job.yaml",
        "calibrate job.yaml -o rows.json --rows job.yaml",
        "layout job.yaml --to bridge -o job.yaml",
        "predict rows.json -o rows.json",
    ],
)
def test_no_output_replaces_what_the_command_reads(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("job.yaml", "plan.json", "other.json", "config.json", "rows.json"):
        Path(name).write_text("{}")
    Path("job.yaml").write_text(JOB)
    accept("plan", "job.yaml", "-o", "plan.json", "--profile", EXAMPLES / "elastic-cpu.json")
    Path("link.json").symlink_to("plan.json")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    refuse(*words.split(), words="this command reads it; want another file to write", folder=tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_page_takes_no_plans_place_and_a_search_fails_before_it_starts(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    page, plan = tmp_path / "plan.json", tmp_path / "job.yaml" / "plan.json"
    refuse("report", tmp_path, "-o", page, words="plans and traces have this ending", folder=tmp_path)
    refuse("search", tmp_path / "job.yaml", "-o", plan, words="cannot be written", folder=tmp_path)
