"""Reference of files that are frozen dataclasses as JSON: one section for every record in them."""

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from docs.generate.markdown import anchor, code, table
from workbench.data.sample import WHERE_SET, Item
from workbench.docstrings import fields_of, summary_of
from workbench.schedule.action import Action

SHORTHANDS: Mapping[type, str] = {
    Action: "action, such as `2F0`",
    Item: "item `[sample, k]`",
    int: "whole number",
    float: "number",
    str: "text",
    bool: "true or false",
}


def sections(root: type) -> str:
    """The root's fields, then those of every record inside it, in order of appearance."""
    return "\n\n".join(_section(cls) for cls in records_in(root))


def field_rows(cls: type) -> Iterator[tuple[str, str, str, str]]:
    """(field, kind, default, meaning) of a dataclass or a named tuple."""
    hints, meanings = get_type_hints(cls), fields_of(cls)
    for name, default in _defaults(cls):
        yield code(name), shown(hints[name]), default, meanings.get(name, "")


def _defaults(cls: type) -> Iterator[tuple[str, str]]:
    """(field, default in words), in order."""
    if is_dataclass(cls):
        yield from ((field.name, _default(field)) for field in fields(cls))
    else:
        yield from ((name, "required") for name in cls._fields)  # type: ignore[attr-defined]


def shown(kind: Any) -> str:
    """A type in words, as it stands in JSON."""
    origin, inside = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        words = [shown(part) for part in inside if part is not NoneType]
        return " or ".join(words + ["null"] * (NoneType in inside))
    if origin is tuple:
        if inside[-1:] == (Ellipsis,):
            return f"list of {shown(inside[0])}"
        return f"[{', '.join(shown(part) for part in inside)}]"
    if isinstance(kind, type) and issubclass(kind, Enum):
        return " or ".join(code(member.value) for member in kind)
    if kind in SHORTHANDS:
        return SHORTHANDS[kind]
    return f"[{kind.__name__}](#{anchor(kind.__name__)})"


def records_in(root: type) -> list[type]:
    """The root, and every record that stands inside it, in order of appearance."""
    found = [root]
    for cls in found:
        inside = (part for hint in get_type_hints(cls).values() for part in _parts(hint))
        found += [
            p for p in dict.fromkeys(inside) if p not in found and p not in SHORTHANDS and _is_record(p)
        ]
    return found


def _is_record(kind: Any) -> bool:
    return is_dataclass(kind) or hasattr(kind, "_fields")


def _parts(kind: Any) -> Iterator[Any]:
    inside = get_args(kind)
    if not inside:
        yield kind
    for part in inside:
        yield from _parts(part)


def _section(cls: type) -> str:
    rows = table(("key", "kind", "default", "meaning"), field_rows(cls))
    return f"## {cls.__name__}\n\n{summary_of(cls)}\n\n{rows}"


def _default(field: Field[Any]) -> str:
    if field.default is not MISSING:
        value = field.default
        text = code("null" if value is None else _json(value))
        return f"{text}, left out" if field.metadata.get(WHERE_SET) else text
    return "required" if field.default_factory is MISSING else "its own defaults"


def _json(value: Any) -> object:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, bool):
        return str(value).lower()
    return list(value) if isinstance(value, tuple) else value if value != "" else '""'
