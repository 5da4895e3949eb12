"""Modules out of Hugging Face `config.json`: the dimensions are read, the defaults are transformers'."""

import difflib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from workbench.graph.layer import Layer, Pointwise
from workbench.graph.model_graph import TEXT, Module, Source
from workbench.graph.module_layers import (
    Projection,
    Projector,
    block_layers,
    learned_positions,
    lm_head,
    patch_embedding,
    projector_layer,
    token_embedding,
    whisper_stem,
)
from workbench.graph.trainable import Trainable, with_trainable
from workbench.graph.transformer import Block, Heads, Mlp, Norm, Placement

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Encoder:
    """An encoder before its projector: its layers and how it ends."""

    layers: tuple[Layer, ...]
    width: int
    norm: Norm | None
    merge: int = 1


def read_config(path: str | Path) -> dict[str, Any]:
    """A `config.json`; `path` may be the file or the folder that holds it."""
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    if not file.is_file():
        raise ValueError(f"model config {str(path)!r}: no such file or folder with a config.json")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"model config {str(file)!r}: not JSON, line {error.lineno}: {error.msg}") from None
    if not isinstance(config, dict):
        raise ValueError(f"model config {str(file)!r}: want a JSON object, got {type(config).__name__}")
    return config


def module_from_config(
    config: Config,
    *,
    name: str,
    modality: str,
    trainable: Trainable = Trainable.ALL,
    projector: Projector | None = None,
    llm_width: int | None = None,
) -> Module:
    """The module that transformers would build from this configuration.

    Args:
        config: as in `config.json`. A composite one (clip, siglip, qwen2_vl, qwen2_5_vl) gives
            its `vision_config` for an encoder.
        name: of the module.
        modality: "text" makes it the LLM; anything else an encoder with a projector.
        trainable: what of it is trained.
        projector: of an encoder; default MLP, for Qwen2-VL vision its own merger.
        llm_width: hidden width of the consumer; an encoder needs it.

    Returns:
        LLM: embed, block x N, head (final norm, LM head).
        Encoder: embed, block x N, projector (final norm where it has one, projector).

    Raises:
        ValueError: an unknown model_type, an encoder as the LLM or the other way round, an
            encoder without `llm_width`, a missing or impossible dimension.
    """
    config = _part_for(config, modality)
    kind = _model_type(config)
    try:
        if kind in _LLMS:
            if modality != TEXT:
                raise ValueError(f"{kind} is a language model: modality must be 'text', got {modality!r}")
            if projector is not None:
                raise ValueError(f"{kind} is a language model: it has no projector, got {projector.value!r}")
            layers, used = _LLMS[kind](config), None
        else:
            if modality == TEXT:
                raise ValueError(f"{kind} is an encoder: modality must not be 'text'")
            layers, used = _projected(_ENCODERS[kind](config), projector, llm_width)
    except ValueError as error:
        raise ValueError(f"module {name!r}: {error}") from None
    source = Source(
        architecture=kind, config=canonical_json(config), projector=None if used is None else used.value
    )
    return with_trainable(Module(name=name, modality=modality, layers=layers, source=source), trainable)


def canonical_json(config: Config) -> str:
    """The configuration as one line with sorted keys: equal configurations, equal text."""
    return json.dumps(config, sort_keys=True, separators=(",", ":"))


def _part_for(config: Config, modality: str) -> dict[str, Any]:
    part = dict(config)
    if modality != TEXT and isinstance(part.get("vision_config"), Mapping):
        composite, part = part.get("model_type"), dict(part["vision_config"])
        part.setdefault("model_type", f"{composite}_vision_model")
    part["model_type"] = _ALIASES.get(part.get("model_type"), part.get("model_type"))
    return part


def _model_type(config: Config) -> str:
    kind = config.get("model_type")
    known = [*_LLMS, *_ENCODERS]
    if kind not in known:
        near = difflib.get_close_matches(str(kind), known, n=1)
        hint = f" (nearest: {near[0]})" if near else ""
        raise ValueError(f"unknown model_type {kind!r}{hint}; known are {', '.join(known)}")
    return str(kind)


