"""Communication in a recording: NCCL kernels, or gloo's annotations on the host."""

import re
from collections.abc import Sequence
from typing import NamedTuple

from workbench.schedule.action import MEANING, Operation, Pass
from workbench.trace_files.kineto import Event, Recording

POINT_TO_POINT = "SendRecv"
KINDS: dict[str, Pass] = {
    operation: kind for kind in Pass if (operation := MEANING[kind].operation) is not None
}
# Names of NCCL's kernels: `ncclKernel_AllReduce_RING_LL_Sum_float` to 2.18, `ncclDevKernel_...` since.
_NCCL = re.compile(r"^nccl(?:Dev)?Kernel_?([A-Za-z]+)")
_GLOO: dict[str, str] = {
    "gloo:all_reduce": Operation.ALL_REDUCE,
    "gloo:_allgather_base": Operation.ALL_GATHER,
    "gloo:all_gather": Operation.ALL_GATHER,
    "gloo:reduce_scatter": Operation.REDUCE_SCATTER,
    "gloo:_reduce_scatter_base": Operation.REDUCE_SCATTER,
}
_OF_TENSOR_PARALLEL = re.compile(r"\btp\b|_tp|tp_|tensor", re.IGNORECASE)
_GROUP_NAMES = ("Process Group Description", "Process Group Name")
_BYTES = {"Byte": 1, "Half": 2, "BFloat16": 2, "Float": 4, "Int": 4, "Long": 8, "Double": 8}


class Wire(NamedTuple):
    """One side of a message between two ranks, as its rank recorded it.

    `issued_s`: when its host launched it.
    """

    source: int
    destination: int
    num_bytes: int
    issued_s: float
    start_s: float
    end_s: float


def collective_of(kernel: str) -> str | None:
    """`AllGather`, `SendRecv`, ...; None for a kernel that is not NCCL's.

    >>> collective_of("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)")
    'AllGather'
    """
    match = _NCCL.match(kernel)
    return match[1] if match else None


def collectives(
    recording: Recording, passes_s: Sequence[tuple[float, float, Pass]]
) -> list[tuple[Pass, Event]]:
    """Collectives outside the passes; those of tensor parallelism are parts of passes.

    They are distinguished by the group's name if the recording has it. Otherwise, a reduction inside a
    forward indicates tensor parallelism, and then all unnamed collectives inside passes belong to it.

    Args:
        passes_s: (start, end, kind) of the passes, by start.
    """
    all_collectives = [
        (KINDS[name], event) for event in _events(recording) if (name := _name(event)) in KINDS
    ]
    unnamed = [pair for pair in all_collectives if not _group(pair[1])]
    is_tensor_parallel = any(
        MEANING[kind].operation is not Operation.ALL_GATHER and _inside(event, passes_s) is Pass.F
        for kind, event in unnamed
    )
    return [
        (kind, event)
        for kind, event in all_collectives
        if not _OF_TENSOR_PARALLEL.search(_group(event))
        and not (is_tensor_parallel and not _group(event) and _inside(event, passes_s) is not None)
    ]


def wires(recording: Recording, rank: int) -> list[Wire]:
    """Sends and receives with a recorded peer, by start."""
    sides = []
    for event in recording.kernels:
        direction = str(event.args.get("Collective name", "")).lower()
        peer = event.args.get("Dst Rank" if direction == "send" else "Src Rank")
        if collective_of(event.name) != POINT_TO_POINT or direction not in ("send", "recv"):
            continue
        if isinstance(peer, int) and not isinstance(peer, bool):
            ends = (rank, peer) if direction == "send" else (peer, rank)
            issued_s = recording.issued_s(event)
            sides.append(Wire(*ends, _num_bytes(event), issued_s, event.start_s, event.end_s))
    return sides


def _num_bytes(event: Event) -> int:
    count = event.args.get("In msg nelems")
    width = _BYTES.get(str(event.args.get("dtype")), 1)
    return count * width if isinstance(count, int) and count >= 0 else 0


def _events(recording: Recording) -> Sequence[Event]:
    return recording.kernels or recording.annotations


def _name(event: Event) -> str | None:
    return collective_of(event.name) or _GLOO.get(event.name)


def _group(event: Event) -> str:
    """The name that the job gave the group; torch's default numbers carry no information."""
    names = (str(event.args.get(name, "")) for name in _GROUP_NAMES)
    return next((name for name in names if name and not name.isdigit() and name != "undefined"), "")


def _inside(event: Event, passes_s: Sequence[tuple[float, float, Pass]]) -> Pass | None:
    """The pass that contains the middle of an event."""
    middle_s = (event.start_s + event.end_s) / 2
    return next((kind for start_s, end_s, kind in passes_s if start_s <= middle_s < end_s), None)
