"""Rotary positions of language models: what the runtime supports of their parameters."""

from collections.abc import Mapping
from typing import Any

from workbench.model.config_fields import Config, number, whole

PARTIAL = "partial_rotary_factor"
_BY_BATCH = ("dynamic", "longrope")


def check_fixed_positions(config: Config, head_dim: int | None = None) -> None:
    """Raise ValueError for a language model that the runtime does not support.

    Positions must not depend on the batch, rotary axes must fill the heads, and attention must be causal.

    Args:
        head_dim: default width of a head; None: heads share the width.
    """
    check_causal_positions(config)
    section = rope_of(config).get("mrope_section")
    if section is not None:
        shared = head_dim or whole(config, "hidden_size") // whole(config, "num_attention_heads")
        check_axes(section, whole(config, "head_dim", shared) // 2, "half a head's width")


def check_causal_positions(config: Config) -> None:
    """Raise ValueError unless positions are independent of the batch and attention is causal."""
    for kind in _rope_types(rope_of(config)):
        if kind in _BY_BATCH:
            raise ValueError(
                f"rope type {kind!r} depends on the longest sequence of a batch, so results would depend on "
                "grouping; give a fixed one, e.g. 'default' or 'yarn'"
            )
    if config.get("use_bidirectional_attention"):
        raise ValueError(
            "use_bidirectional_attention must be false: the language model predicts the next token"
        )


def rope_of(config: Config) -> Mapping[str, Any]:
    """The parameters of the rotation, under the key of newer or of older releases of transformers."""
    return config.get("rope_parameters") or config.get("rope_scaling") or {}


def rotated_share(config: Config, default: float) -> float:
    """Share of every head that is rotated, as the rotation's parameters say, else the configuration."""
    rope = rope_of(config)
    known = config if rope.get(PARTIAL) is None else {"model_type": config["model_type"], **rope}
    return number(known, PARTIAL, default)


def rotary_dim(config: Config, head_dim: int, default: float) -> int:
    """Numbers of a head that are rotated, in pairs; `default`: as of `rotated_share`."""
    rotated = int(head_dim * rotated_share(config, default))
    return rotated + rotated % 2


def check_axes(section: Any, half: int, what: str) -> None:
    """Raise ValueError unless the parts of three axes add up to `half`, which `what` describes."""
    if sum(section) != half:
        nearest = [half - 2 * (half // 3), half // 3, half // 3]
        raise ValueError(
            f"rope_parameters.mrope_section must add up to {half}, {what}, got {list(section)}; "
            f"nearest: {nearest}"
        )


def _rope_types(rope: Mapping[str, Any]) -> tuple[Any, ...]:
    """Rope types of all kinds of layers, None where one is not given."""
    by_kind = [each for each in rope.values() if isinstance(each, Mapping)]
    return tuple(each.get("rope_type", each.get("type")) for each in (by_kind or [rope]))
