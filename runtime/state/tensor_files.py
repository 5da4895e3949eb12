"""Named tensors as a folder: a safetensors file, and a JSON manifest with its content, size and SHA-256.

Reading executes nothing. A folder is complete when its manifest exists, which is written last.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from workbench.bounded_file import open_regular
from workbench.strict_json import parse_strict
from workbench.whole_file import write_text

TENSORS, MANIFEST = "tensors.safetensors", "tensors.json"
FORMAT = 1
CHUNK_BYTES = 2**20
MOST_MANIFEST_BYTES = 2**27
HEADER_LENGTH_BYTES = 8
OLD_METADATA = ".metadata"  # of torch's distributed checkpoints, which are pickles
NAME_OF = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class TornError(ValueError):
    """Files are missing or changed since they were written."""


@dataclass(frozen=True, slots=True)
class TensorFormat:
    """Type, in safetensors' name, and shape of a tensor."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Manifest of a folder of tensors.

    Args:
        num_bytes, sha256: of the file with the tensors.
        tensors: name -> format.
        about: further data of its writer.
    """

    num_bytes: int
    sha256: str
    tensors: Mapping[str, TensorFormat]
    about: Mapping[str, Any]


def write_tensors(
    folder: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any] | None = None
) -> None:
    """Create the folder, synced to disk when this returns. Tensors are copied in chunks.

    Args:
        tensors: on any device.
        about: further data, of JSON types: strings, finite numbers, lists, objects.

    Raises:
        OSError: it cannot be written; partial files are removed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{TENSORS}.{os.getpid()}.tmp"
    try:
        with temporary.open("wb") as file:
            num_bytes, sha256 = _write(file, tensors)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(folder / TENSORS)
    finally:
        temporary.unlink(missing_ok=True)
    manifest = {
        "format": FORMAT,
        "bytes": num_bytes,
        "sha256": sha256,
        "tensors": {
            key: {"dtype": NAME_OF[each.dtype], "shape": list(each.shape)} for key, each in tensors.items()
        },
        "about": dict(about or {}),
    }
    write_text(json.dumps(manifest, allow_nan=False), folder / MANIFEST)


