"""Figure 4.12 in simulation: iteration times of one replica under every way of regrouping its samples.

Paper:   I. Jang, dissertation, section 4.7.2, Figure 4.12: Entrain up to 1.40 times DistTrain and DIP.
Setup:   Qwen2.5-VL vision and Llama 3.2 3B on 16 A40s, tp 2, 4 + 4 stages, 128 samples in 32 microbatches.
Given:   nothing printed; sizes are drawn from our corpora, seconds are our cost model's.
Differs: all systems have the same stages, so that only the grouping differs; one of four replicas; no DIP.
Ours:    simulated, about 5 s a batch and data set. A study, not a reproduction: the figure has no numbers.
Run:     python -m experiments.entrain.regrouping [--batches N] [--json]
"""

import statistics

from experiments.cornstarch.modelled import a40_cost
from experiments.cornstarch.planned import simulated
from experiments.entrain.intervals import bootstrap
from experiments.entrain.workload import CORPUS_OF, batch_of, job_of
from experiments.harness.command import Found, bench, want_at_least
from workbench.planner.stage_counts import silent
from workbench.planner.strategy_spec import Planner
from workbench.report.progress import ticking
from workbench.strategies import cornstarch, entrain, entrain_graded, reordered

SYSTEMS: dict[str, Planner] = {
    "as drawn": cornstarch.plan,
    "disttrain": reordered.plan,
    "exchanges": reordered.plan_by_exchanges,
    "entrain in turn": entrain.plan_in_turn,
    "entrain": entrain.plan,
    "graded": entrain_graded.plan,
}
LLM, NUM_SAMPLES, STAGES = "Llama3-3b", 128, (4, 4)


def iteration_s(dataset: str, system: str, seed: int) -> float:
    """Simulated seconds of one batch."""
    job = job_of(dataset, LLM, batch_of(dataset, NUM_SAMPLES, seed), pp=STAGES)
    return simulated(lambda given, cost: SYSTEMS[system](given, cost, silent), job, a40_cost()).iteration_s


@bench()
def run(batches: int = 3) -> Found:
    """Print mean times, and how much faster than `as drawn` each system is, batch by batch."""
    want_at_least(1, batches=batches)
    record: dict[str, dict[str, list[float]]] = {}
    with ticking("batches", batches * len(CORPUS_OF), quiet=False) as ticker:
        for dataset in CORPUS_OF:
            times: dict[str, list[float]] = {system: [] for system in SYSTEMS}
            for seed in range(1, 1 + batches):
                ticker.step(dataset)
                for system in SYSTEMS:
                    times[system].append(iteration_s(dataset, system, seed))
            record[dataset] = times
    for dataset, times in record.items():
        for system, taken_s in times.items():
            ratios = [plain / system_s for plain, system_s in zip(times["as drawn"], taken_s, strict=True)]
            faster = bootstrap(ratios) if len(ratios) > 1 else f"{ratios[0]:.3f}"
            print(f"{dataset:14} {system:10} {statistics.mean(taken_s):7.3f} s   {faster} times as drawn")
    return Found(record)
