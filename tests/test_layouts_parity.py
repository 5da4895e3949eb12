"""Modules with layouts of their own, on disjoint ranks or on the same, train as one process does."""

from dataclasses import replace

import pytest
import torch

from runtime.data.batches import SyntheticSource
from runtime.launch import run_lowered
from runtime.reference import Reference
from runtime.run_settings import RunSettings
from runtime.step.offload import Offload
from runtime.world.pool import Pool
from tests.layout_jobs import Degrees, planned, three_phase, vision_language
from tests.test_parity import assert_same
from tests.tiny_valm import tiny_valm
from workbench.model.model_graph import ModelGraph, connect
from workbench.model.trainable import Trainable
from workbench.plan.lower import lower
from workbench.plan.lowered import Route
from workbench.plan.plan import Precision
from workbench.schedule.action import Pass
from workbench.schedule.choice import Schedule

PAIRS = [
    pytest.param((2, 1, 1), (1, 2, 1), 2, (1, 2, 0, 1), id="fan-in"),
    pytest.param((1, 2, 1), (2, 2, 1), 1, (1, 2, 0, 1), id="fan-out"),
    pytest.param((3, 1, 1), (2, 1, 1), 2, (1, 2, 0, 1, 1, 0, 2, 1), id="non-divisible-in"),
    pytest.param((2, 1, 1), (3, 1, 1), 1, (1, 2, 0, 1, 1, 0), id="non-divisible-out"),
    pytest.param((3, 1, 1), (1, 1, 2), 1, (1, 2, 1), id="more-replicas-than-samples-in-a-round"),
    pytest.param((3, 1, 1), (1, 1, 1), 1, (2, 2), id="more-replicas-than-samples"),
    pytest.param((1, 1, 2), (2, 1, 2), 1, (1, 2, 0, 1), id="both-context-parallel-fan-out"),
    pytest.param((2, 1, 2), (1, 1, 2), 2, (1, 2, 0, 1), id="both-context-parallel-fan-in"),
]


@pytest.mark.parametrize(("vision", "llm", "microbatch", "images"), PAIRS)
def test_one_encoder(
    vision: Degrees, llm: Degrees, microbatch: int, images: tuple[int, ...], pool: Pool
) -> None:
    plan = planned(vision_language(), {"vision": vision, "llm": llm}, microbatch=microbatch, images=images)
    for module, (dp, pp, cp) in (("vision", vision), ("llm", llm)):
        assert {(len(plan.chain[module, r]), plan.chain[module, r][0].cp) for r in range(dp)} == {(pp, cp)}
    assert_same(plan, pool, Precision.FLOAT64)


def test_two_encoders_with_three_degrees(pool: Pool) -> None:
    layouts = {"vision": (3, 1, 1), "audio": (1, 1, 1), "llm": (2, 1, 1)}
    plan = planned(tiny_valm(), layouts, microbatch=1, images=(1, 2, 0, 1))
    assert len(plan.ranks) == 6
    assert_same(plan, pool, Precision.FLOAT64)


@pytest.mark.parametrize(("vision", "llm"), [((1, 1, 1, 2), (1, 1, 1, 1)), ((1, 1, 1, 1), (1, 1, 1, 2))])
def test_every_rank_of_the_wider_grid_sends_its_part(vision: Degrees, llm: Degrees, pool: Pool) -> None:
    plan = planned(vision_language(), {"vision": vision, "llm": llm}, microbatch=1, images=(1, 2, 0, 1))
    rows = [row for row in lower(plan).transfers if row.edge == "vision>llm" and row.route is Route.P2P]
    assert {row.source_rank for row in rows} == set(plan.ranks)
    assert_same(plan, pool, Precision.FLOAT64)


SHARED = [
    pytest.param((4, 1, 1), (2, 2, 1), 1, three_phase(), id="fan-in-before-a-pipeline"),
    pytest.param((4, 1, 1), (2, 2, 1), 1, three_phase(1, 1), id="windows-that-run-ahead"),
    pytest.param((1, 4, 1), (4, 1, 1), 1, three_phase(), id="fan-out-of-a-pipeline"),
    pytest.param((2, 1, 1), (2, 1, 1), 2, three_phase(1), id="equal"),
    pytest.param((3, 2, 1), (2, 3, 1), 1, three_phase(2), id="non-divisible"),
    pytest.param((4, 1, 1), (1, 1, 4), 2, three_phase(), id="context-parallel-llm"),
    pytest.param((1, 1, 2), (2, 1, 1), 1, three_phase(2), id="context-parallel-encoder"),
    pytest.param((4, 1, 1), (1, 2, 1, 2), 2, three_phase(1), id="tensor-parallel-llm"),
    pytest.param((1, 1, 1, 2), (1, 1, 2), 1, three_phase(), id="tensor-to-context"),
]


