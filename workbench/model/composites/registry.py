"""All supported composites: those that join parts of several families, then families' own."""

import difflib
from collections.abc import Mapping
from functools import cache

from workbench.model.composites import (
    any_size,
    cohere,
    deepseek,
    internvl,
    llava,
    nemotron,
    qwen,
    sound,
    speech,
    vision,
)
from workbench.model.composites.composite import Composite, Parts
from workbench.model.config_fields import Config
from workbench.model.families.registry import ARCHITECTURES

COMPOSITES: Mapping[str, Composite] = {
    each.model_type: each
    for each in (
        *llava.COMPOSITES,
        *vision.COMPOSITES,
        *internvl.COMPOSITES,
        *qwen.COMPOSITES,
        *deepseek.COMPOSITES,
        *sound.COMPOSITES,
        *speech.COMPOSITES,
        *cohere.COMPOSITES,
        *any_size.COMPOSITES,
        *nemotron.COMPOSITES,
        *(composite for family in ARCHITECTURES.values() for composite in family.composites),
    )
}

_PARTS = ("vision_config", "audio_config", "text_config")


def is_composite(config: Config) -> bool:
    """Whether a configuration contains those of other models, whether or not it can be taken apart.

    Example:
        >>> is_composite({"model_type": "bark", "codec_config": {"model_type": "encodec"}})
        True
    """
    inner = (each for each in config.values() if isinstance(each, Mapping))
    return _has_usual_parts(config) or any(each.get("model_type") for each in inner)


def _unknown_parts(config: Config) -> list[str]:
    """Parts of a composite that cannot be planned as modules: their keys, with their model_type."""
    kinds = {key: inner.get("model_type") for key, inner in config.items() if isinstance(inner, Mapping)}
    return [f"{key} ({kind})" for key, kind in kinds.items() if kind and str(kind) not in known_types()]


def _has_usual_parts(config: Config) -> bool:
    return any(key in config for key in _PARTS)


@cache
def known_types() -> frozenset[str]:
    """Every model_type that is planned as one module."""
    aliases = {alias for family in ARCHITECTURES.values() for alias in family.aliases}
    return frozenset({*ARCHITECTURES, *aliases})


def take_apart(config: Config) -> Parts:
    """The modules of a composite configuration.

    Raises:
        ValueError: an unknown `model_type` (parts that are unknown, too, are named, or else the nearest where
            the parts have the usual keys), or an unsupported value.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in COMPOSITES:
        if unknown := _unknown_parts(config):
            raise ValueError(
                f"composite model_type {kind!r} is not supported, and neither are these parts of it: "
                f"{', '.join(unknown)}; add their layers (workbench/model/families) and a rule "
                "(workbench/model/composites); `workbench models` lists those that are supported"
            )
        near = difflib.get_close_matches(str(kind), COMPOSITES, n=1) if _has_usual_parts(config) else []
        hint = (
            f" (nearest: {near[0]}; if it combines its parts the same way, use that model_type)"
            if near
            else ""
        )
        raise ValueError(
            f"composite model_type {kind!r} is not supported{hint}; give its parts as modules of a job, or "
            "add a rule (workbench/model/composites); `workbench models` lists those that are supported"
        )
    return COMPOSITES[kind].take_apart(config)
