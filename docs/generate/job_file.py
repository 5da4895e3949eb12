"""Reference of a job file, from the schema that reads it."""

from collections.abc import Iterable, Iterator
from enum import Enum
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, MinLen
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from docs.generate.markdown import anchor, code, page, table
from workbench.docstrings import fields_of, summary_of
from workbench.job.schema import JobSpec

INTRO = """A job is one YAML file: the model, the cluster, the batch, and what the layouts should be. It is
read strictly: an unknown key, a value out of range or a key that stands twice is one line that names the
place and the nearest known key. `examples/tiny.yaml` and `examples/valm.yaml` are commented examples. Paths
are relative to the file."""

LARGE = 10**9  # bounds above it are written with an exponent

_WORDS = {int: "whole number", float: "number", str: "text", bool: "true or false"}


def job_page() -> str:
    """The page."""
    return page("Job file", INTRO, *(_section(model) for model in mappings_in(JobSpec)))


def field_rows(model: type[BaseModel]) -> Iterator[tuple[str, str, str, str]]:
    """(key, kind, default, meaning) of one mapping."""
    meanings = fields_of(model)
    for name, field in model.model_fields.items():
        yield code(name), _kind(field), _default(field), meanings.get(name, "")


def _section(model: type[BaseModel]) -> str:
    title = "The file" if model is JobSpec else model.__name__
    rows = table(("key", "kind", "default", "meaning"), field_rows(model))
    return f"## {title}\n\n{summary_of(model)}\n\n{rows}"


def mappings_in(root: type[BaseModel]) -> list[type[BaseModel]]:
    """The root, and every mapping that may stand inside it, in order of appearance."""
    found = [root]
    for model in found:
        parts = (part for field in model.model_fields.values() for part in _parts(field.annotation))
        found += [part for part in dict.fromkeys(parts) if part not in found]
    return found


def _parts(kind: Any) -> Iterator[type[BaseModel]]:
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        yield kind
    for part in get_args(kind):
        yield from _parts(part)


def _kind(field: FieldInfo) -> str:
    return _words(field.annotation) + _bounds(field.metadata)


def _words(kind: Any) -> str:
    inside = get_args(kind)
    if hasattr(kind, "__metadata__"):
        return _words(inside[0]) + _bounds(kind.__metadata__)
    if inside:
        return _compound(get_origin(kind), inside)
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return f"[{kind.__name__}](#{anchor(kind.__name__)})"
    if isinstance(kind, type) and issubclass(kind, Enum):
        return " or ".join(code(member.value) for member in kind)
    return _WORDS.get(kind, "anything")


def _compound(origin: Any, inside: tuple[Any, ...]) -> str:
    """A type with others inside."""
    if origin is Literal:
        return " or ".join(code(word) for word in inside)
    words = [_words(part) for part in inside if part not in (NoneType, Ellipsis)]
    if origin is dict:
        return f"mapping of {words[0]} to {words[1]}"
    if origin is tuple:
        return f"list of {words[0]}" if inside[-1] is Ellipsis else f"[{', '.join(words)}]"
    return " or ".join(words)


def _bounds(metadata: Iterable[Any]) -> str:
    """Limits in words, the tightest of each side; those of a `Field` stand inside it."""
    flat = [part for item in metadata for part in getattr(item, "metadata", [item])]
    above = max((part.gt for part in flat if isinstance(part, Gt)), default=None)
    least = max((part.ge for part in flat if isinstance(part, Ge)), default=None)
    most = min((part.le for part in flat if isinstance(part, Le)), default=None)
    said = [] if above is None else [f"> {above:g}"]
    said += [] if least is None else [f">= {least:g}"]
    said += [] if most is None else [f"at most {most:,.0f}" if most < LARGE else f"at most {most:g}"]
    said += [
        f"at least {part.min_length}" for part in flat if isinstance(part, MinLen) and part.min_length > 1
    ]
    return f" {', '.join(said)}" if said else ""


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.default
    if value is None:
        return "-"
    if isinstance(value, BaseModel):
        return "its own defaults"
    if isinstance(value, Enum):
        return code(value.value)
    return code(str(value).lower() if isinstance(value, bool) else "none" if value in ((), {}) else value)
