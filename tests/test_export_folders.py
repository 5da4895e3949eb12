"""Exported folders: what is said of a plan, what is refused with which nearest plan, what a folder holds."""

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.doors.export_jobs import export_jobs
from experiments.doors.targets import CHECKED, Folder, refusals, shell_arguments
from sim.predict import predict
from workbench.cost.model import CostModel
from workbench.cost.products import ProductFormat
from workbench.export.approximation import Alternative, nearest
from workbench.export.decoder import decoder_of
from workbench.export.export import export
from workbench.export.folder import FORMAT, MARK, ranks_by_node
from workbench.export.megatron import decoder_arguments
from workbench.export.mimo_config import equal_stage_layers
from workbench.export.module_layouts import RankSharing, placed_modules, rank_sharing_of, schedule_like
from workbench.export.registry import BY_NAME, TARGETS
from workbench.job.job import Job, load_job
from workbench.job.machines import cost_of
from workbench.job.notations.layout_string import stage_layers_of
from workbench.job.other_layouts import with_layouts
from workbench.plan.plan import ModuleSettings, Plan, Precision, Recompute, Sharding
from workbench.planner.budget import Budget
from workbench.planner.stage_counts import Progress
from workbench.schedule.choice import Schedule, ScheduleKind, usual
from workbench.schedule.sharded import ReshardAfter
from workbench.strategies import fsdp
from workbench.strategies.registry import BY_NAME as STRATEGIES
from workbench.timing.accept import accept

JOBS = {job.name: job for job in export_jobs()}


class Prices:
    """As the command has them."""

    def __init__(self, cost: CostModel) -> None:
        self.cost = cost

    def step_s(self, plan: Plan) -> float:
        return predict(*accept(plan), self.cost).iteration_s


def prices_of(job: Job) -> Prices:
    return Prices(cost_of(job, None, None))


def plan_of(job: Job, strategy: str) -> Plan:
    return STRATEGIES[strategy].planner(job, cost_of(job, None, None), lambda *_: None)


def test_the_nearest_plan_of_a_refusal_is_searched_within_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that every report moves by a second: what was found until then is named."""
    job = with_layouts(load_job("examples/valm.yaml"), ())
    reports: list[float] = []
    colocated = STRATEGIES["megatron-colocated"]

    def counting(job: Job, cost: CostModel, progress: Progress) -> Plan:
        def report(done: int, total: int, best_s: float) -> None:
            reports.append(best_s)
            progress(done, total, best_s)

        return colocated.planner(job, cost, report)

    counting(job, cost_of(job, None, None), lambda *_: None)
    whole = len(reports)
    monkeypatch.setitem(STRATEGIES, "megatron-colocated", replace(colocated, planner=counting))
    reports.clear()
    alternative = Alternative(words="it", strategy="megatron-colocated")
    plan, budget = plan_of(job, "disttrain"), Budget(50.0, lambda: float(len(reports)))
    found = nearest(plan, [alternative], lambda plan: None, prices_of(job), budget)
    assert found is not None
    assert len(reports) == 51 < whole


@pytest.fixture(scope="module")
def pipeline() -> Plan:
    """Two replicas of two stages of two tensor-parallel ranks."""
    return plan_of(JOBS["llama"], "megatron-heterogeneous")


@pytest.fixture(scope="module")
def sharded() -> Plan:
    return plan_of(JOBS["frozen-tower"], "fsdp")


@pytest.fixture(scope="module")
def islands() -> Plan:
    return plan_of(JOBS["frozen-tower"], "megatron-islands")


@pytest.mark.parametrize("name", ["torchrun", "fsdp2"])
def test_what_cannot_run_is_not_sent_to_torchrun(name, pipeline):
    """A module without a configuration, as the zoo's diffusion models."""
    modules = tuple(replace(module, source=None) for module in pipeline.model.modules)
    plan = replace(pipeline, model=replace(pipeline.model, modules=modules))
    with pytest.raises(ValueError, match=f"^{name} cannot express ") as refused:
        export(plan, BY_NAME[name], prices_of(JOBS["llama"]))
    assert "it can be simulated, not run: module 'llm' has no source" in str(refused.value)
    assert "--to torchrun" not in str(refused.value)


def test_half_of_the_jobs_have_several_modules():
    several = [job for job in JOBS.values() if len(job.model.modules) > 1]
    assert len(JOBS) >= 10
    assert 2 * len(several) == len(JOBS)


def test_a_layout_is_read_off_the_stages(pipeline):
    placed = placed_modules(pipeline)["llm"]
    assert (placed.layout.tp, placed.layout.dp, placed.pp, placed.virtual) == (2, 2, 2, 1)
    assert sum(placed.layout.stage_layers) == len(pipeline.model.llm.layers)
    assert rank_sharing_of(pipeline) is RankSharing.ALONE
    assert schedule_like(pipeline) == Schedule()


