"""Megatron's pipeline layout string, e.g. `Et*3|(tt|)*29,m|L`, which lists the layers of every stage.

Source: Megatron-Core, `PipelineParallelLayerLayout` (the argument --pipeline-model-parallel-layout).
E is the embedding, t a transformer layer, m a multi-token-prediction layer, L the loss with its head; `|`
ends a stage, `x*n` and `(...)*n` repeat, commas are ignored. With several stages on a rank the order is
still that of the model: stage i is on block i mod pp.

The notation expresses only where the language model is cut. What layouts cannot express is refused: m, as
no module here has such layers, and stages without layers. Stricter than the source, which unrolls by text
substitution: groups are not nested and have a factor, factors are >= 1.
"""

import re
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

EMBEDDING, BLOCK, PREDICTION, LOSS, END = "E", "t", "m", "L", "|"
MOST_SYMBOLS = 100_000  # after unrolling
_DIGITS = re.compile(r"[0-9]+")
_KNOWN = (EMBEDDING, BLOCK, PREDICTION, LOSS, END)


class _Symbol(NamedTuple):
    """A letter of the string, and its position, from 1."""

    letter: str
    place: int


def stage_layers_of(text: str, *, num_blocks: int | None = None) -> tuple[int, ...]:
    """The number of layers of every stage; embedding, transformer layers and head count one each.

    Args:
        text: the layout string.
        num_blocks: transformer layers of the model; None: as many as the string has.

    Raises:
        ValueError: invalid text, or not a whole model; the message gives the position in the string.

    Complexity: O(layers).
    """
    symbols = _Reader(text).read()
    _check_ends(text, symbols)
    stages = _stages(text, symbols)
    count = sum(symbol.letter == BLOCK for symbol in symbols)
    if num_blocks is not None and count != num_blocks:
        raise ValueError(
            f"layout {text!r} has {count} transformer layers, the model {num_blocks}: nearest is "
            f"{abs(num_blocks - count)} 't' {'more' if count < num_blocks else 'fewer'}"
        )
    return tuple(len(stage) for stage in stages)


def layout_string(stage_layers: Sequence[int]) -> str:
    """The layout string of stages, with runs of equal stages and layers folded.

    Raises:
        ValueError: not a module of an embedding, transformer layers and a head in stages of >= 1 layer.
    """
    num_layers = sum(stage_layers)
    if num_layers < 2 or min(stage_layers) < 1:
        raise ValueError(
            f"a layout string wants stages of >= 1 layer, with an embedding and a head, got "
            f"{list(stage_layers)}"
        )
    letters = EMBEDDING + BLOCK * (num_layers - 2) + LOSS
    stages, start = [], 0
    for count in stage_layers:
        stages.append(_folded(letters[start : start + count]))
        start += count
    return _joined(stages)


def _folded(letters: str) -> str:
    """Fold runs of letters: Ettt as Et*3."""
    runs = ((letter, len(list(run))) for letter, run in groupby(letters))
    return "".join(letter * count if count < 3 else f"{letter}*{count}" for letter, count in runs)


def _joined(stages: Sequence[str]) -> str:
    """Join stages by their ends, runs of equal ones as (stage|)*n; the last stage has no end."""
    *others, last = stages
    runs = ((stage, len(list(run))) for stage, run in groupby(others))
    return "".join(f"{s}|" if n == 1 else f"({s}|)*{n}" for s, n in runs) + last


class _Reader:
    """Parses and unrolls the string in one pass."""

    def __init__(self, text: str) -> None:
        self._text, self._next = text, 0

    def read(self) -> list[_Symbol]:
        symbols: list[_Symbol] = []
        while (letter := self._peek()) is not None:
            part = self._group() if letter == "(" else [self._symbol()]
            self._repeat(part, symbols)
        return symbols

    def _group(self) -> list[_Symbol]:
        start = self._next
        self._next += 1
        inside: list[_Symbol] = []
        while (letter := self._peek()) != ")":
            if letter is None:
                raise self._wrong("this group is not closed; want ')*n'", start)
            if letter == "(":
                raise self._wrong("groups do not nest; close the one before it first", self._next)
            self._repeat([self._symbol()], inside)
        end = self._next
        self._next += 1
        if not inside:
            raise self._wrong("this group is empty", start)
        if self._peek() != "*":
            raise self._wrong("a group wants a factor; nearest: ')*1'", end)
        return inside

    def _symbol(self) -> _Symbol:
        letter, index = self._text[self._next], self._next
        self._next += 1
        if letter not in _KNOWN:
            near = [known for known in _KNOWN if known.lower() == letter.lower()]
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(_KNOWN)}, *, (, ) and ','"
            raise self._wrong(f"no layer is called {letter!r}; {hint}", index)
        return _Symbol(letter, index + 1)

    def _repeat(self, part: list[_Symbol], symbols: list[_Symbol]) -> None:
        """Append the part as often as the factor after it says."""
        factor, start = 1, self._next
        if self._peek() == "*":
            start = self._next
            self._next += 1
            digits = _DIGITS.match(self._text, self._next)
            self._next += 0 if digits is None else digits.end() - digits.start()
            factor = 0 if digits is None else min(int(digits[0][:9]), MOST_SYMBOLS + 1)
        if not 1 <= factor <= MOST_SYMBOLS:
            nearest = 1 if factor < 1 else MOST_SYMBOLS
            raise self._wrong(f"'*' wants a factor of 1 to {MOST_SYMBOLS}; nearest: '*{nearest}'", start)
        if len(symbols) + len(part) * factor > MOST_SYMBOLS:
            raise self._wrong(f"want at most {MOST_SYMBOLS} layers and stages' ends in all", start)
        symbols += part * factor

    def _peek(self) -> str | None:
        """The next character that is not a comma; None at the end."""
        while self._next < len(self._text) and self._text[self._next] == ",":
            self._next += 1
        return self._text[self._next] if self._next < len(self._text) else None

    def _wrong(self, what: str, index: int) -> ValueError:
        return _wrong(self._text, what, index + 1)


def _wrong(text: str, what: str, position: int) -> ValueError:
    return ValueError(f"layout {text!r}, at {position}: {what}")


def _check_ends(text: str, symbols: Sequence[_Symbol]) -> None:
    """Raise ValueError unless there is one embedding, first, one loss, last, and no prediction layer."""
    layers = [symbol for symbol in symbols if symbol.letter != END]
    if not layers:
        raise _wrong(text, "there is no layer; nearest: 'EL'", 1)
    for symbol in layers:
        if symbol.letter == PREDICTION:
            raise _wrong(text, "no model here has multi-token-prediction layers; leave 'm' out", symbol.place)
    for letter, what, expected in ((EMBEDDING, "first", layers[0]), (LOSS, "last", layers[-1])):
        if expected.letter != letter:
            raise _wrong(
                text, f"the {what} layer must be {letter!r}, got {expected.letter!r}", expected.place
            )
        for symbol in layers:
            if symbol.letter == letter and symbol is not expected:
                raise _wrong(text, f"{letter!r} must stand once, as the {what} layer", symbol.place)


def _stages(text: str, symbols: Sequence[_Symbol]) -> list[list[_Symbol]]:
    stages: list[list[_Symbol]] = [[]]
    for symbol in symbols:
        if symbol.letter != END:
            stages[-1].append(symbol)
            continue
        if not stages[-1]:
            raise _wrong(text, "a stage wants at least one layer in front of its '|'", symbol.place)
        stages.append([])
    if not stages[-1]:
        raise _wrong(text, "the last stage has no layer; leave out the '|'", len(text))
    return stages
