"""Tiny transformers models as users hand them in, batches for them, and callbacks that processes can find."""

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    CLIPVisionConfig,
    CLIPVisionModel,
    Dinov2Config,
    Dinov2Model,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2AudioEncoder,
    Qwen2AudioEncoderConfig,
    SiglipVisionConfig,
    SiglipVisionModel,
    WhisperConfig,
)
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.llama4 import modeling_llama4 as llama4
from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni as omni
from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as omni_3
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from runtime.frontend.multimodal import ModalityModule, MultimodalModule
from runtime.models.norm import widen_norms
from runtime.models.patch_attention import rotated
from tests import tiny_models

LLAMA = tiny_models.LLAMA
SIDE_PX, CHANNELS, BINS = 12, 3, tiny_models.WHISPER["num_mel_bins"]
QWEN, OMNI = "qwen2_audio_encoder", "qwen2_5_omni_audio_encoder"
VISION, AUDIO = 60, 61  # special tokens
TOKEN_IDS = {"vision": VISION, "audio": AUDIO}


def siglip() -> PreTrainedModel:
    return _made(SiglipVisionModel, SiglipVisionConfig, tiny_models.SIGLIP)


def clip() -> PreTrainedModel:
    return _made(CLIPVisionModel, CLIPVisionConfig, tiny_models.CLIP)


def whisper() -> PreTrainedModel:
    return _made(WhisperEncoder, WhisperConfig, tiny_models.WHISPER)


def dinov2() -> PreTrainedModel:
    shared = ("hidden_size", "num_hidden_layers", "num_attention_heads", "image_size", "patch_size")
    return _made(Dinov2Model, Dinov2Config, {key: tiny_models.SIGLIP[key] for key in shared})


def llama4_vision() -> PreTrainedModel:
    width = tiny_models.SIGLIP["hidden_size"]
    adapter = {"pixel_shuffle_ratio": 1 / 3, "projector_input_dim": 24, "projector_output_dim": 24}
    sizes = {"intermediate_size": 9 * width, "vision_output_dim": 24, **adapter}
    return _made(llama4.Llama4VisionModel, llama4.Llama4VisionConfig, tiny_models.SIGLIP | sizes)


def qwen2_audio() -> PreTrainedModel:
    return _made(Qwen2AudioEncoder, Qwen2AudioEncoderConfig, tiny_models.WHISPER | {"model_type": QWEN})


def omni_audio() -> PreTrainedModel:
    """Windows of ten tokens."""
    config = omni.Qwen2_5OmniAudioEncoderConfig
    return _made(
        omni.Qwen2_5OmniAudioEncoder, config, tiny_models.WHISPER | {"model_type": OMNI, "n_window": 10}
    )


def qwen3_omni_audio() -> PreTrainedModel:
    """Windows of two chunks."""
    config = tiny_models.WHISPER | {
        "model_type": "qwen3_omni_moe_audio_encoder",
        "max_source_positions": 13,
        "n_window_infer": 200,
        "downsample_hidden_size": 6,
        "output_dim": 8,
    }
    return _made(omni_3.Qwen3OmniMoeAudioEncoder, omni_3.Qwen3OmniMoeAudioEncoderConfig, config)


def llama(**changes: Any) -> PreTrainedModel:
    """Its norms stay in float64, where transformers' round to float32."""
    model = _made(LlamaForCausalLM, LlamaConfig, tiny_models.LLAMA | changes)
    widen_norms(model, LlamaRMSNorm)
    return model.double()


def _made(model: Any, config: Any, values: dict[str, Any]) -> PreTrainedModel:
    torch.manual_seed(5)
    made: PreTrainedModel = model(config(**values)).double()
    return made


def valm(**changes: Any) -> MultimodalModule:
    """Vision (MLP projector), audio (linear one), Llama; `changes` are arguments of MultimodalModule."""
    encoders = {"vision": ModalityModule(siglip(), "mlp"), "audio": ModalityModule(whisper(), proj="linear")}
    return MultimodalModule(
        **{"encoders": encoders, "language_model": llama(), "token_ids": TOKEN_IDS, **changes}
    )


def batch() -> dict[str, Any]:
    """Four samples: both modalities, two images, audio alone, text alone."""
    torch.manual_seed(6)
    return {
        "input_ids": [
            torch.tensor([1, 2, VISION, 3, AUDIO, 4]),
            torch.tensor([VISION, 5, 6, VISION, 7]),
            torch.tensor([8, AUDIO, 9, 10, 11]),
            torch.tensor([12, 13, 14]),
        ],
        "pixel_values": [image(), torch.stack([image(), image()]), None, None],
        "audio": {"input_features": [frames(10), None, frames(10), None]},
    }


def image(height: int = SIDE_PX, width: int = SIDE_PX) -> Tensor:
    return torch.randn(CHANNELS, height, width, dtype=torch.float64)


def frames(num_tokens: int) -> Tensor:
    return torch.randn(BINS, 2 * num_tokens, dtype=torch.float64)


def scaled_by_place(inputs: dict[str, Any], output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Depends on which item it is, so a mix-up shows."""
    places = [1 + sample + k / 8 for sample, k in inputs["items"]]
    return tuple(index * each for index, each in zip(places, output, strict=True))


def squashed(inputs: dict[str, Any], output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    assert inputs["num_tokens"] == tuple(map(len, output))
    return tuple(torch.tanh(each) for each in output)


def shortened(inputs: dict[str, Any], output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """What a callback must not do."""
    del inputs
    return tuple(each[1:] for each in output)


def broken(inputs: dict[str, Any], output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """What a callback of a user may do, on two lines."""
    raise KeyError(f"no such item\n{inputs['items'][0]}")


def broken_before(inputs: dict[str, Any]) -> dict[str, Any]:
    return {"pixel_values": inputs["pixels"]}


def rotate_in_given_precision(monkeypatch: pytest.MonkeyPatch, *families: ModuleType) -> None:
    """Let Qwen's towers rotate queries and keys in their own precision; transformers uses float32 only."""

    def turned(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return rotated(q, cos, sin), rotated(k, cos, sin)

    for family in families:
        monkeypatch.setattr(family, "apply_rotary_pos_emb_vision", turned)
