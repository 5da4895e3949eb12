"""Names of devices as people write them, and the one that ships under each: one rule for all of them."""

import re
from collections.abc import Sequence
from difflib import get_close_matches
from typing import NamedTuple

from workbench.units import GB

# Makers, form factors and kinds of memory that name no other device. "pcie" and "nvl" do, so they stay.
_SAID_TOO = re.compile(
    r"nvidia|amd|instinct|geforce|tesla|gpus?|[dh]gx|sxm\d?|oam|hbm\d?e?|nvl72|tensor|core"
)
_PART = re.compile(r"\d+(?:gb|w)(?![a-z0-9])|[a-z]+\d+[a-z]*|[a-z]+|\d+")
_MEMORY = re.compile(r"\d+gb")
SHOWN = 4  # of the known devices, where none is meant
SAME_MEMORY = 0.1  # announced and usable sizes of one device differ by less
_POWER = re.compile(r"\d+w")


class _Name(NamedTuple):
    """A device's name in parts: its model, and its memory and power limit where they are said."""

    model: tuple[str, ...]
    memory: str | None
    power: str | None


def shipped_device(name: str, known: Sequence[str]) -> str:
    """The known name that a name of the field means.

    Case, separators, makers, form factors (SXM, OAM) and kinds of memory do not matter. The size of the
    memory and a power limit decide between variants: a known name that says neither takes any memory that no
    other known name says, but no power limit.

    >>> shipped_device("NVIDIA-A100-SXM4-80GB", ["A100-40GB", "A100-80GB", "H100"])
    'A100-80GB'
    >>> shipped_device("h100_80gb", ["A100-40GB", "A100-80GB", "H100"])
    'H100'

    Raises:
        ValueError: none, or several of which the name does not say which; names the nearest.
    """
    if name in known:
        return name
    wanted = _parts(name)
    fitting = [each for each in known if _fits(wanted, _parts(each))]
    fitting = [each for each in fitting if _parts(each).memory == wanted.memory] or fitting
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise ValueError(f"no profile {name!r}: want one of {', '.join(fitting)}; nearest: {fitting[0]}")
    lowered = {each.lower(): each for each in known}
    near = [lowered[each] for each in get_close_matches(name.lower(), lowered, n=SHOWN, cutoff=0.0)]
    file = "a file, which `workbench calibrate` writes," if name.endswith(".json") else "a file"
    said = f"{file} or one of {len(known)} such as {', '.join(near)}"
    raise ValueError(f"no profile {name!r}: want {said}; nearest: {near[0]}")


def check_memory(name: str, device: str, memory_bytes: int) -> None:
    """Raise ValueError where a name says another size of memory than the device has: it means another."""
    said = _parts(name).memory
    if said is not None and abs(int(said.removesuffix("gb")) * GB / memory_bytes - 1) > SAME_MEMORY:
        has = f"{memory_bytes / GB:.0f}GB"
        raise ValueError(f"no profile {name!r}: {device} has {has}; nearest: {device}")


def _parts(name: str) -> _Name:
    parts = _PART.findall(_SAID_TOO.sub(" ", name.lower()))
    memory = next((part for part in parts if _MEMORY.fullmatch(part)), None)
    power = next((part for part in parts if _POWER.fullmatch(part)), None)
    return _Name(tuple(part for part in parts if part not in (memory, power)), memory, power)


def _fits(wanted: _Name, known: _Name) -> bool:
    memories = {wanted.memory, known.memory} - {None}
    return wanted.model == known.model and wanted.power == known.power and len(memories) < 2
