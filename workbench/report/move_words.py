"""Moves of a joint search in words, out of their records."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]

DEGREES = ("dp", "pp", "tp", "cp", "ep")


def told_moves(moves: Sequence[Record]) -> Iterator[tuple[str, str]]:
    """Question and words of moves that were made at once; modules that change alike share a line."""
    pending: list[Record] = []
    for move in moves:
        if pending and not _alike(pending[-1], move):
            yield _line(pending)
            pending = []
        pending.append(move)
    if pending:
        yield _line(pending)


def _alike(first: Record, second: Record) -> bool:
    """Whether they are one change of two modules."""
    return "module" in first and {**first, "module": second.get("module")} == second


def _line(moves: Sequence[Record]) -> tuple[str, str]:
    first = moves[0]
    merged = (
        {**first, "module": ", ".join(str(move["module"]) for move in moves)} if len(moves) > 1 else first
    )
    tell = _TELLS.get(first["move"], _by_fields)
    return first["question"], tell(merged)


def _arrange(move: Record) -> str:
    arrangement = move["arrangement"]
    words = f"{arrangement['placement']}: {_degrees(arrangement['degrees'])}"
    return words if move["samples"] is None else f"{words}; {_samples(move['samples'])}"


def _replan(move: Record) -> str:
    words = [
        f"{move['strategy']}'s plan, {_samples(move['microbatch_samples'])}, {_schedule(move['schedule'])}"
    ]
    if move["layouts"]:
        words.append(_degrees([{"dp": move["replicas"], **_said(each)} for each in move["layouts"]]))
    settings = [f"{each['module']} {_settings(each)}" for each in move["modules"]]
    return "; ".join([*words, *settings])


def _keep(move: Record) -> str:
    return f"{move['module'] or 'all modules'}: {_settings(move)}"


def _take(move: Record) -> str:
    return f"as {move['start']} has it"


def _by_fields(move: Record) -> str:
    """`Exchange first 3, second 5`; what a move leaves open is not said."""
    fields = {key: value for key, value in _said(move).items() if key not in ("move", "question")}
    return f"{move['move']} {', '.join(f'{key} {_plain(value)}' for key, value in fields.items())}"


_TELLS: dict[str, Callable[[Record], str]] = {
    "Arrange": _arrange,
    "Replan": _replan,
    "Keep": _keep,
    "Take": _take,
    "Reschedule": lambda move: _schedule(move["schedule"]),
    "CutStages": lambda move: f"stages that train in pieces, {move['pieces']} each",
    "Resize": lambda move: _samples(move["samples"]),
    "Regroup": lambda move: str(move["way"]),
    "Distribute": lambda move: f"tokens {move['rule']}",
    "ExchangeKeys": lambda move: f"{move['module']}: keys by {move['way']}",
}


def _degrees(degrees: Sequence[Record]) -> str:
    return ", ".join(f"{each['module']} {_beyond_one(each)}" for each in degrees)


def _beyond_one(each: Record) -> str:
    known = [f"{name} {each[name]}" for name in DEGREES if each.get(name) not in (None, 1)]
    return " ".join(known) or "one rank"


def _samples(number: int) -> str:
    return f"{number} sample{'s' if number > 1 else ''} a microbatch"


def _schedule(schedule: Record) -> str:
    usual = {"virtual_stages": 1, "run_ahead": 0}
    others = {k: v for k, v in _said(schedule).items() if k != "kind" and v != usual.get(k)}
    return ", ".join([schedule["kind"], *(f"{key} {value}" for key, value in others.items())])


def _settings(move: Record) -> str:
    """Recomputation, sharding and what belongs to it."""
    words = [f"recompute {move['recompute']}", f"sharding {move['sharding']}"]
    if move.get("instances", 1) > 1:
        words.append(f"in {move['instances']} instances")
    if move.get("sequence_parallel"):
        words.append("sequence parallelism")
    return ", ".join(words)


def _said(record: Record) -> dict[str, Any]:
    return {k: v for k, v in record.items() if v is not None and v is not False and v != []}


def _plain(value: object) -> str:
    if isinstance(value, Mapping):
        return " ".join(_plain(each) for each in _said(value).values())
    if isinstance(value, list):
        return "; ".join(_plain(each) for each in value)
    return str(value)
