"""Language models whose result for a sample depends on nothing else of its batch: what the runtime takes."""

from collections.abc import Mapping
from typing import Any

from workbench.model.config_fields import Config, whole

_BY_BATCH = ("dynamic", "longrope")


def check_fixed_positions(config: Config) -> None:
    """ValueError for positions that depend on the batch, axes that fill no head, and attention ahead."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    for kind in _rope_types(rope):
        if kind in _BY_BATCH:
            raise ValueError(
                f"rope type {kind!r} depends on the longest sequence of a batch, so results would depend on "
                "grouping; give a fixed one, e.g. 'default' or 'yarn'"
            )
    section = rope.get("mrope_section")
    if section is not None:
        _check_axes(section, whole(config, "hidden_size") // whole(config, "num_attention_heads") // 2)
    if config.get("use_bidirectional_attention"):
        raise ValueError(
            "use_bidirectional_attention must be false: the language model predicts the next token"
        )


def _check_axes(section: Any, half: int) -> None:
    if sum(section) != half:
        nearest = [half - 2 * (half // 3), half // 3, half // 3]
        raise ValueError(
            f"rope_parameters.mrope_section must add up to {half}, half a head's width, got {section}; "
            f"nearest: {nearest}"
        )


def _rope_types(rope: Mapping[str, Any]) -> tuple[Any, ...]:
    """Of all kinds of layers; none where nothing is said."""
    by_kind = [each for each in rope.values() if isinstance(each, Mapping)]
    return tuple(each.get("rope_type", each.get("type")) for each in (by_kind or [rope]))
