"""`explain`: the account is the whole step, waste and sensitivities are told, and input is checked."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.table import Table

from sim.predict import predict, prices_of, step_s
from tests.command_line import answered, refuse, workbench
from tests.vlm_job import H100, VLM, planned, side, vlm_job
from workbench.cost.collectives import Collective
from workbench.cost.hardware import uniform
from workbench.data.sample import Sample, Segment
from workbench.explain.changes import Changes, Judged, Tried
from workbench.explain.critical_path import Cause
from workbench.explain.explanation import Account, account_of
from workbench.explain.idle import IdleCause, IdleSeconds
from workbench.explain.sensitivity import sensitivities
from workbench.explain.warnings import unlike_layouts, warnings_of, waste_of
from workbench.job.job import Job, load_job
from workbench.job.module_layout import ModuleLayout
from workbench.plan.codec import write_plan
from workbench.plan.plan import KeyExchange, ModuleSettings, Recompute, Sharding
from workbench.report.explained import account_tables, changes_tables
from workbench.schedule.action import Pass
from workbench.strategies import dip
from workbench.timing.accept import accept


@pytest.fixture(scope="module")
def job() -> Job:
    return vlm_job()


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


def test_changes_without_effect_are_not_the_closest(job: Job) -> None:
    """A millisecond of 100 s is no effect, and a byte of 1,000 none; 100 ms are, and 20 bytes."""
    plan = planned(job)

    def tried(about: str, step_s: float, peak_bytes: int) -> Tried:
        change = SimpleNamespace(kind=Cause.HOST, about=about)
        return Tried(change=change, judged=Judged(plan=plan, step_s=step_s, peak_bytes=peak_bytes))

    slower = (
        tried("as before", 100.001, 999),
        tried("less memory", 100.0, 980),
        tried("slower", 100.1, 1000),
    )
    base = Judged(plan=plan, step_s=100.0, peak_bytes=1000)
    table, counts = changes_tables(
        Changes(base=base, helping=(), slower=slower, misfits=(), refused=()), most=5
    )
    assert isinstance(table, Table)
    assert list(table.columns[0].cells) == ["less memory", "slower"]
    assert "3 do not help" in str(counts)


def test_a_step_is_sensitive_to_what_it_is_made_of(job: Job) -> None:
    """Rates that nothing uses change nothing; slower products make it longer, by a ninth at most."""
    lowered, _ = accept(planned(job))
    found = {each.about: each for each in sensitivities(lowered, H100, step_s)}
    base_s = step_s(lowered, H100)
    products = found["matrix product rate"]
    assert base_s < products.less_s < base_s / 0.9
    assert base_s / 1.1 < products.more_s < base_s
    assert found["rate of collectives inside layers"].span_s == 0
    assert "link bandwidth between nodes" not in found, "there is one node"
    launch = found["kernel launch times"]
    assert launch.less_s < base_s < launch.more_s
    for modality in ("text", "vision"):
        tokens = found[f"{modality} tokens"]
        assert tokens.refusal == ""
        assert tokens.less_s < tokens.more_s


@pytest.mark.parametrize("strategy", ["fsdp", "megatron-heterogeneous"])
def test_a_rate_changes_a_step_by_its_tenth_at_most(job: Job, strategy: str) -> None:
    """No collective leaves its measured table because a link's bandwidth is varied."""
    layouts = () if strategy == "fsdp" else job.layouts
    lowered, _ = accept(planned(replace(job, layouts=layouts), strategy))
    base_s = step_s(lowered, H100)
    found = [each for each in sensitivities(lowered, H100, step_s) if each.about.split()[0] != "kernel"]
    rates = [each for each in found if "rate" in each.about or "bandwidth" in each.about]
    assert len(rates) == 6
    for each in rates:
        assert base_s * (1 - 1e-9) <= each.less_s <= base_s / 0.9 * (1 + 1e-9), each.about
        assert base_s / 1.1 * (1 - 1e-9) <= each.more_s <= base_s * (1 + 1e-9), each.about
    inside = next(each for each in rates if each.about == "link bandwidth inside a node")
    assert inside.more_s < base_s


def test_measured_collectives_on_twice_the_bandwidth_keep_their_latency() -> None:
    seconds, link = H100.collectives.seconds, H100.profile.machine_link("intra").link
    fast = replace(link, bytes_per_s=2 * link.bytes_per_s)
    least, most = 512.0, 536870912.0  # the table's smallest and largest messages
    latency_s = seconds(Collective.ALL_GATHER, least, 8, link)
    assert seconds(Collective.ALL_GATHER, least, 8, fast) == pytest.approx(latency_s)
    moving_s = seconds(Collective.ALL_GATHER, most, 8, link) - latency_s
    assert seconds(Collective.ALL_GATHER, most, 8, fast) == pytest.approx(latency_s + moving_s / 2)


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


