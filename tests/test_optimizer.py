"""How AdamW updates: fused where everything is on GPUs, else one tensor at a time, bit for bit as torch's."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile

from runtime.step.optimizer import (
    NORM_ELEMENTS,
    OptimizerSettings,
    RateSchedule,
    Update,
    build_adamw,
    optimizer_of,
    squared_norm,
    step_count,
    update_of,
)
from workbench.job.run_options import RunOptions


@pytest.mark.parametrize(
    ("devices", "update", "where"),
    [
        (("cuda", "cuda"), Update.FUSED, "cuda"),
        (("cpu", "cpu"), Update.SINGLE, "cpu"),
        (("cuda", "cpu"), Update.SINGLE, "cpu"),
    ],
)
def test_fused_on_gpus_alone(devices: tuple[str, ...], update: Update, where: str) -> None:
    with FakeTensorMode():  # type: ignore[no-untyped-call]
        held = [nn.Parameter(torch.empty(3, device=device)) for device in devices]
        adamw = build_adamw(held, OptimizerSettings())
        assert adamw is not None
        assert update_of(adamw) is update
        assert step_count(adamw, held[0], 4).device.type == where


def test_the_cpu_keeps_its_bits() -> None:
    """Five steps with a schedule of rates, against torch's own with the same rate set by hand."""
    schedule = RateSchedule(warmup_steps=2, decay_steps=3, floor=0.1)
    settings = OptimizerSettings(learning_rate=0.1, schedule=schedule)
    ours, theirs = ([nn.Parameter(torch.linspace(-1, 1, n)) for n in (3, 7)] for _ in range(2))
    adamw = build_adamw(ours, settings)
    assert adamw is not None
    reference = torch.optim.AdamW(theirs, lr=0.1, foreach=False)
    for step in range(5):
        for mine, its in zip(ours, theirs, strict=True):
            mine.grad = torch.sin(mine.detach() + step)
            its.grad = mine.grad.clone()
        reference.param_groups[0]["lr"] = 0.1 * schedule.factor(step)
        adamw.step()
        reference.step()
        assert all(torch.equal(mine, its) for mine, its in zip(ours, theirs, strict=True))


def test_the_norm_widens_a_large_gradient_piece_by_piece() -> None:
    """A float64 copy of all of it would be twice as large as the gradient itself."""
    gradient = torch.linspace(-1, 1, 4 * NORM_ELEMENTS + 3).view(1, -1)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        squared = squared_norm([gradient], torch.device("cpu"))
    assert float(squared) == pytest.approx(float(gradient.double().square().sum()), rel=1e-12)
    largest = max(event.self_cpu_memory_usage for event in profiler.events())
    assert 0 < largest <= 8 * NORM_ELEMENTS


def test_options_of_a_run_are_its_optimizer() -> None:
    assert optimizer_of(RunOptions()) == OptimizerSettings()
    said = RunOptions(learning_rate=2e-5, rate_warmup=2, rate_decay=3, weight_decay=0.1, clip_norm=1.0)
    schedule = RateSchedule(warmup_steps=2, decay_steps=3)
    assert optimizer_of(said) == OptimizerSettings(
        learning_rate=2e-5, weight_decay=0.1, clip_norm=1.0, schedule=schedule
    )
    assert [schedule.factor(step) for step in (0, 1, 2, 5, 9)] == [0.5, 1.0, 1.0, 0.0, 0.0]
    rising = optimizer_of(RunOptions(rate_warmup=4)).schedule
    assert rising is not None
    assert [rising.factor(step) for step in (0, 3, 4, 1000)] == [0.25, 1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"learning_rate": 0.0}, "learning rate must be > 0 and finite, got 0.0"),
        ({"learning_rate": float("nan")}, "learning rate must be > 0 and finite, got nan"),
        ({"weight_decay": -0.1}, "weight decay must be >= 0"),
        ({"clip_norm": 0.0}, "clipping norm must be > 0"),
        ({"rate_warmup": -1}, "rate_warmup must be 0 to 1,000,000, got -1"),
        ({"rate_decay": 0}, "rate_decay must be 1 to 1,000,000, got 0"),
    ],
)
def test_options_of_an_optimizer_out_of_bounds(said: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        optimizer_of(RunOptions(**said))
