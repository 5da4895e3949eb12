"""torch's memory snapshots as curves: the bytes that the allocator held, event by event.

`torch.cuda.memory._dump_snapshot` writes a pickle. None is loaded here as Python would: the reader knows
containers, numbers and text alone, every name of a class is refused, and its size is bounded. The same
content as JSON is read too. Format: pytorch, `torch/cuda/_memory_viz.py` and `torch.cuda.memory._snapshot`.
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
from workbench.trace_files.kineto import Held, thinned
from workbench.trace_files.packed_file import read_packed
from workbench.units import US_PER_S

MOST_BYTES = 2**28
MOST_OPCODES = 50_000_000
_PICKLE = b"\x80"
_GROWS, _SHRINKS = "alloc", "free_completed"


class _PlainUnpickler(pickle.Unpickler):
    """Containers, numbers and text; no class, no function."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it names {module}.{name}")

    def persistent_load(self, pid: object) -> NoReturn:
        raise pickle.UnpicklingError("it names something outside")


def looks_like_snapshot(head: bytes) -> bool:
    """Whether a file begins as a snapshot does: a pickle, or JSON whose first keys are a snapshot's."""
    return head.startswith(_PICKLE) or b'"device_traces"' in head or b'"segments"' in head


def read_snapshot(path: Path) -> Trace:
    """The curve of every device in a snapshot; its trace has memory alone, a rank for each device.

    Raises:
        ValueError: too long, damaged, no such snapshot, or a pickle that holds more than plain data.
        OSError: it cannot be read.
    """
    content = read_packed(path, MOST_BYTES)
    return snapshot_trace(
        _unpickled(content, path) if content.startswith(_PICKLE) else _json(content, path), path
    )


def snapshot_trace(snapshot: object, path: Path) -> Trace:
    """The trace of a snapshot's content; ValueError in one line where it is none."""
    devices = snapshot.get("device_traces") if isinstance(snapshot, dict) else None
    if not isinstance(snapshot, dict) or not isinstance(devices, list):
        raise ValueError(f"{path}: no memory snapshot: want a dict with a list device_traces")
    ends = _held_at_the_end(snapshot.get("segments"))
    curves = [_curve(events, ends.get(device), path) for device, events in enumerate(devices)]
    zero_s = min((held.time_s for curve in curves for held in curve), default=None)
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
            MemorySample(device, held.time_s - zero_s, held.num_bytes)
            for device, curve in enumerate(curves)
            for held in thinned(curve)
        ),
        details=((DEVICE, "gpu"), ("recorded by", "torch.cuda.memory")),
    )


def _held_at_the_end(segments: object) -> dict[int, int]:
    """Device -> bytes in use when the snapshot was made, where it says so."""
    found: dict[int, int] = {}
    for segment in segments if isinstance(segments, list) else ():
        device, size = (
            (segment.get("device"), segment.get("active_size")) if isinstance(segment, dict) else (0, 0)
        )
        if _is_count(device) and _is_count(size):
            found[device] = found.get(device, 0) + size
    return found


def _curve(events: object, end_bytes: int | None, path: Path) -> list[Held]:
    """Bytes in use after each event of one device.

    What was in use before the first event follows from what is at the end, or, where nobody says that, from
    frees of what was never seen to be allocated.
    """
    if not isinstance(events, list):
        raise ValueError(f"{path}: want a list of events per device")
    changes = list(_changes(events, path))
    reached = list(accumulate(change for _, change in changes))
    before = max(0, -min(reached, default=0))
    if end_bytes is not None and reached:
        before = max(before, end_bytes - reached[-1])
    return [Held(time_s, before + held) for (time_s, _), held in zip(changes, reached, strict=True)]


def _changes(events: Sequence[object], path: Path) -> Iterator[tuple[float, int]]:
    """(second, bytes more) of each event that takes or gives back memory."""
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
