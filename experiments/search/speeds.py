"""Candidates per second of the joint search: on 24, 1,296 and 10,008 GPUs.

Setup:   the cases of `bench.speed_cases` as jobs, with their layouts; the third has the replicas of the
         second until it takes 10,000 GPUs. The start is one strategy's plan, so that candidates are timed.
Ours:    candidates that were built, checked, lowered, priced, checked for memory and swept, over CPU seconds
         of one process between the starts and the end; refused ones cost time and do not count. A search
         with another seed runs before, so that no function is compiled in that time.
         `seconds_10000` is wall time of a whole search with two workers.
"""

import time
from dataclasses import replace
from typing import Any

from experiments.bench.speed_cases import CASES, PROFILE, Case, plan_of
from sim.predict import IterationJudge
from workbench.cost.model import CostModel
from workbench.cost.profile import load_profile
from workbench.job.job import Job
from workbench.job.module_layout import ModuleLayout
from workbench.plan.lru_cache import clear_caches
from workbench.search.joint.drive import joint_search
from workbench.search.joint.result import SearchResult, State
from workbench.search.joint.terms import Scope, Stop
from workbench.strategies.registry import PLANNERS

START = "megatron-heterogeneous"
CANDIDATES = {24: 400, 1296: 24}
LONG_CANDIDATES = 120  # of 1,296 GPUs: far from the start are plans that take longer
LIMIT_S = 120.0  # of CPU, should a machine be slow
LARGE_GPUS, LARGE_CANDIDATES, LARGE_LIMIT_S = 10_000, 24, 600.0
WORKERS = 2


def job_of(case: Case) -> Job:
    """The job of a case: model, cluster, batch and degrees, with drawn samples, so that grouping matters."""
    plan = plan_of(case)
    return Job(
        name=case.name,
        model=plan.model,
        cluster=plan.cluster,
        batch=plan.batch,
        microbatch_samples=case.samples,
        replicas=case.replicas,
        layouts=tuple(ModuleLayout(module=name, pp=pp, tp=tp) for name, (pp, tp) in case.layout.items()),
        profile=PROFILE,
    )


def rate_of(case: Case, candidates: int, *, seed: int) -> dict[str, Any]:
    """Candidates a second of one case, and the search's result."""
    samples_seen: list[tuple[float, int]] = []

    def report(state: State) -> None:
        samples_seen.append((time.process_time(), state.candidates))

    def searched(seed: int, num: int) -> SearchResult:
        clear_caches()
        cost = CostModel(load_profile(PROFILE))
        return joint_search(
            job_of(case),
            cost,
            IterationJudge(cost),
            stop=Stop(candidates=num, seconds=LIMIT_S, clock=time.process_time),
            scope=Scope(seed=seed, planners={START: PLANNERS[START]}),
            progress=report,
        )

    searched(seed + 1, candidates // 4)
    samples_seen.clear()
    result = searched(seed, candidates)
    (first_s, _), (last_s, counted) = samples_seen[0], samples_seen[-1]
    return _record(result) | {"candidates_per_s": counted / max(last_s - first_s, 1e-9)}


def large(*, seed: int) -> dict[str, Any]:
    """A whole search on `LARGE_GPUS`, by two workers."""
    case = CASES[2]
    ranks = sum(pp * tp for pp, tp in case.layout.values())
    grown = replace(case, name=f"{LARGE_GPUS} GPUs", replicas=-(-LARGE_GPUS // ranks))
    job, cost = job_of(grown), CostModel(load_profile(PROFILE))
    result = joint_search(
        job,
        cost,
        IterationJudge(cost),
        stop=Stop(candidates=LARGE_CANDIDATES, seconds=LARGE_LIMIT_S),
        scope=Scope(seed=seed, planners={START: PLANNERS[START]}),
        workers=WORKERS,
    )
    return _record(result) | {"gpus": job.cluster.num_ranks}


def speeds(*, seed: int) -> dict[str, Any]:
    """The speeds of all three cases."""
    small, middle = (
        rate_of(case, CANDIDATES[gpus], seed=seed) for case, gpus in zip(CASES[1:], CANDIDATES, strict=True)
    )
    longer = rate_of(CASES[2], LONG_CANDIDATES, seed=seed)
    whole = large(seed=seed)
    return {
        "candidates_per_s_24": small["candidates_per_s"],
        "candidates_per_s_1296": middle["candidates_per_s"],
        "candidates_per_s_1296_long": longer["candidates_per_s"],
        "seconds_10000": whole["seconds"],
        "speed_searches": {"24": small, "1296": middle, "1296, long": longer, "10000": whole},
    }


def _record(result: SearchResult) -> dict[str, Any]:
    return {
        "start_s": result.best_start.value,
        "joint_s": result.value,
        "lower_bound": result.lower_bound,
        "gap": result.gap,
        "candidates": result.candidates,
        "proposed": len(result.log),
        "seconds": result.seconds,
    }
