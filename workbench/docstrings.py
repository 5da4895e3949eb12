"""Parses docstrings of classes: the summary, and the field descriptions under `Args:`."""

import inspect
import re

_FIELD = re.compile(r"    (\w+(?:, \w+)*): (.*)")
_SECTION = re.compile(r"(Args|Raises|Returns|Complexity|Differs):")


def summary_of(cls: type) -> str:
    """The docstring up to `Args:`, with paragraphs."""
    lines = _lines(cls)
    end = next((i for i, line in enumerate(lines) if _SECTION.match(line)), len(lines))
    return "\n".join(lines[:end]).strip()


def fields_of(cls: type) -> dict[str, str]:
    """Field -> its description in `Args:`, of a class and its bases."""
    description_of: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        description_of |= _own_fields(base)
    return description_of


def _own_fields(cls: type) -> dict[str, str]:
    lines = _lines(cls)
    if "Args:" not in lines:
        return {}
    description_of: dict[str, str] = {}
    names: list[str] = []
    for line in lines[lines.index("Args:") + 1 :]:
        if _SECTION.match(line):
            break
        match = _FIELD.fullmatch(line)
        if match is not None:
            names = match[1].split(", ")
            description_of |= dict.fromkeys(names, match[2])
        else:
            description_of |= {name: f"{description_of[name]} {line.strip()}".strip() for name in names}
    return description_of


def _lines(cls: type) -> list[str]:
    return inspect.cleandoc(cls.__dict__.get("__doc__") or "").splitlines()
