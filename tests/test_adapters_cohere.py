"""Cohere 2, Aya Vision and Command A Vision as wholes: gradients, layouts, sizes, refusals."""

from typing import Any

import pytest
import torch

from experiments.doors.whole_configs import CONFIGS
from runtime.models.choose import adapter_of
from runtime.models.decoder import NextTokenHead
from runtime.world.pool import Pool
from tests import tiny_models
from tests.test_expert_plan import moe_plan
from tests.test_parity import assert_same
from workbench.model.composites.composite import LLM, VISION
from workbench.model.composites.registry import take_apart
from workbench.model.hf_config import module_from_config
from workbench.model.layer import Attention, LayerKind
from workbench.model.projector import ProjectorStep
from workbench.model.transformer import Norm
from workbench.plan.plan import ModuleSettings, Recompute, Sharding
from workbench.plan.runnable import check_family

TINY: dict[str, Any] = tiny_models.LLAMA | {
    "model_type": "cohere2",
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "sliding_window": 4,
    "sliding_window_pattern": 2,
    "logit_scale": 0.3,
    "tie_word_embeddings": True,
}


@pytest.mark.parametrize(
    ("degrees", "settings"),
    [
        ({"tp": 2, "pp": 2}, ModuleSettings(module="llm", recompute=Recompute.FULL)),
        ({"tp": 2, "dp": 2}, ModuleSettings(module="llm", sequence_parallel=True)),
        ({"tp": 2, "cp": 2}, ModuleSettings(module="llm")),
        ({"cp": 2, "pp": 2}, ModuleSettings(module="llm")),
        ({"dp": 2}, ModuleSettings(module="llm", sharding=Sharding.PARAMETERS)),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_layouts_train_as_one_process(degrees: dict[str, int], settings: ModuleSettings, pool: Pool) -> None:
    """With tied embeddings, and windows shorter than the samples."""
    assert_same(moe_plan(**degrees, config=TINY, modules=(settings,)), pool)


def test_blocks_without_a_window_do_not_rotate() -> None:
    """Every other one, and all of them where the configuration has no window."""
    module = tiny_models.llm(TINY)
    blocks = [layer for layer in module.layers if layer.kind is LayerKind.BLOCK]
    windows = [next(op.window for op in layer.operators if isinstance(op, Attention)) for layer in blocks]
    assert windows == [4, None, 4]
    rotates = [any(op.name == "rotary" for op in layer.operators) for layer in blocks]
    assert rotates == [True, False, True]
    plain = tiny_models.llm(TINY | {"sliding_window": None})
    assert not any(op.name == "rotary" for layer in plain.layers for op in layer.operators)


def test_logits_are_scaled() -> None:
    """By any number, and not where another family's configuration has the key."""

    def head(config: dict[str, Any]) -> NextTokenHead:
        layer = adapter_of(tiny_models.llm(config)).last()
        assert isinstance(layer, NextTokenHead)
        return layer

    ours, plain = head(TINY), head(TINY | {"logit_scale": 1.0})
    for layer in (ours, plain):
        torch.manual_seed(0)
        for weight in layer.parameters():
            torch.nn.init.normal_(weight)
    x_TD = torch.randn(5, TINY["hidden_size"])
    torch.testing.assert_close(ours.logits(x_TD), 0.3 * plain.logits(x_TD))
    assert head(tiny_models.LLAMA | {"logit_scale": 0.3}).logit_scale is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"text_config": {"model_type": "llama"}}, "text_config.model_type must be cohere2, got 'llama'"),
        (
            {"alignment_intermediate_size": 41},
            "must be even, as one half gates the other, got 41; nearest: 42",
        ),
        ({"vision_feature_select_strategy": "default"}, "its first patch would be dropped"),
    ],
)
def test_what_cannot_be_taken_apart_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        take_apart({**CONFIGS["aya_vision"], **change})


def test_a_note_names_the_scale_that_transformers_composite_leaves_out() -> None:
    text = {**CONFIGS["aya_vision"]["text_config"], "logit_scale": 0.25}
    parts = take_apart({**CONFIGS["aya_vision"], "text_config": text})
    assert parts.modules[LLM].config["logit_scale"] == 1.0
    assert any("logit_scale: 0.25 of llm changes them" in note for note in parts.notes)


def test_a_projector_may_have_a_norm_without_a_shift() -> None:
    """As many weights as are built."""
    steps = (ProjectorStep(norm=Norm.UNSHIFTED), ProjectorStep(linear_out=True))
    module = module_from_config(
        tiny_models.SIGLIP, name=VISION, modality=VISION, projector=steps, llm_width=32
    )
    adapter = adapter_of(module)
    last = adapter.build(adapter.num_layers - 1)
    assert sum(weight.numel() for weight in last.parameters()) == module.layers[-1].num_parameters


@pytest.mark.parametrize(
    ("ropes", "words"),
    [
        ({"sliding_attention": None}, "rope_parameters must have .* got none for 'full_attention'"),
        (
            {"sliding_attention": None, "full_attention": {"mrope_section": [2, 2, 1]}},
            r"mrope_section must add up to 6, half a head's width, got \[2, 2, 1\]",
        ),
    ],
)
def test_kinds_of_blocks_of_compass_say_how_they_rotate(ropes: dict[str, Any], words: str) -> None:
    text = {**CONFIGS["cohere_compass"]["text_config"], "rope_parameters": ropes}
    config = {**text, "model_type": "cohere_compass_text"}
    with pytest.raises(ValueError, match=words):
        check_family(module_from_config(config, name="llm", modality="text"))
