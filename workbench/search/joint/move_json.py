"""Moves as JSON data, and their parser."""

import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, Union, get_args, get_origin, get_type_hints

from workbench.schedule.spec import ScheduleSpec
from workbench.search.joint.grouping_moves import Exchange, MoveSample, Regroup, Reorder, Resize
from workbench.search.joint.layout_moves import Arrange, CutStages, Reschedule, RunEncodersAhead, ShiftLayer
from workbench.search.joint.move import Move
from workbench.search.joint.replan import Replan
from workbench.search.joint.setting_moves import Distribute, ExchangeKeys, Keep, Reshard
from workbench.search.joint.take import Take

MOVES: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        Arrange,
        Reschedule,
        ShiftLayer,
        CutStages,
        RunEncodersAhead,
        Exchange,
        MoveSample,
        Reorder,
        Resize,
        Regroup,
        Distribute,
        ExchangeKeys,
        Keep,
        Reshard,
        Take,
        Replan,
    )
}


def move_to_json(move: Move) -> dict[str, Any]:
    """The move's name and its fields as JSON data."""
    data = _plain(move)
    assert isinstance(data, dict), "moves are dataclasses"
    return {"move": type(move).__name__, **data}


def _plain(value: object) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, ScheduleSpec):  # not registered, so a log names it and cannot make it again
        return value.name
    if is_dataclass(value):
        return {each.name: _plain(getattr(value, each.name)) for each in fields(value)}
    return [_plain(each) for each in value] if isinstance(value, tuple) else value


def move_from_json(data: Mapping[str, Any]) -> Move:
    """Parse a move; ValueError for anything else."""
    name = data.get("move")
    kind = MOVES.get(str(name))
    if kind is None:
        raise ValueError(f"no move {name!r}; there are {', '.join(MOVES)}")
    try:
        move: Move = _read(kind, {key: value for key, value in data.items() if key != "move"})
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"move {name}: {error}") from None
    return move


def _read(kind: Any, value: Any) -> Any:
    if get_origin(kind) in (Union, types.UnionType):
        return None if value is None else _read(next(k for k in get_args(kind) if k is not type(None)), value)
    if get_origin(kind) is tuple:
        return tuple(_read(get_args(kind)[0], each) for each in value)
    if isinstance(kind, type) and is_dataclass(kind):
        hints = get_type_hints(kind)
        unknown = set(value) - {each.name for each in fields(kind)}
        if unknown:
            raise ValueError(f"no {', '.join(sorted(unknown))} in {kind}")
        dataclass_type: Any = kind
        return dataclass_type(**{key: _read(hints[key], each) for key, each in value.items()})
    return kind(value)