@pytest.mark.parametrize(
    ("strategy", "cause"), [("fsdp", "ranks with more work"), ("cornstarch", "waits for a stage")]
)
def test_ranks_wait_for_stages_or_for_ranks_that_do_not_join(job: Job, strategy: str, cause: str) -> None:
    is_fsdp = strategy == "fsdp"
    lowered, memory = accept(planned(replace(job, layouts=() if is_fsdp else job.layouts), strategy))
    trace = predict(lowered, memory, H100)
    found = account_of(lowered, trace, H100, prices_of)
    _, idle = account_tables(found, trace.iteration_s)
    causes, places = (list(column.cells) for column in idle.columns[:2])
    rows = list(zip(causes, places, strict=True))
    assert (cause, "llm" if is_fsdp else "llm, stage 1") in rows
    assert len(set(rows)) == len(rows)
    words = {str(word).split()[-2] for word in places if ", " in str(word)}
    assert words == (set() if is_fsdp else {"stage"})
    assert ("pipeline drains" in map(str, causes)) == (not is_fsdp)
    assert all(each.is_layer == is_fsdp for each in found.idle if each.place is not None)


def test_waits_for_layers_of_a_module_are_one_row() -> None:
    """Each layer that is gathered for itself is a stage, but no stage of a pipeline."""
    idle = [
        IdleSeconds(cause, "llm", place, 0.1, is_layer=True)
        for cause in (IdleCause.STAGE, IdleCause.DRAIN)
        for place in (3, 4)
    ]
    account = Account(path=(), num_steps=0, idle=tuple(idle))
    _, table = account_tables(account, 1.0)
    causes, places = (list(column.cells) for column in table.columns[:2])
    assert causes == ["waits for a layer", "waits after the last pass"]
    assert places == ["llm", "llm"]


def test_waste_is_told(job: Job) -> None:
    alone = replace(job, layouts=(ModuleLayout(module="llm", pp=2),), replicas=1)
    (line,) = waste_of(dip.plan(alone, H100), alone)
    assert line.startswith("dip leaves 6 of 8 ranks idle")
    assert waste_of(planned(replace(job, max_ranks=6)), replace(job, max_ranks=6)) == ()


def test_replicas_with_unequal_numbers_of_microbatches_are_told_in_one_line(job: Job) -> None:
    few = replace(job, batch=job.batch[:6], microbatch_samples=1, replicas=2)
    deep = replace(few, layouts=(ModuleLayout(module="vision", pp=1), ModuleLayout(module="llm", pp=3)))
    plan = planned(deep)
    first, *rest = (each for each in plan.microbatches if (each.module, each.replica) == ("llm", 1))
    fewer = replace(plan, microbatches=tuple(each for each in plan.microbatches if each is not first))
    assert len(rest) == 2
    (line,) = (line for line in waste_of(fewer, deep) if "microbatches" in line)
    assert line.startswith(
        "cornstarch has 2 to 3 microbatches, the job asks for 3, on 4 consecutive stages in 2 of 2 replicas, "
    )


def test_layouts_that_a_strategy_does_not_keep_are_told(job: Job) -> None:
    cuts = (3, len(job.model.llm.layers) - 3)
    asked = replace(job, layouts=(ModuleLayout(module="llm", pp=2, stage_layers=cuts),))
    assert unlike_layouts(planned(asked), asked) == ()
    (line,) = unlike_layouts(planned(asked, "megatron-homogeneous"), asked)
    assert (
        f" changes the layout of 'llm': the job has stage_layers {[*cuts]}, the plan stage_layers [" in line
    )
    (line,) = unlike_layouts(planned(job), replace(job, layouts=(ModuleLayout(module="llm", pp=1),)))
    assert line == "cornstarch changes the layout of 'llm': the job has pp 1, the plan pp 2"
    again = ModuleSettings(module="llm", recompute=Recompute.BLOCKS, sharding=Sharding.OPTIMIZER)
    kept = replace(job, settings=replace(job.settings, modules=(again,)))
    assert unlike_layouts(planned(kept), kept) == ()
    shards = replace(again, sharding=Sharding.OPTIMIZER, instances=2, key_exchange=KeyExchange.RING)
    others = replace(job, settings=replace(job.settings, modules=(shards,)))
    assert "instances 2, key_exchange ring, the plan" in unlike_layouts(planned(job), others)[0]
    placed = replace(job, layouts=(ModuleLayout(module="llm", rank_offset=0),))
    assert unlike_layouts(planned(job), placed)[0].endswith(
        "the job has rank_offset 0, the plan rank_offset 1"
    )
    settings_alone = replace(kept, layouts=())
    assert len(unlike_layouts(planned(replace(job, layouts=())), settings_alone)) == 1
    (line,) = unlike_layouts(planned(job), kept)
    assert line == (
        "cornstarch changes the layout of 'llm': the job has recompute blocks, sharding optimizer, the plan "
        "recompute none, sharding none"
    )