def test_modules_lie_apart_or_on_the_same_ranks(islands, sharded):
    assert rank_sharing_of(islands) is RankSharing.APART
    assert rank_sharing_of(sharded) is RankSharing.SHARED


@pytest.mark.parametrize(
    "kind", [ScheduleKind.GPIPE, ScheduleKind.INTERLEAVED, ScheduleKind.ZB_H1, ScheduleKind.ZB_V]
)
def test_a_schedule_is_read_off_the_programs(kind):
    job = replace(JOBS["llama"], schedule=usual(kind))
    assert schedule_like(plan_of(job, "cornstarch")).kind is kind


def test_sizes_are_those_of_the_configuration(pipeline):
    decoder = decoder_of(pipeline.model.llm)
    assert (decoder.num_blocks, decoder.width, decoder.ffn, decoder.vocab) == (16, 2048, 5632, 32000)
    assert (decoder.num_heads, decoder.num_kv_heads, decoder.head_dim) == (16, 8, 128)
    assert (decoder.rope_base, decoder.is_tied, decoder.qk_norm) == (500000.0, False, False)
    experts = decoder_of(plan_of(JOBS["mixtral"], "megatron-heterogeneous").model.llm)
    assert (experts.num_experts, experts.experts_per_token, experts.rope_base) == (8, 2, 1e6)
    of_all = decoder_of(plan_of(JOBS["qwen3-experts"], "megatron-heterogeneous").model.llm)
    assert (of_all.ffn, of_all.qk_norm, experts.sums_to_one, of_all.sums_to_one) == (768, True, True, False)
    flags = decoder_arguments(of_all).keys() - decoder_arguments(experts).keys()
    assert flags == {"--moe-router-pre-softmax", "--qk-layernorm"}


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_every_folder_has_launcher_batch_script_container_and_readme(target, pipeline, sharded):
    job, plan = ("llama", pipeline) if target.refuses(pipeline) is None else ("frozen-tower", sharded)
    files = export(plan, target, prices_of(JOBS[job]))
    assert {"README.md", "launch.sh", "job.sbatch", "env.sh", "CONTAINER.md", MARK} < set(files)
    for name in files:
        if name.endswith((".sh", ".sbatch")):
            subprocess.run(["bash", "-n"], input=files[name], text=True, check=True, timeout=60)
        if name.endswith(".py"):
            compile(files[name], name, "exec")
    mark = json.loads(files[MARK])
    assert (mark["format"], mark["target"]) == (FORMAT, target.name)
    total = sum(each["seconds"] or 0.0 for each in mark["differences"])
    assert mark["plan_step_s"] + total == pytest.approx(mark["exported_step_s"], rel=1e-12)
    assert f"--nnodes {len(ranks_by_node(plan))} " in files["launch.sh"]


# What each folder trains on without a change, and a name in it that its README says is where to change that.
TRIALS = {
    "torchrun": ("one step", "--data"),
    "fsdp2": ("ten steps", "--data"),
    "torchtitan": ("c4_test", "dataloader"),
    "megatron": ("random tokens", "--train-iters"),
    "megatron-bridge": ("random data", "dataset"),
}


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_a_readme_says_what_is_trained_as_it_is_and_where_to_change_that(target, pipeline, sharded):
    job, plan = ("llama", pipeline) if target.refuses(pipeline) is None else ("frozen-tower", sharded)
    files = export(plan, target, prices_of(JOBS[job]))
    section = files["README.md"].split("## Data, weights and steps\n")[1].split("## ")[0]
    trains, where = TRIALS[target.name]
    assert trains in section
    assert where in section
    assert any(where in text for name, text in files.items() if name != "README.md") or where == "--data"


