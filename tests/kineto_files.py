"""Recordings of torch.profiler, written by rule from our traces: as a GPU job would have made them.

The host runs ahead: it names every pass, or shows its module or its call of autograd, and launches its
kernels, a backward's from a thread of its own. A pass is three kernels on stream 7; exchanges are NCCL's on
streams of their own, sends and receives with the arguments that c10d gives them. Format: Kineto's
`output_json.cpp` and torch's `ParamCommsUtils.hpp`.
"""

import gzip
import json
from collections.abc import Iterator, Sequence
from enum import Enum
from itertools import count
from pathlib import Path
from typing import Any

from workbench.schedule.action import COMPUTE, Pass
from workbench.trace import Lane, Trace

HOST, AUTOGRAD = 100, 101  # threads
SLOT_US, LAUNCH_US = 50.0, 5.0
BEGIN_US = 4_501_429_030_502.0
KERNELS = {
    Pass.F: ("void flash_fwd_kernel<128>", "ampere_bf16_s16816gemm", "vectorized_elementwise_kernel"),
    Pass.B: ("void flash_bwd_kernel<128>", "ampere_bf16_s16816gemm", "ampere_bf16_s16816gemm"),
    Pass.STEP: ("multi_tensor_apply_kernel<FusedAdamMathFunctor>",) * 3,
}
NCCL = {
    Pass.REDUCE_GRAD: "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    Pass.ALL_GATHER: "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    Pass.REDUCE_SCATTER: "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
}
SEND_RECV = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"

Event = dict[str, Any]


class Shows(Enum):
    """What of a pass the host's events tell."""

    ACTIONS = "PP:2F0"
    WORDS = "forward"
    MODULES = "nn.Module"
    NOTHING = "kernels alone"


def write_recordings(steps: Sequence[Trace], folder: Path, *, packed: bool = True) -> None:
    """One file per rank; every step begins 10 ms after the one before has ended."""
    for rank in sorted({span.rank for span in steps[0].spans}):
        text = json.dumps(document(steps, rank))
        if packed:
            (folder / f"host.{rank}.pt.trace.json.gz").write_bytes(gzip.compress(text.encode()))
        else:
            (folder / f"host.{rank}.pt.trace.json").write_text(text)


def document(steps: Sequence[Trace], rank: int, shows: Shows = Shows.ACTIONS) -> dict[str, Any]:
    ranks = {span.rank for span in steps[0].spans}
    events, begin_us, numbers = [], BEGIN_US, count(1)
    for number, step in enumerate(steps):
        events += list(_step(step, rank, begin_us, number, shows, numbers))
        begin_us += step.iteration_s * 1e6 + 10_000
    return {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "NVIDIA H100 80GB HBM3"}],
        "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": len(ranks)},
        "baseTimeNanoseconds": 1790857026000000000,
        "traceEvents": events,
    }


def _step(
    trace: Trace, rank: int, begin_us: float, number: int, shows: Shows, numbers: Iterator[int]
) -> Iterator[Event]:
    """Its kernels begin `begin_us`; the host is ahead of them by as much as it needs for the whole step."""
    spans = [s for s in trace.spans if s.rank == rank and s.lane is Lane.COMPUTE]
    passes = sorted(
        (s for s in spans if s.action.kind in (*COMPUTE, Pass.STEP)), key=lambda s: (s.start_s, s.end_s)
    )
    host_us = begin_us - 9_000
    for index, span in enumerate(passes):
        kind, slot_us = span.action.kind, host_us + index * SLOT_US
        yield from _shown(str(span.action), kind, slot_us, shows)
        thread = AUTOGRAD if kind is Pass.B else HOST
        cut_s = (span.end_s - span.start_s) / 3
        for piece, name in enumerate(KERNELS[kind]):
            start_s = span.start_s + piece * cut_s
            launch_us = slot_us + LAUNCH_US * (piece + 1)
            yield from _launched(name, 7, (begin_us, start_s, start_s + cut_s), (thread, launch_us), numbers)
    later_us = host_us + len(passes) * SLOT_US
    for span in (s for s in trace.spans if s.rank == rank and s.lane is Lane.REDUCE):
        args = {
            "Process Group Description": "data_parallel",
            "Collective name": "allreduce",
            "dtype": "BFloat16",
        }
        times = (begin_us, span.start_s, span.end_s)
        yield from _launched(NCCL[span.action.kind], 20, times, (HOST, later_us), numbers, args)
    for message in trace.messages:
        if rank not in (message.source_rank, message.destination_rank):
            continue
        is_send = message.source_rank == rank
        args = {
            "Collective name": "send" if is_send else "recv",
            "In msg nelems": message.num_bytes // 2,
            "dtype": "BFloat16",
            "Src Rank": message.source_rank,
            "Dst Rank": message.destination_rank,
            "Process Group Name": "3",
        }
        times = (begin_us, message.ready_s if is_send else message.start_s, message.end_s)
        yield from _launched(SEND_RECV, 30 if is_send else 40, times, (HOST, later_us), numbers, args)
    for sample in (s for s in trace.memory if s.rank == rank):
        args = {"Total Allocated": sample.num_bytes, "Device Type": 1, "Device Id": 0, "Bytes": 0}
        at_us = begin_us + sample.time_s * 1e6
        yield {
            "ph": "i",
            "cat": "cpu_instant_event",
            "s": "t",
            "name": "[memory]",
            "pid": 1,
            "tid": HOST,
            "ts": at_us,
            "args": args,
        }
    yield _slice("user_annotation", f"ProfilerStep#{number}", HOST, host_us - 1, later_us + 1_000)


def _shown(action: str, kind: Pass, slot_us: float, shows: Shows) -> Iterator[Event]:
    end_us = slot_us + SLOT_US - 10
    words = {Pass.F: "forward", Pass.B: "backward", Pass.STEP: "Optimizer.step#AdamW.step"}
    calls = {
        Pass.F: "nn.Module: Stage_0",
        Pass.B: "<built-in method run_backward of torch._C._EngineBase object at 0x7f>",
    }
    if shows is Shows.ACTIONS:
        yield _slice("user_annotation", f"PP:{action}", HOST, slot_us, end_us)
        yield _slice("user_annotation", "forward", HOST, slot_us + 1, end_us - 1)  # inside, so not a pass
    elif shows is Shows.WORDS:
        yield _slice("user_annotation", words[kind], HOST, slot_us, end_us)
    elif shows is Shows.MODULES and kind in calls:
        yield _slice("python_function", calls[kind], HOST, slot_us, end_us)
        yield _slice("python_function", "nn.Module: Linear_0", HOST, slot_us + 2, slot_us + 3)
    elif shows is Shows.MODULES:
        yield _slice("user_annotation", words[kind], HOST, slot_us, end_us)


def _launched(
    name: str,
    stream: int,
    times: tuple[float, float, float],
    launch: tuple[int, float],
    numbers: Iterator[int],
    args: Event | None = None,
) -> Iterator[Event]:
    begin_us, start_s, end_s = times
    number = next(numbers)
    yield _slice("cuda_runtime", "cudaLaunchKernel", launch[0], launch[1], launch[1] + 2) | {
        "args": {"correlation": number}
    }
    start_us, end_us = begin_us + start_s * 1e6, begin_us + end_s * 1e6
    noted = {"stream": stream, "device": 0, "correlation": number} | (args or {})
    yield _slice("kernel", name, stream, start_us, end_us) | {"pid": 0, "args": noted}


def _slice(category: str, name: str, thread: int, start_us: float, end_us: float) -> Event:
    times = {"ts": start_us, "dur": end_us - start_us}
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": thread, **times, "args": {}}
