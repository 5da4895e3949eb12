"""`explain` and `diff`: changes are what `plan` and `simulate` say of them, sums add up, input is checked."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.predict import predict, prices_of, step_s
from tests.command_line import answered, workbench
from workbench.cost.hardware import uniform
from workbench.cost.model import CostModel
from workbench.cost.profile import load_profile
from workbench.data.sample import Sample, Segment
from workbench.explain.changes import Judge, try_changes
from workbench.explain.critical_path import Cause
from workbench.explain.difference import Side, difference, differing
from workbench.explain.explanation import account_of, parts_of_all
from workbench.explain.neighbours import ChangeKind, neighbours
from workbench.explain.plan_as_job import Origin, origin_of
from workbench.explain.sensitivity import sensitivities
from workbench.explain.warnings import unlike_layouts, waste_of
from workbench.job.job import Job, ModuleLayout, load_job
from workbench.memory.account import peak_bytes
from workbench.plan.build import with_programs
from workbench.plan.codec import plan_hash, write_plan
from workbench.plan.plan import Plan, Sharding
from workbench.planner.stage_counts import silent
from workbench.schedule.action import Pass
from workbench.schedule.choice import ScheduleKind, usual
from workbench.strategies import cornstarch, dip
from workbench.strategies.registry import PLANNERS
from workbench.timing.accept import accept

H100 = CostModel(load_profile("H100"))
VLM = """
name: vlm
model:
  modules:
    vision:
      config: {model_type: siglip_vision_model, hidden_size: 768, intermediate_size: 3072,
               num_hidden_layers: 6, num_attention_heads: 12, image_size: 224, patch_size: 14,
               vision_use_head: false}
      trainable: projector
      projector: linear
    llm:
      config: {model_type: llama, vocab_size: 32000, hidden_size: 1024, intermediate_size: 2816,
               num_hidden_layers: 8, num_attention_heads: 16, num_key_value_heads: 8}
cluster: {device: H100, nodes: 1, ranks_per_node: 8}
batch:
  samples: 16
  replicas: 2
  mixture: {seed: 1, text_tokens: [64, 2048], items: {vision: {most: 3, missing: 0.25}}}
layouts:
  vision: {pp: 1}
  llm: {pp: 2}
