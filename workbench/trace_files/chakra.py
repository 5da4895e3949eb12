"""Export traces as Chakra execution traces: a graph of nodes for every rank, in protobuf.

Schema: mlcommons/chakra, `schema/protobuf/et_def.proto` (package mlc-chakra 1.0.0, Apache-2.0). A file is a
`GlobalMetadata` followed by `Node`s, each prefixed with its length. The small part of protobuf that this
needs is implemented here, to avoid a dependency; encoding: protobuf.dev, "Encoding".

A node depends on the previous one on its lane, and on its inputs: a send on the computation that ended when
it was ready, the first computation after its arrival on a receive. A trace shows no more than that.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from workbench.schedule.action import MEANING, Activity, Operation
from workbench.trace import Lane, Message, Span, Trace
from workbench.trace_files.ranks import ranks_with_spans
from workbench.units import US_PER_S
from workbench.whole_file import write_bytes

VERSION = "0.0.4"  # of the schema, as mlc-chakra's generator writes it


class NodeType(IntEnum):
    """`ChakraProtoMsg.NodeType`."""

    MEM_LOAD = 2
    MEM_STORE = 3
    COMPUTE = 4
    SEND = 5
    RECEIVE = 6
    COLLECTIVE = 7


# `CollectiveCommType`
_COLLECTIVE_TYPE = {Operation.ALL_REDUCE: 0, Operation.ALL_GATHER: 2, Operation.REDUCE_SCATTER: 7}
_COPY_TYPE = {-1: NodeType.MEM_STORE, 1: NodeType.MEM_LOAD}  # by what becomes of the weights

Attribute = bool | int | str


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node of one rank's graph.

    Args:
        id: unique in the rank's file.
        after: ids of preceding nodes in its lane.
        needs: ids of nodes whose data it needs.
        attributes: (name, value) pairs.
    """

    id: int
    name: str
    type: NodeType
    start_us: int
    duration_us: int
    after: tuple[int, ...] = ()
    needs: tuple[int, ...] = ()
    attributes: tuple[tuple[str, Attribute], ...] = ()


def write_chakra(trace: Trace, folder: Path) -> tuple[Path, ...]:
    """Write `trace.<rank>.et` for every rank into a folder; equal traces give equal bytes.

    Raises:
        ValueError: the trace has no spans.
        OSError: a file cannot be written.
    """
    ranks = ranks_with_spans(trace, "chakra")
    paths = []
    for rank in ranks:
        paths.append(folder / f"trace.{rank}.et")
        metadata = _text_field(1, VERSION)
        messages = [metadata, *(_encoded(node) for node in nodes_of(trace, rank))]
        write_bytes(b"".join(_varint(len(each)) + each for each in messages), paths[-1])
    return tuple(paths)


def nodes_of(trace: Trace, rank: int) -> tuple[Node, ...]:
    """One rank's graph, ordered by start."""
    spans = [span for span in trace.spans if span.rank == rank]
    messages = [m for m in trace.messages if rank in (m.source_rank, m.destination_rank)]
    work: list[Span | Message] = sorted([*spans, *messages], key=lambda item: item.start_s)
    computing = [i for i, item in enumerate(work) if isinstance(item, Span) and item.lane is Lane.COMPUTE]
    starts_s, ends_s = [work[i].start_s for i in computing], [work[i].end_s for i in computing]
    needs: dict[int, list[int]] = {}
    for index, item in enumerate(work):
        if isinstance(item, Span):
            if item.lane is Lane.REDUCE:
                _depend_on_last(needs, index, computing, ends_s, item.start_s)
        elif item.source_rank == rank:
            _depend_on_last(needs, index, computing, ends_s, item.ready_s)
        else:
            first = bisect_left(starts_s, item.end_s)
            if first < len(computing):
                needs.setdefault(computing[first], []).append(index)
    last: dict[object, int] = {}
    nodes = []
    for index, item in enumerate(work):
        lane = item.lane if isinstance(item, Span) else (item.source_rank, item.destination_rank)
        after = (last[lane],) if lane in last else ()
        last[lane] = index
        nodes.append(_node(index, item, rank, after, tuple(sorted(needs.get(index, ())))))
    return tuple(nodes)


def _depend_on_last(
    needs: dict[int, list[int]], index: int, computing: Sequence[int], ends_s: Sequence[float], time_s: float
) -> None:
    """Add a dependency on the last computation that had ended by then."""
    before = bisect_right(ends_s, time_s)
    if before:
        needs.setdefault(index, []).append(computing[before - 1])


def _node(
    index: int, work: Span | Message, rank: int, after: tuple[int, ...], needs: tuple[int, ...]
) -> Node:
    attributes: tuple[tuple[str, Attribute], ...] = (("is_cpu_op", False),)
    if isinstance(work, Message):
        is_send = work.source_rank == rank
        name, kind = f"{work.edge} row {work.row}", NodeType.SEND if is_send else NodeType.RECEIVE
        attributes += (
            ("comm_size", work.num_bytes),
            ("comm_src", work.source_rank),
            ("comm_dst", work.destination_rank),
            ("comm_tag", work.row),
        )
    else:
        name, kind, meaning = str(work.action), NodeType.COMPUTE, MEANING[work.action.kind]
        if meaning.operation is not None:
            kind = NodeType.COLLECTIVE
            attributes += (("comm_type", _COLLECTIVE_TYPE[meaning.operation]),)
        elif meaning.activity is Activity.COPY:
            kind = _COPY_TYPE[meaning.weights]
    start_us, end_us = round(work.start_s * US_PER_S), round(work.end_s * US_PER_S)
    return Node(
        id=index,
        name=name,
        type=kind,
        start_us=start_us,
        duration_us=end_us - start_us,
        after=after,
        needs=needs,
        attributes=attributes,
    )


# Protobuf


def _encoded(node: Node) -> bytes:
    """Encode a `Node`; field numbers as in the schema."""
    return b"".join(
        (
            _number_field(1, node.id),
            _text_field(2, node.name),
            _number_field(3, node.type),
            _numbers_field(4, node.after),
            _numbers_field(5, node.needs),
            _number_field(6, node.start_us),
            _number_field(7, node.duration_us),
            *(_bytes_field(10, _attribute(*pair)) for pair in node.attributes),
        )
    )


def _attribute(name: str, value: Attribute) -> bytes:
    """Encode an `AttributeProto`: a value of a oneof is written even if it is 0."""
    if isinstance(value, bool):
        return _text_field(1, name) + _varint(27 << 3) + _varint(int(value))
    if isinstance(value, int):
        return _text_field(1, name) + _varint(9 << 3) + _varint(value)
    return _text_field(1, name) + _text_field(29, value)


def _number_field(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _text_field(field: int, value: str) -> bytes:
    return _bytes_field(field, value.encode("utf-8"))


def _numbers_field(field: int, values: Sequence[int]) -> bytes:
    return _bytes_field(field, b"".join(map(_varint, values))) if values else b""


def _bytes_field(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    """Seven bits per byte, lowest first; for numbers >= 0."""
    return bytes(_septets(value))


def _septets(value: int) -> Iterator[int]:
    while value > 0x7F:
        yield value & 0x7F | 0x80
        value >>= 7
    yield value
