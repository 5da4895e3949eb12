"""Trace files: Chrome JSON that Perfetto opens, with exact numbers, so that it can be read back."""

import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from workbench.bounded_file import read_bounded
from workbench.finite_json import finite
from workbench.schedule.action import COMPUTE, NEWEST, SPELLINGS, Pass, Spelling
from workbench.trace import Executor, Lane, MemorySample, Message, Span, Trace
from workbench.units import US_PER_S
from workbench.whole_file import write_text


class Flow(NamedTuple):
    """A dependency between two spans on the same rank.

    Args:
        name: what flows, "weights" or "gradients".
        giver: the gather of weights, or the pass that makes gradients.
        taker: the pass that needs the weights, or the sum of the gradients.
    """

    name: str
    giver: Span
    taker: Span


def exchange_flows(trace: Trace) -> Iterator[Flow]:
    """Yield the flows from all-gathers to the stage's next pass, and from the last pass to reduce-scatters.

    An exchange without such a pass has no flow. Flows are in the order of the exchanges in the trace.

    Complexity: O(spans log spans).
    """
    passes: dict[tuple[int, int | None], list[Span]] = {}
    for span in trace.spans:
        if span.action.kind in COMPUTE:
            passes.setdefault((span.rank, span.action.stage), []).append(span)
    for stage_passes in passes.values():
        stage_passes.sort(key=lambda span: span.start_s)
    for span in trace.spans:
        stage_passes = passes.get((span.rank, span.action.stage), [])
        if span.action.kind is Pass.ALL_GATHER:
            index = bisect_left(stage_passes, span.end_s, key=lambda other: other.start_s)
            if index < len(stage_passes):
                yield Flow("weights", span, stage_passes[index])
        elif span.action.kind is Pass.REDUCE_SCATTER:
            index = bisect_right(stage_passes, span.start_s, key=lambda other: other.end_s)
            if index > 0:
                yield Flow("gradients", stage_passes[index - 1], span)


FORMAT = "multimodal-workbench trace"
SCHEMA_VERSION = NEWEST  # version of the names of actions

SEND = "send"
RECEIVE = "receive"
MEMORY = "memory"

LANE_IDS = {Lane.COMPUTE: 0, Lane.SEND: 1, Lane.REDUCE: 2}
_FIRST_SEND_ID = 10  # tracks of overlapping messages: senders from here, receivers from 1010
_FIRST_RECEIVE_ID = 1010

_ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"))

Event = dict[str, Any]


def write_trace(trace: Trace, path: Path) -> None:
    """Write a file that Perfetto and chrome://tracing open, all of it or nothing.

    A process is a rank and a thread a lane; slices are named like torch's (`PP:2F0`), with the pass as their
    category. A message is a slice at its sender and one at its receiver, joined by an arrow, as are
    exchanges of sharded weights and their passes; memory is a counter. Timestamps are microseconds for the
    viewer, beside the exact seconds. Equal traces give equal bytes.

    Raises:
        ValueError: a time that is not finite.
    """
    write_text(dumps(trace), path)


def read_trace(path: Path) -> Trace:
    """Read a file of `write_trace`; ValueError in one line for any other file."""
    text = read_bounded(path)
    try:
        return loads(text)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def dumps(trace: Trace) -> str:
    """The file's text, one event per line."""
    events = [*_metadata(trace), *_spans(trace), *_messages(trace), *_exchanges(trace), *_memory(trace)]
    try:
        lines = ",\n".join(_ENCODER.encode(event) for event in events)
    except ValueError as error:
        raise ValueError("trace: times must be finite to be written") from error
    header = _ENCODER.encode(_header(trace))
    return f'{{"traceEvents":[\n{lines}\n],\n"displayTimeUnit":"ms",\n"otherData":{header}}}\n'


