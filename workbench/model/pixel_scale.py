"""How a checkpoint's processor scales pixels, as keys of its encoder's configuration."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from workbench.model.config_fields import Config

MEAN, STD = "image_mean", "image_std"
_RESCALE = 1 / 255  # of bytes: pixels in [0, 1]


class PixelScale(NamedTuple):
    """Mean and standard deviation of each channel, or one for all, of pixels in [0, 1]."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


def scale_keys(processor: Config) -> dict[str, Any]:
    """The keys of an encoder's configuration; empty where the processor's file does not say them.

    A processor that does not normalise leaves pixels in [0, 1]. One that takes bytes as they are, or
    rescales them otherwise, is left out, as a mean of pixels in [0, 1] cannot say that.

    Example:
        >>> scale_keys({"do_normalize": False})
        {'image_mean': [0.0], 'image_std': [1.0]}
    """
    rescale = processor.get("rescale_factor", _RESCALE)
    is_number = isinstance(rescale, int | float) and not isinstance(rescale, bool)
    if processor.get("do_rescale") is False or not is_number or not math.isclose(rescale, _RESCALE):
        return {}
    if processor.get("do_normalize") is False:
        return {MEAN: [0.0], STD: [1.0]}
    return {key: processor[key] for key in (MEAN, STD)} if {MEAN, STD} <= processor.keys() else {}


def pixel_scale(config: Config) -> PixelScale | None:
    """The scale that an encoder's configuration says; None where it says none.

    Raises:
        ValueError: one key without the other, lists of unlike length, or other than finite numbers, of which
            deviations are > 0.
    """
    if MEAN not in config and STD not in config:
        return None
    mean, std = (_numbers(config.get(key), key) for key in (MEAN, STD))
    if len(mean) != len(std):
        raise ValueError(f"{MEAN} and {STD} must be of equally many channels, got {len(mean)} and {len(std)}")
    if not all(each > 0 for each in std):
        raise ValueError(f"{STD} must be > 0, got {list(std)}")
    return PixelScale(mean, std)


def _numbers(value: object, key: str) -> tuple[float, ...]:
    listed = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    for each in listed:
        if isinstance(each, bool) or not isinstance(each, int | float) or not math.isfinite(each):
            raise ValueError(f"{key} must be a list of numbers, one of each channel, got {value!r:.60}")
    if not listed:
        raise ValueError(f"{key} must be a list of numbers, one of each channel, got none")
    return tuple(map(float, listed))
