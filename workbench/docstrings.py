"""What a class says about its fields: the summary of its docstring and the `Args:` below it."""

import inspect
import re

_FIELD = re.compile(r"    (\w+(?:, \w+)*): (.*)")
_SECTION = re.compile(r"(Args|Raises|Returns|Complexity|Differs):")


def summary_of(cls: type) -> str:
    """The docstring up to `Args:`, paragraphs kept."""
    lines = _lines(cls)
    end = next((i for i, line in enumerate(lines) if _SECTION.match(line)), len(lines))
    return "\n".join(lines[:end]).strip()


def fields_of(cls: type) -> dict[str, str]:
    """Field -> what `Args:` says about it, of this class and of those it inherits from."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        found |= _own_fields(base)
    return found


def _own_fields(cls: type) -> dict[str, str]:
    lines = _lines(cls)
    if "Args:" not in lines:
        return {}
    found: dict[str, str] = {}
    names: list[str] = []
    for line in lines[lines.index("Args:") + 1 :]:
        if _SECTION.match(line):
            break
        opened = _FIELD.fullmatch(line)
        if opened is not None:
            names = opened[1].split(", ")
            found |= dict.fromkeys(names, opened[2])
        else:
            found |= {name: f"{found[name]} {line.strip()}".strip() for name in names}
    return found


def _lines(cls: type) -> list[str]:
    return inspect.cleandoc(cls.__dict__.get("__doc__") or "").splitlines()
