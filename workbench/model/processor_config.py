"""The configuration of a checkpoint's processor, which decides the sizes of items and the scale of pixels."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from workbench.bounded_file import MOST_SETTINGS_BYTES, read_bounded
from workbench.model.composites.composite import VISION, Parts
from workbench.model.config_fields import Config
from workbench.model.families.family import Encoder
from workbench.model.families.registry import ARCHITECTURES
from workbench.model.pixel_scale import pixel_scale, scale_keys

_FILES = ("preprocessor_config.json", "processor_config.json")
_INSIDE = ("image_processor", "feature_extractor")  # of a `processor_config.json`
_OF_VIDEOS, _VIDEOS = "video_preprocessor_config.json", "video_processor"  # a file, a key of the others


def read_processor(path: str | Path) -> dict[str, Any]:
    """All keys of a checkpoint's processors of images and sound; empty where it has none.

    Keys of its video processor are under `video_processor`.

    Args:
        path: the folder, or the `config.json` in it.

    Raises:
        ValueError: a file that is not a JSON object.
    """
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    merged: dict[str, Any] = {}
    for file in (folder / name for name in _FILES):
        if not file.is_file():
            continue
        content = _object(file)
        for part in (content, *(content.get(key) for key in _INSIDE)):
            if isinstance(part, Mapping):
                merged = {**part, **merged}
    if _VIDEOS not in merged and (folder / _OF_VIDEOS).is_file():
        merged[_VIDEOS] = _object(folder / _OF_VIDEOS)
    return merged


def with_processor(config: Config, processor: Config) -> dict[str, Any]:
    """An encoder's configuration with its processor's keys about items and pixels; its own take precedence.

    Raises:
        ValueError: means and deviations of pixels that are none.
    """
    family = ARCHITECTURES.get(str(config.get("model_type")))
    if not isinstance(family, Encoder):
        return dict(config)
    scale = scale_keys(processor) if family.modality == VISION else {}
    merged = {**scale, **family.processed(processor), **config}
    pixel_scale(merged)
    return merged


def parts_with_processor(parts: Parts, processor: Config) -> Parts:
    """A composite's parts with the processor's keys about items, and notes where these are missing."""
    lines = (
        (module_name, _unprocessed(part.config, processor)) for module_name, part in parts.modules.items()
    )
    notes = tuple(f"{module_name}: {line}" for module_name, line in lines if line)
    modules = {
        module_name: replace(part, config=with_processor(part.config, processor))
        for module_name, part in parts.modules.items()
    }
    return replace(parts, modules=modules, notes=(*parts.notes, *notes))


def _unprocessed(config: Config, processor: Config) -> str:
    """The assumption for an encoder without processor keys; empty where it does not matter."""
    family = ARCHITECTURES.get(str(config.get("model_type")))
    return family.unprocessed if isinstance(family, Encoder) and not family.processed(processor) else ""


def _object(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(read_bounded(file, MOST_SETTINGS_BYTES))
    except (ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"processor config {str(file)!r}: not JSON: {reason}") from None
    if not isinstance(content, dict):
        raise ValueError(f"processor config {str(file)!r}: want a JSON object, got {type(content).__name__}")
    return content
