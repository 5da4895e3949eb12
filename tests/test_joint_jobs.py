"""Jobs of plans whose replicas share experts, their next batches, and other systems' notations for them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.data.scenes import make
from tests.command_line import accept
from tests.joint_jobs import joint_job
from workbench.cost.model import CostModel
from workbench.cost.profile import load_profile
from workbench.data.sample import Sample
from workbench.explain.neighbours import ChangeKind, looser, neighbours
from workbench.explain.plan_as_job import origin_of
from workbench.job.job import Job
from workbench.job.module_layout import ModuleLayout
from workbench.job.notations.job_layouts import Notation, read_layouts, write_layouts
from workbench.job.other_layouts import apart, with_layouts
from workbench.plan.following import next_plan
from workbench.plan.plan import Plan, TokenShard
from workbench.planner.layout_choice import degrees_of
from workbench.strategies.next_step import next_step
from workbench.strategies.registry import PLANNERS

COST = CostModel(load_profile("A40"))
EXAMPLE = Path(__file__).parents[1] / "examples" / "experts.yaml"
JOBS: dict[str, dict[str, Any]] = {
    "stages": {"ep": 2, "dp": 2, "pp": 2},
    "two of two": {"ep": 2, "dp": 4, "samples": 8},
    "cut replicas": {"tp": 2, "ep": 4, "dp": 2, "microbatch": 2},
    "encoder apart": {"ep": 2, "dp": 2, "images": (1, 2, 0, 1)},
    "one encoder": {"ep": 2, "dp": 2, "images": (1, 2, 1, 0), "encoder_dp": 1},
    "more encoders": {"ep": 2, "dp": 2, "images": (1, 2, 1, 2), "encoder_dp": 4},
}
REGROUPING = ("entrain", "dip", "disttrain-reordered")


def plan_of(job: Job, strategy: str = "megatron-heterogeneous") -> Plan:
    return PLANNERS[strategy](job, COST, lambda *_: None)


def next_batch(job: Job) -> tuple[Sample, ...]:
    """The job's samples with new ids, in the other order."""
    return tuple(replace(sample, id=100 + index) for index, sample in enumerate(reversed(job.batch)))


@pytest.mark.parametrize("name", JOBS)
def test_a_plan_is_that_of_its_job_again(name: str) -> None:
    job = joint_job(**JOBS[name])
    plan = plan_of(job)
    for given_job in (None, job):
        origin = origin_of(plan, COST, PLANNERS["megatron-heterogeneous"], given_job)
        assert origin.is_exact
        assert apart(origin.job)[1:] == apart(job)[1:]  # replicas, and samples of a microbatch
        assert origin.job.joint_replicas == job.joint_replicas == 2


def test_a_plan_of_other_replicas_than_its_job_has() -> None:
    """A search may share experts where the job does not, and the reverse; samples of a replica stay."""
    job, shared = joint_job(dp=4, samples=8), joint_job(dp=4, samples=8, ep=4)
    for first, second in ((job, shared), (shared, job)):
        origin = origin_of(plan_of(first), COST, PLANNERS["megatron-heterogeneous"], second)
        assert origin.is_exact
        assert apart(origin.job)[1:] == apart(first)[1:] == (4, 1, 1)


@pytest.mark.parametrize("name", JOBS)
def test_the_next_batch_takes_the_positions_of_the_first(name: str) -> None:
    job = joint_job(**JOBS[name])
    batch = next_batch(job)
    following = next_plan(plan_of(job), batch)
    assert following == plan_of(replace(job, batch=batch))
    assert next_step(plan_of(job), batch, job, COST) == following


@pytest.mark.parametrize("strategy", REGROUPING)
@pytest.mark.parametrize("name", ["two of two", "encoder apart"])
def test_the_next_batch_is_grouped_again(strategy: str, name: str) -> None:
    job = joint_job(**JOBS[name])
    plan, batch = plan_of(job, strategy), next_batch(job)
    expected = plan_of(replace(job, batch=batch), strategy)
    assert next_step(plan, batch, job, COST) == replace(expected, stages=plan.stages)


