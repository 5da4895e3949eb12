"""Weight files of a checkpoint: those that its index names, and whether they are complete."""

import json
from collections.abc import Iterable
from pathlib import Path

from workbench.bounded_file import entry_in, open_regular, read_bounded
from workbench.model.composites.composite import Parts
from workbench.model.composites.registry import COMPOSITES, take_apart
from workbench.model.hf_config import read_config

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
CONFIG = "config.json"
MOST_INDEX_BYTES = 2**27
MOST_HEADER_BYTES = 10**8  # as safetensors' own reader allows
_LENGTH_BYTES = 8  # a safetensors file begins with its header's length, little-endian


def composite_of(folder: Path) -> Parts | None:
    """The parts of a composite model's checkpoint; None where the folder is not one."""
    if not (folder / CONFIG).is_file():
        return None
    config = read_config(folder)
    return take_apart(config) if config.get("model_type") in COMPOSITES else None


def weight_map(folder: Path) -> dict[str, str]:
    """Tensor name -> file that holds it, from the index.

    Raises:
        ValueError: an invalid index.
    """
    index = folder / INDEX
    try:
        file_of = dict(json.loads(read_bounded(index, MOST_INDEX_BYTES))["weight_map"])
    except (ValueError, LookupError, TypeError, RecursionError):
        raise ValueError(f"{index}: want an object weight_map; is it half downloaded?") from None
    for name in file_of.values():
        if not isinstance(name, str):
            raise ValueError(f"{index}: want names of files, got {name!r:.80}")
    return file_of


def missing_weights(folder: Path) -> tuple[str, ...]:
    """Files that a checkpoint's index names and its folder lacks; empty without an index.

    Raises:
        ValueError: an invalid index.
    """
    if not (folder / INDEX).is_file():
        return ()
    try:
        return tuple(
            name for name in sorted(set(weight_map(folder).values())) if not (folder / name).is_file()
        )
    except OSError:
        raise ValueError(f"{folder / INDEX}: weight_map names files by more than a name can hold") from None


def check_weights(folder: Path, modules: Iterable[str]) -> None:
    """Raise ValueError unless every weight file exists in full length.

    Only headers are read, as this runs before anything is started.

    Args:
        folder: a composite model's checkpoint, or a folder of folders named like modules.
        modules: names of the modules to read.
    """
    if not folder.is_dir():
        raise ValueError(f"weights {folder}: no such folder")
    for holder in (folder,) if composite_of(folder) is not None else (folder / name for name in modules):
        _refuse_quantized(holder)
        _check_files(holder)


def _refuse_quantized(folder: Path) -> None:
    """Raise ValueError where weights are stored as blocks of small numbers with scales."""
    if not (folder / CONFIG).is_file():
        return
    how = read_config(folder).get("quantization_config")
    if how is not None:
        method = how.get("quant_method", how) if isinstance(how, dict) else how
        raise ValueError(
            f"weights {folder}: they are quantized ({method!s:.40}), and training wants plain ones; load "
            "them dequantized with transformers, and give the folder that its save_pretrained writes"
        )


def _check_files(folder: Path) -> None:
    is_sharded = (folder / INDEX).is_file()
    if not is_sharded and not (folder / SINGLE).is_file():
        raise ValueError(f"weights {folder}: it has neither {SINGLE} nor {INDEX}")
    files = sorted(set(weight_map(folder).values())) if is_sharded else [SINGLE]
    missing = missing_weights(folder)
    if missing:
        first = f"{missing[0]}, ..." if len(missing) > 1 else missing[0]
        raise ValueError(
            f"weights {folder}: {len(missing)} of {len(files)} files are not there ({first}); is it half "
            "downloaded?"
        )
    for name in files:
        _check_length(entry_in(folder, name))


def _check_length(file: Path) -> None:
    """Raise ValueError unless a safetensors file is as long as its header says."""
    with open_regular(file) as opened:
        header_bytes = int.from_bytes(opened.read(_LENGTH_BYTES), "little")
        text = opened.read(header_bytes) if header_bytes <= MOST_HEADER_BYTES else b""
    try:
        header = json.loads(text)
        ends = (tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__")
        expected = _LENGTH_BYTES + header_bytes + max(ends, default=0)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"weights {file}: no safetensors file; is it half downloaded?") from None
    size = file.stat().st_size
    if size != expected:
        raise ValueError(f"weights {file}: want {expected:,} bytes, it has {size:,}; is it half downloaded?")
