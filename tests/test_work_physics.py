"""What holds of every strategy's plans of two jobs, of which one asks for no less work than the other."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from sim.predict import step_s
from tests.test_plan_physics import LLM, VISION
from workbench.job.job import job_from_spec
from workbench.job.machines import cost_of
from workbench.job.schema import JobSpec
from workbench.memory.account import memory_table, peak_bytes
from workbench.planner.stage_counts import silent
from workbench.strategies.registry import PLANNERS
from workbench.timing.accept import checked

Spec = dict[str, Any]
BASE: Spec = {
    "name": "work",
    "model": {
        "modules": {
            "vision": {"config": VISION, "trainable": "projector", "projector": "mlp"},
            "llm": {"config": LLM, "trainable": "all"},
        }
    },
    "cluster": {"device": "H100", "nodes": 1, "ranks_per_node": 8},
    "batch": {
        "samples": 16,
        "replicas": 2,
        "fixed": {"text_tokens": 2048, "items": {"vision": {"each": 1}}},
    },
    "profile": "H100",
}
STRATEGIES = ["cornstarch", "encoders-colocated", "dip", "megatron-colocated", "megatron-homogeneous", "fsdp"]


def priced(change: Callable[[Spec], object], strategy: str) -> tuple[float, int]:
    """Seconds of a step, and bytes of the fullest rank."""
    spec = deepcopy(BASE)
    change(spec)
    job = job_from_spec(JobSpec.model_validate(spec), folder=Path())
    cost = cost_of(job, None, None)
    lowered = checked(PLANNERS[strategy](job, cost, silent))
    return step_s(lowered, cost), max(peak_bytes(lowered, memory_table(lowered)).values())


def twice_the_samples(spec: Spec) -> None:
    spec["batch"]["samples"] *= 2


def more_text(spec: Spec) -> None:
    spec["batch"]["fixed"]["text_tokens"] *= 2


def more_images(spec: Spec) -> None:
    spec["batch"]["fixed"]["items"]["vision"]["each"] = 8


def a_trained_tower(spec: Spec) -> None:
    spec["model"]["modules"]["vision"]["trainable"] = "all"


def slower_devices(spec: Spec) -> None:
    spec["cluster"]["device"] = spec["profile"] = "A100-80GB"


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("more", [twice_the_samples, more_text, more_images, a_trained_tower, slower_devices])
def test_more_work_or_slower_devices_take_no_shorter_step(
    more: Callable[[Spec], None], strategy: str
) -> None:
    before_s, before_bytes = priced(lambda _: None, strategy)
    after_s, after_bytes = priced(more, strategy)
    assert after_s >= before_s
    if more is twice_the_samples:
        assert after_s <= 2 * before_s
    if more in (more_text, more_images) and strategy == "fsdp":  # one layout: no other that saves memory
        assert after_bytes >= before_bytes


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_twice_the_nodes_and_samples_take_at_least_the_step_and_less_than_twice_it(strategy: str) -> None:
    def doubled(spec: Spec) -> None:
        twice_the_samples(spec)
        spec["cluster"]["nodes"], spec["batch"]["replicas"] = 2, 4

    before_s, _ = priced(lambda _: None, strategy)
    after_s, _ = priced(doubled, strategy)
    assert before_s * (1 - 1e-9) <= after_s < 2 * before_s
