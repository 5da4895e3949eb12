"""Builds modules from Hugging Face `config.json` files, with transformers' defaults."""

import json
from pathlib import Path
from typing import Any

from workbench.bounded_file import MOST_SETTINGS_BYTES, read_bounded
from workbench.model.composites.composite import LLM, Part, Parts
from workbench.model.composites.registry import COMPOSITES, take_apart
from workbench.model.config_aliases import without_aliases
from workbench.model.config_fields import Config
from workbench.model.families.family import Ending
from workbench.model.families.registry import ARCHITECTURES, architecture_of
from workbench.model.feature_layers import FeatureLayers
from workbench.model.model_graph import TEXT, Module, Source
from workbench.model.projector import ProjectorKind, to_text
from workbench.model.trainable import Trainable, with_trainable


def read_config(path: str | Path) -> dict[str, Any]:
    """Read a `config.json`; `path` is the file or the folder that holds it."""
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    if not file.is_file():
        raise ValueError(f"model config {str(path)!r}: no such file or folder with a config.json")
    text = read_bounded(file, MOST_SETTINGS_BYTES)
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"model config {str(file)!r}: not JSON, line {error.lineno}: {error.msg}") from None
    except ValueError as error:  # a number of thousands of digits
        raise ValueError(f"model config {str(file)!r}: not JSON: {error}") from None
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
    projector: ProjectorKind | None = None,
    feature_layer: FeatureLayers | None = None,
    llm_width: int | None = None,
) -> Module:
    """The module that transformers would build from this configuration.

    Args:
        config: as in `config.json`. A composite one gives the part of that modality, a pair of encoders
            (clip, siglip) its `vision_config`, or else its `audio_config`.
        name: name of the module.
        modality: "text" makes it the LLM; anything else an encoder with a projector.
        trainable: which part of it is trained.
        projector: of an encoder; default MLP, for Qwen2-VL vision its own merger.
        feature_layer: hidden state of an encoder that its projector reads, or several, as in
            `vision_feature_layer`; None: its output.
        llm_width: hidden width of the LLM; encoders and generators need it.

    Returns:
        LLM: embed, block x N, head (final norm, LM head).
        Encoder: embed, block x N, projector (final norm where it has one, projector).
        Generator ("dit"): projector of the LLM's states, embed, block x N, head (final norm, loss).

    Raises:
        ValueError: an unknown model_type, an encoder as the LLM or the other way round, an
            encoder without `llm_width`, a missing or impossible dimension.
    """
    config = part_for(config, modality)
    family = architecture_of(config)
    try:
        family.check_modality(modality)
        ending = Ending(projector=projector, feature_layer=feature_layer)
        layers, final_projector = family.layers(without_aliases(config), ending, llm_width)
    except ValueError as error:
        raise ValueError(f"module {name!r}: {error}") from None
    source = Source(
        architecture=family.model_type,
        config=canonical_json(config),
        projector=None if final_projector is None else to_text(final_projector),
        feature_layer=feature_layer,
    )
    return with_trainable(Module(name=name, modality=modality, layers=layers, source=source), trainable)


def modality_of(config: Config) -> str:
    """The default modality of a configuration: "text", "vision", "audio" or "generator".

    Raises:
        ValueError: an unknown model_type, or a composite of several modules.
    """
    inner = [key for key in (*_ENCODERS, "thinker_config") if isinstance(config.get(key), dict)]
    if inner and any(key in config for key in _WITH_TEXT):
        raise ValueError(
            f"model_type {config.get('model_type')!r} is of several modules ({', '.join(inner)} beside an "
            "LLM): `workbench init` takes it apart; `modality` says which part of it one module is"
        )
    return architecture_of(part_for(config, TEXT)).modality


def canonical_json(config: Config) -> str:
    """The configuration as one line with sorted keys: equal configurations, equal text."""
    return json.dumps(config, sort_keys=True, separators=(",", ":"))


def part_for(config: Config, modality: str) -> dict[str, Any]:
    """The module's own configuration: of a composite, as it is taken apart; of a pair, its encoder's.

    Raises:
        ValueError: an unsupported composite, or one with several encoders and none of that modality.
    """
    kind = str(config.get("model_type"))
    if kind in COMPOSITES and any(key in config for key in _WITH_TEXT):
        part = dict(_part_of(take_apart(config), modality).config)
    else:
        inner = (config.get(key) for key in _ENCODERS if modality != TEXT)
        encoder_config = next((each for each in inner if isinstance(each, dict)), None)
        part = (
            dict(config)
            if encoder_config is None
            else {"model_type": f"{kind}_vision_model", **encoder_config}
        )
    part["model_type"] = _ALIASES.get(str(part.get("model_type")), part.get("model_type"))
    return part


def _part_of(parts: Parts, modality: str) -> Part:
    """A composite's LLM, its encoder of that name, or its only encoder."""
    if modality == TEXT:
        return parts.modules[LLM]
    encoders = [name for name in parts.modules if name != LLM]
    name = encoders[0] if len(encoders) == 1 else modality
    if name not in encoders:
        raise ValueError(
            f"a composite of several encoders: modality must be one of {encoders}, got {modality!r}"
        )
    return parts.modules[name]


_ENCODERS = ("vision_config", "audio_config")
_WITH_TEXT = ("text_config", "thinker_config", "hidden_size")
_ALIASES = {alias: kind for kind, family in ARCHITECTURES.items() for alias in family.aliases}
