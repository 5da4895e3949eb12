"""Plans per second from model to time: on one core, all different.

Setup:   the cases of `speed_cases` on 24 and 1,296 GPUs. Each plan passes every step: model described, plan
         built and checked, hashed, lowered, priced with its own cost model, memory checked, compiled into a
         sweep and timed by it. Plans differ in the names of their layers, in cuts into stages and in the
         sizes of samples. So they share no layer, stage or microbatch, and nothing that is cached by these.
         They share the profile, read from its file, and compiled code. Replicas of one plan are equal, as in
         a plan for average sizes; in the drawn cases every sample has its own sizes, and no two replicas or
         microbatches are equal.
Ours:    plans divided by CPU seconds of the one thread, over all plans of a case together.
Run:     python -m experiments.bench.sim_speed --json
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from experiments.bench.speed_cases import CASES, PROFILE, Case, plan_of
from sim.step.sweep import Sweep
from workbench.cost.model import CostModel
from workbench.cost.profile import Profile, load_profile
from workbench.float_sum import float_sum
from workbench.memory.account import check_memory, memory_table
from workbench.memory.layer import layer_bytes
from workbench.plan.codec import plan_hash
from workbench.plan.lower import lower
from workbench.plan.lru_cache import clear_caches
from workbench.timing.price import price

GPUS_24, GPUS_1296 = CASES[1:]
STEPS = ("build", "hash", "lower", "price", "memory", "compile", "time")
NUM_PLANS = {GPUS_24.name: (20, 5), GPUS_1296.name: (4, 1)}  # of equal replicas, of a drawn batch


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRate:
    """Plans per second of one case, and mean CPU seconds of each planning phase."""

    name: str
    num_plans: int
    plans_per_s: float
    seconds: dict[str, float]


def plan_rates() -> Iterator[PlanRate]:
    """Measure both sizes: with equal replicas, then with a random batch."""
    profile = load_profile(PROFILE)
    for case in (GPUS_24, GPUS_1296):
        drawn = replace(case, name=f"{case.name}, drawn", is_drawn=True)
        for variant, num_plans in zip((case, drawn), NUM_PLANS[case.name], strict=True):
            yield plan_rate(variant, profile, num_plans)


def plan_rate(case: Case, profile: Profile, num_plans: int) -> PlanRate:
    """Time plans 1..n of a case; plan 0 goes first, untimed, to compile the sweep's loop."""
    _seconds(case, 0, profile)
    measurements = [_seconds(case, number, profile) for number in range(1, num_plans + 1)]
    totals = {step: float_sum(seconds[step] for seconds in measurements) for step in STEPS}
    return PlanRate(
        name=case.name,
        num_plans=num_plans,
        plans_per_s=num_plans / sum(totals.values()),
        seconds={step: total / num_plans for step, total in totals.items()},
    )


def _seconds(case: Case, number: int, profile: Profile) -> dict[str, float]:
    """CPU seconds of each phase of planning, starting from empty caches."""
    layer_bytes.cache_clear()
    clear_caches()
    clock_s = [time.process_time()]

    def has_ended() -> None:
        clock_s.append(time.process_time())

    plan = plan_of(case, number)
    has_ended()
    plan_hash(plan)
    has_ended()
    lowered = lower(plan)
    has_ended()
    duration_s = price(lowered, CostModel(profile)).duration_s
    has_ended()
    check_memory(lowered, memory_table(lowered))
    has_ended()
    sweep = Sweep(lowered)
    has_ended()
    sweep.iteration_s(duration_s)
    has_ended()
    return {step: end_s - start_s for step, (start_s, end_s) in zip(STEPS, pairwise(clock_s), strict=True)}
