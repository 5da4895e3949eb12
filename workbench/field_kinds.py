"""Checks values of frozen records against the types of their fields, as users make such records in Python."""

from dataclasses import fields, is_dataclass
from enum import Enum
from numbers import Integral, Real
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

_CHECKED = (bool, int, float, str, Path, Enum)
_WORDS = {bool: "True or False", int: "a whole number", float: "a number", str: "text", Path: "a Path"}
_NUMBERS = {int: Integral, float: Real}  # numpy's are some, too


class _FieldKind(NamedTuple):
    """A field of one kind of value, or of a tuple of such values; `is_open`: or of None."""

    name: str
    kind: type
    is_open: bool
    is_tuple: bool


_FIELDS: dict[type, tuple[_FieldKind, ...]] = {}


def check_kinds(record: object, where: str = "") -> None:
    """Check numbers, texts, paths, members of enums and records, alone and in tuples.

    Of a tuple of records only the first is looked at: a job may have 10^5 samples. Other values are not.

    Args:
        record: an instance of a dataclass.
        where: begins the message.

    Raises:
        ValueError: a value of another kind; names field, kind and value, and the nearest valid value if the
            given text names one.

    Complexity: O(fields), besides the values of tuples.
    """
    for field in _FIELDS.get(type(record)) or _fields_of(type(record)):
        value = getattr(record, field.name)
        if not _holds(field, value):
            raise ValueError(
                f"{where}{field.name} must be {_wanted(field)}, got {value!r:.60}{_nearest(field, value)}"
            )


def _fields_of(record: type) -> tuple[_FieldKind, ...]:
    hints = get_type_hints(record)
    kinds = (_field_kind(each.name, hints[each.name]) for each in fields(record))
    return _FIELDS.setdefault(record, tuple(kind for kind in kinds if kind is not None))


def _field_kind(name: str, hint: Any) -> _FieldKind | None:
    """None where the field's values are not checked."""
    options = get_args(hint) if NoneType in get_args(hint) else (hint,)
    (one, *others) = (option for option in options if option is not NoneType)
    is_tuple = get_origin(one) is tuple and get_args(one)[1:] == (...,)
    kind = get_args(one)[0] if is_tuple else one
    if others or not (isinstance(kind, type) and (issubclass(kind, _CHECKED) or is_dataclass(kind))):
        return None
    return _FieldKind(name, kind, NoneType in options, is_tuple)


def _holds(field: _FieldKind, value: Any) -> bool:
    if value is None:
        return field.is_open
    if field.is_tuple:
        seen = value[:1] if is_dataclass(field.kind) and isinstance(value, tuple) else value
        return isinstance(value, tuple) and all(_is_of(each, field.kind) for each in seen)
    return type(value) is field.kind or _is_of(value, field.kind)  # the first is sooner, and mostly true


def _is_of(value: Any, kind: type) -> bool:
    number = _NUMBERS.get(kind)
    return (
        isinstance(value, kind)
        if number is None
        else isinstance(value, number) and not isinstance(value, bool)
    )


def _wanted(field: _FieldKind) -> str:
    of = "a member of" if issubclass(field.kind, Enum) else "of kind"
    word = _WORDS.get(field.kind) or f"{of} {field.kind.__name__}"
    return (f"a tuple, each {word}" if field.is_tuple else word) + (" or None" if field.is_open else "")


def _nearest(field: _FieldKind, value: Any) -> str:
    """The member of an enum, or the whole number, that a text names."""
    if not isinstance(value, str) or field.is_tuple:
        return ""
    if issubclass(field.kind, Enum):
        member = next((each for each in field.kind if each.value == value), None)
        return "" if member is None else f"; nearest: {field.kind.__name__}.{member.name}"
    is_number = field.kind is int and value.isdecimal() and len(value) < 10
    return f"; nearest: {int(value)}" if is_number else ""
