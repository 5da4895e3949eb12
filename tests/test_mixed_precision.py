"""Narrow weights under a wide optimizer, and the schedule of its rate."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn

from runtime.launch import RunResult, run_lowered
from runtime.run_settings import Collect, RunSettings
from runtime.step.optimizer import OptimizerSettings, RateSchedule, build_adamw
from runtime.step.weight_bucket import Share, WeightBucket
from runtime.world.pool import Pool
from tests.plans import disjoint_plan
from tests.test_parity import SEED, mixed
from tests.test_sharded_optimizer import WHOLE, on_fewer_ranks, sharded
from tests.tiny_valm import tiny_batch
from workbench.memory.layer import StateBytes, state_bytes
from workbench.plan.kernels import Kernels
from workbench.plan.lower import lower
from workbench.plan.plan import Plan, Precision, Settings
from workbench.timing.price import step_bytes

ALONE = Share(instance=(0,), peers=(0,), rank=0)
F32, F64, BF16 = Precision.FLOAT32, Precision.FLOAT64, Precision.BFLOAT16


def test_gradients_of_microbatches_are_added_up_wide() -> None:
    """In bfloat16, 1 + 2^-9 is 1, however often."""
    weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    bucket = WeightBucket([[weight]], ALONE, torch.float32)
    weight.grad = torch.ones_like(weight)
    bucket.accumulate()
    for _ in range(64):
        weight.grad = torch.full_like(weight, 2.0**-9)
        bucket.accumulate()
        assert weight.grad is None
    assert bucket.take().tolist() == [1.125] * 3
    assert bucket.take().tolist() == [0.0] * 3


def planned(precision: Precision, wide: Precision | None, replicas: int = 2) -> Plan:
    plan = disjoint_plan(mixed("everything", tied=True), tiny_batch(), WHOLE, replicas=replicas)
    plan = on_fewer_ranks(plan, replicas)
    return replace(plan, settings=replace(plan.settings, precision=precision, optimizer_precision=wide))


def trained(plan: Plan, pool: Pool, rate: float, steps: int) -> RunResult:
    optimizer = OptimizerSettings(learning_rate=rate, weight_decay=0.0, clip_norm=1.0)
    settings = RunSettings(seed=SEED, steps=steps, optimizer=optimizer, collect=Collect.STATE, timeout_s=30.0)
    return run_lowered(lower(plan), settings, pool=pool)


def test_small_updates_are_not_lost(pool: Pool) -> None:
    """Each is below half the distance between neighbouring bfloat16 weights, together they are not."""
    key = ("llm", "model.layers.1.mlp.up_proj.weight")
    start = trained(planned(BF16, None, 1), pool, 1e-30, 1).states[0].weights[key]
    narrow = trained(planned(BF16, None, 1), pool, 2e-5, 5).states[0].weights[key]
    wide = trained(planned(BF16, F32, 1), pool, 2e-5, 5).states[0].weights[key]
    size = start.float().abs()
    near = (size > 2.0**-6) & (size < 2.0**-5)  # neighbours are 1.2e-4 apart
    moved_narrow, moved_wide = ((each != start)[near].float().mean() for each in (narrow, wide))
    assert wide.dtype == torch.bfloat16
    assert moved_narrow < 0.01
    assert moved_wide > 0.8


def test_wide_optimizers_agree_however_they_are_sharded(pool: Pool) -> None:
    plan = planned(F32, F64)
    whole = trained(plan, pool, 1e-3, 3)
    parts = trained(sharded(plan), pool, 1e-3, 3)
    alone = trained(planned(F32, None), pool, 1e-3, 3)
    assert parts.losses == pytest.approx(whole.losses, rel=1e-6)
    assert alone.losses == pytest.approx(whole.losses, rel=1e-4)
    for mine, other in zip(parts.states, whole.states, strict=True):
        assert {gradient.dtype for gradient in mine.gradients.values()} == {torch.float64}
        for key, weight in other.weights.items():
            assert (mine.weights[key] - weight).norm() <= 1e-5 * weight.norm().clamp(min=1e-3), key


def test_an_optimizer_narrower_than_its_weights_is_refused() -> None:
    with pytest.raises(
        ValueError, match="as wide as precision 'float32', got 'bfloat16'; nearest: 'float32'"
    ):
        Settings(precision=F32, optimizer_precision=BF16)


def test_state_and_step_of_a_wide_optimizer() -> None:
    assert state_bytes(2, Kernels.EAGER, 4) == StateBytes(2, 4, 12)
    assert state_bytes(4, Kernels.FUSED, 4) == StateBytes(4, 4, 8)
    assert step_bytes(BF16, F32) == 4 + 12 + 12 + 2
    assert step_bytes(F32, F32) == step_bytes(F32)


def test_rates_rise_and_fall() -> None:
    schedule = RateSchedule(warmup_steps=4, decay_steps=8, floor=0.1)
    factors = [schedule.factor(step) for step in range(16)]
    assert factors[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert factors[8] == pytest.approx(0.55)
    assert factors[12:] == [0.1] * 4
    assert all(before > after for before, after in pairwise(factors[4:13]))
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(
        torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0), T_max=8, eta_min=0.1
    )
    for step in range(4, 12):
        assert math.isclose(theirs.get_last_lr()[0], factors[step])
        theirs.optimizer.step()
        theirs.step()
    with pytest.raises(ValueError, match=r"floor must be 0 to 1 times the learning rate, got 2"):
        RateSchedule(warmup_steps=0, decay_steps=1, floor=2.0)


def test_the_rate_goes_on_where_the_state_does() -> None:
    """A step of Adam from fresh moments moves a weight by the rate."""
    settings = OptimizerSettings(
        learning_rate=1.0, weight_decay=0.0, schedule=RateSchedule(warmup_steps=4, decay_steps=4)
    )
    weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    adamw = build_adamw([weight], settings)
    assert adamw is not None
    places = [0.0]
    for step in range(3):
        if step == 2:  # a new process brings the state back
            state = adamw.state_dict()
            adamw = build_adamw([weight], settings)
            assert adamw is not None
            adamw.load_state_dict(state)
        weight.grad = torch.ones_like(weight)
        adamw.step()
        places.append(float(weight.detach()))
    moves = [before - after for before, after in pairwise(places)]
    assert moves == pytest.approx([0.25, 0.5, 0.75], rel=1e-6)
