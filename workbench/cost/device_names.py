"""Matches names of devices as people write them with the profiles that ship."""

import re
from collections.abc import Sequence
from difflib import get_close_matches
from typing import NamedTuple

from workbench.units import GB

# Makers, form factors and kinds of memory that do not distinguish devices; "pcie" and "nvl" do.
_IGNORED = re.compile(r"nvidia|amd|instinct|geforce|tesla|gpus?|[dh]gx|sxm\d?|oam|hbm\d?e?|nvl72|tensor|core")
_PART = re.compile(r"\d+(?:gb|w)(?![a-z0-9])|[a-z]+\d+[a-z]*|[a-z]+|\d+")
_MEMORY = re.compile(r"\d+gb")
SHOWN = 4  # known devices that an error message lists
SAME_MEMORY = 0.1  # announced and usable sizes of one device differ by less
_POWER = re.compile(r"\d+w")


class _Name(NamedTuple):
    """A parsed device name: its model, and its memory and power limit where given."""

    model: tuple[str, ...]
    memory: str | None
    power: str | None


def shipped_device(name: str, known: Sequence[str]) -> str:
    """The known device name that a common name refers to.

    Case, separators, makers, form factors (SXM, OAM) and kinds of memory do not matter. The size of the
    memory and a power limit decide between variants: a known name without either matches any memory size
    that no other known name has, but no power limit.

    >>> shipped_device("NVIDIA-A100-SXM4-80GB", ["A100-40GB", "A100-80GB", "H100"])
    'A100-80GB'
    >>> shipped_device("h100_80gb", ["A100-40GB", "A100-80GB", "H100"])
    'H100'

    Raises:
        ValueError: no match, or several; the message names the nearest.
    """
    if name in known:
        return name
    parsed = _parts(name)
    fitting = [candidate for candidate in known if _fits(parsed, _parts(candidate))]
    fitting = [candidate for candidate in fitting if _parts(candidate).memory == parsed.memory] or fitting
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise ValueError(f"no profile {name!r}: want one of {', '.join(fitting)}; nearest: {fitting[0]}")
    lowered = {candidate.lower(): candidate for candidate in known}
    near = [lowered[candidate] for candidate in get_close_matches(name.lower(), lowered, n=SHOWN, cutoff=0.0)]
    shipped = f"or one of {len(known)} such as {', '.join(near)}"
    if name.endswith(".json"):
        raise ValueError(f"no profile {name!r}: want a file, which `workbench calibrate` writes, {shipped}")
    raise ValueError(f"no profile {name!r}: want a file {shipped}; nearest: {near[0]}")


def may_be(name: str, device: str) -> bool:
    """Whether a name may mean a device, as `shipped_device` compares them; true of names that mean none.

    >>> may_be("a100", "A100-80GB"), may_be("A100", "H100"), may_be("gpu", "H100")
    (True, False, True)
    """
    parts = _parts(name)
    return not parts.model or _fits(parts, _parts(device))


def check_memory(name: str, device: str, memory_bytes: int) -> None:
    """Raise ValueError where a name has another memory size than the device."""
    size = _parts(name).memory
    if size is not None and abs(int(size.removesuffix("gb")) * GB / memory_bytes - 1) > SAME_MEMORY:
        actual = f"{memory_bytes / GB:.0f}GB"
        raise ValueError(f"no profile {name!r}: {device} has {actual}; nearest: {device}")


def _parts(name: str) -> _Name:
    parts = _PART.findall(_IGNORED.sub(" ", name.lower()))
    memory = next((part for part in parts if _MEMORY.fullmatch(part)), None)
    power = next((part for part in parts if _POWER.fullmatch(part)), None)
    return _Name(tuple(part for part in parts if part not in (memory, power)), memory, power)


def _fits(name: _Name, candidate: _Name) -> bool:
    memories = {name.memory, candidate.memory} - {None}
    return name.model == candidate.model and name.power == candidate.power and len(memories) < 2
