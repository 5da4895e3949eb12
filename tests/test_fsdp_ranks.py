"""Ranks and microbatches that fsdp and hsdp choose: by the replicas there are, never more ranks at a loss."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from sim.step.engine import simulate
from tests.test_fsdp_instances import two_nodes
from tests.test_fsdp_plan import A40, fsdp_job
from tests.tiny_valm import tiny_batch
from workbench.cost.hardware import Link, Node, uniform
from workbench.job.job import Job
from workbench.job.module_layout import ModuleLayout
from workbench.plan.plan import Plan, Precision
from workbench.planner.layout_choice import Mode
from workbench.strategies import fsdp
from workbench.strategies.registry import PLANNERS
from workbench.timing.accept import accept
from workbench.timing.price import price

MODES = {"fsdp": Mode.SHARDED, "hsdp": Mode.HYBRID}


def simulated_s(plan: Plan) -> float:
    lowered, _ = accept(plan)
    prices = price(lowered, A40)
    return simulate(lowered, prices.duration_s, step_s=prices.step_s).iteration_s


def job_of(num_samples: int, num_ranks: int, cp: int = 1) -> Job:
    """Layouts say only how many ranks share a sample."""
    job = fsdp_job(1, num_ranks=num_ranks)
    layouts = tuple(ModuleLayout(module=name, cp=cp) for name in ("vision", "llm") if cp > 1)
    return replace(job, batch=tiny_batch((1,) * num_samples, (0,) * num_samples), layouts=layouts)


def steps_of_all(job: Job, strategy: str) -> Iterator[float]:
    """The best step of every microbatch size on every number of ranks from two on: brute force."""
    for num_ranks in range(2, job.usable_ranks + 1):
        for samples in range(1, len(job.batch) + 1):
            sized = replace(job, microbatch_samples=samples)
            try:
                yield fsdp.fastest_of_size(sized, A40, MODES[strategy], num_ranks=num_ranks)[0]
            except ValueError:
                continue


@pytest.mark.parametrize("strategy", MODES)
@pytest.mark.parametrize(
    ("num_samples", "num_ranks", "cp"),
    [
        pytest.param(10, 8, 1, id="10-of-8"),
        pytest.param(6, 4, 2, id="cp"),
        pytest.param(12, 7, 1, id="12-of-7"),
    ],
)
def test_no_microbatch_and_no_part_of_the_ranks_is_faster(
    strategy: str, num_samples: int, num_ranks: int, cp: int
) -> None:
    """10 samples on 8 ranks: 5 replicas take one microbatch of 2 each, where 10 // 8 would be two of 1."""
    job = job_of(num_samples, num_ranks, cp)
    plan = PLANNERS[strategy](job, A40)
    assert simulated_s(plan) == pytest.approx(min(steps_of_all(job, strategy)), rel=0.05)
    samples = max(len(m.items) for m in plan.microbatches if m.module == "llm")
    ours_s, _ = fsdp.fastest_of_size(
        replace(job, microbatch_samples=samples), A40, MODES[strategy], num_ranks=len(plan.ranks)
    )
    assert ours_s == min(steps_of_all(job, strategy))


def test_microbatches_divide_the_share_of_a_replica_of_several_ranks() -> None:
    """Two ranks of four share each of six samples: a replica has three, and takes them at once."""
    layouts = tuple(ModuleLayout(module=name, cp=2, dp=2) for name in ("vision", "llm"))
    plan = PLANNERS["fsdp"](replace(job_of(6, 4), layouts=layouts), A40)
    assert len(plan.replicas("llm")) == 2
    assert {len(m.items) for m in plan.microbatches} == {3}


def test_a_node_alone_is_taken_where_the_link_to_the_next_is_slow() -> None:
    """On four ranks of two nodes gathers take longer than all passes of a node's two."""
    plan = PLANNERS["fsdp"](two_nodes(1e8), A40)
    assert plan.ranks == (0, 1)
    whole = fsdp.fastest_of_size(replace(two_nodes(1e8), microbatch_samples=2), A40)[1]
    assert simulated_s(plan) < simulated_s(whole)


@pytest.mark.parametrize("wide", [None, Precision.FLOAT32])
@pytest.mark.parametrize(("mode", "num_ranks"), [(Mode.SHARDED, 5), (Mode.SHARDED, 8), (Mode.HYBRID, 6)])
def test_the_formula_knows_nodes_in_part_and_wide_gradients(
    wide: Precision | None, mode: Mode, num_ranks: int
) -> None:
    """One rank of five on the second node of four; an instance over two; gradients of twice the bytes."""
    node = Node(device="A40", num_ranks=4, memory_bytes=2**34, num_cards=4)
    near = Link(name="near", bytes_per_s=4e9, latency_s=1e-6)
    far = Link(name="far", bytes_per_s=1e9, latency_s=1e-6)
    job = job_of(num_ranks * 2, 8)
    job = replace(
        job,
        cluster=uniform("two", node, num_nodes=2, intra=near, inter=far),
        microbatch_samples=2,
        settings=replace(job.settings, precision=Precision.BFLOAT16, optimizer_precision=wide),
    )
    formula_s, plan = fsdp.fastest_of_size(job, A40, mode, num_ranks=num_ranks)
    assert len(plan.ranks) == num_ranks
    assert simulated_s(plan) == pytest.approx(formula_s, rel=0.05)
