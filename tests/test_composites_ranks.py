"""Composites as wholes: gradients of transformers' own model, and every layout trains as one process."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from experiments.doors.families import plan_of
from experiments.doors.whole_configs import CONFIGS
from experiments.doors.whole_models import modules_of, segments_of
from runtime.world.pool import Pool
from tests.composite_gradients import assert_same_gradients, gradients_of_both
from tests.encoder_cases import wide_rotations  # noqa: F401  (a fixture)
from tests.plans import disjoint_plan
from tests.test_parity import assert_same
from workbench.data.sample import Sample, Segment
from workbench.model.composites.composite import LLM
from workbench.model.composites.registry import take_apart
from workbench.model.model_graph import TEXT, ModelGraph, Module, connect
from workbench.model.trainable import Trainable, with_trainable
from workbench.plan.plan import ModuleSettings

torch.set_num_threads(1)
NAMES = (
    "cosmos3_edge",
    "cosmos3_edge, biases",
    "hyperclovax_vision_v2",
    "cohere_compass",
    "gemma4_unified",
    "gemma4_unified, sound",
    "minicpm_ocr",
    "minicpm_ocr, merged twice",
    "minicpmv4_6",
    "minicpmv4_6, last block",
)
# Towers whose ranks may share tokens.
SHARED = ("cosmos3_edge", "gemma4_unified, sound", "minicpm_ocr", "minicpm_ocr, merged twice")
HYBRID = (
    "minicpm_ocr",
    "minicpmv4_6",
    "minicpmv4_6, last block",
)  # language models whose ranks do not share tokens
TIED = {"lm_head.weight", "model.language_model.embed_tokens.weight"}


def modules(name: str) -> tuple[Module, ...]:
    """Encoders, then the language model."""
    made = modules_of(dict(take_apart(CONFIGS[name]).modules))
    return (*(module for called, module in made.items() if called != LLM), made[LLM])


def batch_of(encoders: tuple[Module, ...]) -> tuple[Sample, ...]:
    """Items between texts, items first, and a text alone."""
    said, after = Segment(TEXT, 0, 5, 5), Segment(TEXT, 1, 3, 3)
    items = tuple(segment for encoder in encoders for segment in segments_of(encoder))
    lone = (Segment(TEXT, 0, 9, 9),)
    return Sample(0, (said, *items, after)), Sample(1, (*items, said)), Sample(2, lone)


def connected(parts: tuple[Module, ...]) -> ModelGraph:
    *encoders, llm = parts
    return connect("whole", *((encoder, llm) for encoder in encoders))


def cuts_of(parts: tuple[Module, ...]) -> dict[str, tuple[int, ...]]:
    *encoders, llm = parts
    return {
        **{encoder.name: (len(encoder.layers),) for encoder in encoders},
        LLM: (2, len(llm.layers) - 2),
    }


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_the_whole_model(name: str, tmp_path: Path, pool: Pool) -> None:
    """Of every weight that a module has."""
    ours, theirs = gradients_of_both(name, plan_of(name), tmp_path / "whole", pool)
    assert ours.keys() - TIED == theirs.keys() - TIED
    assert_same_gradients(ours, theirs, ours.keys() - TIED)


@pytest.mark.parametrize("name", NAMES)
def test_tensor_parallel_ranks_train_as_one_process(name: str, pool: Pool) -> None:
    """Of encoders and the language model; with sequence parallelism, too."""
    parts = modules(name)
    plan = disjoint_plan(
        connected(parts), batch_of(parts[:-1]), cuts_of(parts), grids={part.name: (1, 2) for part in parts}
    )
    assert_same(plan, pool)
    divided = tuple(ModuleSettings(module=part.name, sequence_parallel=True) for part in parts)
    assert_same(replace(plan, settings=replace(plan.settings, modules=divided)), pool)


@pytest.mark.parametrize("name", NAMES)
def test_context_parallel_ranks_train_as_one_process(name: str, pool: Pool) -> None:
    """Of the language model, and of towers whose ranks may share tokens."""
    parts = modules(name)
    grids = {
        part.name: (2, 1) for part in parts if (name not in HYBRID if part.name == LLM else name in SHARED)
    }
    assert_same(disjoint_plan(connected(parts), batch_of(parts[:-1]), cuts_of(parts), grids=grids), pool)


@pytest.mark.parametrize("name", NAMES)
def test_stages_of_every_module_in_two_replicas(name: str, pool: Pool) -> None:
    *encoders, _llm = parts = modules(name)
    cuts: dict[str, tuple[int, ...]] = {part.name: (1, len(part.layers) - 1) for part in parts}
    if len(encoders) > 1:  # on fewer ranks
        cuts |= {encoder.name: (len(encoder.layers),) for encoder in encoders}
    batch = batch_of(parts[:-1])[:2]
    assert_same(disjoint_plan(connected(parts), batch, cuts, replicas=2), pool)


@pytest.mark.parametrize("trained", [(Trainable.NONE, Trainable.ALL), (Trainable.PROJECTOR, Trainable.NONE)])
@pytest.mark.parametrize("name", NAMES)
def test_frozen_parts(name: str, trained: tuple[Trainable, Trainable], pool: Pool) -> None:
    """Encoders; and all but projectors."""
    *encoders, llm = modules(name)
    parts = (*(with_trainable(encoder, trained[0]) for encoder in encoders), with_trainable(llm, trained[1]))
    assert_same(disjoint_plan(connected(parts), batch_of(parts[:-1]), cuts_of(parts)), pool)