@pytest.mark.parametrize(("vision", "llm", "microbatch", "schedule"), SHARED)
def test_one_encoder_on_the_same_ranks(
    vision: Degrees, llm: Degrees, microbatch: int, schedule: Schedule, pool: Pool
) -> None:
    layouts = {"vision": vision, "llm": llm}
    images = (1, 2, 0, 1, 1, 0, 2, 1)
    plan = planned(vision_language(), layouts, microbatch=microbatch, images=images, schedule=schedule)
    assert all(len(stages) == 2 for stages in plan.stages_on.values())
    assert_same(plan, pool, Precision.FLOAT64)


@pytest.mark.parametrize("trains", [Trainable.ALL, Trainable.PROJECTOR, Trainable.NONE])
def test_encoders_that_leave_while_the_llm_runs(trains: Trainable, pool: Pool) -> None:
    """Two steps, so that the moments of the first leave too."""
    schedule = replace(three_phase(), offload=True)
    layouts = {"vision": (4, 1, 1), "llm": (1, 2, 1, 2)}
    model = vision_language() if trains is Trainable.ALL else frozen_vision_language(trains)
    plan = planned(model, layouts, microbatch=1, images=(1, 2, 0, 1, 1, 0, 2, 1), schedule=schedule)
    assert {action.kind for action in plan.program_actions} > {Pass.OFFLOAD, Pass.ONLOAD}
    assert_same(plan, pool, Precision.FLOAT64)
    settings = RunSettings(seed=3, precision=Precision.FLOAT64, steps=2, timeout_s=30.0)
    result = run_lowered(lower(plan), settings, pool=pool)
    reference = Reference(plan, seed=3, dtype=torch.float64)
    expected = [reference.step(SyntheticSource(3)).loss for _ in range(2)]
    assert result.losses == pytest.approx(expected, rel=1e-10)


def test_what_left_takes_no_memory_and_comes_back_whole() -> None:
    modules = {0: torch.nn.Linear(3, 4), 1: torch.nn.Linear(4, 2)}
    optimizer = torch.optim.AdamW(modules[0].parameters())
    modules[0](torch.ones(1, 3)).sum().backward()
    optimizer.step()
    output = modules[0](torch.ones(2, 3, requires_grad=True)).sum()
    before = [weight.detach().clone() for weight in modules[0].parameters()]
    held = [*modules[0].parameters(), *(state["exp_avg"] for state in optimizer.state.values())]
    offload = Offload(modules)
    offload.leave(0, optimizer)
    assert [tensor.untyped_storage().nbytes() for tensor in held] == [0] * 4
    assert all(weight.untyped_storage().nbytes() for weight in modules[1].parameters())
    offload.come_back(0)
    assert all(torch.equal(a, b) for a, b in zip(before, modules[0].parameters(), strict=True))
    output.backward()  # what autograd kept is whole again
    modules[1].weight = modules[0].weight
    with pytest.raises(ValueError, match="stage 0 cannot be offloaded: its weights share memory with others"):
        offload.leave(0, optimizer)


def test_replicas_share_the_images_of_fewer_samples(pool: Pool) -> None:
    layouts = {"vision": (4, 1, 1), "llm": (1, 1, 4)}
    plan = planned(
        vision_language(), layouts, microbatch=1, images=(3, 0, 2), schedule=three_phase(), num_ranks=4
    )
    held = [[tuple(item) for m in plan.microbatches_of["vision", r] for item in m.items] for r in range(4)]
    assert held == [[(0, 0), (0, 1)], [(0, 2)], [(2, 0)], [(2, 1)]]
    assert_same(plan, pool, Precision.FLOAT64)


def frozen_vision_language(trains: Trainable) -> ModelGraph:
    model = tiny_valm(vision=trains)
    return connect("tiny-vlm", (model.module("vision"), model.module("llm")))


def test_two_encoders_on_the_ranks_of_the_llm(pool: Pool) -> None:
    layouts = {"vision": (4, 1, 1), "audio": (2, 1, 2), "llm": (2, 2, 1)}
    plan = planned(tiny_valm(), layouts, microbatch=1, images=(1, 2, 0, 1), schedule=three_phase(1))
    assert len(plan.ranks) == 4
    assert_same(plan, pool, Precision.FLOAT64)
