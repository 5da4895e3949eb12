"""The tiny LLaVA of the loss curves in bfloat16 and float32, and the baseline in other orders of its sums."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum

from experiments.mimo.loss_curves_runs import ONE_BATCH, SEED, TIMEOUT_S, Run, microbatch_samples, model
from experiments.mimo.loss_curves_runs import optimizer as first_rate
from experiments.mimo.loss_curves_runs import plan_of as plan_in_order
from runtime.launch import run_lowered
from runtime.run_settings import RunSettings
from runtime.step.optimizer import OptimizerSettings, RateSchedule
from runtime.world.pool import Pool
from workbench.plan.lower import lower
from workbench.plan.plan import Plan, Precision, Settings
from workbench.plan.stage import Stage

WARMUP = 0.06  # of the steps: Table A6's 60 steps of the 1000 in bfloat16
FLOORS = {False: 2.0e-5 / 1.0e-3, True: 1.0e-5 / 1.0e-4}  # least over first rate, by whether the LLM trains
IN_ORDER = 0  # of the samples and ranks


class Arithmetic(Enum):
    """A run's arithmetic: bfloat16 with gradients, weights and moments in float32, or float32."""

    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"

    @property
    def settings(self) -> Settings:
        if self is Arithmetic.FLOAT32:
            return Settings(precision=Precision.FLOAT32)
        return Settings(precision=Precision.BFLOAT16, optimizer_precision=Precision.FLOAT32)


class Mix(Enum):
    """What a different order permutes: whole microbatches, or samples in microbatches of four or two."""

    MICROBATCHES = "order"
    SAMPLES = "grouping"


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """One curve: a configuration, its arithmetic, and the baseline's order of summation.

    Args:
        order: seed of the order; `IN_ORDER`: that of the data.
        mix: what it permutes.
    """

    run: Run
    arithmetic: Arithmetic
    order: int = IN_ORDER
    mix: Mix = Mix.MICROBATCHES

    @property
    def name(self) -> str:
        order = "" if self.order == IN_ORDER else f", {self.mix.value} {self.order}"
        return f"{self.arithmetic.value}, {self.run.name}{order}"


def plan_of(played: Played) -> Plan:
    """The plan of a curve; other orders permute microbatches and positions in the grid.

    Where samples of a microbatch stay together, another order only changes the order in which microbatches'
    gradients are added (and, with replicas, which of them adds which), and which rank contributes which part
    of a sum over tensor-parallel ranks. Otherwise sums inside a microbatch are of other samples too.
    """
    plan = plan_in_order(played.run)
    if played.order != IN_ORDER:
        rng = random.Random(played.order)
        size, microbatch = microbatch_samples(played.run), None
        (samples,) = ONE_BATCH.batches(model(played.run.trains_llm))
        if played.mix is Mix.SAMPLES:
            size, microbatch = 1, 2 if played.order % 2 else size
        blocks = [samples[start : start + size] for start in range(0, len(samples), size)]
        rng.shuffle(blocks)
        mixed = tuple(sample for block in blocks for sample in block)
        plan = plan_in_order(played.run, mixed, microbatch)
        plan = replace(plan, stages=tuple(_placed_anew(plan, rng)))
    return replace(plan, settings=played.arithmetic.settings)


def _placed_anew(plan: Plan, rng: random.Random) -> Iterator[Stage]:
    """Stages with the ranks of every row permuted, equally for rows of the same ranks."""
    orders: dict[tuple[int, ...], tuple[int, ...]] = {}
    for stage in plan.stages:
        rows = []
        for row in stage.ranks:
            if row not in orders:
                orders[row] = tuple(rng.sample(row, len(row)))
            rows.append(orders[row])
        yield replace(stage, ranks=tuple(rows))


def optimizer(played: Played, steps: int) -> OptimizerSettings:
    """Table A6's optimizer with its schedule over the steps; gradients are clipped only in bfloat16."""
    warmup = round(WARMUP * steps)
    schedule = RateSchedule(
        warmup_steps=warmup, decay_steps=max(1, steps - warmup), floor=FLOORS[played.run.trains_llm]
    )
    clip_norm = 1.0 if played.arithmetic is Arithmetic.BFLOAT16 else None
    return replace(first_rate(played.run), schedule=schedule, clip_norm=clip_norm)


def train(played: Played, steps: int, pool: Pool) -> tuple[float, ...]:
    """Losses of all steps on real processes.

    Raises:
        WorldFailed: a rank raised or did not finish in time.
    """
    settings = RunSettings(steps=steps, seed=SEED, optimizer=optimizer(played, steps), timeout_s=TIMEOUT_S)
    return run_lowered(lower(plan_of(played)), settings, pool=pool).losses
