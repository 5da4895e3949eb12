"""Gain from summing each layer's gradients during the backward of the layers before it.

Paper:   Oobleck chapter, section 2.6.1: layers are synchronised one by one, and the communication overlaps
         the computation. It prints no gain.
Setup:   two nodes of one rank, each a whole Llama of 6 blocks (width 256); samples of 4 to 9 tokens, three
         microbatches a rank, so that sums take about as long as passes. Both ways alternate, in rounds.
Ours:    seconds of a step between votes of the elastic runtime, medians over all rounds; both ways have the
         same losses, bit for bit. Also the simulator's gain for the same plan where sums take no time from
         passes, by the time of all sums of a rank in units of one microbatch's backward.
Differs: gloo's sums occupy a core themselves, so two ranks on two cores have no idle time to gain; links that
         transfer data without a core would.
Run:     python -m experiments.bench.layerwise [--rounds 5] [--steps 12] [--json]
"""

import statistics
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise

from experiments.harness.command import command_line, finish
from experiments.oobleck.chaos_job import LLAMA, elastic_job
from runtime.elastic.job import ElasticJob, Reduction, plan_step
from runtime.elastic.replan import start_layout
from runtime.elastic.training import ElasticTraining
from sim.step.engine import simulate
from workbench.elastic.layerwise import layerwise
from workbench.plan.lower import lower
from workbench.schedule.action import Action, Pass

ROUNDS, STEPS, WARM_UP = 5, 12, 2
WEIGHTS = (0.25, 0.5, 1.0, 2.0)
WIDE = LLAMA | {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 512}


def step_seconds(job: ElasticJob, steps: int) -> tuple[list[float], tuple[float, ...]]:
    """Return the seconds of each step after warm-up, and all losses."""
    with ElasticTraining(job, ("a", "b")) as training:
        training.train(WARM_UP + steps)
        ends = [done.end_s for done in training.steps][WARM_UP - 1 :]
        return [after - before for before, after in pairwise(ends)], training.losses


def measure(rounds: int, steps: int) -> dict[str, float | bool]:
    """Return medians of both ways, their spread, and whether the losses agree."""
    job = elastic_job(2, config=WIDE, wait_s=20.0)
    seconds_by_way: dict[Reduction, list[float]] = {way: [] for way in Reduction}
    losses: set[tuple[float, ...]] = set()
    for _ in range(rounds):
        for way in Reduction:
            seconds, step_losses = step_seconds(replace(job, reduction=way), steps)
            seconds_by_way[way] += seconds
            losses.add(step_losses)
    medians = {way: statistics.median(seconds) for way, seconds in seconds_by_way.items()}
    result: dict[str, float | bool] = {f"{way.replace(' ', '_')}_s": medians[way] for way in Reduction}
    for way, seconds in seconds_by_way.items():
        quarters = statistics.quantiles(seconds, n=4)
        result[f"{way.replace(' ', '_')}_quartiles_apart_s"] = quarters[2] - quarters[0]
    result["gain"] = medians[Reduction.AFTER_BACKWARD] / medians[Reduction.LAYERWISE] - 1
    result["same_losses"] = len(losses) == 1
    return result


def simulated_gains() -> dict[str, float]:
    """Gain by weight of the reductions; a forward takes half a backward, layers are equally long."""
    job = elastic_job(2)
    lowered = lower(plan_step(job, start_layout(job, ("a", "b")), job.batch(0)))
    overlapped = layerwise(lowered, lambda module, layer: 1.0)
    gains = {}
    for weight in WEIGHTS:
        units = {Pass.F: 0.5, Pass.B: 1.0, Pass.REDUCE_GRAD: weight, Pass.STEP: 0.0}
        plain, fast = (
            simulate(lowered, partial(_units, units), overlapped=pairs) for pairs in ({}, overlapped)
        )
        gains[f"simulated_gain_at_{weight:g}"] = (
            max(s.end_s for s in plain.spans) / max(s.end_s for s in fast.spans) - 1
        )
    return gains


def _units(units: Mapping[Pass, float], action: Action) -> float:
    return units[action.kind]


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--steps", type=int, default=STEPS)
    arguments = parser.parse_args()
    if min(arguments.rounds, arguments.steps) < 1:
        parser.error(f"want 1 round and 1 step or more, got {arguments.rounds} and {arguments.steps}")
    gains = simulated_gains()
    result = measure(arguments.rounds, arguments.steps) | gains
    for way in Reduction:
        name = way.replace(" ", "_")
        print(
            f"{way:16} {result[f'{name}_s'] * 1e3:8.1f} ms a step, "
            f"quartiles {result[f'{name}_quartiles_apart_s'] * 1e3:.1f} ms apart"
        )
    print(f"layer by layer gains {result['gain']:+.1%}")
    for weight, gain in zip(WEIGHTS, gains.values(), strict=True):
        print(f"simulated, sums of {weight:g} backwards: {gain:+.1%}")
    claims = {"both ways give the same losses, bit for bit": result["same_losses"] is True}
    return finish(result, claims, as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