def test_rows_given_to_replicas_stay_with_them() -> None:
    job = joint_job(ep=2, dp=2, samples=4, microbatch=2)
    plan = plan_of(job)
    shards = tuple(
        TokenShard(module="llm", replica=0, microbatch=0, row=row, block_tokens=4, owners=(row // 2,) * num)
        for row, num in enumerate((2, 2, 2, 3))
    )
    following = next_plan(replace(plan, token_shards=shards), next_batch(job))
    assert [shard.owners for shard in following.token_shards] == [(0,) * 3, (0,) * 2, (1,) * 2, (1,) * 2]
    assert next_plan(plan, next_batch(job)).token_shards == ()


def test_changes_count_every_replica() -> None:
    job = joint_job(ep=4, dp=4, samples=8)
    changes = {change.about: change for change in neighbours(job) if change.kind is ChangeKind.LAYOUT}
    assert {"dp 4 -> 8", "dp 4 -> 2, llm tp 1 -> 2", "llm ep 4 -> 2"} < set(changes)
    halved = changes["llm ep 4 -> 2"].edit(job)
    assert (halved.joint_replicas, halved.replicas, halved.microbatch_samples) == (2, 2, 2)
    assert degrees_of(plan_of(halved), "llm").ep == 2
    assert apart(changes["dp 4 -> 8"].edit(job)).replicas == 8
    assert apart(changes["dp 4 -> 2, llm tp 1 -> 2"].edit(job)).replicas == 2
    [doubled] = (change for change in neighbours(job) if change.about == "samples of a microbatch 1 -> 2")
    assert apart(doubled.edit(job)).microbatch_samples == 2


def test_experts_of_a_replica_may_go_over_several() -> None:
    job = joint_job(dp=4, samples=8)
    [change] = (change for change in neighbours(job) if change.about == "llm ep 1 -> 2")
    assert change.edit(job) == joint_job(ep=2, dp=4, samples=8)


def test_a_looser_job_has_replicas_of_their_own() -> None:
    loose = [(job.replicas, job.joint_replicas) for job in looser(joint_job(ep=4, dp=4, samples=8))]
    assert loose == [(4, 1), (2, 1), (1, 1)]


def test_a_search_without_joint_replicas_refuses_the_job() -> None:
    with pytest.raises(ValueError, match=r"entrain-search: layouts are searched, .* got 2 joint replicas"):
        plan_of(joint_job(ep=2, dp=2), "entrain-search")


@given(
    st.sampled_from([1, 2]), st.sampled_from([2, 4]), st.sampled_from([2, 4]), st.sampled_from([1, 2, None])
)
@settings(max_examples=24)
def test_layouts_go_to_megatron_bridge_and_back(tp: int, ep: int, dp: int, encoder_dp: int | None) -> None:
    job = joint_job(tp=tp, ep=min(ep, tp * dp), dp=dp, images=(1,) * 8, encoder_dp=encoder_dp)
    content = write_layouts(job, Notation.BRIDGE)["module_parallelisms"]
    assert content["llm"]["data_parallel_size"] == dp
    assert content["llm"]["expert_model_parallel_size"] == min(ep, tp * dp)
    assert content["vision"]["data_parallel_size"] == encoder_dp or dp
    read = read_layouts({"module_parallelisms": content}, job)
    again = with_layouts(job, [replace(layout, rank_offset=None) for layout in read])
    assert (again.joint_replicas, again.microbatch_samples) == (job.joint_replicas, job.microbatch_samples)
    assert plan_of(again) == plan_of(job)


def test_bridge_sizes_join_the_replicas_of_a_job() -> None:
    """The file alone has degrees, the job one replica."""
    sizes = {"data_parallel_size": 4, "expert_model_parallel_size": 4, "expert_tensor_parallel_size": 1}
    content = {"module_parallelisms": {"language": sizes}}
    job = joint_job(samples=8)
    joint = with_layouts(job, read_layouts(content, job))
    assert (joint.joint_replicas, joint.replicas, joint.microbatch_samples) == (4, 1, 4)
    assert plan_of(joint).stages[0].expert_ranks == ((0, 1, 2, 3),)
    odd = {"module_parallelisms": {"language": sizes | {"expert_model_parallel_size": 3}}}
    with pytest.raises(ValueError, match=r"a divisor of its 4 replicas, got 3; nearest: 2"):
        with_layouts(job, read_layouts(odd, job))


@pytest.mark.parametrize("notation", [Notation.MEGATRON, Notation.TORCHTITAN, Notation.CORNSTARCH])
def test_notations_without_experts_refuse_them(notation: Notation) -> None:
    layouts = [ModuleLayout(module="llm", pp=1, ep=2, stage_layers=(4,))]
    job = with_layouts(joint_job(dp=2), layouts)
    assert job.joint_replicas == 2
    with pytest.raises(ValueError, match="cannot express ep of 'llm', got 2"):
        write_layouts(job, notation)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A job of four ranks, and data of unequal lengths."""
    text = (
        EXAMPLE.read_text()
        .replace("pp: 1, tp: 2, cp: 2, ep: 4", "pp: 1, ep: 2")
        .replace("ranks: 5", "ranks: 4")
    )
    text = text.replace("samples: 4", "samples: 4\n  replicas: 2").replace("cpu.json", "elastic-cpu.json")
    (tmp_path / "job.yaml").write_text(text)
    (tmp_path / "elastic-cpu.json").write_bytes((EXAMPLE.parent / "elastic-cpu.json").read_bytes())
    make(tmp_path / "data", num_samples=12, seed=2)
    index = tmp_path / "data" / "data.jsonl"
    lines = [json.loads(line) for line in index.read_text().splitlines()]
    seen = (line | {"segments": [x for x in line["segments"] if "audio" not in x]} for line in lines)
    index.write_text("".join(json.dumps(line) + "\n" for line in seen))
    return tmp_path


def test_the_command_converts_layouts_both_ways(folder: Path) -> None:
    accept("layout", folder / "job.yaml", "--to", "bridge", "-o", folder / "bridge.yaml")
    written = yaml.safe_load((folder / "bridge.yaml").read_text())["module_parallelisms"]
    assert (written["llm"]["data_parallel_size"], written["llm"]["expert_model_parallel_size"]) == (2, 2)
    accept("layout", folder / "job.yaml", "--from", folder / "bridge.yaml", "-o", folder / "again.yaml")
    again = yaml.safe_load((folder / "again.yaml").read_text())["layouts"]
    assert again["llm"] == {"pp": 1, "ep": 2, "rank_offset": 2}


def test_every_step_of_a_run_has_its_next_samples(folder: Path) -> None:
    plan, data = folder / "plan.json", folder / "data"
    accept("plan", folder / "job.yaml", "--strategy", "megatron-heterogeneous", "--data", data, "-o", plan)
    run = ("run", plan, "--local", "--warmup", 0, "--steps", 3, "--data", data, "--next-samples", "--json")
    losses = [
        json.loads(accept(*run, *job).stdout.splitlines()[-1])["losses"]
        for job in ((), ("--job", folder / "job.yaml"))
    ]
    assert losses[0] == losses[1]
    assert losses[0][0] > losses[0][1] > losses[0][2]
