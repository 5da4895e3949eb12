"""Read recordings of torch.profiler: Kineto's Chrome JSON of one rank.

Times are seconds on the recording machine's clock. Unused events are dropped while reading. Format:
pytorch/kineto, `libkineto/src/output_json.cpp`, and torch's `export_chrome_trace`.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from workbench.trace_files.packed_file import read_packed
from workbench.units import US_PER_S

ANNOTATION = "user_annotation"
DEVICE_ANNOTATION = "gpu_user_annotation"
KERNEL = "kernel"
FUNCTION = "python_function"
MOST_SAMPLES = 1000  # of memory, per rank and step
LAUNCHES = ("cuda_runtime", "cuda_driver")
_MEMORY = "[memory]"
_RANK_IN_NAME = re.compile(r"rank[-_. ]?(\d+)", re.IGNORECASE)
# The only Python calls that delimit passes: modules, and the engine that runs a backward.
_WANTED_CALL = re.compile(r"^nn\.Module: |run_backward")
_CUDA = 1  # device type in memory events


class Event(NamedTuple):
    """A range with a duration.

    Args:
        name: of the range, call or kernel.
        thread: (process, thread) of the host, or (device, stream).
        start_s, end_s: on the machine's clock.
        args: further fields of the profiler.
    """

    name: str
    thread: tuple[str, str]
    start_s: float
    end_s: float
    args: Mapping[str, Any]

    def holds(self, time_s: float) -> bool:
        return self.start_s <= time_s < self.end_s


class AllocatedBytes(NamedTuple):
    """Bytes allocated from `time_s` on."""

    time_s: float
    num_bytes: int


def thinned(samples: Sequence[AllocatedBytes]) -> list[AllocatedBytes]:
    """At most `MOST_SAMPLES` samples, each the highest of equally many neighbours. O(n)."""
    size = max(1, -(-len(samples) // MOST_SAMPLES))
    return [
        max(samples[first : first + size], key=lambda each: each.num_bytes)
        for first in range(0, len(samples), size)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """One rank's file; events ordered by start.

    Args:
        path: of the file.
        rank: by torch.distributed, or by the file's name; None if neither states it.
        world_size: by torch.distributed.
        device: name of the GPU, or "cpu".
        annotations: ranges named by the program, on host threads.
        device_annotations: the same ranges on streams.
        calls: of modules, and of the autograd engine.
        kernels: on streams, NCCL's too.
        launched_s: correlation id -> when the host launched that kernel.
        memory: of its GPU, ordered by time.
        base_ns: origin of its times; usually the same for all ranks of a job.
    """

    path: Path
    rank: int | None
    world_size: int | None
    device: str
    annotations: tuple[Event, ...]
    device_annotations: tuple[Event, ...]
    calls: tuple[Event, ...]
    kernels: tuple[Event, ...]
    launched_s: Mapping[int, float]
    memory: tuple[AllocatedBytes, ...]
    base_ns: int

    def issued_s(self, kernel: Event) -> float:
        """When the host launched a kernel; the kernel's own start if unrecorded."""
        correlation = kernel.args.get("correlation")
        return (
            self.launched_s.get(correlation, kernel.start_s)
            if isinstance(correlation, int)
            else kernel.start_s
        )


def read_recording(path: Path) -> Recording:
    """Read a `.json` or `.json.gz` file of torch.profiler.

    Raises:
        ValueError: too long, truncated, not JSON, or no such recording.
        OSError: it cannot be read.
    """
    return recording_of(document_of(path), path)


def document_of(path: Path) -> dict[str, Any]:
    """Read the JSON object of a file, compressed or not; ValueError with one line otherwise."""
    content = read_packed(path)
    try:
        document = json.loads(content.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not JSON: not UTF-8 text at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path}: not JSON, or cut off: {error.msg} at line {error.lineno} column {error.colno}"
        ) from None
    except RecursionError:
        raise ValueError(f"{path}: JSON nested too deeply") from None
    except ValueError:
        raise ValueError(f"{path}: JSON with a number of too many digits") from None
    if not isinstance(document, dict):
        raise ValueError(f"{path}: want a JSON object, got a {type(document).__name__}")
    return document


