"""Language models as transformers builds them: their sizes, what they read, and as users hand them in."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek_v3
from transformers.models.ernie4_5_moe import modeling_ernie4_5_moe as ernie4_5_moe
from transformers.models.glm4_moe import modeling_glm4_moe as glm4_moe
from transformers.models.minimax_m2 import modeling_minimax_m2 as minimax_m2
from transformers.models.nemotron_h import modeling_nemotron_h as nemotron_h

from runtime.frontend.multimodal import ModalityModule, MultimodalModule
from runtime.models.decoder_families import DECODERS
from runtime.models.glm import CORRECTION, CorrectedRouter
from runtime.models.norm import replace_parts, widen_norms
from runtime.models.wide_float import in_float64
from runtime.state.weights_export import exporting, write_part
from runtime.step.stage_module import build_stage_module
from tests import user_models
from tests.user_models import VISION
from workbench.plan.plan import Plan

CORRECTED = (deepseek_v3.DeepseekV3TopkRouter, glm4_moe.Glm4MoeTopkRouter, nemotron_h.NemotronHTopkRouter)
ROUNDS_TO_FLOAT32 = (
    ernie4_5_moe.Ernie4_5_MoeAttention,
    ernie4_5_moe.Ernie4_5_MoeTopKRouter,
    minimax_m2.MiniMaxM2TopKRouter,
    nemotron_h.NemotronHForCausalLM,
)


def model_of(config: Mapping[str, Any]) -> PreTrainedModel:
    """transformers' own; it draws its weights."""
    made = CONFIG_MAPPING[config["model_type"]].from_dict(dict(config))
    model: PreTrainedModel = AutoModelForCausalLM.from_config(made)
    return model


def num_weights(config: Mapping[str, Any]) -> int:
    """Of transformers' model, which takes no memory."""
    with torch.device("meta"):
        return sum(weight.numel() for weight in model_of(config).parameters())


def assert_read_by_transformers(theirs: PreTrainedModel, plan: Plan, folder: Path) -> None:
    """What is read from `in` of the folder and exported to `out` is theirs, bit by bit, as they read it."""
    with exporting(folder / "out", plan.model, dtype=torch.float32):
        for stage in plan.stages:
            module = build_stage_module(plan, stage, seed=0, dtype=theirs.dtype, weights=folder / "in")
            write_part(folder / "out", stage.module, stage.layers[0], module.owned_weights())
    again, report = type(theirs).from_pretrained(
        folder / "out" / "llm", output_loading_info=True, dtype=theirs.dtype
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    loaded = again.state_dict()
    assert all(torch.equal(loaded[name], values) for name, values in theirs.state_dict().items())


def users_model(config: Mapping[str, Any]) -> PreTrainedModel:
    """In float64, where transformers' norms and routers round to float32; no correction or bias is 0."""
    torch.manual_seed(5)
    model, family = model_of(config), DECODERS[config["model_type"]]
    if family.norm is not None:
        widen_norms(model, family.norm)
    for router in CORRECTED:
        replace_parts(model, router, CorrectedRouter)
    for name, values in model.state_dict().items():
        if CORRECTION in name:
            values.copy_(torch.linspace(0.6, -0.6, values.numel()).view_as(values))
        elif name.endswith(("bias", "sinks")):
            nn.init.normal_(values, std=0.5)
    for module in model.modules():
        if isinstance(module, ROUNDS_TO_FLOAT32):
            module.forward = in_float64(module.forward)
    if any(name.endswith("Experts") for name in {type(module).__name__ for module in model.modules()}):
        model.set_experts_implementation("eager")  # the others know no float64
    return model.double()


def behind_a_tower(language: PreTrainedModel) -> MultimodalModule:
    tower = ModalityModule(user_models.siglip(), "mlp")
    return MultimodalModule({"vision": tower}, language, token_ids={"vision": VISION})


def an_image_and_a_text() -> dict[str, Any]:
    """For such a model."""
    return {
        "input_ids": [torch.tensor([1, VISION, 2, 3]), torch.tensor([4, 5, 6, 7, 8])],
        "pixel_values": [user_models.image(), None],
    }


def refused(message: str, do: Callable[[], object]) -> None:
    """In one line."""
    with pytest.raises(ValueError, match=message) as info:
        do()
    assert "\n" not in str(info.value)
