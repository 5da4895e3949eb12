"""Read torch's memory snapshots as curves of the allocator's bytes, event by event.

`torch.cuda.memory._dump_snapshot` writes a pickle. It is not loaded as Python would load it: the reader
accepts only containers, numbers and text, refuses every class, and bounds its size. The same content as
JSON is read too. Format: pytorch, `torch/cuda/_memory_viz.py` and `torch.cuda.memory._snapshot`.
"""

import io
import json
import pickle
import pickletools
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import NoReturn, TypeGuard

from workbench.timing.provenance import DEVICE
from workbench.trace import Executor, MemorySample, Trace
from workbench.trace_files.kineto import AllocatedBytes, thinned
from workbench.trace_files.packed_file import read_packed
from workbench.units import US_PER_S

MOST_BYTES = 2**28
MOST_OPCODES = 50_000_000
_PICKLE = b"\x80"
_GROWS, _SHRINKS = "alloc", "free_completed"


class _PlainUnpickler(pickle.Unpickler):
    """An unpickler for containers, numbers and text, without classes or functions."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it names {module}.{name}")

    def persistent_load(self, pid: object) -> NoReturn:
        raise pickle.UnpicklingError("it names something outside")


def looks_like_snapshot(head: bytes) -> bool:
    """Whether a file starts like a snapshot: a pickle, or JSON whose first keys are a snapshot's."""
    return head.startswith(_PICKLE) or b'"device_traces"' in head or b'"segments"' in head


def read_snapshot(path: Path) -> Trace:
    """Read the curve of every device as a trace with memory alone, one rank per device.

    Raises:
        ValueError: too long, damaged, no such snapshot, or a pickle with more than plain data.
        OSError: it cannot be read.
    """
    content = read_packed(path, MOST_BYTES)
    return snapshot_trace(
        _unpickled(content, path) if content.startswith(_PICKLE) else _json(content, path), path
    )


def snapshot_trace(snapshot: object, path: Path) -> Trace:
    """The trace of a snapshot's content; ValueError with one line if it is none."""
    devices = snapshot.get("device_traces") if isinstance(snapshot, dict) else None
    if not isinstance(snapshot, dict) or not isinstance(devices, list):
        raise ValueError(f"{path}: no memory snapshot: want a dict with a list device_traces")
    ends = _final_bytes(snapshot.get("segments"))
    curves = [_curve(events, ends.get(device), path) for device, events in enumerate(devices)]
    zero_s = min((sample.time_s for curve in curves for sample in curve), default=None)
    if zero_s is None:
        raise ValueError(
            f"{path}: no allocation was recorded; call torch.cuda.memory._record_memory_history() before the "
            "steps and torch.cuda.memory._dump_snapshot(path) after them"
        )
    return Trace(
        plan_hash="",
        executor=Executor.EXECUTED,
        spans=(),
        memory=tuple(
            MemorySample(device, sample.time_s - zero_s, sample.num_bytes)
            for device, curve in enumerate(curves)
            for sample in thinned(curve)
        ),
        details=((DEVICE, "gpu"), ("recorded by", "torch.cuda.memory")),
    )


def _final_bytes(segments: object) -> dict[int, int]:
    """Device -> bytes in use when the snapshot was made, if it states them."""
    bytes_by_device: dict[int, int] = {}
    for segment in segments if isinstance(segments, list) else ():
        device, size = (
            (segment.get("device"), segment.get("active_size")) if isinstance(segment, dict) else (0, 0)
        )
        if _is_count(device) and _is_count(size):
            bytes_by_device[device] = bytes_by_device.get(device, 0) + size
    return bytes_by_device


def _curve(events: object, end_bytes: int | None, path: Path) -> list[AllocatedBytes]:
    """Bytes in use after each event of one device.

    Bytes in use before the first event are derived from the final ones or, if these are unknown, from frees
    of blocks that were never seen to be allocated.
    """
    if not isinstance(events, list):
        raise ValueError(f"{path}: want a list of events per device")
    changes = list(_changes(events, path))
    totals = list(accumulate(change for _, change in changes))
    before = max(0, -min(totals, default=0))
    if end_bytes is not None and totals:
        before = max(before, end_bytes - totals[-1])
    return [
        AllocatedBytes(time_s, before + total) for (time_s, _), total in zip(changes, totals, strict=True)
    ]


def _changes(events: Sequence[object], path: Path) -> Iterator[tuple[float, int]]:
    """(second, added bytes) of each event that allocates or frees memory."""
    for event in events:
        if not isinstance(event, dict):
            raise ValueError(f"{path}: want events that are dicts, got a {type(event).__name__}")
        action, size, time_us = event.get("action"), event.get("size"), event.get("time_us", 0)
        if action not in (_GROWS, _SHRINKS):
            continue
        if not _is_count(size) or not _is_count(time_us):
            raise ValueError(
                f"{path}: event {action!r}: want whole size and time_us, got {size!r:.20} and {time_us!r:.20}"
            )
        yield time_us / US_PER_S, size if action == _GROWS else -size


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**62


def _unpickled(content: bytes, path: Path) -> object:
    try:
        for count, (_, _, _) in enumerate(pickletools.genops(content)):
            if count > MOST_OPCODES:
                raise ValueError(f"{path}: want at most {MOST_OPCODES:,} parts in a pickle")
        return _PlainUnpickler(io.BytesIO(content)).load()
    except Exception as error:
        raise ValueError(f"{path}: a pickle of plain data is wanted: {error}") from None


def _json(content: bytes, path: Path) -> object:
    try:
        return json.loads(content)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON, or cut off: {error}") from None
    except ValueError:
        raise ValueError(f"{path}: JSON with a number of too many digits") from None
