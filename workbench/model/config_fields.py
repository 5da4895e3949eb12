"""Reads typed values from a Hugging Face configuration."""

from collections.abc import Mapping
from sys import float_info
from typing import Any

from workbench.model.transformer import Heads

Config = Mapping[str, Any]

MOST = 2**40  # largest dimension
MOST_REAL = float_info.max  # whole numbers may be larger
MOST_LISTED = 4096  # most layers or experts, which are made one by one


def count(config: Config, key: str, default: int | None = None) -> int:
    """A number of layers or experts: as `whole`, but at most `MOST_LISTED`."""
    return whole(config, key, default, most=MOST_LISTED)


def whole(config: Config, key: str, default: int | None = None, *, most: int = MOST) -> int:
    """A whole number >= 1; null counts as absent, and an absent one is the default."""
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, list | tuple) and value and all(member == value[0] for member in value):
        value = value[0]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{config['model_type']}: {key} must be a whole number >= 1, got {value!r:.60}")
    if value > most:
        raise ValueError(f"{config['model_type']}: {key} must be at most {most}, got {value!r:.60}")
    return value


def whole_or_zero(config: Config, key: str, default: int) -> int:
    """A whole number >= 0; an absent or null one is the default."""
    value = config.get(key)
    value = default if value is None else value
    return 0 if value == 0 and not isinstance(value, bool) else whole({**config, key: value}, key)


def layer_indices(config: Config, key: str, default: tuple[int, ...]) -> tuple[int, ...]:
    """A list of layer indices, whole numbers >= 0; an absent or null list is the default."""
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, list | tuple) or not all(type(index) is int and index >= 0 for index in value):
        raise ValueError(f"{config['model_type']}: {key} must list whole numbers >= 0, got {value!r:.60}")
    return tuple(value)


def heads_of(
    config: Config, *, width: int, num: int, causal: bool = True, num_kv: int | None = None
) -> Heads:
    """Heads with the given head width, or else their share of `width`."""
    if "head_dim" not in config and width % num:
        raise ValueError(f"{config['model_type']}: hidden width {width} must divide by {num} heads")
    return Heads(num=num, num_kv=num_kv or num, dim=whole(config, "head_dim", width // num), causal=causal)


def number(config: Config, key: str, default: float) -> float:
    """A number > 0; an absent or null one is the default."""
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MOST_REAL:
        raise ValueError(f"{config['model_type']}: {key} must be a number > 0, got {value!r:.60}")
    return float(value)


def flag(config: Config, key: str, *, default: bool = False) -> bool:
    """A boolean; an absent or null one is the default.

    Example:
        >>> flag({"model_type": "llama", "mlp_bias": True}, "mlp_bias")
        True
    """
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise ValueError(f"{config['model_type']}: {key} must be true or false, got {value!r:.60}")
    return value


def attention_bias(config: Config, products: str = "qkvo", *, default: bool = False) -> str:
    """The attention's products with a bias, see `Heads`: these where the configuration's key is true."""
    return products if flag(config, "attention_bias", default=default) else ""


def text(config: Config, key: str, default: str) -> str:
    """A text; an absent or null one is the default."""
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, str):
        raise ValueError(f"{config['model_type']}: {key} must be text, got {value!r}")
    return value