def loads(text: str) -> Trace:
    """The trace of a file's text, of any version; ValueError in one line for other text."""
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not a trace file: {error.msg} at line {error.lineno}") from error
    except RecursionError as error:
        raise ValueError("not a trace file: nested too deeply") from error
    header = document.get("otherData") if isinstance(document, dict) else None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise ValueError(f"not a trace file: otherData.format must be {FORMAT!r}")
    version: Any = header.get("schema_version")
    if version not in range(1, SCHEMA_VERSION + 1):
        raise ValueError(f"trace schema version must be 1 to {SCHEMA_VERSION}, got {version!r:.20}")
    try:
        return _trace(header, document["traceEvents"], SPELLINGS[version])
    except KeyError as error:
        raise ValueError(f"damaged trace file: {error} is missing") from error
    except (TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"damaged trace file: {error}") from error


# Writing


def _header(trace: Trace) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "schema_version": SCHEMA_VERSION,
        "plan_hash": trace.plan_hash,
        "executor": trace.executor.value,
        "loss": finite(trace.loss),
        "details": [list(pair) for pair in trace.details],
        "counts": [len(trace.spans), len(trace.messages), len(trace.memory)],
    }


def _metadata(trace: Trace) -> Iterator[Event]:
    """Names and sort order of processes and threads."""
    names: dict[tuple[int, int], str] = {}
    for span in trace.spans:
        names[span.rank, LANE_IDS[span.lane]] = span.lane.value
    for message, send, receive in _tracks(trace.messages):
        names[message.source_rank, send] = SEND
        names[message.destination_rank, receive] = RECEIVE
    ranks = {rank for rank, _ in names} | {sample.rank for sample in trace.memory}
    for rank in sorted(ranks):
        yield _named("process_name", rank, 0, {"name": f"rank {rank}"})
        yield _named("process_sort_index", rank, 0, {"sort_index": rank})
    for (rank, thread), name in sorted(names.items()):
        yield _named("thread_name", rank, thread, {"name": name})
        yield _named("thread_sort_index", rank, thread, {"sort_index": thread})


def _named(name: str, rank: int, thread: int, args: Event) -> Event:
    return {"ph": "M", "name": name, "pid": rank, "tid": thread, "args": args}


def _spans(trace: Trace) -> Iterator[Event]:
    for span in trace.spans:
        args = {"action": str(span.action), "start_s": span.start_s, "end_s": span.end_s}
        lane = (span.rank, LANE_IDS[span.lane])
        yield _slice(f"PP:{span.action}", span.action.kind.value, lane, args)


def _slice(name: str, category: str, thread: tuple[int, int], args: Event) -> Event:
    start_us, end_us = args["start_s"] * US_PER_S, args["end_s"] * US_PER_S
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": thread[0],
        "tid": thread[1],
        "ts": start_us,
        "dur": end_us - start_us,
        "args": args,
    }


def _messages(trace: Trace) -> Iterator[Event]:
    for number, (message, send, receive) in enumerate(_tracks(trace.messages)):
        name = f"{message.edge} row {message.row}"
        args = message._asdict()
        times = {"start_s": message.start_s, "end_s": message.end_s}
        source, destination = (message.source_rank, send), (message.destination_rank, receive)
        yield _slice(name, SEND, source, args)
        yield _slice(name, RECEIVE, destination, times)
        yield from _arrow("message", number, (source, message.start_s), (destination, message.start_s))


def _exchanges(trace: Trace) -> Iterator[Event]:
    """Arrows between exchanges of sharded weights and their passes."""
    for number, flow in enumerate(exchange_flows(trace), len(trace.messages)):
        yield from _arrow(flow.name, number, *(_slice_position(span) for span in (flow.giver, flow.taker)))


def _slice_position(span: Span) -> tuple[tuple[int, int], float]:
    return (span.rank, LANE_IDS[span.lane]), span.start_s


