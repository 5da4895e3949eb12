"""A rank's state besides its tensors, for resuming without a difference: losses, Python's random state."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RANDOM_VERSION = 3
NUM_WORDS = 625  # of a Mersenne twister: its state, and its position
WORD = 2**32


@dataclass(frozen=True, slots=True, kw_only=True)
class RankNotes:
    """Losses of every step so far, and `random.getstate()`."""

    losses: tuple[float, ...]
    python_random: tuple[Any, ...]

    def as_json(self) -> dict[str, Any]:
        """JSON with losses to the last bit, including NaN and infinities."""
        version, words, gauss = self.python_random
        return {
            "losses": [loss.hex() for loss in self.losses],
            "python_random": [version, list(words), None if gauss is None else gauss.hex()],
        }


def notes_from(about: Mapping[str, Any], *, where: Path) -> RankNotes:
    """Decode the result of `as_json`.

    Raises:
        ValueError: it has another form.
    """
    try:
        match about:
            case {"losses": list(losses), "python_random": [int(version), list(words), gauss]}:
                return RankNotes(
                    losses=tuple(map(float.fromhex, losses)),
                    python_random=(_version(version), _words(words), _gauss(gauss)),
                )
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{where}: losses and random numbers cannot be read ({error})") from None
    raise ValueError(f"{where}: want losses and python_random beside the tensors")


def _version(version: int) -> int:
    if version != RANDOM_VERSION:
        raise ValueError(f"want random numbers of version {RANDOM_VERSION}, got {version}")
    return version


def _words(words: list[Any]) -> tuple[int, ...]:
    if len(words) != NUM_WORDS or not all(type(word) is int and 0 <= word < WORD for word in words):
        raise ValueError(f"want {NUM_WORDS} words of random numbers")
    if words[-1] >= NUM_WORDS:
        raise ValueError(f"want a place below {NUM_WORDS}, got {words[-1]}")
    return tuple(words)


def _gauss(gauss: Any) -> float | None:
    value = None if gauss is None else float.fromhex(gauss)
    if value is not None and not math.isfinite(value):
        raise ValueError("want a finite number of the normal distribution")
    return value
