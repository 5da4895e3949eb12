"""Test plans: every strategy and schedule at two numbers of ranks, and every division of a layer."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from experiments.fidelity.memory import tiny_job
from experiments.fidelity.mutant_kinds import EXAMPLES, newer_plans, roomy, small, with_layouts
from experiments.fidelity.work import LLM, Cuts, Work, decoder, plan_of, text_only, text_samples, this_machine
from workbench.cost.hardware import Link
from workbench.cost.model import CostModel
from workbench.cost.profile import load_profile
from workbench.job.device_pools import Aim, Pool
from workbench.job.job import Job, load_job
from workbench.job.module_layout import ModuleLayout
from workbench.plan.build import with_programs
from workbench.plan.check import check
from workbench.plan.lower import lower
from workbench.plan.plan import Plan
from workbench.planner.stage_counts import silent
from workbench.schedule.choice import ScheduleKind, rank_block, usual
from workbench.strategies.registry import PLANNERS, PRICED

LINK = Link(name="wire", bytes_per_s=1e9, latency_s=1e-4)
SMALL_NODE_BYTES = 20 << 20  # less than a half of the small job's weights and states
RANK_COUNTS = 2
PIPELINES = (2, 4)  # ranks
NUM_MICROBATCHES = 4


@dataclass(frozen=True, slots=True)
class Case:
    """A plan with its subject: a schedule or strategy by name, or a division of a layer."""

    name: str
    plan: Plan
    hangs_as_before: bool = False  # shown with the executor of before too


def cases() -> Iterator[Case]:
    """All cases; equal plans of two strategies stay separate."""
    yield from schedules()
    yield from strategies()
    yield from divisions()


def schedules() -> Iterator[Case]:
    """Every kind of schedule on pipelines of two and four ranks, or with modules on shared ranks."""
    for kind in ScheduleKind:
        for ranks in PIPELINES:
            is_old = ranks == PIPELINES[0] and kind in {ScheduleKind.ONE_F_ONE_B, ScheduleKind.GPIPE}
            plan = shared_ranks(kind, ranks) if kind.spec.shares_ranks_in_part else pipeline(kind, ranks)
            yield Case(f"{kind}, {ranks} ranks", plan, is_old)


def pipeline(kind: ScheduleKind, num_ranks: int) -> Plan:
    """A small decoder on text, with stages placed cyclically, or forth and back."""
    schedule = usual(kind)
    num_stages = num_ranks * schedule.virtual_stages
    order = [rank_block(schedule, index, num_stages) for index in range(num_stages)]
    llm = decoder("llama", width=128, blocks=len(order))
    layers = [len(llm.layers) // len(order)] * len(order)
    layers[-1] += len(llm.layers) - sum(layers)
    work = Work(name="texts", model=text_only(llm), batch=text_samples([12, 9, 16, 5]))
    cuts: Cuts = {LLM: tuple((count, (rank,)) for count, rank in zip(layers, order, strict=True))}
    cluster = this_machine(LINK, num_ranks, num_cores=num_ranks)
    return plan_of(work, cluster, cuts, samples=(1,) * NUM_MICROBATCHES, schedule=schedule)


def shared_ranks(kind: ScheduleKind, num_ranks: int) -> Plan:
    """Encoders on the ranks of the language model's first stage, in replicas of two ranks."""
    job = with_layouts(small("all"), encoders=1, llm=1)
    job = replace(job, replicas=num_ranks // 2)
    plan = PLANNERS["encoders-colocated"](job, CostModel(load_profile("A40")), silent)
    return with_programs(replace(plan, programs=()), usual(kind))


def strategies() -> Iterator[Case]:
    """Every strategy's plan at its first two numbers of ranks."""
    cost = CostModel(load_profile("A40"))
    for name, planner in {**PLANNERS, **PRICED}.items():
        plans: dict[int, Plan] = {}
        for job in jobs():
            plan = _planned(planner, priced(job) if name in PRICED else job, cost)
            if plan is not None and len(plan.ranks) not in {1, *plans}:
                plans[len(plan.ranks)] = plan
            if len(plans) == RANK_COUNTS:
                break
        yield from (Case(f"{name}, {ranks} ranks", plan) for ranks, plan in plans.items())


def divisions() -> Iterator[Case]:
    """Every division of a layer over ranks."""
    for name, plan in newer_plans(CostModel(load_profile("A40"))):
        yield Case(name, plan)


def jobs() -> Iterator[Job]:
    """The tour's job under layouts that strategies take, and one of two modules; quick ones first."""
    yield replace(small("all"), max_ranks=2)
    for encoders, llm in ((1, 2), (1, 1), (1, 3), (2, 2)):
        yield with_layouts(small("all"), encoders=encoders, llm=llm)
    for replicas in (2, 4):
        yield replace(with_layouts(small("all"), encoders=1, llm=1), replicas=replicas)
    for pp in (2, 3):
        job = small("all")
        layouts = tuple(ModuleLayout(module=module.name, pp=pp) for module in job.model.modules)
        yield replace(job, layouts=layouts)
    yield replace(small("all"), max_ranks=4)
    whole = tiny_job("all")
    for ranks in (4, 8):
        yield replace(roomy(whole), batch=whole.batch[:ranks], replicas=ranks, max_ranks=ranks)
    yield roomy(load_job(EXAMPLES / "cross_attention.yaml"))
    # Where memory does not make them take more, sharding takes two ranks and hybrid sharding four.
    eight = replace(roomy(whole), batch=whole.batch[:8])
    node = replace(eight.cluster.nodes[0], num_ranks=1, memory_bytes=SMALL_NODE_BYTES)
    yield replace(eight, cluster=replace(eight.cluster, nodes=(node,) * 8))


def _planned(planner: Callable[..., Plan], job: Job, cost: CostModel) -> Plan | None:
    """The strategy's plan; None where it does not take the job."""
    try:
        plan = planner(job, cost, silent)
        check(plan)
        lower(plan)
    except ValueError:
        return None
    return plan


def priced(job: Job) -> Job:
    """The job on one pool of all its ranks, with a price."""
    pool = Pool(
        name="all",
        first_rank=0,
        num_ranks=job.cluster.num_ranks,
        profile="A40",
        device=job.cluster.nodes[0].device,
        dollars_per_hour=1.0,
    )
    return replace(job, pools=(pool,), aim=Aim.DOLLARS)