def _arrow(
    name: str, number: int, start: tuple[tuple[int, int], float], end: tuple[tuple[int, int], float]
) -> Iterator[Event]:
    """An arrow between two slices, each identified by its thread and a time inside it."""
    for phase, (thread, time_s) in (("s", start), ("f", end)):
        event = {"ph": phase, "name": name, "cat": name, "id": number}
        into = {"bp": "e"} if phase == "f" else {}
        yield event | {"pid": thread[0], "tid": thread[1], "ts": time_s * US_PER_S} | into


def _tracks(messages: Sequence[Message]) -> list[tuple[Message, int, int]]:
    """Each message with the threads of its two slices; slices of one thread must not overlap."""
    order = sorted(range(len(messages)), key=lambda i: (messages[i].start_s, messages[i].end_s, i))
    free_s: dict[tuple[str, int], list[float]] = {}  # (side, rank) -> when each of its tracks is free
    threads_of: dict[int, tuple[int, int]] = {}
    for i in order:
        message = messages[i]
        send = _track(free_s.setdefault((SEND, message.source_rank), []), message)
        receive = _track(free_s.setdefault((RECEIVE, message.destination_rank), []), message)
        threads_of[i] = (_FIRST_SEND_ID + send, _FIRST_RECEIVE_ID + receive)
    return [(message, *threads_of[i]) for i, message in enumerate(messages)]


def _track(free_s: list[float], message: Message) -> int:
    for track, time_s in enumerate(free_s):
        if time_s <= message.start_s:
            free_s[track] = message.end_s
            return track
    free_s.append(message.end_s)
    return len(free_s) - 1


def _memory(trace: Trace) -> Iterator[Event]:
    """Counter events; args are their series, so the exact time is outside."""
    for sample in trace.memory:
        yield {
            "ph": "C",
            "name": MEMORY,
            "pid": sample.rank,
            "ts": sample.time_s * US_PER_S,
            "args": {"bytes": sample.num_bytes},
            "time_s": sample.time_s,
        }


# Reading


def _trace(header: Event, events: Sequence[Event], spelling: Spelling) -> Trace:
    loss = header["loss"]
    trace = Trace(
        plan_hash=_text(header["plan_hash"]),
        executor=Executor(header["executor"]),
        spans=tuple(_read_span(event, spelling) for event in events if event.get("cat") in spelling.names),
        messages=tuple(_read_message(event["args"]) for event in events if event.get("cat") == SEND),
        memory=tuple(_read_memory(event) for event in events if event["ph"] == "C"),
        loss=None if loss is None else float(loss),
        details=tuple((_text(name), _text(value)) for name, value in header["details"]),
    )
    counts = [len(trace.spans), len(trace.messages), len(trace.memory)]
    if counts != header["counts"]:
        raise ValueError(
            f"damaged trace file: want {header['counts']} spans, messages and memory samples, got {counts}"
        )
    return trace


def _read_span(event: Event, spelling: Spelling) -> Span:
    args = event["args"]
    lanes = {number: lane for lane, number in LANE_IDS.items()}
    times_s = _number(args["start_s"]), _number(args["end_s"])
    return Span(_whole(event["pid"]), lanes[event["tid"]], spelling.read(args["action"]), *times_s)


def _read_message(args: Event) -> Message:
    return Message(
        row=_whole(args["row"]),
        edge=_text(args["edge"]),
        source_rank=_whole(args["source_rank"]),
        destination_rank=_whole(args["destination_rank"]),
        num_bytes=_whole(args["num_bytes"]),
        ready_s=_number(args["ready_s"]),
        start_s=_number(args["start_s"]),
        end_s=_number(args["end_s"]),
    )


def _read_memory(event: Event) -> MemorySample:
    return MemorySample(_whole(event["pid"]), _number(event["time_s"]), _whole(event["args"]["bytes"]))


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"want a number of seconds, got {value!r}")
    return float(value)


def _whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"want a whole number, got {value!r}")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"want text, got {value!r}")
    return value
