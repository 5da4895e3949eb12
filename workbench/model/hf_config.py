"""Modules out of Hugging Face `config.json`: the dimensions are read, the defaults are transformers'."""

import difflib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from workbench.model.config_fields import Config
from workbench.model.dit import DIT, dit_layers
from workbench.model.hf_encoder import ENCODERS, Encoder
from workbench.model.hf_llm import LLMS
from workbench.model.layer import Layer, TokenCount
from workbench.model.model_graph import GENERATED, TEXT, Module, Source
from workbench.model.module_layers import Projection, Projector, projector_layer
from workbench.model.trainable import Trainable, with_trainable


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
    except RecursionError:
        raise ValueError(f"model config {str(file)!r}: nested too deeply") from None
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
        config: as in `config.json`. A composite one (clip, siglip, qwen2_vl, qwen2_5_vl, internvl,
            qwen2_audio) gives its `vision_config`, or else its `audio_config`, for an encoder.
        name: of the module.
        modality: "text" makes it the LLM; anything else an encoder with a projector.
        trainable: what of it is trained.
        projector: of an encoder; default MLP, for Qwen2-VL vision its own merger.
        llm_width: hidden width of the LLM; encoders and generators need it.

    Returns:
        LLM: embed, block x N, head (final norm, LM head).
        Encoder: embed, block x N, projector (final norm where it has one, projector).
        Generator ("dit"): projector of the LLM's states, embed, block x N, head (final norm, loss).

    Raises:
        ValueError: an unknown model_type, an encoder as the LLM or the other way round, an
            encoder without `llm_width`, a missing or impossible dimension.
    """
    config = _part_for(config, modality)
    kind = _model_type(config)
    try:
        if kind in LLMS:
            if modality != TEXT:
                raise ValueError(f"{kind} is a language model: modality must be 'text', got {modality!r}")
            if projector is not None:
                raise ValueError(f"{kind} is a language model: it has no projector, got {projector.value!r}")
            layers, used = LLMS[kind](config), None
        elif modality == TEXT:
            what = "a generator" if kind == DIT else "an encoder"
            raise ValueError(f"{kind} is {what}: modality must not be 'text'")
        elif kind == DIT:
            layers, used = _generator(config, projector, llm_width)
        else:
            layers, used = _projected(ENCODERS[kind](config), projector, llm_width)
    except ValueError as error:
        raise ValueError(f"module {name!r}: {error}") from None
    source = Source(
        architecture=kind, config=canonical_json(config), projector=None if used is None else used.value
    )
    return with_trainable(Module(name=name, modality=modality, layers=layers, source=source), trainable)


def modality_of(config: Config) -> str:
    """ "text", "vision", "audio" or "generator": what a configuration is for, when nobody says."""
    kind = _model_type(_part_for(config, TEXT))
    if kind in LLMS:
        return TEXT
    if kind == DIT:
        return GENERATED
    return "audio" if kind in _AUDIO else "vision"


def canonical_json(config: Config) -> str:
    """The configuration as one line with sorted keys: equal configurations, equal text."""
    return json.dumps(config, sort_keys=True, separators=(",", ":"))


def _part_for(config: Config, modality: str) -> dict[str, Any]:
    part = dict(config)
    if modality != TEXT and isinstance(part.get("vision_config"), dict):
        composite, part = part.get("model_type"), dict(part["vision_config"])
        part.setdefault("model_type", f"{composite}_vision_model")
    elif (
        modality == TEXT
        and str(part.get("model_type")) in _TEXT_PARTS
        and isinstance(part.get("text_config"), dict)
    ):
        part = {"model_type": _TEXT_PARTS[str(part["model_type"])], **part["text_config"]}
    elif modality != TEXT and isinstance(part.get("audio_config"), dict):
        part = dict(part["audio_config"])
    part["model_type"] = _ALIASES.get(str(part.get("model_type")), part.get("model_type"))
    return part


def _model_type(config: Config) -> str:
    kind = config.get("model_type")
    known = [*LLMS, *ENCODERS, DIT]
    if kind not in known:
        near = difflib.get_close_matches(str(kind), known, n=1)
        hint = f" (nearest: {near[0]})" if near else ""
        raise ValueError(f"unknown model_type {kind!r}{hint}; known are {', '.join(known)}")
    return str(kind)


def _generator(
    config: Config, projector: Projector | None, llm_width: int | None
) -> tuple[tuple[Layer, ...], Projector]:
    if llm_width is None:
        raise ValueError("a generator needs llm_width, the width its projector begins with")
    used = projector or Projector.MLP
    if used is Projector.MERGER:
        raise ValueError("its projector must be 'linear' or 'mlp', got 'merger'")
    return dit_layers(config, used, llm_width), used


def _projected(
    encoder: Encoder, projector: Projector | None, llm_width: int | None
) -> tuple[tuple[Layer, ...], Projector]:
    if llm_width is None:
        raise ValueError("an encoder needs llm_width, the width its projector ends with")
    used = encoder.projectors[0] if projector is None else projector
    if used not in encoder.projectors:
        allowed = " or ".join(repr(each.value) for each in sorted(encoder.projectors))
        raise ValueError(f"its projector must be {allowed}, got {used.value!r}")
    projection = Projection(
        kind=used, in_width=encoder.width, out_width=llm_width, norm=encoder.norm, merge=encoder.merge
    )
    last = projector_layer(projection)
    return (*encoder.layers, _keeping_tokens(last) if encoder.is_read else last), used


def _keeping_tokens(projector: Layer) -> Layer:
    """The projector of all tokens that were inside."""
    operators = tuple(replace(operator, tokens=TokenCount.IN) for operator in projector.operators)
    return replace(projector, operators=operators, emits=TokenCount.IN)


_AUDIO = ("whisper", "qwen2_audio_encoder", "phi4_multimodal_audio")

# Composite configurations whose language model is planned -> its model_type.
_TEXT_PARTS = {"llama4": "llama4_text", "mllama": "mllama_text_model"}

# Names under which older files hold the vision half.
_ALIASES: dict[str | None, str] = {
    "qwen2_vl": "qwen2_vl_vision",
    "qwen2_5_vl": "qwen2_5_vl_vision",
    "qwen2_vl_vision_model": "qwen2_vl_vision",
    "qwen2_5_vl_vision_model": "qwen2_5_vl_vision",
}
