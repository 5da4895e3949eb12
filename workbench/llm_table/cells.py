"""Cells of a table of language models: the values that a column allows, and their parser."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from math import isfinite
from typing import Any

from workbench.llm_table.llm_row import Recomputed, YesNo
from workbench.model.block_modules import BlockModule

MOST = 10**7  # largest count; far above any model's
SMALLEST = 1e-6  # least number with a fraction that may not be 0
LONGEST = 250  # characters of a cell, a path included
TEXTS = ("framework", "release", "pattern", "gpu")
SPELLED = {"1": "yes", "0": "no", "true": "yes", "false": "no"}  # in yes/no cells

JOIN = "+"
SPELLED_MODULES = {"layernorm": "norm", "layer_norm": "norm"}
WHOLE = {"none": Recomputed.NONE, "selective": Recomputed.SELECTIVE, "full": Recomputed.FULL}

Values = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table.

    Args:
        name: its heading.
        about: its meaning, with its unit.
        default: computes the value of an absent or empty cell from the columns before it; None: required.
        choices: the allowed words; None: a number.
        real: whether the number may have a fraction.
        shown: description of the default.
        least: the smallest number.
    """

    name: str
    about: str
    default: Callable[[Values], Any] | None = None
    choices: type[StrEnum] | None = None
    real: bool = False
    shown: str = ""
    least: float = 1


def always(value: Any) -> Callable[[Values], Any]:
    """A default that is the same in every row."""
    return lambda _: value


def count_column(name: str, about: str, default: int = 1, *, least: int = 1) -> Column:
    """A column of whole numbers."""
    return Column(name, about, always(default), shown=str(default), least=least)


def flag_column(name: str, about: str, default: YesNo = YesNo.NO) -> Column:
    """A column of yes and no."""
    return Column(name, f"yes: {about}", always(default), YesNo, shown=str(default))


def text_column(name: str, about: str) -> Column:
    """A column of words, by default none."""
    return Column(name, about, always(""), shown="none")


def real_column(
    name: str, about: str, default: float | None = None, *, shown: str = "profile's", least: float = SMALLEST
) -> Column:
    """A column of numbers with fractions."""
    return Column(name, about, always(default), real=True, shown=shown, least=least)


def read_cell(column: Column, text: str) -> Any:
    """Parse a cell; ValueError: `column: rule, got text; nearest valid choice`."""
    if len(text) > LONGEST:
        raise ValueError(
            f"{column.name}: want at most {LONGEST} characters, got {len(text):,} that begin {text[:20]!r}"
        )
    if column.name in TEXTS:
        return text
    if column.name == "recompute":
        return _read_modules(text)
    if column.name == "stage_blocks":
        return _read_counts(column.name, text)
    if column.choices is not None:
        return _read_word(column.name, column.choices, text)
    try:
        number = float(text)
    except ValueError:
        raise ValueError(f"{column.name}: want a number, got {text!r}; nearest: 1") from None
    return _real_number(column, text, number) if column.real else _whole_number(column, text, number)


def _read_modules(text: str) -> tuple[Recomputed, tuple[BlockModule, ...]]:
    """Recomputation and its modules in the order of `BlockModule`; ValueError for an unknown word."""
    words = [SPELLED_MODULES.get(word.strip().lower(), word.strip().lower()) for word in text.split(JOIN)]
    if len(words) == 1 and words[0] in WHOLE:
        return WHOLE[words[0]], ()
    known = [str(module) for module in BlockModule]
    for word in words:
        if word not in known:
            near = get_close_matches(word, (*WHOLE, *known), n=1, cutoff=0.0)
            raise ValueError(
                f"recompute: want one of {', '.join((*WHOLE, *known))}, or modules with + between, "
                f"got {text!r}; nearest: {near[0]}"
            )
    return Recomputed.MODULES, tuple(module for module in BlockModule if module in words)


def _read_counts(name: str, text: str) -> tuple[int, ...]:
    """Whole numbers with + between; ValueError for anything else."""
    words = [word.strip() for word in text.split(JOIN)]
    if not all(word.isascii() and word.isdigit() for word in words):
        raise ValueError(f"{name}: want whole numbers with + between, got {text!r}; nearest: an empty cell")
    return tuple(int(word) for word in words)


def _read_word(name: str, choices: type[StrEnum], text: str) -> StrEnum:
    word = text.lower()
    if choices is YesNo:
        word = SPELLED.get(word, word)
    words = [str(each) for each in choices]
    if word in words:
        return choices(word)
    near = get_close_matches(word, words, n=1, cutoff=0.0)
    raise ValueError(f"{name}: want one of {', '.join(words)}, got {text!r}; nearest: {near[0]}")


def _real_number(column: Column, text: str, number: float) -> float:
    if isfinite(number) and column.least <= number <= MOST:
        return number
    nearest = min(max(number, column.least), MOST) if isfinite(number) else MOST
    raise ValueError(
        f"{column.name}: want a number from {column.least:g} to {MOST:,}, got {text}; nearest: {nearest:g}"
    )


def _whole_number(column: Column, text: str, number: float) -> int:
    if isfinite(number) and number == int(number) and column.least <= number <= MOST:
        return int(number)
    nearest = int(min(max(round(number), column.least), MOST)) if isfinite(number) else column.least
    raise ValueError(
        f"{column.name}: want a whole number from {column.least} to {MOST:,}, got {text}; nearest: {nearest}"
    )