def test_several_nodes_are_told_how_to_start_and_want_an_address(tmp_path, sharded):
    files = export(sharded, BY_NAME["torchrun"], prices_of(JOBS["frozen-tower"]))
    nodes = len(ranks_by_node(sharded))
    assert nodes > 1
    assert f"`MASTER_ADDR=<first node> NODE_RANK=<0 to {nodes - 1}> bash launch.sh`" in files["README.md"]
    for name in ("launch.sh", "env.sh"):
        (tmp_path / name).write_text(files[name])
    (tmp_path / "torchrun").write_text("#!/bin/sh\necho started\n")
    (tmp_path / "torchrun").chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}

    def started(**variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", tmp_path / "launch.sh"],
            env=path | variables,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

    for variables in ({}, {"NODE_RANK": "1"}, {"MASTER_ADDR": "node0"}):
        refused = started(**variables)
        assert refused.returncode == 2
        assert f"{nodes} nodes want MASTER_ADDR" in refused.stderr
    for rank in ("NODE_RANK", "SLURM_NODEID"):
        assert started(MASTER_ADDR="node0", **{rank: "1"}).stdout == "started\n"


def test_a_difference_is_priced_by_simulating_what_the_system_does(pipeline):
    prices = prices_of(JOBS["llama"])
    mark = json.loads(export(pipeline, BY_NAME["megatron"], prices)[MARK])
    [difference] = mark["differences"]
    assert difference["has"] == "gradients and optimizer in bfloat16"
    wide = replace(
        JOBS["llama"], settings=replace(JOBS["llama"].settings, optimizer_precision=Precision.FLOAT32)
    )
    again = plan_of(wide, "megatron-heterogeneous")
    assert mark["exported_step_s"] == prices.step_s(again)


def test_the_runtime_takes_the_plan_as_it_is(islands):
    files = export(islands, BY_NAME["torchrun"], prices_of(JOBS["frozen-tower"]))
    assert json.loads(files[MARK])["differences"] == []
    assert "Nothing: this folder executes the plan exactly." in files["README.md"]
    assert "relative paths start here" in files["README.md"]


@pytest.mark.parametrize(
    ("target", "after", "text", "differences"),
    [
        ("torchtitan", ReshardAfter.PASS, "'fsdp_reshard_after_forward': 'always'", []),
        ("torchtitan", ReshardAfter.BACKWARD, "'fsdp_reshard_after_forward': 'never'", []),
        ("torchtitan", ReshardAfter.STEP, "'fsdp_reshard_after_forward': 'never'", ["kept for a step"]),
        ("megatron", ReshardAfter.BACKWARD, "-strategy optim_grads_params\n", ["kept for a backward"]),
        ("megatron", ReshardAfter.STEP, "--overlap-grad-reduce\n  --overlap-param-gather\n", []),
        ("megatron-bridge", ReshardAfter.PASS, "'overlap_param_gather': True", ["kept for a pass"]),
        ("megatron-bridge", ReshardAfter.STEP, "'overlap_param_gather': True", []),
        ("fsdp2", ReshardAfter.BACKWARD, '"reshard_after": "backward"', []),
    ],
)
def test_systems_gather_as_often_as_the_plan_or_it_is_a_difference(target, after, text, differences):
    settings = ModuleSettings(module="llm", sharding=Sharding.PARAMETERS, reshard_after=after)
    job = with_layouts(JOBS["llama"], (), replicas=1)
    job = replace(job, settings=replace(job.settings, modules=(settings,)), microbatch_samples=1)
    _, plan = fsdp.fastest_of_size(job, cost_of(job, None, None))
    files = export(plan, BY_NAME[target], prices_of(job))
    assert any(text in content for content in files.values())
    names = [each["has"] for each in json.loads(files[MARK])["differences"]]
    assert [name for name in names if "gathered" in name] == [f"gathered parameters {d}" for d in differences]


def test_megatron_cuts_where_the_plan_cuts(pipeline):
    words = shell_arguments(export(pipeline, BY_NAME["megatron"], prices_of(JOBS["llama"])))
    layout = words[words.index("--pipeline-model-parallel-layout") + 1]
    assert stage_layers_of(layout) == placed_modules(pipeline)["llm"].layout.stage_layers


@pytest.mark.parametrize(
    ("target", "job", "strategy", "part"),
    [
        ("megatron", "frozen-tower", "cornstarch", "pp 3 of 'vision': megatron-core's towers are whole"),
        ("torchtitan", "mixtral", "megatron-heterogeneous", "experts of 'llm'"),
        ("torchtitan", "qwen2", "megatron-colocated", "biases of 'llm'"),
        ("megatron-bridge", "audio", "megatron-islands", "module 'audio' (whisper)"),
        ("megatron-bridge", "llava", "fsdp", "all modules on the same ranks"),
        ("fsdp2", "llama", "megatron-heterogeneous", "pp 2 of 'llm'"),
        ("fsdp2", "llava", "encoders-replicated", "copies of 'vision' that all compute the same items"),
    ],
)
def test_what_cannot_be_said_is_one_line_with_a_nearest_plan(target, job, strategy, part):
    with pytest.raises(ValueError, match="cannot express") as refused:
        export(plan_of(JOBS[job], strategy), BY_NAME[target], prices_of(JOBS[job]))
    message = str(refused.value)
    assert message.startswith(f"{target} cannot express {part}")
    assert "\n" not in message
    assert "nearest: " in message
    assert " ms a step" in message or message.endswith("nearest: the language model alone")


@pytest.mark.parametrize(
    ("target", "job", "nearest"),
    [
        ("megatron", "audio", "the language model alone"),  # its towers are other ones
        ("megatron-bridge", "audio", "the language model alone"),
        ("torchtitan", "mixtral", "--to torchrun, which runs this one"),  # it has no experts at all
    ],
)
def test_what_no_layouts_change_is_refused_without_a_search(target, job, nearest, monkeypatch):
    plan, prices = plan_of(JOBS[job], "megatron-islands"), prices_of(JOBS[job])

    def searching(*_: object) -> Plan:
        raise AssertionError("nothing is to be planned")

    monkeypatch.setattr("workbench.export.approximation.planned", searching)
    for name, strategy in STRATEGIES.items():
        monkeypatch.setitem(STRATEGIES, name, replace(strategy, planner=searching))
    with pytest.raises(ValueError, match=f"nearest: {nearest}"):
        export(plan, BY_NAME[target], prices)


def test_double_precision_has_no_flag(pipeline):
    wide = replace(pipeline, settings=replace(pipeline.settings, precision=Precision.FLOAT64))
    assert BY_NAME["megatron"].refuses(wide) == "precision float64"


@pytest.mark.parametrize(
    ("layers", "stages", "equal"), [(18, 1, (18,)), (18, 2, (9, 9)), (18, 4, (5, 4, 4, 5))]
)
def test_equal_stages_have_equally_many_blocks(layers, stages, equal):
    assert equal_stage_layers(layers, stages) == equal


def test_megatron_s_flags_are_in_its_kept_list(pipeline):
    """The list is `megatron_flags.json`: of a parser that is in no environment of ours."""
    kept = json.loads((Path(__file__).parent / "golden" / "megatron_flags.json").read_text())
    flags = {row["flag"]: row for row in kept["flags"]}
    plans = [(JOBS["llama"], pipeline)]
    plans += [
        (job, plan_of(job, strategy))
        for job in (JOBS["mixtral"], JOBS["qwen3"], JOBS["qwen2"], JOBS["mistral"])
        for strategy in ("megatron-heterogeneous", "megatron-colocated")
    ]
    for job, plan in plans:
        words = shell_arguments(export(plan, BY_NAME["megatron"], prices_of(job)))
        check_flags(words, flags)


def check_flags(words, flags):
    index = 0
    while index < len(words):
        row = flags.get(words[index])
        assert row is not None, f"Megatron has no flag {words[index]}"
        values = []
        index += 1
        while index < len(words) and not words[index].startswith("--"):
            values.append(words[index])
            index += 1
        if row["type"] == "flag":
            assert values == [], f"{row['flag']} takes nothing"
            continue
        assert len(values) == 1 or row.get("nargs") in ("+", "*")
        convert = {"int": int, "float": float}.get(row["type"], str)
        for value in values:
            convert(value)
            assert row.get("choices") is None or value in row["choices"]


@pytest.mark.parametrize("words", [["--no-such-flag"], ["--bf16", "1"], ["--num-layers", "many"]])
def test_a_flag_that_megatron_does_not_have_fails(words):
    kept = json.loads((Path(__file__).parent / "golden" / "megatron_flags.json").read_text())
    with pytest.raises((AssertionError, ValueError)):
        check_flags(words, {row["flag"]: row for row in kept["flags"]})


@pytest.mark.parametrize("target", CHECKED)
def test_the_systems_themselves_take_the_folders(target, packages, pipeline, islands):
    some_layers = ModuleSettings(module="llm", recompute=Recompute.FULL, recompute_layers=5)
    partial = replace(pipeline, settings=pipeline.settings.with_module(some_layers))
    plans = ("llama", pipeline), ("llama", partial), ("frozen-tower", islands)
    plans += (("llama", in_fp8(pipeline)), ("frozen-tower", in_fp8(islands)))
    folders = [
        Folder(files=export(plan, BY_NAME[target], prices_of(JOBS[job])), ranks=len(plan.ranks))
        for job, plan in plans
        if BY_NAME[target].refuses(plan) is None
    ]
    assert folders
    broken = Folder(files=with_unknown_word(target, folders[0].files), ranks=folders[0].ranks)
    *taken, refused = refusals(target, [*folders, broken], packages)
    if target == "torchtitan":  # whose converter takes its words, and torchao is not installed
        assert "torchao is not installed" in taken.pop()
    assert taken == [None] * len(taken)
    assert refused is not None
    assert "no_such" in refused or "no-such" in refused


def in_fp8(plan):
    own = replace(plan.settings.of("llm"), products=ProductFormat.FP8)
    return replace(plan, settings=plan.settings.with_module(own))


def with_unknown_word(target, files):
    """The folder with a key or flag that the system does not have."""
    if "data.sh" in files:
        return files | {"data.sh": "DATA=(--no-such-flag)\n"}
    if target == "torchtitan":
        return files | {"plan_config.py": files["plan_config.py"].replace("'seq_len'", "'no_such'")}
    tables = json.loads(files["tables.json"])
    tables["language"]["no_such"] = 1
    return files | {"tables.json": json.dumps(tables)}