def _write(file: BinaryIO, tensors: Mapping[str, Tensor]) -> tuple[int, str]:
    """Write the safetensors format: length of the header, header, all bytes, widest types first."""
    ordered = sorted(tensors.items(), key=lambda each: (-each[1].element_size(), each[0]))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for key, tensor in ordered:
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[key] = {
            "dtype": NAME_OF[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % HEADER_LENGTH_BYTES)
    sums, num_bytes = hashlib.sha256(), 0
    for piece in (len(text).to_bytes(HEADER_LENGTH_BYTES, "little"), text, *_pieces(ordered)):
        file.write(piece)
        sums.update(piece)
        num_bytes += len(piece)
    return num_bytes, sums.hexdigest()


def _pieces(tensors: list[tuple[str, Tensor]]) -> Iterator[bytes]:
    for _, tensor in tensors:
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        for begin in range(0, flat.numel(), CHUNK_BYTES):
            yield flat[begin : begin + CHUNK_BYTES].cpu().numpy().tobytes()


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a folder.

    Raises:
        TornError: it is missing, or not of this format.
    """
    path = folder / MANIFEST
    if (folder / OLD_METADATA).exists():
        raise old_format(folder)
    try:
        document = parse_strict(read_small(path), most_bytes=MOST_MANIFEST_BYTES)
        return _manifest(document)
    except (OSError, ValueError) as error:
        raise TornError(f"{path} cannot be read ({error})") from None


def old_format(folder: Path) -> ValueError:
    """The error for a folder of torch's distributed checkpoints."""
    return ValueError(
        f"{folder} is of the earlier format, torch's distributed checkpoints: to read it is to run the code "
        "in it; if you trust who wrote it: workbench checkpoint import OLD NEW --trust"
    )


def check_tensors(folder: Path) -> Manifest:
    """Verify every byte of a folder, in chunks.

    Raises:
        TornError: it has changed since it was written.
    """
    manifest = read_manifest(folder)
    path = folder / TENSORS
    if not path.is_file() or _sums(path) != (manifest.num_bytes, manifest.sha256):
        raise TornError(f"{path} is not what was written")
    return manifest


def read_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> Manifest:
    """Verify the folder, then fill tensors in place, one by one.

    Raises:
        ValueError: a torn folder, or a tensor that is missing or has another type or shape.
    """
    manifest = check_tensors(folder)
    for key, tensor in tensors.items():
        kind = manifest.tensors.get(key)
        if kind is None:
            raise ValueError(f"{folder} has no tensor {key!r}")
        if kind != (want := TensorFormat(NAME_OF[tensor.dtype], tuple(tensor.shape))):
            raise ValueError(f"{folder}: {key!r} is {kind}, want {want}")
    try:
        with safe_open(folder / TENSORS, framework="pt") as file:
            for key, tensor in tensors.items():
                tensor.copy_(file.get_tensor(key))
    except (SafetensorError, RuntimeError) as error:
        raise TornError(f"{folder / TENSORS} is not what {MANIFEST} says ({error})") from None
    return manifest


def keys_in(folder: Path) -> frozenset[str]:
    """Names of the tensors of a folder."""
    return frozenset(read_manifest(folder).tensors)


def manifest_sha256(folder: Path) -> str:
    """SHA-256 of a folder's manifest, which identifies the folder's content.

    Raises:
        TornError: it cannot be read.
    """
    try:
        return hashlib.sha256(read_small(folder / MANIFEST)).hexdigest()
    except (OSError, ValueError) as error:
        raise TornError(f"{folder / MANIFEST} cannot be read ({error})") from None


def read_stamp(path: Path) -> dict[str, Any]:
    """Read the JSON object that combines several folders of tensors.

    Raises:
        TornError: it cannot be read.
    """
    try:
        document = parse_strict(read_small(path), most_bytes=MOST_MANIFEST_BYTES)
    except (OSError, ValueError) as error:
        raise TornError(f"{path} cannot be read ({error})") from None
    if not isinstance(document, dict):
        raise TornError(f"{path} holds no object")
    return document


def read_small(path: Path) -> bytes:
    """Read a regular file up to the size limit of manifests."""
    with open_regular(path) as file:
        return file.read(MOST_MANIFEST_BYTES + 1)


def _sums(path: Path) -> tuple[int, str]:
    """Size in bytes and SHA-256 of a file."""
    size, sums = 0, hashlib.sha256()
    with open_regular(path) as file:
        while chunk := file.read(CHUNK_BYTES):
            size += len(chunk)
            sums.update(chunk)
    return size, sums.hexdigest()


def _manifest(document: Any) -> Manifest:
    match document:
        case {
            "format": int(form),
            "bytes": int(num_bytes),
            "sha256": str(sha256),
            "tensors": dict(tensors),
            "about": dict(about),
        } if len(document) == 5:
            if form != FORMAT:
                raise ValueError(f"it is of format {form}, this program reads {FORMAT}")
            if num_bytes < 0 or not re.fullmatch("[0-9a-f]{64}", sha256):
                raise ValueError("its bytes and sha256 are none")
            kinds = {key: _kind(key, entry) for key, entry in tensors.items()}
            return Manifest(num_bytes=num_bytes, sha256=sha256, tensors=kinds, about=about)
    raise ValueError("want format, bytes, sha256, tensors and about")


def _kind(key: str, entry: Any) -> TensorFormat:
    match entry:
        case {"dtype": str(dtype), "shape": list(shape)} if (
            len(entry) == 2
            and dtype in NAME_OF.values()
            and all(type(side) is int and side >= 0 for side in shape)
        ):
            return TensorFormat(dtype, tuple(shape))
    raise ValueError(f"tensor {key!r:.60}: want dtype and shape")
