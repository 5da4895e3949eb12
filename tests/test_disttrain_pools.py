"""Modules on several kinds of devices: from the job to prices, links, placements and dollars."""

from dataclasses import replace
from pathlib import Path

import pytest

from sim.step.engine import simulate
from tests.job_files import put, write
from tests.layout_jobs import layout_job, vision_language
from tests.plans import disjoint_plan, sample, two_encoders
from workbench.balance.orchestration.cheapest import dollars_per_sample, orchestrate_cheapest
from workbench.balance.orchestration.exact import orchestrate
from workbench.cost.execution import Execution
from workbench.cost.hardware import Cluster, Link, Node
from workbench.cost.model import CostModel
from workbench.cost.profile import ideal_profile, load_profile
from workbench.job.device_pools import Pool, cost_model, dollars_per_hour, placements, pool_cluster
from workbench.job.job import Job, load_job
from workbench.job.matching import cost_for
from workbench.plan.codec import dumps, loads
from workbench.plan.lower import lower
from workbench.schedule.action import Pass
from workbench.search.drive import search
from workbench.search.objectives.objective import Objective
from workbench.strategies import disttrain
from workbench.strategies.registry import PLANNERS, PRICED
from workbench.timing.accept import accept
from workbench.timing.price import price
from workbench.timing.provenance import utilisation, with_provenance

FAST = Link(name="fast", bytes_per_s=8e9, latency_s=1e-6)
SLOW = Link(name="slow", bytes_per_s=1e9, latency_s=5e-6)
CARD = Link(name="card", bytes_per_s=4e9, latency_s=2e-6)
POOLS = {
    "cheap": {"profile": "L20", "nodes": 1, "ranks_per_node": 2, "modules": ["vision"]},
    "fast": {"profile": "H100", "nodes": 2, "ranks_per_node": 4, "inter": {"gb_per_s": 10, "latency_us": 3}},
}


def mixed_cluster(*, cheap: int, fast: int) -> Cluster:
    slow = Node(device="slow", num_ranks=cheap, memory_bytes=2**34, link=SLOW, card=CARD)
    quick = Node(device="quick", num_ranks=fast, memory_bytes=2**34, link=FAST, card=FAST)
    return Cluster(name="mixed", nodes=(slow, quick), intra=FAST, inter=FAST)


def machines() -> CostModel:
    """The quick device does four times the FLOP of the slow one."""
    slow = CostModel(ideal_profile("slow", flop_per_s=1e9))
    return CostModel(ideal_profile("quick", flop_per_s=4e9), beside={"slow": slow})


def pooled_job(*, cheap: int = 4, fast: int = 4, dollars: tuple[float, float] = (1.0, 4.0)) -> Job:
    job = layout_job(vision_language(), {}, microbatch=1, images=(1, 2, 1, 1, 2, 1, 1, 1), num_ranks=8)
    pools = (
        Pool(name="cheap", first_rank=0, num_ranks=cheap, profile="slow", device="slow",
             dollars_per_hour=dollars[0], modules=("vision",)),
        Pool(name="fast", first_rank=cheap, num_ranks=fast, profile="quick", device="quick",
             dollars_per_hour=dollars[1]),
    )  # fmt: skip
    return replace(job, cluster=mixed_cluster(cheap=cheap, fast=fast), pools=pools)