def recording_of(document: Mapping[str, Any], path: Path) -> Recording:
    """Parse a document read from `path`; ValueError if it is no recording."""
    events = document.get("traceEvents")
    if not isinstance(events, list):
        raise ValueError(f"{path}: no recording of torch.profiler: it has no traceEvents")
    shared = document.get("distributedInfo")
    shared = shared if isinstance(shared, dict) else {}
    wanted = [event for event in events if isinstance(event, dict) and _is_wanted(event)]
    # Microseconds since 1970 leave no room for nanoseconds in a double of seconds.
    origin_us = int(_microseconds(wanted[0], "ts", path)) if wanted else 0
    by_kind: dict[str, list[Event]] = {}
    for event in wanted:
        by_kind.setdefault(event["cat"], []).append(_event(event, origin_us, path))
    launches = [event for kind in LAUNCHES for event in by_kind.get(kind, ())]
    return Recording(
        path=path,
        rank=_count(shared.get("rank"), _rank_in(path)),
        world_size=_count(shared.get("world_size"), None),
        device=_gpu(document) if KERNEL in by_kind else "cpu",
        annotations=_by_start(by_kind.get(ANNOTATION, ())),
        device_annotations=_by_start(by_kind.get(DEVICE_ANNOTATION, ())),
        calls=_by_start(by_kind.get(FUNCTION, ())),
        kernels=_by_start(by_kind.get(KERNEL, ())),
        launched_s={event.args["correlation"]: event.start_s for event in launches},
        memory=tuple(sorted(_memory(events, origin_us, path))),
        base_ns=_base_ns(document) + 1000 * origin_us,
    )


def _is_wanted(event: Mapping[str, Any]) -> bool:
    if event.get("ph") != "X" or not isinstance(event.get("name"), str):
        return False
    kind = event.get("cat")
    if kind == FUNCTION:
        return _WANTED_CALL.search(event["name"]) is not None
    if kind in LAUNCHES:
        return isinstance(event.get("args"), dict) and isinstance(event["args"].get("correlation"), int)
    return kind in (ANNOTATION, DEVICE_ANNOTATION, KERNEL)


def _event(event: Mapping[str, Any], origin_us: int, path: Path) -> Event:
    args = event.get("args")
    start_s = (_microseconds(event, "ts", path) - origin_us) / US_PER_S
    return Event(
        name=event["name"],
        thread=(str(event.get("pid")), str(event.get("tid"))),
        start_s=start_s,
        end_s=start_s + max(0.0, _microseconds(event, "dur", path)) / US_PER_S,
        args=args if isinstance(args, dict) else {},
    )


def _microseconds(event: Mapping[str, Any], field: str, path: Path) -> float:
    value = event.get(field)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < math.inf:
        raise ValueError(
            f"{path}: event {event.get('name')!r:.60}: want microseconds as {field}, got {value!r:.20}"
        )
    return value


def _base_ns(document: Mapping[str, Any]) -> int:
    base = document.get("baseTimeNanoseconds", 0)
    return base if isinstance(base, int) and abs(base) < 2**63 else 0


def _memory(events: Sequence[Any], origin_us: int, path: Path) -> Iterator[AllocatedBytes]:
    """Samples of the GPU; torch's host counts omit what existed when recording started."""
    for event in events:
        if not isinstance(event, dict) or event.get("name") != _MEMORY:
            continue
        args = event.get("args")
        args = args if isinstance(args, dict) else {}
        total, kind = args.get("Total Allocated"), args.get("Device Type")
        if isinstance(total, int) and kind == _CUDA:
            time_s = (_microseconds(event, "ts", path) - origin_us) / US_PER_S
            yield AllocatedBytes(time_s, max(0, total))


def _gpu(document: Mapping[str, Any]) -> str:
    known = document.get("deviceProperties")
    first = known[0] if isinstance(known, list) and known else None
    name = first.get("name") if isinstance(first, dict) else None
    return name if isinstance(name, str) else "gpu"


def _rank_in(path: Path) -> int | None:
    match = _RANK_IN_NAME.search(path.name)
    return int(match[1]) if match and len(match[1]) < 9 else None


def _count(value: object, otherwise: int | None) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else otherwise


def _by_start(events: Sequence[Event]) -> tuple[Event, ...]:
    return tuple(sorted(events, key=lambda event: (event.start_s, -event.end_s)))
