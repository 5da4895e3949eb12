"""Reads a job.yaml strictly; every mistake is one line that names the nearest known key."""

import difflib
import re
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from workbench.bounded_file import MOST_SETTINGS_BYTES, read_bounded
from workbench.job.schema import JobSpec
from workbench.json_schema import DIALECT, Schema, describe
from workbench.plain_yaml import parse_yaml

SHOWN_KEYS = 4
_MAPPING = ("dict_type", "model_type", "model_attributes_type")  # pydantic's kinds of errors
_MADE = re.compile(r'"?format"?: *"?(multimodal-workbench [a-z]+)')  # by a command, in the first lines
_FORMAT_BY = 200  # characters
_WITH_EXPONENT = re.compile(r"[-+]?\d+(\.\d+)?[eE][-+]?1?\d")  # text in YAML without a point and a sign
_NUMBER = ("int_type", "int_parsing", "float_type", "float_parsing")


def read_spec(path: Path) -> JobSpec:
    """Read and check a job.yaml.

    Raises:
        ValueError: one line with the file, the place, the rule and the value.
    """
    try:
        text = read_bounded(path, MOST_SETTINGS_BYTES)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror or error}") from None
    return parse_spec(text, where=str(path))


def parse_spec(text: str, *, where: str = "job") -> JobSpec:
    """Check the text of a job.yaml; see `read_spec`."""
    _check_not_made(text, where)
    data = parse_yaml(text, where=where)
    if not isinstance(data, dict):
        kind = "nothing" if data is None else type(data).__name__
        raise ValueError(f"{where}: want keys and values, got {kind}; `workbench init` drafts a job")
    try:
        return JobSpec.model_validate(data)
    except ValidationError as error:
        raise ValueError(f"{where}: {_one_line(error)}") from None


def _check_not_made(text: str, where: str) -> None:
    """Raise ValueError for a file that a command made; by its text, as a job may not have so many values."""
    made = _MADE.search(text[:_FORMAT_BY])
    if made is not None:
        raise ValueError(f"{where}: a file of format {made[1]!r}; want a job file, as `init` writes")


def _one_line(error: ValidationError) -> str:
    """The first unknown key, which explains a missing one, or else the first error, in one line."""
    errors = error.errors()
    first = next((e for e in errors if e["type"] == "extra_forbidden"), errors[0])
    parts = [str(part) if str(part).isprintable() else repr(part) for part in first["loc"]]
    where = ".".join(parts)
    if first["type"] == "extra_forbidden":
        known = _known_keys(parts[:-1])
        near = difflib.get_close_matches(parts[-1], known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known keys are {', '.join(known)}"
        return f"unknown key {where!r}; {hint}"
    if first["type"] == "missing":
        return f"missing key {where!r}"
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] in _MAPPING:
        known = _known_keys(parts) if first["type"] != "dict_type" else []  # whose keys are names
        message = f"want keys and values{', such as ' if known else ''}{', '.join(known[:SHOWN_KEYS])}"
    message = message[:1].lower() + message[1:]
    has_value = isinstance(first["input"], dict) or ", got " in message
    value = "" if has_value else f", got {first['input']!r:.60}"
    return f"{where or 'file'}: {message}{value}{_hint(first)}"


def _hint(error: ErrorDetails) -> str:
    """The nearest choice for a word, or how a number is written; empty for other errors."""
    given = error["input"]
    if not isinstance(given, str):
        return ""
    if error["type"] in _NUMBER:
        if _is_number(given):
            return "; want it without quotes"
        if _WITH_EXPONENT.fullmatch(given) and float(given).is_integer():
            return f"; want it as {float(given):.0f}"
        return "; want a number alone, without a unit"
    choices = re.findall(r"'([^']*)'", str(error.get("ctx", {}).get("expected", "")))
    by_lower = {choice.lower(): choice for choice in choices}
    near = difflib.get_close_matches(given.lower(), by_lower, n=1, cutoff=0.5)
    return f"; did you mean {by_lower[near[0]]!r}?" if near else ""


def _is_number(text: str) -> bool:
    return re.fullmatch(r"[-+]?\d+(\.\d+)?", text) is not None


def _known_keys(path: list[str]) -> list[str]:
    """The keys allowed at a path in the file."""
    model: Any = JobSpec
    for part in path:
        field = model.model_fields.get(part) if model is not None else None
        if field is not None:
            model = _model_in(field.annotation)
    return list(model.model_fields) if model is not None else []


def _model_in(annotation: Any) -> Any:
    """The schema class inside an annotation, or None."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((model for part in get_args(annotation) if (model := _model_in(part))), None)


def job_schema() -> Schema:
    """JSON Schema of a job.yaml; keys that exclude each other are checked only when a file is read."""
    schema = JobSpec.model_json_schema()
    classes = {model.__name__: model for model in _models(JobSpec)}
    for name, definition in schema["$defs"].items():
        if name in classes:
            describe(definition, classes[name])
    describe(schema, JobSpec)
    return {"$schema": DIALECT, **schema}


def _models(kind: Any) -> list[type[BaseModel]]:
    """A schema class and those in its fields, recursively."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        inner = (each for field in kind.model_fields.values() for each in _models(field.annotation))
        return [kind, *inner]
    return [each for member in get_args(kind) for each in _models(member)]