profile: H100
"""
UNTOLD = "entrain-graded"  # where single samples are heavy it makes fewer microbatches than were asked for


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    file = tmp_path_factory.mktemp("job") / "vlm.yaml"
    file.write_text(VLM)
    return load_job(file)


def planned(job: Job, strategy: str = "cornstarch") -> Plan:
    return PLANNERS[strategy](job, H100, silent)


def judge(**changes: object) -> Judge:
    return replace(Judge(planners=PLANNERS, cost=H100, step_s=step_s), **changes)  # type: ignore[arg-type]


def side(plan: Plan) -> Side:
    lowered, memory = accept(plan)
    trace = predict(lowered, memory, H100)
    return Side(lowered=lowered, trace=trace, parts=parts_of_all(lowered, H100, prices_of))


@pytest.mark.parametrize("name", PLANNERS)
def test_a_strategy_makes_the_plan_again_of_the_job_that_the_plan_tells(job: Job, name: str) -> None:
    degrees = () if name in ("fsdp", "hsdp") else job.layouts
    plan = planned(replace(job, layouts=degrees), name)
    origin = origin_of(plan, H100, PLANNERS[name])
    assert origin.is_exact or name == UNTOLD
    again = PLANNERS[name](origin.job, H100, silent)
    assert (plan_hash(again) == plan_hash(plan)) == origin.is_exact


def test_ranks_without_token_shards_straggle_where_zigzag_is_uneven(job: Job) -> None:
    """One document of three quarters of a row: half of four ranks have twice the mean of all pairs."""
    documents = "causal_document(lengths=[49152, 8192, 8192])"
    shares = {}
    for mask in (documents, "causal"):
        batch = (Sample(0, (Segment("text", 0, 65536, 65536),), mask),)
        layouts = (ModuleLayout(module="vision", pp=1), ModuleLayout(module="llm", pp=1, cp=4))
        plan = planned(replace(job, batch=batch, replicas=1, layouts=layouts), "megatron-heterogeneous")
        llm = {stage.id for stage in plan.stages if stage.module == "llm"}
        parts = side(plan).parts.passes
        shares[mask] = {action: part.straggler for action, part in parts.items() if action.stage in llm}
    passes = [action for action in shares[documents] if action.kind in (Pass.F, Pass.B)]
    assert len(passes) == 2
    assert all(shares[documents][action] > 0.1 for action in passes)
    assert all(share == 0.0 for share in shares["causal"].values())


@pytest.mark.parametrize("kind", ScheduleKind)
def test_the_schedule_is_told_from_the_programs(job: Job, kind: ScheduleKind) -> None:
    plan = planned(replace(job, schedule=usual(kind)))
    assert origin_of(plan, H100, PLANNERS["cornstarch"]).job.schedule == usual(kind)


def test_changes_are_what_plan_and_simulate_say_of_them(job: Job) -> None:
    """Every change that was simulated, planned by hand as a user would, and simulated with its trace."""
    plan, origin = planned(job), Origin(job, "cornstarch", is_exact=True)
    found = try_changes(judge().judged(plan), origin, tuple(neighbours(job)), judge())
    assert found.num_simulated > 15
    assert {each.change.kind for each in (*found.helping, *found.slower)} >= {
        ChangeKind.LAYOUT,
        ChangeKind.MICROBATCHES,
        ChangeKind.SCHEDULE,
        ChangeKind.ACTIVATIONS,
        ChangeKind.SHARDING,
    }
    for each in (*found.helping, *found.slower):
        assert each.judged is not None
        lowered, memory = accept(cornstarch.plan(each.change.edit(job), H100))
        trace = predict(lowered, memory, H100)
        assert each.judged.step_s == trace.iteration_s
        assert each.judged.peak_bytes == max(peak_bytes(lowered, memory).values())
    steps = [each.judged.step_s for each in found.helping if each.judged]
    assert steps == sorted(steps)
    assert all(seconds < found.base.step_s for seconds in steps)


def test_a_change_says_what_is_changed(job: Job) -> None:
    by_name = {change.about: change for change in neighbours(job, ["dip"])}
    edited = by_name["llm tp 1 -> 2, pp 2 -> 1"].edit(job)
    assert edited.layouts == (ModuleLayout(module="vision", pp=1), ModuleLayout(module="llm", pp=1, tp=2))
    both = by_name["dp 2 -> 1, vision tp 1 -> 2, llm tp 1 -> 2"].edit(job)
    assert (both.replicas, [layout.tp for layout in both.layouts]) == (1, [2, 2])
    moved = by_name["vision pp 1 -> 2, llm pp 2 -> 1"].edit(job)
    assert [layout.pp for layout in moved.layouts] == [2, 1]
    assert by_name["samples of a microbatch 1 -> 2"].edit(job).microbatch_samples == 2
    assert by_name["schedule 1f1b -> gpipe"].edit(job).schedule == usual(ScheduleKind.GPIPE)
    recomputed = by_name["llm recompute none -> full"].edit(job).settings
    assert (
        by_name["llm recompute none -> full"].edit(replace(job, settings=recomputed)).settings == recomputed
    )
    assert by_name["strategy dip"].strategy == "dip"
    assert "llm ep 1 -> 2" not in by_name, "it has no experts"


def test_a_change_that_does_not_fit_stands_apart(job: Job) -> None:
    """Of a cluster whose memory is what the plan holds, all that holds more does not fit."""
    held = judge().judged(planned(job)).peak_bytes
    nodes = tuple(replace(node, memory_bytes=held) for node in job.cluster.nodes)
    tight = replace(job, cluster=replace(job.cluster, nodes=nodes))
    base = judge().judged(planned(tight))
    found = try_changes(base, Origin(tight, "cornstarch", is_exact=True), tuple(neighbours(tight)), judge())
    assert base.misfit == ""
    assert found.misfits
    for each in found.misfits:
        assert each.judged is not None
        assert each.judged.peak_bytes > held
        assert "does not fit" in each.judged.misfit
    for each in (*found.helping, *found.slower):
        assert each.judged is not None
        assert each.judged.peak_bytes <= held


def test_time_ends_the_changes_also_within_a_planner(job: Job) -> None:
    """The clock runs out at its fifth reading; the rest is counted and not tried."""
    plan, todo, readings = planned(job), tuple(neighbours(job)), iter(range(1000))
    hurried = judge(is_over=lambda: next(readings) >= 4)
    found = try_changes(hurried.judged(plan), Origin(job, "cornstarch", is_exact=True), todo, hurried)
    done = found.num_simulated + found.num_same + len(found.refused)
    assert 0 < done < len(todo)
    assert done + found.num_left == len(todo)


def test_what_no_strategy_plans_has_its_reason(job: Job) -> None:
    plan = planned(job)
    found = try_changes(
        judge().judged(plan), Origin(job, "cornstarch", is_exact=True), tuple(neighbours(job)), judge()
    )
    refusals = {each.change.about: each.refusal for each in found.refused}
    assert "tp of module 'llm' must divide its 8 key/value heads" not in refusals["llm pp 2 -> 4"]
    assert "the layout needs 10 ranks" in refusals["llm pp 2 -> 4"]


def test_a_step_is_sensitive_to_what_it_is_made_of(job: Job) -> None:
    """Rates that nothing uses change nothing; slower products make it longer, by a ninth at most."""
    lowered, _ = accept(planned(job))
    found = {each.about: each for each in sensitivities(lowered, H100, step_s)}
    base_s = step_s(lowered, H100)
    products = found["rate of products"]
    assert base_s < products.less_s < base_s / 0.9
    assert base_s / 1.1 < products.more_s < base_s
    assert found["rate of collectives inside layers"].span_s == 0
    assert "bandwidth of links between nodes" not in found, "there is one node"
    launch = found["times of launches"]
    assert launch.less_s < base_s < launch.more_s
    for modality in ("text", "vision"):
        tokens = found[f"tokens of {modality}"]
        assert tokens.refusal == ""
        assert tokens.less_s < tokens.more_s


def test_compute_that_is_all_there_is_follows_its_rate() -> None:
    """One rank without launches: every kernel and the optimizer a tenth faster is the step a tenth faster."""
    lowered, _ = accept(planned(load_job(Path("examples/tiny.yaml"))))
    rates = {"matmul_rate": 1.1, "attention_rate": 1.1, "memory_rate": 1.1, "step_rate": 1.1}
    faster = H100.executed(replace(H100.execution, **rates))
    passes = [action for action in lowered.plan.program_actions if action.stage is not None]
    for action in passes:
        ratio = prices_of(lowered, faster).duration_s(action) / prices_of(lowered, H100).duration_s(action)
        assert 1 / 1.1 - 1e-9 <= ratio <= 1 + 1e-9


def test_weights_that_are_gathered_are_no_update(job: Job) -> None:
    """Of optimizer state sharded over two nodes, the gather is half of the weights over the slow card."""
    slow = replace(job.cluster.inter, bytes_per_s=1e8, latency_s=0.0)
    node = replace(job.cluster.nodes[0], num_ranks=1, card=None)
    cluster = uniform("slow", node, num_nodes=2, intra=job.cluster.intra, inter=slow)
    layouts = (ModuleLayout(module="vision", pp=1), ModuleLayout(module="llm", pp=1))
    whole = replace(job, cluster=cluster, layouts=layouts)
    plan = planned(whole, "megatron-colocated")
    assert plan.settings.of("llm").sharding is Sharding.OPTIMIZER
    lowered, memory = accept(plan)
    trace = predict(lowered, memory, H100)
    found = {each.cause: each.seconds for each in account_of(lowered, trace, H100, prices_of).path}
    updated = sum(group.num_elements for group in lowered.groups if 0 in group.ranks)
    on_the_wire_s = updated * 2 / 2 / 1e8
    assert (
        on_the_wire_s <= found[Cause.AT_STEP] < 1.2 * on_the_wire_s
    )  # a collective reaches a share of a card
    assert found[Cause.STEP] < 0.1 * found[Cause.AT_STEP]


def test_the_account_is_the_whole_step(job: Job) -> None:
    lowered, memory = accept(planned(job))
    trace = predict(lowered, memory, H100)
    found = account_of(lowered, trace, H100, prices_of)
    assert sum(cause.seconds for cause in found.path) == pytest.approx(trace.iteration_s, rel=1e-12)
    assert all(cause.seconds >= 0 for cause in found.path)


STRATEGIES = st.sampled_from(["cornstarch", "encoders-colocated", "dip", "entrain", "megatron-homogeneous"])


@settings(max_examples=12)
@given(STRATEGIES, STRATEGIES)
def test_changes_of_both_tables_add_up_to_the_difference(job: Job, first: str, second: str) -> None:
    sides = side(planned(job, first)), side(planned(job, second))
    found = difference(*sides)
    change_s = sides[1].trace.iteration_s - sides[0].trace.iteration_s
    for rows in (found.along_path, found.of_ranks):
        assert sum(row.change_s for row in rows) == pytest.approx(change_s, abs=1e-12)
        assert sum(row.first_s for row in rows) == pytest.approx(sides[0].trace.iteration_s, rel=1e-12)
    if first == second:
        assert found.differs == ()
        assert change_s == 0


def test_what_differs_is_named_part_by_part(job: Job) -> None:
    one = planned(job)
    other = planned(
        replace(
            job,
            layouts=(ModuleLayout(module="vision", pp=1), ModuleLayout(module="llm", pp=1, tp=2)),
            microbatch_samples=2,
        )
    )
    found = {(each.part, each.about): each[2:] for each in difference(side(one), side(other)).differs}
    assert found["stages", "llm"] == ("dp 2 x 2 stages of cp 1 x tp 1", "dp 2 x 1 stages of cp 1 x tp 2")
    assert found["microbatches", "llm"] == ("16 of 1 items", "8 of 2 items")
    assert ("samples", "") not in found
    assert ("stages", "vision") not in found


def test_what_only_the_second_replica_has_is_named(job: Job) -> None:
    """Its cuts, the ranks of its stages, and whose microbatches they are."""
    plan = planned(job)
    llm = [stage for stage in plan.stages if stage.module == "llm" and stage.replica == 1]
    middle, end = llm[0].layers[1], llm[1].layers[1]
    cut = {llm[0].id: (0, middle - 1), llm[1].id: (middle - 1, end)}
    place = {llm[0].id: llm[1].ranks, llm[1].id: llm[0].ranks}
    cuts = tuple(replace(stage, layers=cut.get(stage.id, stage.layers)) for stage in plan.stages)
    places = tuple(replace(stage, ranks=place.get(stage.id, stage.ranks)) for stage in plan.stages)
    told = {row[1]: row[2:] for row in differing(plan, replace(plan, stages=cuts))}
    assert told["llm, layers of replica 1"] == (
        f"{middle} {end - middle}",
        f"{middle - 1} {end - middle + 1}",
    )
    moved = with_programs(replace(plan, stages=places, programs=()))
    first, second = (stage.flat_ranks[0] for stage in llm)
    told = {row[1]: row[2:] for row in differing(plan, moved)}
    assert told["llm, ranks of replica 1"] == (f"{first} {second}", f"{second} {first}")
    swapped = tuple(replace(each, replica=1 - each.replica) for each in plan.microbatches)
    told = {row[1]: row[2:] for row in differing(plan, replace(plan, microbatches=swapped))}
    assert told["llm, samples"] == ("16", "0 of them the same")


def test_waste_is_told(job: Job) -> None:
    alone = replace(job, layouts=(ModuleLayout(module="llm", pp=2),), replicas=1)
    (line,) = waste_of(dip.plan(alone, H100), alone)
    assert line.startswith("dip leaves 6 of 8 ranks idle")
    assert waste_of(planned(replace(job, max_ranks=6)), replace(job, max_ranks=6)) == ()


def test_layouts_that_a_strategy_does_not_keep_are_told(job: Job) -> None:
    cuts = (3, len(job.model.llm.layers) - 3)
    asked = replace(job, layouts=(ModuleLayout(module="llm", pp=2, stage_layers=cuts),))
    assert unlike_layouts(planned(asked), asked) == ()
    (line,) = unlike_layouts(planned(asked, "megatron-homogeneous"), asked)
    assert f" keep the layout of 'llm': asked for stage_layers {[*cuts]}, it has stage_layers [" in line
    (line,) = unlike_layouts(planned(job), replace(job, layouts=(ModuleLayout(module="llm", pp=1),)))
    assert line == "cornstarch does not keep the layout of 'llm': asked for pp 1, it has pp 2"


def test_a_heavy_sample_that_collapses_microbatches_is_told(job: Job) -> None:
    text = replace(job.batch[0].segments[-1], tokens_in=200_000, tokens_out=200_000)
    heavy = replace(job.batch[0], segments=(*job.batch[0].segments[:-1], text))
    lone = replace(
        job,
        batch=(heavy, *job.batch[1:6]),
        replicas=1,
        max_ranks=4,
        layouts=(ModuleLayout(module="llm", pp=3),),
    )
    lines = [line for line in waste_of(planned(lone, "entrain"), lone) if "microbatches" in line]
    assert len(lines) == 1
    assert "so that some always wait; sample 0 has" in lines[0]


def test_explain_and_diff_for_people_and_machines(job: Job, tmp_path: Path) -> None:
    file, other = tmp_path / "a.json", tmp_path / "b.json"
    write_plan(planned(job), file)
    write_plan(planned(job, "dip"), other)
    ran = workbench("explain", file, "--profile", "H100", "--json")
    assert ran.exit_code == 0
    found = json.loads(ran.stdout.splitlines()[-1])
    step = found["step"]["iteration_s"]
    assert sum(row["seconds"] for row in found["critical_path"]) == pytest.approx(step)
    assert len(found["changes"]["best"]) == 5
    assert found["changes"]["best"][0]["iteration_s"] < step
    assert found["note"] == ""
    told = workbench("explain", file, "--changes", "1")
    assert "changes that help most" in told.stdout
    assert "sensitivity of the step" in told.stdout
    compared = answered("diff", file, other)
    assert sum(row["change_s"] for row in compared["mean_rank"]) == pytest.approx(compared["change_s"])
    assert "what differs" in workbench("diff", file, other).stdout
    assert workbench("diff", file, file).stdout.strip() == "Both plans do the same."


def test_explain_takes_a_job_and_a_strategy(tmp_path: Path) -> None:
    file = tmp_path / "vlm.yaml"
    file.write_text(VLM)
    ran = workbench("explain", file, "--strategy", "dip", "--changes", "0", "--json")
    assert ran.exit_code == 0
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["changes"] is None
    assert found["note"] == "no changes were asked for"
    assert found["step"]["strategy"] == "dip"


def test_a_plan_of_no_strategy_is_explained_like_any_other(job: Job, tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    write_plan(replace(planned(job), strategy="joint"), file)
    found = answered("explain", file, "--budget", "2")
    assert found["changes"]["helping"] or found["changes"]["slower"]


def test_bad_input_is_one_line(job: Job, tmp_path: Path) -> None:
    file, spec = tmp_path / "a.json", tmp_path / "vlm.yaml"
    write_plan(planned(job), file)
    spec.write_text(VLM)
    other = tmp_path / "other.yaml"
    other.write_text(VLM.replace("samples: 16", "samples: 8"))
    for arguments, message in (
        (("explain", tmp_path / "none.json"), "No such file"),
        (("explain", file, "--strategy", "dip"), "is a plan, of a strategy already"),
        (("explain", spec, "--job", spec), "is a job already"),
        (("explain", file, "--job", other), "a plan for another batch than job 'vlm'"),
        (("explain", spec, "--strategy", "fsdp"), "fsdp: every rank does all layers of 'llm' whole"),
        (("explain", file, "--budget", "-1"), "greater than or equal to 0"),
        (("diff", file, spec), "vlm.yaml"),
    ):
        ran = workbench(*arguments)
        assert ran.exit_code == 2
        assert message in ran.stderr
        assert len(ran.stderr.splitlines()) == 1
