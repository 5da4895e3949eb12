"""Positions of three axes: transformers' own, whole and shared by context-parallel ranks."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.doors.families import plan_of
from experiments.doors.whole_configs import CONFIGS
from experiments.doors.whole_models import modules_of, original
from runtime.data.batches import axes_of
from runtime.models.choose import adapter_of
from runtime.world.pool import Pool
from tests.test_parity import assert_same
from workbench.data.sample import Sample, Segment
from workbench.model.composites.registry import take_apart
from workbench.plan.build import with_programs
from workbench.plan.plan import Plan

IMAGE = 90
SIDES = st.integers(1, 4).map(lambda side: 2 * side)


def sample_of(texts: list[int], grids: list[tuple[int, int]]) -> Sample:
    """Text, then an image and text again, and so on."""
    parts = [Segment("text", 0, texts[0], texts[0])]
    for k, (rows, columns) in enumerate(grids):
        patches = rows * columns
        parts.append(Segment("vision", k, patches, patches // 4, (rows, columns)))
        parts.append(Segment("text", k + 1, texts[k + 1], texts[k + 1]))
    return Sample(0, tuple(parts))


@settings(deadline=None, max_examples=25)
@given(st.lists(st.tuples(SIDES, SIDES), max_size=3), st.data())
def test_axes_are_those_of_transformers(grids: list[tuple[int, int]], data: st.DataObject) -> None:
    sizes = st.lists(st.integers(1, 6), min_size=len(grids) + 1, max_size=len(grids) + 1)
    sample = sample_of(data.draw(sizes), grids)
    kinds = [part.modality != "text" for part in sample.segments for _ in range(part.tokens_out)]
    is_image = torch.tensor(kinds).int()
    ids = torch.where(is_image.bool(), IMAGE, 1)
    grid = torch.tensor([[1, *sides] for sides in grids]) if grids else None
    wanted, _ = WHOLE.model.get_rope_index(ids[None], is_image[None], image_grid_thw=grid)
    assert torch.equal(axes_of(PLAN.model.modules, [sample]), wanted[:, 0])


PLAN = plan_of("qwen2_vl")
WHOLE = original({**CONFIGS["qwen2_vl"], "image_token_id": IMAGE})


def test_context_parallel_ranks_turn_by_the_same_axes(pool: Pool) -> None:
    """The LLM's two stages as one of two ranks that share its tokens."""
    encoder, first, last = PLAN.stages
    whole = replace(first, layers=(0, last.layers[1]), ranks=(first.ranks[0], last.ranks[0]))
    shared: Plan = with_programs(replace(PLAN, stages=(encoder, whole), programs=()))
    assert {stage.cp for stage in shared.stages} == {1, 2}
    assert_same(shared, pool)


def test_shares_of_axes_that_are_no_head_are_refused() -> None:
    config = {**CONFIGS["qwen2_vl"]}
    rotation = {"rope_type": "default", "mrope_section": [16, 24, 24]}
    config["text_config"] = {**config["text_config"], "rope_parameters": rotation}
    with pytest.raises(ValueError, match=r"mrope_section must add up to 6, .*nearest: \[2, 2, 2\]"):
        adapter_of(modules_of(dict(take_apart(config).modules))["llm"])
