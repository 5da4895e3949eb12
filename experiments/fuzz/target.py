"""A reader under fuzz: where its good inputs come from, how they are written, and who takes them."""

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
    """A target whose good inputs have been made.

    Args:
        seeds: good inputs: trees where there is a `render`, else bytes.
        render: a tree as the program would get it.
        parse: the first thing that is done with the bytes, such as parsing JSON; whatever it raises, they
            did not pass.
        take: all of it. A ValueError or OSError refuses the bytes in one line.
        draw: a new tree, instead of mutations of the good ones.
        out: folder that it may write to.
    """

    seeds: Sequence[Any]
    parse: Callable[[bytes], object]
    take: Callable[[bytes], object]
    render: Callable[[Any], bytes] | None = None
    draw: Callable[[Random], Any] | None = None
    out: Path | None = None

    def good(self, index: int) -> bytes:
        """A seed as the program would get it."""
        seed = self.seeds[index]
        content: bytes = seed if self.render is None else self.render(seed)
        return content

    def mutant(self, rng: Random) -> bytes:
        """An input that is almost good."""
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
        name: of it.
        kind: what it takes.
        readers: functions that read what it takes, as `module:function`.
        make: gets a folder of its own, makes good inputs.
    """

    name: str
    make: Callable[[Path], Ready]
    readers: tuple[str, ...] = ()
    kind: TargetKind = TargetKind.FILE


class Ending(StrEnum):
    """How an input was taken. All but the first two are findings."""

    ACCEPTED = "accepted"
    REFUSED = "refused"
    TRACEBACK = "traceback"
    UNCLEAR = "unclear line"
    OVER_2GB = "over 2 GB"
    HALF_WRITTEN = "half written"
    HANG = "hang"
    NATIVE_CRASH = "native crash"


@dataclass(frozen=True, slots=True)
class Judged:
    """What became of one input."""

    ending: Ending
    passed_parse: bool
    text: str = ""


class UnclearError(Exception):
    """A refusal that does not name what it refuses."""


@contextmanager
def naming(word: str) -> Iterator[None]:
    """Around a reader: whatever it refuses, the line that is shown holds the word."""
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


def judged(ready: Ready, content: bytes) -> Judged:
    """Let the target take the bytes, and see how that ends."""
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
    if ready.out is not None and (left := _left(ready.out, ending)):
        return Judged(Ending.HALF_WRITTEN, passed, left)
    return Judged(ending, passed, text)


def _passes(ready: Ready, content: bytes) -> bool:
    try:
        ready.parse(content)
    except Exception:
        return False
    return True


def _refusal(error: Exception) -> tuple[Ending, str]:
    """Refused, or by a line that nobody meant."""
    line = one_line(error)
    shown = plain(line)
    if len(shown) > MOST_CHARACTERS or not shown.isprintable():
        return Ending.UNCLEAR, f"not a short printable line: {shown!r}"
    if UNMEANT.match(line) or not line:
        return Ending.UNCLEAR, f"not meant: {type(error).__name__}: {line[:300]}"
    return Ending.REFUSED, shown


def _left(out: Path, ending: Ending) -> str:
    """What stands in the folder and should not: parts, or anything at all of what was refused."""
    found = [path for path in out.rglob("*") if path.is_file()]
    wrong = [
        path.name
        for path in found
        if ending is not Ending.ACCEPTED or path.suffix in (".tmp", ".part") or path.name.startswith(".")
    ]
    for path in found:
        path.unlink()
    return ", ".join(wrong)