def test_a_job_file_with_pools(tmp_path: Path):
    job = load_job(
        write(tmp_path, put("cluster", value={"pools": POOLS} | {"inter": {"gb_per_s": 20, "latency_us": 1}}))
    )
    cheap, first, second = job.cluster.nodes
    assert [(node.device, node.num_ranks) for node in job.cluster.nodes] == [
        ("L20", 2),
        ("H100", 4),
        ("H100", 4),
    ]
    assert (cheap.memory_bytes, first.memory_bytes) == (48 * 10**9, 80 * 10**9)
    assert cheap.link == load_profile("L20").machine_link("intra").link
    assert cheap.card == Link(name="inter", bytes_per_s=20e9, latency_s=1e-6)  # the cluster's
    assert first == second
    assert first.card == Link(name="inter", bytes_per_s=10e9, latency_s=3e-6)  # its own
    assert [(pool.first_rank, pool.num_ranks, pool.device) for pool in job.pools] == [
        (0, 2, "L20"),
        (2, 8, "H100"),
    ]
    assert job.cluster.joining((0, 3)).bytes_per_s == 10e9  # the slower card of the two


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (
            ("pools", "cheap", "profil"),
            "L20",
            "unknown key 'cluster.pools.cheap.profil'; did you mean 'profile'?",
        ),
        (("pools", "cheap", "profile"), "L2", "cluster.pools.cheap: no profile 'L2'"),
        (
            ("pools", "cheap", "nodes"),
            0,
            "cluster.pools.cheap.nodes: input should be greater than or equal to 1",
        ),
        (
            ("pools", "cheap", "modules"),
            ["visoin"],
            "pool 'cheap': no module 'visoin'; there are vision, llm",
        ),
        (("pools", "fast", "modules"), ["vision"], "no pool takes module 'llm'"),
        (("pools", "fast", "dollars_per_hour"), 0, "cluster.pools.fast.dollars_per_hour"),
        (("device",), "L20", "'pools' excludes everything beside it but 'inter'"),
    ],
)
def test_mistakes_about_pools_are_one_line(tmp_path: Path, path, value, message):
    def change(data):
        data["cluster"] = {"pools": {name: dict(pool) for name, pool in POOLS.items()}}
        put("cluster", *path, value=value)(data)

    file = write(tmp_path, change)
    with pytest.raises(ValueError) as refusal:
        load_job(file)
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_links_between_kinds_are_the_slower_card():
    cluster = mixed_cluster(cheap=2, fast=2)
    assert cluster.joining((0, 1)) is SLOW
    assert cluster.joining((2, 3)) is FAST
    assert cluster.joining((1, 2)) is CARD
    assert cluster.slowest([(0, 1), (2, 3)]) is SLOW
    assert cluster.slowest([(0, 1), (1, 2)]) is CARD  # leaves a node, though it is faster
    assert cluster.device_of((2, 3)) == "quick"
    with pytest.raises(ValueError, match=r"ranks \[1, 2\] work as one but are of several kinds: quick, slow"):
        cluster.device_of((1, 2))


def mixed_plan():
    """Vision and sound on the slow ranks 0 and 1, the LLM on the quick ranks 2 and 3."""
    cuts = {"vision": (3,), "audio": (2,), "llm": (2, 2)}
    plan = disjoint_plan(two_encoders(), [sample(i) for i in range(4)], cuts)
    return replace(plan, cluster=mixed_cluster(cheap=2, fast=2))


def test_every_action_is_priced_on_its_own_device():
    plan = mixed_plan()
    lowered, _ = accept(plan)
    mixed = price(lowered, machines())
    slow, quick = (price(lowered, machines().on(device)) for device in ("slow", "quick"))
    for action in plan.program_actions:
        if action.kind is Pass.STEP:
            continue
        alike = slow if action.stage in (0, 1) else quick
        assert mixed.duration_s(action) == alike.duration_s(action)
    assert slow.step_s(0) == mixed.step_s(0)
    assert quick.step_s(3) == mixed.step_s(3)


def test_messages_between_kinds_take_the_slower_card():
    plan = mixed_plan()
    lowered, memory = accept(plan)
    prices = price(lowered, machines())
    trace = simulate(lowered, prices.duration_s, step_s=prices.step_s, memory=memory)
    sent = {(m.source_rank, m.destination_rank): m for m in trace.messages}
    across, inside = sent[0, 2], sent[2, 3]
    assert across.end_s - across.start_s == pytest.approx(across.num_bytes / 4e9 + 2e-6, rel=1e-9)
    assert inside.end_s - inside.start_s == pytest.approx(inside.num_bytes / 8e9 + 1e-6, rel=1e-9)


def test_utilisation_counts_each_ranks_own_peak():
    plan = mixed_plan()
    lowered, memory = accept(plan)
    cost = machines()
    prices = price(lowered, cost)
    trace = simulate(lowered, prices.duration_s, step_s=prices.step_s, memory=memory)
    mixed = with_provenance(trace, plan, cost.profile, prices, beside=cost.beside)
    alike = with_provenance(trace, plan, cost.profile, prices)
    assert ("profile", "quick, slow") in mixed.details
    assert utilisation(mixed) == pytest.approx(utilisation(alike) * 16 / 10)


def test_a_plan_file_keeps_links_of_nodes():
    plan = mixed_plan()
    assert loads(dumps(plan)).cluster == plan.cluster


def test_a_stage_of_two_kinds_is_refused():
    plan = mixed_plan()
    stages = tuple(replace(stage, ranks=((1, 2),)) if stage.id == 1 else stage for stage in plan.stages)
    with pytest.raises(ValueError, match="of several kinds: quick, slow"):
        price(lower(replace(plan, stages=stages)), machines())


