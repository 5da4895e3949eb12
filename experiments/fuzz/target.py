"""A fuzzed reader: the source of its valid inputs, their notation, and the function that takes them."""

import re
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from random import Random
from typing import Any

from experiments.fuzz import raw, trees
from workbench.cli.console import one_line
from workbench.plain_text import MOST_CHARACTERS, plain

TREE_SHARE = 0.8  # of the mutations, where there are trees


class TargetKind(StrEnum):
    """What a target takes."""

    FILE = "file"
    MESSAGE = "message"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A target with its valid inputs.

    Args:
        seeds: valid inputs: trees where there is a `render`, else bytes.
        render: tree -> bytes as the program would read them.
        parse: the first step of reading, such as parsing JSON; if it raises, the bytes did not pass.
        take: the whole reader; ValueError or OSError refuses the bytes in one line.
        draw: makes new trees, instead of mutations of the valid ones.
        out: folder that it may write to.
    """

    seeds: Sequence[Any]
    parse: Callable[[bytes], object]
    take: Callable[[bytes], object]
    render: Callable[[Any], bytes] | None = None
    draw: Callable[[Random], Any] | None = None
    out: Path | None = None

    def good(self, index: int) -> bytes:
        """A seed as the program would read it."""
        seed = self.seeds[index]
        content: bytes = seed if self.render is None else self.render(seed)
        return content

    def mutant(self, rng: Random) -> bytes:
        """An almost valid input."""
        if self.draw is not None and self.render is not None:
            return self.render(self.draw(rng))
        seed, other = rng.choice(self.seeds), rng.choice(self.seeds)
        if self.render is None:
            return raw.mutated(seed, other, rng)
        if rng.random() < TREE_SHARE:
            return self.render(trees.mutated(seed, rng))
        return raw.mutated(self.render(seed), self.render(other), rng)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One reader, or one kind of message.

    Args:
        name: its name.
        kind: what it takes.
        readers: functions that read its inputs, as `module:function`.
        make: makes valid inputs in its own folder.
    """

    name: str
    make: Callable[[Path], Ready]
    readers: tuple[str, ...] = ()
    kind: TargetKind = TargetKind.FILE


class Ending(StrEnum):
    """The outcome of an input; all but the first two are findings."""

    ACCEPTED = "accepted"
    REFUSED = "refused"
    TRACEBACK = "traceback"
    UNCLEAR = "unclear line"
    OVER_2GB = "over 2 GB"
    HALF_WRITTEN = "half written"
    HANG = "hang"
    NATIVE_CRASH = "native crash"


@dataclass(frozen=True, slots=True)
class Judgement:
    """The judgement of one input."""

    ending: Ending
    passed_parse: bool
    text: str = ""


class UnclearError(Exception):
    """A refusal whose message does not name its subject."""


@contextmanager
def naming(word: str) -> Iterator[None]:
    """In this context, every refusal of a reader must contain a word."""
    try:
        yield
    except (ValueError, OSError) as error:
        if word not in plain(one_line(error)):
            raise UnclearError(f"does not name {word!r}: {one_line(error)[:500]}") from error
        raise


# What Python itself says where a value was not looked at before it was used.
UNMEANT = re.compile(
    r"^(cannot convert float|not enough values|too many values|invalid literal for|could not convert string"
    r"|math domain|max\(\)|min\(\)|.* (is not|not) in (list|tuple|range)|Exceeds the limit|embedded null"
    r"|zip\(\)|tuple\.index|list\.index|substring not found|range\(\) arg|Sample larger|byte must be"
    r"|operands could not|cannot reshape|negative shift|array is too big|Maximum allowed dimension)"
)


def judged(ready: Ready, content: bytes) -> Judgement:
    """Let the target read the bytes, and judge the outcome."""
    passed = _passes(ready, content)
    try:
        ready.take(content)
        ending, text = Ending.ACCEPTED, ""
    except UnclearError as error:
        ending, text = Ending.UNCLEAR, str(error)
    except (ValueError, OSError) as error:
        ending, text = _refusal(error)
    except MemoryError:
        ending, text = Ending.OVER_2GB, "MemoryError"
    except BaseException as error:
        ending, text = Ending.TRACEBACK, "".join(traceback.format_exception(error)[-4:])
    if ready.out is not None and (leftover := _left(ready.out, ending)):
        return Judgement(Ending.HALF_WRITTEN, passed, leftover)
    return Judgement(ending, passed, text)


def _passes(ready: Ready, content: bytes) -> bool:
    try:
        ready.parse(content)
    except Exception:
        return False
    return True


def _refusal(error: Exception) -> tuple[Ending, str]:
    """The ending of a refusal: intended, or by an unintended line."""
    line = one_line(error)
    message = plain(line)
    if len(message) > MOST_CHARACTERS or not message.isprintable():
        return Ending.UNCLEAR, f"not a short printable line: {message!r}"
    if UNMEANT.match(line) or not line:
        return Ending.UNCLEAR, f"not meant: {type(error).__name__}: {line[:300]}"
    return Ending.REFUSED, message


def _left(out: Path, ending: Ending) -> str:
    """Files that should not be in the folder: parts, or anything of a refused input."""
    files = [path for path in out.rglob("*") if path.is_file()]
    wrong = [
        path.name
        for path in files
        if ending is not Ending.ACCEPTED or path.suffix in (".tmp", ".part") or path.name.startswith(".")
    ]
    for path in files:
        path.unlink()
    return ", ".join(wrong)
