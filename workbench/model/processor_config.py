"""What lies beside a `config.json` about sizes of items: the configuration of the checkpoint's processor."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from workbench.bounded_file import MOST_SETTINGS_BYTES, read_bounded
from workbench.model.composites.composite import Parts
from workbench.model.config_fields import Config
from workbench.model.families.family import Encoder
from workbench.model.families.registry import ARCHITECTURES

_FILES = ("preprocessor_config.json", "processor_config.json")
_INSIDE = ("image_processor", "feature_extractor")  # of a `processor_config.json`
_OF_VIDEOS, _VIDEOS = "video_preprocessor_config.json", "video_processor"  # a file, a key of the others


def read_processor(path: str | Path) -> dict[str, Any]:
    """Of a checkpoint: all that its files say, those of images and of sound as one; empty where it has none.

    What they say of videos stands apart under `video_processor`.

    Args:
        path: the folder, or the `config.json` in it.

    Raises:
        ValueError: a file that is no JSON object.
    """
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    found: dict[str, Any] = {}
    for file in (folder / name for name in _FILES):
        if not file.is_file():
            continue
        said = _object(file)
        for each in (said, *(said.get(key) for key in _INSIDE)):
            if isinstance(each, Mapping):
                found = {**each, **found}
    if _VIDEOS not in found and (folder / _OF_VIDEOS).is_file():
        found[_VIDEOS] = _object(folder / _OF_VIDEOS)
    return found


def with_processor(config: Config, processor: Config) -> dict[str, Any]:
    """An encoder's configuration with what the processor says of its items; its own words come first."""
    family = ARCHITECTURES.get(str(config.get("model_type")))
    if not isinstance(family, Encoder):
        return dict(config)
    return {**family.processed(processor), **config}


def parts_with_processor(parts: Parts, processor: Config) -> Parts:
    """A composite's parts with what the processor says of their items, and a note where it does not."""
    lines = ((called, _unprocessed(part.config, processor)) for called, part in parts.modules.items())
    notes = tuple(f"{called}: {line}" for called, line in lines if line)
    modules = {
        called: replace(part, config=with_processor(part.config, processor))
        for called, part in parts.modules.items()
    }
    return replace(parts, modules=modules, notes=(*parts.notes, *notes))


def _unprocessed(config: Config, processor: Config) -> str:
    """What is taken for an encoder's processor that does not say it; empty where nothing hangs on it."""
    family = ARCHITECTURES.get(str(config.get("model_type")))
    return family.unprocessed if isinstance(family, Encoder) and not family.processed(processor) else ""


def _object(file: Path) -> dict[str, Any]:
    try:
        said = json.loads(read_bounded(file, MOST_SETTINGS_BYTES))
    except (ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"processor config {str(file)!r}: not JSON: {reason}") from None
    if not isinstance(said, dict):
        raise ValueError(f"processor config {str(file)!r}: want a JSON object, got {type(said).__name__}")
    return said