def test_machines_of_a_plan_are_found_by_device():
    plan = mixed_plan()
    nodes = tuple(
        replace(node, device=device) for node, device in zip(plan.cluster.nodes, ("L20", "H100"), strict=True)
    )
    plan = replace(plan, cluster=replace(plan.cluster, nodes=nodes))
    assert [cost_for(plan).on(device).profile.name for device in ("L20", "H100")] == ["L20", "H100"]
    given = replace(load_profile("H100"), name="mine")
    assert [cost_for(plan, [given]).on(device).profile.name for device in ("L20", "H100")] == ["L20", "mine"]
    with pytest.raises(ValueError, match="no shipped profile is of device 'slow'"):
        cost_for(mixed_plan())


def test_another_execution_holds_on_every_device():
    other = machines().executed(Execution(matmul_rate=0.5))
    assert other.on("slow").execution.matmul_rate == 0.5
    assert machines().on("slow").execution.matmul_rate == 1.0


def test_placements_are_all_that_pools_take():
    job = pooled_job()
    names = [tuple(pool.name for pool in chosen) for chosen in placements(job.pools, ["vision", "llm"])]
    assert names == [("cheap", "fast"), ("fast", "fast")]
    assert pool_cluster(job.cluster, job.pools[1]).num_ranks == 4
    assert dollars_per_hour(job.pools, (0, 3, 4)) == 1.0 + 1.0 + 4.0
    assert dollars_per_hour((), (0,)) is None


@pytest.mark.parametrize("cheap", [1, 2, 4])
def test_the_plan_is_the_best_of_all_placements(cheap: int):
    job, cost = pooled_job(cheap=cheap, fast=3), machines()
    tasks = disttrain.placed_tasks(job, cost)
    assert len(tasks) == 2
    for planner, search_, score in (
        (disttrain.plan, orchestrate, lambda _, found: found.iteration_s),
        (disttrain.plan_cheapest, orchestrate_cheapest, dollars_per_sample),
    ):
        plan = planner(job, cost)
        accept(plan)
        task, chosen = min(tasks, key=lambda each: score(each[0], search_(each[0])))
        for module, pool, degrees in zip(job.model.modules, chosen, search_(task).degrees, strict=True):
            stages = [stage for stage in plan.stages if stage.module == module.name]
            ranks = {rank for stage in stages for rank in stage.flat_ranks}
            assert len(ranks) == degrees.num_gpus
            assert pool.first_rank <= min(ranks) <= max(ranks) < pool.end_rank


def test_cheap_devices_are_taken_while_they_are_cheap():
    """Four times as slow: worth it below a quarter of the price, or a little more since nothing is shared."""
    kept = disttrain.plan_cheapest(pooled_job(dollars=(0.5, 4.0)), machines())
    left = disttrain.plan_cheapest(pooled_job(dollars=(4.0, 4.0)), machines())
    assert kept.chain["vision", 0][0].flat_ranks[0] < 4
    assert left.chain["vision", 0][0].flat_ranks[0] >= 4


def test_search_ranks_by_dollars():
    job, cost = pooled_job(), machines()

    def predict(plan):
        lowered, _ = accept(plan)
        prices = price(lowered, cost)
        return simulate(lowered, prices.duration_s, step_s=prices.step_s)

    planners = {name: (PLANNERS | PRICED)[name] for name in ("disttrain", "disttrain-cheapest")}
    found = search(job, cost, planners, predict, objective=Objective.DOLLARS)
    dollars = [candidate.dollars_per_sample for candidate in found]
    assert dollars == sorted(dollars)
    for candidate in found:
        rate = dollars_per_hour(job.pools, candidate.plan.ranks)
        assert candidate.dollars_per_sample == rate / 3600 * candidate.trace.iteration_s / len(job.batch)
    with pytest.raises(
        ValueError, match=r"dollars-per-sample wants cluster.dollars_per_gpu_hour, or cluster.pools"
    ):
        search(replace(job, pools=()), cost, planners, predict, objective=Objective.DOLLARS)
    with pytest.raises(ValueError, match=r"disttrain-cheapest: job 'layouts' wants cluster.pools"):
        disttrain.plan_cheapest(replace(job, pools=()), cost)


def test_a_job_of_pools_gets_a_cost_model_for_each(tmp_path: Path):
    job = load_job(write(tmp_path, put("cluster", value={"pools": POOLS})))
    cost = cost_model(job.pools, load_profile("H100"))
    assert cost.on("H100") is cost
    assert cost.on("L20").profile.name == "L20"
