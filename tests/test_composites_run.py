"""Encoders and projectors of composites against transformers' own whole models, in float64."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from runtime.models.norm import widen_norms
from runtime.step.stage_module import StageInput, StageModule
from tests.test_adapters import build, relative
from tests.test_adapters_encoders import qwen_features, widen_vision_rotations
from tests.test_composites import CONFIGS, built, modules_of
from workbench.data.sample import Sample, Segment
from workbench.model.composites.composite import LLM, name_in_composite
from workbench.model.composites.registry import take_apart
from workbench.model.item_tokens import clip_tokens, image_tokens, native_tokens
from workbench.model.model_graph import Module

torch.set_num_threads(1)
F64 = torch.float64
TRANSPOSED = ("mm_input_projection_weight",)  # [in, out], where torch's products have [out, in]
GEMMA_OFFSET = 1.0


def read_state(model: Any, images: Tensor) -> Tensor:
    """What LLaVA's kind makes of whole images, before tiles are put together."""
    config, parts = model.config, model.model
    seen = parts.vision_tower(images, output_hidden_states=True).hidden_states[config.vision_feature_layer]
    kept = seen if config.vision_feature_select_strategy == "full" else seen[:, 1:]
    return parts.multi_modal_projector(kept).flatten(0, 1)


def pooled(model: Any, images: Tensor, **more: Any) -> Tensor:
    found = model.model.get_image_features(pixel_values=images, **more).pooler_output
    return torch.cat([each.reshape(-1, each.shape[-1]) for each in found])


def heard(model: Any, clips: Tensor) -> Tensor:
    found = model.model.get_audio_features(clips).pooler_output
    return torch.cat([each.reshape(-1, each.shape[-1]) for each in found])


def heard_whole(model: Any, clips: Tensor) -> Tensor:
    """Qwen2-Audio's, of clips without padding."""
    parts = model.model
    return parts.multi_modal_projector(parts.audio_tower(clips).last_hidden_state).flatten(0, 1)


def seen_by_qwen(model: Any, images: Tensor) -> Tensor:
    return torch.cat([qwen_features(model.model.visual, image) for image in images])


FEATURES: Mapping[str, Callable[[Any, Tensor], Tensor]] = {
    "llava": read_state,
    "llava, mistral, no bias": read_state,
    "llava_next": read_state,
    "llava_onevision": read_state,
    "internvl": pooled,
    "internvl, earlier state": pooled,
    "gemma3": pooled,
    "paligemma": pooled,
    "idefics3": lambda model, images: pooled(model, images[None]),
    "smolvlm": lambda model, images: pooled(model, images[None]),
    "mistral3": lambda model, images: pooled(model, images, image_sizes=[images.shape[2:]] * len(images)),
    "qwen2_vl": seen_by_qwen,
    "qwen2_5_vl": seen_by_qwen,
    "qwen2_audio": heard_whole,
    "voxtral": heard,
}


def whole_model(config: dict[str, Any]) -> nn.Module:
    """transformers' own model in float64; SigLIP has no class token to leave out."""
    strategy = {"vision_feature_select_strategy": "full"} if "siglip" in str(config) else {}
    made = built({**config, **strategy})
    for norm in {type(each) for each in made.modules() if type(each).__name__.endswith("RMSNorm")}:
        widen_norms(made, norm, GEMMA_OFFSET if norm.__name__.startswith("Gemma") else 0.0)
    return made.to(F64).eval().requires_grad_()


def give_weights(theirs: nn.Module, ours: StageModule, part: Any) -> None:
    held = dict(theirs.named_parameters())
    with torch.no_grad():
        for name, weight in ours.named_weights():
            theirs_name = name_in_composite(part, name)
            value = weight.T if theirs_name.endswith(TRANSPOSED) else weight
            assert held[theirs_name].shape == value.shape, (name, theirs_name)
            held[theirs_name].copy_(value)


def tokens_of(module: Module) -> tuple[int, int]:
    if module.modality == "audio":
        (clip,) = clip_tokens(module, 0.2)  # ten frames of 20 ms, the whole window
        return clip
    return native_tokens(module) or image_tokens(module, 16, 24)


@pytest.mark.parametrize("name", FEATURES)
def test_features_equal_those_of_the_whole_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    widen_vision_rotations(monkeypatch)
    parts = take_apart(CONFIGS[name])
    (called,) = [each for each in parts.modules if each != LLM]
    module = modules_of(dict(parts.modules))[called]
    tokens = tokens_of(module)
    ours, _, data = build(module, F64, *(Sample(k, (Segment(called, 0, *tokens),)) for k in range(2)))
    theirs = whole_model(CONFIGS[name])
    give_weights(theirs, ours, parts.modules[called])
    expected = FEATURES[name](theirs, torch.stack(list(data.raw)))
    features = ours(StageInput(None, data))
    assert relative(features, expected) <= 1e-10
    torch.manual_seed(0)
    cotangent = torch.randn_like(expected)
    expected.backward(cotangent)
    features.backward(cotangent)
    held = dict(theirs.named_parameters())
    grads = {key: held[name_in_composite(parts.modules[called], key)] for key, _ in ours.named_weights()}
    scale = torch.stack([weight.grad.norm() for weight in grads.values()]).norm()
    for key, weight in ours.named_weights():
        grad = grads[key].grad.T if key.startswith("projector.2.") and name == "gemma3" else grads[key].grad
        assert (weight.grad - grad).norm() <= 1e-10 * scale, key
