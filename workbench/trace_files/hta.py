"""Export traces for HolisticTraceAnalysis: Kineto's Chrome JSON, one file per rank.

A span becomes a kernel on a stream of its rank, a message one on both of its ranks; collectives and
messages are named like NCCL's kernels, by which HTA recognizes them. Times are whole microseconds, as HTA
rounds others.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from workbench.schedule.action import MEANING, Activity
from workbench.trace import Lane, Trace
from workbench.trace_files.exchanges import POINT_TO_POINT
from workbench.trace_files.ranks import ranks_with_spans
from workbench.units import US_PER_S
from workbench.whole_file import write_text

COMPUTE_STREAM, REDUCE_STREAM, SEND_STREAM, RECEIVE_STREAM = 7, 20, 30, 40
_NCCL = "ncclDevKernel_"
_COPIES = {-1: "Memcpy DtoH", 1: "Memcpy HtoD"}  # by what becomes of the weights
_STEP = "ProfilerStep#0"
_HOST_THREAD = 1

Event = dict[str, Any]


def write_hta(trace: Trace, folder: Path) -> tuple[Path, ...]:
    """Write `rank<N>.json` for every rank into a folder; equal traces give equal bytes.

    Raises:
        ValueError: the trace has no spans.
        OSError: a file cannot be written.
    """
    ranks = ranks_with_spans(trace, "hta")
    paths = []
    for rank in ranks:
        paths.append(folder / f"rank{rank}.json")
        write_text(hta_text(trace, rank, world_size=max(ranks) + 1), paths[-1])
    return tuple(paths)


def hta_text(trace: Trace, rank: int, *, world_size: int) -> str:
    """One rank's file."""
    events = [
        _step(trace),
        *(
            event
            for number, kernel in enumerate(_kernels(trace, rank), 1)
            for event in _launch_and_kernel(number, *kernel)
        ),
    ]
    head = {
        "schemaVersion": 1,
        "deviceProperties": [{"id": rank, "name": dict(trace.details).get("device", "gpu")}],
        "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": world_size},
    }
    lines = ",\n".join(json.dumps(event) for event in events)
    return json.dumps(head)[:-1] + f',\n"traceEvents": [\n{lines}\n]}}\n'


_Kernel = tuple[
    str, int, int, int, int, Event
]  # name, rank, stream, start and end in microseconds, arguments


def _kernels(trace: Trace, rank: int) -> Iterator[_Kernel]:
    """Kernels of positive duration; HTA ignores others."""
    for name, stream, start_s, end_s, args in (*_of_spans(trace, rank), *_of_messages(trace, rank)):
        start_us, end_us = round(start_s * US_PER_S), round(end_s * US_PER_S)
        if end_us > start_us:
            yield name, rank, stream, start_us, end_us, args


def _of_spans(trace: Trace, rank: int) -> Iterator[tuple[str, int, float, float, Event]]:
    for span in trace.spans:
        if span.rank != rank:
            continue
        meaning, name = MEANING[span.action.kind], f"PP:{span.action}"
        stream = REDUCE_STREAM if span.lane is Lane.REDUCE else COMPUTE_STREAM
        if meaning.operation is not None:
            name = f"{_NCCL}{meaning.operation}({span.action})"
        elif meaning.activity is Activity.COPY:
            name = f"{_COPIES[meaning.weights]} {span.action}"
        yield name, stream, span.start_s, span.end_s, {}


def _of_messages(trace: Trace, rank: int) -> Iterator[tuple[str, int, float, float, Event]]:
    for message in trace.messages:
        for end_rank, direction, stream in (
            (message.source_rank, "send", SEND_STREAM),
            (message.destination_rank, "recv", RECEIVE_STREAM),
        ):
            if end_rank == rank:
                args = {
                    "Collective name": direction,
                    "In msg nelems": message.num_bytes,
                    "Out msg nelems": message.num_bytes,
                    "dtype": "Byte",
                    "Src Rank": message.source_rank,
                    "Dst Rank": message.destination_rank,
                }
                yield f"{_NCCL}{POINT_TO_POINT}({message.edge})", stream, message.start_s, message.end_s, args


def _launch_and_kernel(
    number: int, name: str, rank: int, stream: int, start_us: int, end_us: int, args: Event
) -> Iterator[Event]:
    """A kernel and the call that launches it, at its start."""
    shared = {"correlation": number, "External id": number}
    yield _slice("cuda_runtime", "cudaLaunchKernel", (rank, _HOST_THREAD), start_us, start_us + 1, shared)
    args = {"device": rank, "context": 1, "stream": stream} | shared | args
    yield _slice("kernel", name, (rank, stream), start_us, end_us, args)


def _step(trace: Trace) -> Event:
    end_us = round(trace.iteration_s * US_PER_S) + 1
    return _slice("user_annotation", _STEP, (0, _HOST_THREAD), 0, end_us, {})


def _slice(category: str, name: str, ids: tuple[int, int], start_us: int, end_us: int, args: Event) -> Event:
    process, thread = ids
    times = {"ts": start_us, "dur": end_us - start_us}
    return {"ph": "X", "cat": category, "name": name, "pid": process, "tid": thread, **times, "args": args}
