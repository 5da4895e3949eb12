"""Several hidden states of an encoder, side by side in front of its projector."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from experiments.doors import whole_sizes
from experiments.doors.whole_configs import CONFIGS
from runtime.models.carried_states import beside
from runtime.models.choose import adapter_of
from tests import test_packed_tiles as packed_tiles
from tests.test_memory_eager import LENGTHS, NEEDS, VIT, WIDTH, accounted_bytes, saved_bytes
from workbench.frozen_json import FrozenJson
from workbench.job.schema import ModuleSpec
from workbench.model.families.registry import ARCHITECTURES
from workbench.model.feature_layers import num_beside, states_read
from workbench.model.hf_config import module_from_config
from workbench.model.model_graph import Module, Source
from workbench.model.projector import Projector

TOWER = VIT | {"model_type": "siglip_vision_model", "num_hidden_layers": 3}


def tower(feature_layer: int | tuple[int, ...], **others: Any) -> Module:
    config = {**TOWER, **others}
    return module_from_config(
        config, name="v", modality="image", projector=Projector.MLP, feature_layer=feature_layer, llm_width=96
    )


@given(st.lists(st.integers(-6, 5), min_size=1, max_size=6, unique_by=lambda each: each % 6))
def test_layers_pass_on_what_the_projector_reads(listed: list[int]) -> None:
    """Through layers that add one to a state: the projector is given the states in the order of the list."""
    states = states_read(tuple(listed), 6)
    x_TD = torch.zeros(2, 3)
    for index in range(1, max(states) + 1):
        x_TD = through(states, index, x_TD, lambda own, _: own + 1)
        assert x_TD.shape[1] == 3 * (1 + num_beside(states, index))
    read = through(states, max(states) + 1, x_TD, lambda own, _: own)
    assert read[0, ::3].tolist() == list(states)


def through(states: tuple[int, ...], index: int, x_TD: Tensor, run: Any) -> Tensor:
    around = beside(states, index, 3)
    return run(x_TD, None) if around is None else around.around(run, x_TD, None)


@pytest.mark.parametrize("needs", NEEDS)
@pytest.mark.parametrize("index", [1, 2, 3, 4])
def test_account_is_what_autograd_saves(index: int, needs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of blocks and of the projector, to the byte; of a layer's input, only its own state is kept."""
    module, lengths = tower((1, 0, -1)), LENGTHS["unequal"]
    monkeypatch.setattr("tests.test_memory_eager.module_of", lambda _: module)
    accounted = accounted_bytes("siglip", index, NEEDS[needs], lengths)
    monkeypatch.setattr("tests.test_memory_eager.WIDTH", module.layers[index - 1].out_width)
    assert saved_bytes("siglip", index, NEEDS[needs], lengths, torch.float32) == accounted


def test_blocks_behind_the_last_state_are_left_out() -> None:
    module = tower((0, -2))
    assert [layer.out_width for layer in module.layers] == [WIDTH, 2 * WIDTH, 2 * WIDTH, 96]
    assert adapter_of(module).num_layers == len(module.layers)


def test_a_plan_and_a_job_keep_the_list() -> None:
    source, form = tower((1, 0, -1)).source, FrozenJson()
    assert form.decode(Source, form.encode(source), "source") == source
    assert ModuleSpec(config="c", feature_layer=(1, 0, -1)).feature_layer == (1, 0, -1)


@pytest.mark.parametrize(
    ("listed", "words"),
    [
        ((), "must name each hidden state once, and at least one of 4, got"),
        ((1, -3), r"must name each hidden state once, and at least one of 4, got \[1, -3\]"),
        ((0, 4), "feature_layer must be from -4 to 3, got 4"),
    ],
)
def test_states_that_cannot_be_read_are_refused(listed: tuple[int, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        tower(listed)


@pytest.mark.parametrize("kind", ["qwen2_vl_vision", "mllama_vision_model"])
def test_mergers_of_towers_and_cross_attention_read_one_state(kind: str) -> None:
    example = next(iter(ARCHITECTURES[kind].examples.values()))
    config = {**example.config, "model_type": kind}
    with pytest.raises(ValueError, match=r"its features are of one hidden state, got feature_layer \(0, 1\)"):
        module_from_config(config, name="v", modality="image", feature_layer=(0, 1), llm_width=96)


def test_tiles_of_several_states_are_put_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Granite Vision: LLaVA-NeXT with SigLIP, of which four states are read, and Granite."""
    text = {"model_type": "granite", **whole_sizes.TEXT, "logits_scaling": 4.0}
    seen = {"model_type": "siglip_vision_model", **whole_sizes.VIT}
    several = {"vision_feature_layer": [-4, -3, -2, -1], "vision_feature_select_strategy": "full"}
    config = {**CONFIGS["llava_next"], "text_config": text, "vision_config": seen, **several}
    kind = "llava_next, granite"
    monkeypatch.setitem(CONFIGS, kind, config)
    monkeypatch.setitem(packed_tiles.GRIDS, kind, packed_tiles.GRIDS["llava_next"])
    sizes = packed_tiles.SIZES["padded either way"]
    packed_tiles.test_losses_and_gradients_are_those_of_the_whole_model(kind, sizes, tmp_path)
