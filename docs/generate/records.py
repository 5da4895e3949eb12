"""Reference of files that are records as JSON or YAML: one section for every record in them."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, MinLen
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from docs.generate.markdown import anchor, code, page, table
from workbench.data.sample import WHERE_SET, Item
from workbench.docstrings import fields_of, summary_of
from workbench.job.schema import JobSpec
from workbench.schedule.action import Action

SHORTHANDS: Mapping[type, str] = {
    Action: "action, such as `2F0`",
    Item: "item `[sample, k]`",
    int: "whole number",
    float: "number",
    str: "text",
    bool: "true or false",
}
LARGE = 10**9  # bounds above it are written with an exponent
OR_NULL = " or null"

JOB = """A job file is YAML. It describes the model, the cluster, the batch and, optionally, the layouts.
A small one:

```yaml
name: small
model:
  modules:
    vision: {zoo: siglip-so400m-14-384, trainable: projector, projector: mlp}
    llm: {zoo: llama-3.2-1b}
cluster: {device: H100, nodes: 1, ranks_per_node: 8}
batch:
  samples: 32
  fixed: {text_tokens: 1024, items: {vision: {each: 1}}}
profile: H100
```

`examples/tiny.yaml` and `examples/valm.yaml` are commented examples. Paths are relative to the job file.
`workbench init` writes a job file for a model, and `workbench schema job` prints the JSON Schema for
editors.

Unknown keys, duplicate keys and values out of range are errors. The message names the place and the
nearest valid key."""


def job_page() -> str:
    """The page on job files."""
    return page("Job file", JOB, sections(JobSpec, title="The file"))


def sections(root: type, *, title: str = "") -> str:
    """The root's fields, then those of every record inside it, in order of appearance."""
    titles = {root: title or root.__name__}
    return "\n\n".join(_section(cls, titles.get(cls, cls.__name__)) for cls in records_in(root))


def _section(cls: type, title: str) -> str:
    rows = table(("key", "kind", "default", "meaning"), field_rows(cls))
    return f"## {title}\n\n{summary_of(cls)}\n\n{rows}"


def field_rows(cls: type) -> Iterator[tuple[str, str, str, str]]:
    """(field, kind, default, meaning) of a dataclass, a named tuple or a mapping of a job file."""
    meanings = fields_of(cls)
    for name, kind, default in _fields(cls):
        yield code(name), kind, default, meanings.get(name, "")


def _fields(cls: type) -> Iterator[tuple[str, str, str]]:
    """(field, kind in words, default in words), in order; in a job file what is absent is null."""
    if issubclass(cls, BaseModel):
        for name, field in cls.model_fields.items():
            kind = shown(field.annotation).removesuffix(OR_NULL) + _bounds(field.metadata)
            yield name, kind, _default_of_job(field)
        return
    hints = get_type_hints(cls)
    if is_dataclass(cls):
        yield from ((field.name, shown(hints[field.name]), _default(field)) for field in fields(cls))
    else:
        yield from ((name, shown(hints[name]), "required") for name in cls._fields)  # type: ignore[attr-defined]


def shown(kind: Any) -> str:
    """A type in words, as it stands in JSON."""
    inside = get_args(kind)
    if hasattr(kind, "__metadata__"):
        return shown(inside[0]) + _bounds(kind.__metadata__)
    if inside:
        return _compound(get_origin(kind), inside)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return " or ".join(code(member.value) for member in kind)
    if kind in SHORTHANDS:
        return SHORTHANDS[kind]
    return f"[{kind.__name__}](#{anchor(kind.__name__)})" if _is_record(kind) else "anything"


def _compound(origin: Any, inside: tuple[Any, ...]) -> str:
    """A type with others inside."""
    if origin is Literal:
        return " or ".join(map(code, inside))
    words = [shown(part) for part in inside if part not in (NoneType, Ellipsis)]
    if origin is dict:
        return f"mapping of {words[0]} to {words[1]}"
    if origin in (Union, UnionType):
        return " or ".join(words) + OR_NULL * (NoneType in inside)
    return f"list of {words[0]}" if inside[-1] is Ellipsis else f"[{', '.join(words)}]"


def _bounds(metadata: Iterable[Any]) -> str:
    """Limits in words, the tightest of each side; those of a `Field` stand inside it."""
    flat = [part for item in metadata for part in getattr(item, "metadata", [item])]
    above = max(_limits(flat, Gt, "gt"), default=None)
    least = max(_limits(flat, Ge, "ge"), default=None)
    most = min(_limits(flat, Le, "le"), default=None)
    said = [] if above is None else [f"> {above:g}"]
    said += [] if least is None else [f">= {least:g}"]
    said += [] if most is None else [f"at most {most:,.0f}" if most < LARGE else f"at most {most:g}"]
    said += [
        f"at least {part.min_length}" for part in flat if isinstance(part, MinLen) and part.min_length > 1
    ]
    return f" {', '.join(said)}" if said else ""


def _limits(parts: Iterable[Any], kind: type, name: str) -> Iterator[float]:
    """Of one side."""
    yield from (getattr(part, name) for part in parts if isinstance(part, kind))


def records_in(root: type) -> list[type]:
    """The root, and every record that stands inside it, in order of appearance."""
    found = [root]
    for cls in found:
        if issubclass(cls, BaseModel):
            hints = [field.annotation for field in cls.model_fields.values()]
        else:
            hints = [*get_type_hints(cls).values()]
        inside = (part for hint in hints for part in _parts(hint))
        found += [
            p for p in dict.fromkeys(inside) if p not in found and p not in SHORTHANDS and _is_record(p)
        ]
    return found


def _is_record(kind: Any) -> bool:
    is_class = isinstance(kind, type)
    return is_class and (issubclass(kind, BaseModel) or is_dataclass(kind) or hasattr(kind, "_fields"))


def _parts(kind: Any) -> Iterator[Any]:
    inside = get_args(kind)
    if not inside:
        yield kind
    for part in inside:
        yield from _parts(part)


def _default(field: Field[Any]) -> str:
    if field.default is not MISSING:
        value = field.default
        text = code("null" if value is None else _json(value))
        return f"{text}, left out" if field.metadata.get(WHERE_SET) else text
    return "required" if field.default_factory is MISSING else "its own defaults"


def _default_of_job(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if field.default is None:
        return "-"
    if isinstance(field.default, BaseModel):
        return "its own defaults"
    return code("none" if field.default in ((), {}) else _json(field.default))


def _json(value: Any) -> object:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, bool):
        return str(value).lower()
    return list(value) if isinstance(value, tuple) else value if value != "" else '""'