def test_a_batch_that_a_strategy_divides_its_own_way_is_named(job: Job) -> None:
    asked = replace(job, microbatch_samples=2)
    assert not any("changes the batch" in line for line in warnings_of(planned(asked), asked))
    wide = replace(asked, layouts=())
    plan = planned(wide, "fsdp")
    replicas = len(plan.replicas("llm"))
    samples = len(plan.batch) // replicas // len(plan.microbatches_of["llm", 0])
    assert samples != 2
    (line,) = (line for line in warnings_of(plan, replace(wide, replicas=4)) if "changes the batch" in line)
    assert line == (
        "fsdp changes the batch: the job has replicas 4, microbatch_samples 2, the plan replicas "
        f"{replicas}, microbatch_samples {samples}"
    )
    unasked = replace(wide, replicas=1, microbatch_samples=1)
    assert not any("changes the batch" in line for line in warnings_of(planned(unasked, "fsdp"), unasked))


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
    assert "so some stages always wait; sample 0 has" in lines[0]


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
    assert "differences" in workbench("diff", file, other).stdout
    assert workbench("diff", file, file).stdout.strip() == "The plans do not differ."


def test_explain_takes_a_job_and_a_strategy(tmp_path: Path) -> None:
    file = tmp_path / "vlm.yaml"
    file.write_text(VLM)
    ran = workbench("explain", file, "--strategy", "dip", "--changes", "0", "--json")
    assert ran.exit_code == 0
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["changes"] is None
    assert found["note"] == "no changes tried: --changes 0"
    assert found["step"]["strategy"] == "dip"


def test_a_plan_of_no_strategy_is_explained_like_any_other(job: Job, tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    write_plan(replace(planned(job), strategy="joint"), file)
    found = answered("explain", file, "--budget", "60s")
    changes = [*found["changes"]["helping"], *found["changes"]["slower"]]
    assert {change["kind"] for change in changes} >= {"order", "memory"}
    assert found["note"] == ""


def test_layouts_that_no_strategy_takes_are_changed_by_moves(job: Job, tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    write_plan(replace(planned(job, "megatron-homogeneous"), strategy="theirs"), file)
    found = answered("explain", file, "--budget", "60")
    note = "changes are those of a joint search, as megatron-heterogeneous cannot plan these layouts: "
    assert found["note"].startswith(note + "the layout needs 12 ranks")
    assert any(change["kind"] == "memory" for change in found["changes"]["slower"])


def test_a_budget_also_ends_the_planning_of_a_job(tmp_path: Path) -> None:
    """With the best plan so far, or a line that says that there is none yet."""
    spec = tmp_path / "vlm.yaml"
    spec.write_text(VLM.partition("layouts:")[0] + "profile: H100\n")
    line = "--budget ended before dip had a plan; want more time, or a plan file"
    refuse("explain", spec, "--strategy", "dip", "--budget", "0", words=line, folder=tmp_path)


def test_bad_input_is_one_line(job: Job, tmp_path: Path) -> None:
    file, spec = tmp_path / "a.json", tmp_path / "vlm.yaml"
    write_plan(planned(job), file)
    spec.write_text(VLM)
    other = tmp_path / "other.yaml"
    other.write_text(VLM.replace("samples: 16", "samples: 8"))
    for arguments, message in (
        (("explain", tmp_path / "none.json"), "No such file"),
        (("explain", file, "--strategy", "dip"), "is a plan, which has a strategy"),
        (("explain", spec, "--job", spec), "is a job file"),
        (("explain", file, "--job", other), "a plan for another batch than job 'vlm'"),
        (("explain", spec, "--strategy", "fsdp"), "fsdp: every rank does all layers of 'llm' whole"),
        (
            ("explain", file, "--budget", "-1"),
            "--budget: want a duration > 0 such as 60s, 90m, 12h, 3d or 2w, got '-1'",
        ),
        (("diff", file, spec), "vlm.yaml"),
    ):
        ran = workbench(*arguments)
        assert ran.exit_code == 2
        assert message in ran.stderr
        assert len(ran.stderr.splitlines()) == 1
