"""One replica's step under every system, simulated with its memory."""

from dataclasses import replace
from typing import NamedTuple

from experiments.cornstarch.modelled import a40_cost
from experiments.entrain.series import stable_stages
from experiments.entrain.workload import batch_of, job_of
from sim.step.engine import simulate
from workbench.memory.account import memory_table
from workbench.plan.lower import lower
from workbench.plan.plan import ModuleSettings, Plan, Recompute
from workbench.planner.stage_counts import silent
from workbench.planner.strategy_spec import Planner
from workbench.strategies import cornstarch, dip, entrain, entrain_graded, reordered
from workbench.timing.price import price
from workbench.trace import Trace

PLANNERS: dict[str, Planner] = {
    "1f1b": cornstarch.plan,
    "disttrain": reordered.plan,
    "dip": dip.plan,
    "entrain-in-turn": entrain.plan_in_turn,
    "entrain": entrain.plan,
}
OURS: dict[str, Planner] = {"entrain-graded": entrain_graded.plan}
OWN_STAGES = ("dip", *OURS)  # these also decide the number of stages
NUM_SAMPLES, SEED = 128, 1


class Traced(NamedTuple):
    """A plan and its simulated trace."""

    plan: Plan
    trace: Trace


def traced(dataset: str, llm: str, system: str, recompute: Recompute = Recompute.NONE) -> Traced:
    """128 samples in 32 microbatches on 16 ranks, stages of the data set's mean ratio or the system's own.

    Args:
        recompute: of the encoder.
    """
    batch = batch_of(dataset, NUM_SAMPLES, SEED)
    stages = None if system in OWN_STAGES else stable_stages(dataset, llm)
    job = job_of(dataset, llm, batch, pp=stages)
    settings = replace(job.settings, modules=(ModuleSettings(module="vision", recompute=recompute),))
    plan = (PLANNERS | OURS)[system](replace(job, settings=settings), a40_cost(), silent)
    lowered = lower(plan)
    prices = price(lowered, a40_cost())
    trace = simulate(lowered, prices.duration_s, step_s=prices.step_s, memory=memory_table(lowered))
    return Traced(plan, trace)
