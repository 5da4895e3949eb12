"""Known models by their published dimensions: every row of shapes.csv as a module."""

import csv
import difflib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from workbench.model.diffusion import STABLE_DIFFUSION_2_1, unet_layers
from workbench.model.dit import behind_projector
from workbench.model.hf_config import module_from_config
from workbench.model.hf_encoder import ENCODERS
from workbench.model.layer import Layer
from workbench.model.model_graph import GENERATED, TEXT, Module
from workbench.model.module_layers import (
    Projection,
    Projector,
    bert_embedding,
    bert_head,
    block_layers,
    patch_embedding,
    projector_layer,
)
from workbench.model.trainable import Trainable, with_trainable
from workbench.model.transformer import Block, Heads, Mlp, Norm, Placement, vit_block

_SHAPES_CSV = Path(__file__).with_name("shapes.csv")
_UNET = "sd-2.1-unet"
_TIED = ("llama-3.2-1b", "llama-3.2-3b", "phi-4-mini", "qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One row of shapes.csv; what a model does not have is 0.

    Args:
        name: of the model; role: "llm", "vision" or "audio".
        hidden: width of the residual stream; ffn: inner width of the MLP.
        patch_px, image_px: of encoders with one image size.
        merge: neighbouring tokens that become one behind the encoder.
    """

    name: str
    role: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    max_seq: int
    patch_px: int
    image_px: int
    merge: int


@cache
def shapes() -> tuple[Shape, ...]:
    """Every transformer of shapes.csv, in file order (the UNet of the last row is none)."""
    with _SHAPES_CSV.open(encoding="utf-8", newline="") as file:
        return tuple(_shape(row) for row in csv.DictReader(file) if row["name"] != _UNET)


def shape_names() -> tuple[str, ...]:
    """Names that `from_shape` knows, in file order."""
    return (*(shape.name for shape in shapes()), _UNET)


def role_of(name: str) -> str:
    """ "llm", "vision", "audio" or "generator"; ValueError for an unknown name."""
    return GENERATED if name == _UNET else _find(name).role


def from_shape(
    name: str,
    *,
    module: str | None = None,
    llm_width: int | None = None,
    projector: Projector | None = None,
    trainable: Trainable = Trainable.ALL,
) -> Module:
    """The module of one row of shapes.csv.

    Where transformers has the architecture, the module carries the configuration with which a
    runtime builds it. An encoder's modality is its role, an LLM's is "text".

    Args:
        name: as in the file.
        module: name of the module; default the role.
        llm_width: hidden width of the LLM; encoders need it, the generator gets a projector by it, others
            must not have it.
        projector: of an encoder; default MLP, for Qwen2-VL vision its own merger.
        trainable: what of it is trained.

    Raises:
        ValueError: unknown name (the nearest known one is named), or arguments that do not fit.
    """
    if name == _UNET:
        layers = unet_layers()
        if llm_width is not None:
            layers = behind_projector(layers, STABLE_DIFFUSION_2_1.prompt_width, llm_width)
        return with_trainable(
            Module(name=module or "generator", modality=GENERATED, layers=layers), trainable
        )
    shape = _find(name)
    called = module or shape.role
    if name in _CUSTOM:
        layers = _CUSTOM[name](shape, projector, llm_width)
        modality = TEXT if shape.role == "llm" else shape.role
        return with_trainable(Module(name=called, modality=modality, layers=layers), trainable)
    family = next(make for prefix, make in _FAMILIES.items() if name.startswith(prefix))
    return module_from_config(
        family(shape),
        name=called,
        modality=TEXT if shape.role == "llm" else shape.role,
        trainable=trainable,
        projector=projector,
        llm_width=llm_width,
    )


def eva_clip(shape: Shape, projector: Projector | None, llm_width: int | None) -> tuple[Layer, ...]:
    """EVA-CLIP's vision tower: class token, learned positions, queries and values with a bias.

    EVA02-E norms after instead of before; parameters and work are the same.
    """
    block = vit_block(width=shape.hidden, num_heads=shape.heads, ffn=shape.ffn, activation="gelu", bias="qvo")
    embed = patch_embedding(
        patch_elements=3 * shape.patch_px**2,
        width=shape.hidden,
        bias=True,
        num_patches=(shape.image_px // shape.patch_px) ** 2,
        has_class_token=True,
    )
    return (embed, *block_layers(block, shape.layers), _projector(shape, projector, llm_width))


def _pooled_siglip(shape: Shape, projector: Projector | None, llm_width: int | None) -> tuple[Layer, ...]:
    """Phi-4-multimodal's vision encoder: SigLIP, then the mean of every 2 x 2 patches."""
    layers = ENCODERS["siglip_vision_model"](_siglip(shape)).layers
    return (*layers, _projector(shape, projector, llm_width))


def _projector(shape: Shape, projector: Projector | None, llm_width: int | None) -> Layer:
    if llm_width is None:
        raise ValueError(f"{shape.name}: an encoder needs llm_width, the width its projector ends with")
    if projector is Projector.MERGER:
        raise ValueError(f"{shape.name}: its projector must be 'linear' or 'mlp', got 'merger'")
    return projector_layer(
        Projection(
            kind=projector or Projector.MLP,
            in_width=shape.hidden,
            out_width=llm_width,
            norm=Norm.LAYER,
            merge=shape.merge,
        )
    )


def _bert(shape: Shape, projector: Projector | None, llm_width: int | None) -> tuple[Layer, ...]:
    if projector is not None or llm_width is not None:
        raise ValueError(f"{shape.name} is a language model: it has neither projector nor llm_width")
    heads = Heads(num=shape.heads, num_kv=shape.heads, dim=shape.head_dim, causal=False, bias="qkvo")
    block = Block(
        width=shape.hidden,
        heads=heads,
        mlp=Mlp(width=shape.ffn, gated=False, activation="gelu", bias=True),
        norm=Norm.LAYER,
        placement=Placement.POST,
    )
    return (
        bert_embedding(shape.vocab, shape.hidden, num_positions=512),
        *block_layers(block, shape.layers),
        bert_head(shape.vocab, shape.hidden),
    )


def _find(name: str) -> Shape:
    found = [shape for shape in shapes() if shape.name == name]
    if not found:
        near = difflib.get_close_matches(name, shape_names(), n=1, cutoff=0.3)
        hint = f"; nearest is {near[0]!r}" if near else ""
        raise ValueError(f"unknown model {name!r}{hint}")
    return found[0]


def _shape(row: dict[str, str]) -> Shape:
    def number(key: str) -> int:
        return int(row[key] or 0) if (row[key] or "0").isdigit() else 0

    merged = row["merge"].partition("x")
    return Shape(
        name=row["name"],
        role=row["role"],
        layers=number("layers"),
        hidden=number("hidden"),
        heads=number("heads"),
        kv_heads=number("kv_heads") or number("heads"),
        head_dim=number("head_dim"),
        ffn=number("ffn"),
        vocab=number("vocab"),
        max_seq=number("max_seq"),
        patch_px=number("patch_or_frame"),
        image_px=int(row["native_input"].partition("x")[0]) if "x" in row["native_input"] else 0,
        merge=int(merged[0]) * int(merged[2]) if merged[2].isdigit() else 1,
    )


def _decoder(shape: Shape) -> dict[str, Any]:
    return {
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "max_position_embeddings": shape.max_seq,
        "tie_word_embeddings": shape.name in _TIED,
    }


def _llama(shape: Shape) -> dict[str, Any]:
    theta = 500000.0 if "llama-3" in shape.name else 10000.0
    return _decoder(shape) | {
        "model_type": "llama",
        "head_dim": shape.head_dim,
        "rms_norm_eps": 1e-5,
        "rope_theta": theta,
    }


def _mistral(shape: Shape) -> dict[str, Any]:
    return _decoder(shape) | {"model_type": "mistral", "rms_norm_eps": 1e-5, "sliding_window": 4096}


def _phi3(shape: Shape) -> dict[str, Any]:
    """Phi-4 and Phi-4-mini."""
    share = {"partial_rotary_factor": 0.75} if shape.name == "phi-4-mini" else {"rope_theta": 250000.0}
    return _decoder(shape) | share | {"model_type": "phi3", "pad_token_id": None, "rms_norm_eps": 1e-5}


def _qwen2(shape: Shape) -> dict[str, Any]:
    return _decoder(shape) | {"model_type": "qwen2", "rope_theta": 1000000.0}


def _gemma2(shape: Shape) -> dict[str, Any]:
    config = _decoder(shape) | {"model_type": "gemma2", "head_dim": shape.head_dim, "sliding_window": 4096}
    return config | {"tie_word_embeddings": True}


def _gpt(shape: Shape) -> dict[str, Any]:
    """GPT-2 and GPT-3 (dense attention everywhere; GPT-3 alternates it with sparse).

    Differs: GPT-3 XL's printed 24 heads of 128 are not its width; it gets 16 of 128.
    """
    num_heads = (
        shape.heads if shape.heads * shape.head_dim == shape.hidden else shape.hidden // shape.head_dim
    )
    return {
        "model_type": "gpt2",
        "vocab_size": shape.vocab,
        "n_positions": shape.max_seq,
        "n_embd": shape.hidden,
        "n_layer": shape.layers,
        "n_head": num_heads,
        "n_inner": shape.ffn,
    }


def _vit(shape: Shape) -> dict[str, Any]:
    return {
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "image_size": shape.image_px,
        "patch_size": shape.patch_px,
    }


def _clip(shape: Shape) -> dict[str, Any]:
    activation = "quick_gelu" if shape.name.startswith("clip-vit-l") else "gelu"
    return _vit(shape) | {"model_type": "clip_vision_model", "hidden_act": activation}


def _siglip(shape: Shape) -> dict[str, Any]:
    return _vit(shape) | {"model_type": "siglip_vision_model", "vision_use_head": False}


def _qwen2_vl(shape: Shape) -> dict[str, Any]:
    return {
        "model_type": "qwen2_vl_vision",
        "depth": shape.layers,
        "embed_dim": shape.hidden,
        "num_heads": shape.heads,
        "mlp_ratio": shape.ffn // shape.hidden,
        "patch_size": shape.patch_px,
    }


def _qwen2_5_vl(shape: Shape) -> dict[str, Any]:
    return {
        "model_type": "qwen2_5_vl_vision",
        "depth": shape.layers,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_heads": shape.heads,
        "patch_size": shape.patch_px,
    }


def _whisper(shape: Shape) -> dict[str, Any]:
    return {
        "model_type": "whisper",
        "d_model": shape.hidden,
        "encoder_layers": shape.layers,
        "encoder_attention_heads": shape.heads,
        "encoder_ffn_dim": shape.ffn,
        "num_mel_bins": 128 if "large-v3" in shape.name else 80,
        "max_source_positions": shape.max_seq,
    }


def _phi4_audio(shape: Shape) -> dict[str, Any]:
    return {
        "model_type": "phi4_multimodal_audio",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_blocks": shape.layers,
        "num_attention_heads": shape.heads,
    }


# First match wins: longer prefixes stand before shorter ones.
_FAMILIES: dict[str, Callable[[Shape], dict[str, Any]]] = {
    "llama": _llama,
    "mistral": _mistral,
    "phi-4-mm-audio": _phi4_audio,
    "phi-4": _phi3,
    "qwen2.5-vl": _qwen2_5_vl,
    "qwen2-vl": _qwen2_vl,
    "qwen2.5": _qwen2,
    "gemma": _gemma2,
    "gpt": _gpt,
    "clip": _clip,
    "vit": _clip,
    "siglip": _siglip,
    "whisper": _whisper,
}
_CUSTOM: dict[str, Callable[[Shape, Projector | None, int | None], tuple[Layer, ...]]] = {
    "bert-large": _bert,
    "eva-clip-g-14": eva_clip,
    "eva02-clip-e-14": eva_clip,
    "siglip-so400m-14-448 (phi-4-mm)": _pooled_siglip,
}
