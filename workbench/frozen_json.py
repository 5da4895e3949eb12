"""Encodes frozen dataclasses as strict JSON and decodes them; errors name the place and the nearest key."""

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from workbench.data.sample import WHERE_SET

_SCALARS = frozenset((str, int, float, bool, NoneType))
TYPE_KEY = "op"  # names the member of a union of dataclasses


@dataclass(frozen=True, slots=True)
class Shorthand:
    """A custom notation for values of a type.

    `read` gets the JSON data and its place, and raises ValueError.
    """

    write: Callable[[Any], Any]
    read: Callable[[Any, str], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenJson:
    """One kind of JSON file.

    Args:
        shorthands: types with a custom notation.
        tagged: dataclasses that occur in unions, and are written with their name.
    """

    shorthands: Mapping[type, Shorthand] = field(default_factory=dict)
    tagged: Collection[type] = ()

    def encode(self, value: object) -> Any:
        """A frozen dataclass as JSON data: fields by name, tuples as lists.

        Tuples shared by identity, such as operators of equal layers, become shared lists.
        """
        return self._encode(value, {})

    def _encode(self, value: object, known: dict[int, Any]) -> Any:
        """`known`: encoded tuples by identity."""
        kind = type(value)
        if kind in _SCALARS:
            return value
        shorthand = self.shorthands.get(kind)
        if shorthand is not None:
            return shorthand.write(value)
        if isinstance(value, tuple):
            if id(value) not in known:
                known[id(value)] = [m if type(m) in _SCALARS else self._encode(m, known) for m in value]
            return known[id(value)]
        if isinstance(value, Enum):
            return value.value
        if not is_dataclass(kind):
            return value
        data = {TYPE_KEY: kind.__name__} if kind in self.tagged else {}
        for name, default in _written(kind):
            member = getattr(value, name)
            if type(member) is int and name in _floats(kind):
                member = float(member)  # as it is read back, so that text and hash do not change by it
            if default is MISSING or member != default:
                data[name] = member if type(member) in _SCALARS else self._encode(member, known)
        return data

    def decode(self, kind: Any, data: Any, where: str) -> object:
        """Decode JSON data as a value of a type; `where` is its place in error messages.

        Raises:
            ValueError: unknown or missing keys, a value of the wrong type, or an error of the type itself.
        """
        origin = get_origin(kind)
        if origin in (Union, UnionType):
            return self._decode_union(get_args(kind), data, where)
        if origin is tuple:
            return self._decode_tuple(get_args(kind), data, where)
        if kind in self.shorthands:
            return self.shorthands[kind].read(data, where)
        if isinstance(kind, type) and issubclass(kind, Enum):
            if data not in [member.value for member in kind]:
                raise ValueError(f"{where}: want one of {[member.value for member in kind]}, got {data!r}")
            return kind(data)
        if is_dataclass(kind):
            return self._decode_dataclass(kind, data, where)
        return _decode_scalar(kind, data, where)

    def _decode_union(self, members: tuple[Any, ...], data: Any, where: str) -> object:
        if NoneType in members:
            if data is None:
                return None
            rest = tuple(member for member in members if member is not NoneType)
            if len(rest) == 1:
                return self.decode(rest[0], data, where)
            return self._decode_union(rest, data, where)
        if listed := [member for member in members if get_origin(member) is tuple]:
            (alone,) = (member for member in members if member not in listed)
            return self.decode(listed[0] if isinstance(data, list) else alone, data, where)
        by_name = {member.__name__: member for member in members}
        if not isinstance(data, dict) or str(data.get(TYPE_KEY)) not in by_name:
            raise ValueError(
                f"{where}: want an object with {TYPE_KEY!r} one of {sorted(by_name)}, got {data!r:.60}"
            )
        rest_of = {key: value for key, value in data.items() if key != TYPE_KEY}
        return self._decode_dataclass(by_name[data[TYPE_KEY]], rest_of, where)

    def _decode_tuple(self, members: tuple[Any, ...], data: Any, where: str) -> tuple[object, ...]:
        if not isinstance(data, list):
            raise ValueError(f"{where}: want a list, got {data!r:.60}")
        if len(members) == 2 and members[1] is Ellipsis:
            return tuple(self.decode(members[0], value, f"{where}[{i}]") for i, value in enumerate(data))
        if len(members) != len(data):
            raise ValueError(f"{where}: want {len(members)} values, got {len(data)}")
        pairs = enumerate(zip(members, data, strict=True))
        return tuple(self.decode(member, value, f"{where}[{i}]") for i, (member, value) in pairs)

    def _decode_dataclass(self, kind: Any, data: Any, where: str) -> object:
        if not isinstance(data, dict):
            raise ValueError(f"{where}: want an object ({kind.__name__}), got {data!r:.60}")
        known = {f.name for f in fields(kind)}
        check_keys(data, known, {f.name for f in fields(kind) if not is_required(f)}, where)
        hints = _hints(kind)
        try:
            return kind(
                **{name: self.decode(hints[name], value, f"{where}.{name}") for name, value in data.items()}
            )
        except ValueError as error:
            message = str(error)
            raise ValueError(message if message.startswith(where) else f"{where}: {message}") from None


def parse_json(text: str, what: str) -> Any:
    """Parse JSON text; ValueError in one line, which begins with `what`."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError(f"{what}: nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{what} is not JSON (truncated?): {error}") from None


def check_keys(data: Mapping[str, Any], known: set[str], optional: set[str], where: str) -> None:
    """Raise ValueError for the first unknown key, with the nearest known one, or the first missing key."""
    for key in data:
        if key not in known:
            near = get_close_matches(key, sorted(known), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(sorted(known))}"
            raise ValueError(f"{where}: unknown key {key!r}{hint}")
    missing = sorted(known - optional - set(data))
    if missing:
        raise ValueError(f"{where}: missing key {missing[0]!r}")


def _decode_scalar(kind: Any, data: Any, where: str) -> object:
    if kind is float and isinstance(data, int) and not isinstance(data, bool):
        try:
            return float(data)
        except OverflowError:
            raise ValueError(f"{where}: want a number below 1.8e308, got {len(str(data))} digits") from None
    if not isinstance(data, kind) or (kind is not bool and isinstance(data, bool)):
        raise ValueError(f"{where}: want {kind.__name__}, got {data!r:.60}")
    if kind is str and not data.isprintable() and not all(c.isprintable() or c in "\n\t" for c in data):
        raise ValueError(f"{where}: control characters in {data!r:.60}")
    return data


@cache
def _written(kind: type) -> tuple[tuple[str, object], ...]:
    """Fields in a file, and the value at which each is left out, so that older files keep text and hash."""
    return tuple((f.name, f.default if WHERE_SET in f.metadata else MISSING) for f in fields(kind))


@cache
def _floats(kind: type) -> frozenset[str]:
    """Fields of floats, in which Python code may have whole numbers."""
    return frozenset(name for name, hint in _hints(kind).items() if hint is float or float in get_args(hint))


def is_required(field: Field[Any]) -> bool:
    """Whether a dataclass field has no default."""
    return field.default is MISSING and field.default_factory is MISSING


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def json_lines(value: object, indent: str = "") -> str:
    """JSON text with every value that fits on one line written on one, so that short rows stay readable."""
    flat = json.dumps(value)
    if len(indent) + len(flat) < 100 or not isinstance(value, dict | list):
        return flat
    inner = indent + " "
    if isinstance(value, dict):
        items = [f"{inner}{json.dumps(key)}: {json_lines(item, inner)}" for key, item in value.items()]
        return "{\n" + ",\n".join(items) + f"\n{indent}}}"
    return "[\n" + ",\n".join(inner + json_lines(item, inner) for item in value) + f"\n{indent}]"