def _projected(
    encoder: _Encoder, projector: Projector | None, llm_width: int | None
) -> tuple[tuple[Layer, ...], Projector]:
    if llm_width is None:
        raise ValueError("an encoder needs llm_width, the width its projector ends with")
    own = Projector.MERGER if encoder.merge > 1 else Projector.MLP
    used = own if projector is None else projector
    if (used is Projector.MERGER) != (encoder.merge > 1):
        allowed = "'merger'" if encoder.merge > 1 else "'linear' or 'mlp'"
        raise ValueError(f"its projector must be {allowed}, got {used.value!r}")
    projection = Projection(
        kind=used, in_width=encoder.width, out_width=llm_width, norm=encoder.norm, merge=encoder.merge
    )
    return (*encoder.layers, projector_layer(projection)), used


def _int(config: Config, key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, list | tuple) and len(set(value)) == 1:
        value = value[0]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{config['model_type']}: {key} must be a whole number >= 1, got {value!r}")
    return value


def _heads_of(
    config: Config, *, width: int, num: int, causal: bool = True, num_kv: int | None = None
) -> Heads:
    """Heads whose width is given, or the share of `width`."""
    if "head_dim" not in config and width % num:
        raise ValueError(f"{config['model_type']}: hidden width {width} must divide by {num} heads")
    return Heads(num=num, num_kv=num_kv or num, dim=_int(config, "head_dim", width // num), causal=causal)


def _llama_like(
    config: Config,
    *,
    defaults: Mapping[str, int],
    tied: bool = False,
    heads: Mapping[str, Any],
    mlp: Mapping[str, Any],
    placement: Placement = Placement.PRE,
) -> tuple[Layer, ...]:
    """RMS norms, rotary grouped-query attention, gated MLP."""
    width = _int(config, "hidden_size", defaults["hidden_size"])
    vocab = _int(config, "vocab_size", defaults["vocab_size"])
    num = _int(config, "num_attention_heads", defaults["num_attention_heads"])
    num_kv = _int(config, "num_key_value_heads", defaults.get("num_key_value_heads", num))
    full = {"head_dim": defaults["head_dim"], **config} if "head_dim" in defaults else config
    if full.get("head_dim", 1) is None:
        full = {key: value for key, value in full.items() if key != "head_dim"}
    attention = _heads_of(full, width=width, num=num, num_kv=num_kv)
    block = Block(
        width=width,
        heads=replace(attention, rotary=True, **heads),
        mlp=Mlp(width=_int(config, "intermediate_size", defaults["intermediate_size"]), gated=True, **mlp),
        norm=Norm.RMS,
        placement=placement,
    )
    is_tied = bool(config.get("tie_word_embeddings", tied))
    scale = (Pointwise(name="scale", width=width, num_passes=2),) if "gemma" in config["model_type"] else ()
    return (
        token_embedding(vocab, width, more=scale, tied=is_tied),
        *block_layers(block, _int(config, "num_hidden_layers", defaults["num_hidden_layers"])),
        lm_head(vocab, width, Norm.RMS, tied=is_tied),
    )


def _defaults(vocab: int, hidden: int, ffn: int, layers: int, heads: int, **more: int) -> dict[str, int]:
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        **more,
    }


def _llama(config: Config) -> tuple[Layer, ...]:
    return _llama_like(
        config,
        defaults=_defaults(32000, 4096, 11008, 32, 32),
        heads={"bias": "qkvo" if config.get("attention_bias") else ""},
        mlp={"bias": bool(config.get("mlp_bias"))},
    )


def _qwen2(config: Config) -> tuple[Layer, ...]:
    defaults = _defaults(151936, 4096, 22016, 32, 32, num_key_value_heads=32)
    return _llama_like(config, defaults=defaults, heads={"bias": "qkv"}, mlp={})


def _mistral(config: Config) -> tuple[Layer, ...]:
    defaults = _defaults(32000, 4096, 14336, 32, 32, num_key_value_heads=8)
    return _llama_like(config, defaults=defaults, heads={}, mlp={})


def _gemma(config: Config) -> tuple[Layer, ...]:
    defaults = _defaults(256000, 3072, 24576, 28, 16, num_key_value_heads=16, head_dim=256)
    heads = {"bias": "qkvo" if config.get("attention_bias") else ""}
    return _llama_like(config, defaults=defaults, tied=True, heads=heads, mlp={})


def _gemma2(config: Config) -> tuple[Layer, ...]:
    return _llama_like(
        config,
        defaults=_defaults(256000, 2304, 9216, 26, 8, num_key_value_heads=4, head_dim=256),
        tied=True,
        heads={"bias": "qkvo" if config.get("attention_bias") else ""},
        mlp={},
        placement=Placement.SANDWICH,
    )


def _phi3(config: Config) -> tuple[Layer, ...]:
    defaults = _defaults(32064, 3072, 8192, 32, 32)
    return _llama_like(config, defaults=defaults, heads={"fused": True}, mlp={"fused": True})


def _phi(config: Config) -> tuple[Layer, ...]:
    width, vocab = _int(config, "hidden_size", 2048), _int(config, "vocab_size", 51200)
    num = _int(config, "num_attention_heads", 32)
    heads = _heads_of(config, width=width, num=num, num_kv=_int(config, "num_key_value_heads", num))
    qk_norm = Norm.LAYER if config.get("qk_layernorm") else None
    block = Block(
        width=width,
        heads=replace(heads, bias="qkvo", rotary=True, qk_norm=qk_norm),
        mlp=Mlp(width=_int(config, "intermediate_size", 8192), gated=False, bias=True),
        norm=Norm.LAYER,
        placement=Placement.PARALLEL,
    )
    tied = bool(config.get("tie_word_embeddings", False))
    return (
        token_embedding(vocab, width, tied=tied),
        *block_layers(block, _int(config, "num_hidden_layers", 24)),
        lm_head(vocab, width, Norm.LAYER, tied=tied, bias=True),
    )


def _gpt2(config: Config) -> tuple[Layer, ...]:
    width, vocab = _int(config, "n_embd", 768), _int(config, "vocab_size", 50257)
    heads = _heads_of(config, width=width, num=_int(config, "n_head", 12))
    block = Block(
        width=width,
        heads=replace(heads, bias="qkvo", fused=True),
        mlp=Mlp(width=_int(config, "n_inner", 4 * width), gated=False, bias=True),
        norm=Norm.LAYER,
    )
    tied = bool(config.get("tie_word_embeddings", True))
    positions = learned_positions(_int(config, "n_positions", 1024), width)
    return (
        token_embedding(vocab, width, more=positions, tied=tied),
        *block_layers(block, _int(config, "n_layer", 12)),
        lm_head(vocab, width, Norm.LAYER, tied=tied),
    )


def vit_block(*, width: int, num_heads: int, ffn: int, bias: str = "qkvo") -> Block:
    """The pre-norm block of a vision transformer: full attention, plain MLP, biases."""
    return Block(
        width=width,
        heads=Heads(num=num_heads, num_kv=num_heads, dim=width // num_heads, causal=False, bias=bias),
        mlp=Mlp(width=ffn, gated=False, bias=True),
        norm=Norm.LAYER,
    )


def _fixed_size_vit(config: Config, *, patch: int, pre_norm: Norm | None, class_token: bool) -> _Encoder:
    width = _int(config, "hidden_size", 768)
    num_heads = _int(config, "num_attention_heads", 12)
    _heads_of(config, width=width, num=num_heads)
    block = vit_block(width=width, num_heads=num_heads, ffn=_int(config, "intermediate_size", 3072))
    patch = _int(config, "patch_size", patch)
    embed = patch_embedding(
        patch_elements=_int(config, "num_channels", 3) * patch**2,
        width=width,
        bias=not class_token,
        num_patches=(_int(config, "image_size", 224) // patch) ** 2,
        has_class_token=class_token,
        pre_norm=pre_norm,
    )
    layers = (embed, *block_layers(block, _int(config, "num_hidden_layers", 12)))
    return _Encoder(layers=layers, width=width, norm=Norm.LAYER)


def _siglip(config: Config) -> _Encoder:
    """Without the pooling head: every patch goes on to the projector."""
    return _fixed_size_vit(config, patch=16, pre_norm=None, class_token=False)


def _clip(config: Config) -> _Encoder:
    """The final norm, which transformers applies to the class token alone, runs over all tokens."""
    return _fixed_size_vit(config, patch=32, pre_norm=Norm.LAYER, class_token=True)


def _qwen2_vl(config: Config) -> _Encoder:
    width = _int(config, "embed_dim", 1280)
    mlp = Mlp(width=width * _int(config, "mlp_ratio", 4), gated=False, bias=True)
    return _qwen_vision(config, width=width, mlp=mlp, kind=Norm.LAYER)


def _qwen2_5_vl(config: Config) -> _Encoder:
    """Every block is given full attention; the real one has windows of 8 x 8 patches in most."""
    mlp = Mlp(width=_int(config, "intermediate_size", 3420), gated=True, bias=True)
    return _qwen_vision(config, width=_int(config, "hidden_size", 3584), mlp=mlp, kind=Norm.RMS)


def _qwen_vision(config: Config, *, width: int, mlp: Mlp, kind: Norm) -> _Encoder:
    heads = _heads_of(config, width=width, num=_int(config, "num_heads", 16), causal=False)
    block = Block(width=width, heads=replace(heads, bias="qkvo", fused=True, rotary=True), mlp=mlp, norm=kind)
    elements = _int(config, "in_channels", _int(config, "in_chans", 3))
    elements *= _int(config, "patch_size", 14) ** 2 * _int(config, "temporal_patch_size", 2)
    embed = patch_embedding(patch_elements=elements, width=width, bias=False)
    layers = (embed, *block_layers(block, _int(config, "depth", 32)))
    merge = _int(config, "spatial_merge_size", 2) ** 2
    return _Encoder(layers=layers, width=width, norm=kind, merge=merge)


def _whisper(config: Config) -> _Encoder:
    """The encoder half; the decoder's dimensions are ignored. Keys have no bias."""
    width = _int(config, "d_model", 384)
    num_heads = _int(config, "encoder_attention_heads", 6)
    _heads_of(config, width=width, num=num_heads)
    block = vit_block(width=width, num_heads=num_heads, ffn=_int(config, "encoder_ffn_dim", 1536), bias="qvo")
    stem = whisper_stem(
        mel_bins=_int(config, "num_mel_bins", 80),
        width=width,
        num_positions=_int(config, "max_source_positions", 1500),
    )
    layers = (stem, *block_layers(block, _int(config, "encoder_layers", 4)))
    return _Encoder(layers=layers, width=width, norm=Norm.LAYER)


_LLMS: dict[str, Callable[[Config], tuple[Layer, ...]]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "mistral": _mistral,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "phi": _phi,
    "phi3": _phi3,
    "gpt2": _gpt2,
}
_ENCODERS: dict[str, Callable[[Config], _Encoder]] = {
    "siglip_vision_model": _siglip,
    "clip_vision_model": _clip,
    "qwen2_vl_vision": _qwen2_vl,
    "qwen2_5_vl_vision": _qwen2_5_vl,
    "whisper": _whisper,
}
# Names under which older files hold the vision half.
_ALIASES: dict[str | None, str] = {
    "qwen2_vl": "qwen2_vl_vision",
    "qwen2_5_vl": "qwen2_5_vl_vision",
    "qwen2_vl_vision_model": "qwen2_vl_vision",
    "qwen2_5_vl_vision_model": "qwen2_5_vl_vision",
}
