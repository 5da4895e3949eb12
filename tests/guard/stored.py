"""The guard's file, and what differs from it."""

import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.guard.entries import PLAN, REFUSED, RUN
from tests.guard.project import NEWEST, UNNAMED_SINCE, Facts, write_whole

STORED = Path(__file__).parent / "stored.json"
REL_TOL = 1e-12  # of a loss and of a norm of gradients, between machines
NUMBERS = ("loss", "gradient_norm")
HASHES = "hashes"  # key of the digest of a result file's plan hashes
MOST_SHOWN = 80  # characters of a value
ASPECTS = {  # of an entry whose plan is the same -> how keys of what differs begin
    "memory": ("plan.static_bytes", "plan.peak_bytes", "plan.memory"),
    "times": ("plan.engine", "plan.sweep", "plan.iteration_s"),
    "loss, gradients or weights": (f"{RUN}.",),
}
SAME_PLAN = ("plan.hash", "plan.bytes")

Equal = Callable[[str, Any, Any], bool]  # key, value before, value now


@dataclass(frozen=True, slots=True)
class Stored:
    """Entries by name, the machine on which plans were executed, and whose names their actions have.

    `version` is of plan and trace files; a file that does not say it is of the first.
    """

    machine: Mapping[str, str]
    entries: Mapping[str, Facts]
    version: int = NEWEST


@dataclass(frozen=True, slots=True)
class Verdict:
    """Names of entries; those that changed with what of them did.

    `rehashed`: those whose digest of plan hashes changed, as a plan has another hash since that version.
    `kinds`: how many entries changed in which way; one plan with other memory and times counts as both.
    """

    changed: Mapping[str, str]
    new: tuple[str, ...]
    gone: tuple[str, ...]
    rehashed: tuple[str, ...] = ()
    kinds: Mapping[str, int] = field(default_factory=dict)

    @property
    def holds(self) -> bool:
        """New entries are welcome."""
        return not self.changed and not self.gone

    def lines(self) -> Iterator[str]:
        """One for each entry that is not as stored."""
        yield from (f"other hashes: {name}" for name in self.rehashed)
        yield from (f"changed: {name}: {what}" for name, what in self.changed.items())
        yield from (f"gone: {name}" for name in self.gone)
        yield from (f"new: {name}" for name in self.new)


def read(path: Path) -> Stored:
    """ValueError where it is no such file."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return Stored(data["machine"], data["entries"], data.get("version", 1))
    except (OSError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: want a file that --update wrote: {error}") from None


def write(stored: Stored, path: Path) -> None:
    """One line for each entry, so that a diff names what changed."""
    lines = [f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in stored.entries.items()]
    body = ",\n".join(lines)
    header = f'"machine": {json.dumps(stored.machine)},\n"version": {stored.version},'
    write_whole(f'{{{header}\n"entries": {{\n{body}\n}}}}\n', path)


def compare(before: Stored, now: Stored, expected: set[str]) -> Verdict:
    """What of `now` is not as it was; runs only where `now` has them.

    Bits of runs are compared on the machine where the file was made; elsewhere losses and norms are,
    within `REL_TOL`.

    Args:
        expected: names of entries that `now` would have if all were made; stored ones beside them are gone.
    """
    equal = _to_the_bit if before.machine == now.machine else _elsewhere
    changed, rehashed = {}, []
    kinds = Counter(dict.fromkeys(("refused before or now", "another plan", *map(_of_same_plan, ASPECTS)), 0))
    for name in now.entries.keys() & before.entries.keys():
        old, new = before.entries[name], now.entries[name]
        if before.version < UNNAMED_SINCE and old.get(HASHES) != new.get(HASHES):
            rehashed.append(name)
            old = old | {HASHES: new.get(HASHES)}
        what = dict(_differences(old, new, equal))
        if what:
            changed[name] = "; ".join(f"{key} {text}".strip() for key, text in what.items())
            kinds.update(_kinds(what))
    return Verdict(
        rehashed=tuple(sorted(rehashed)),
        changed=dict(sorted(changed.items())),
        new=tuple(sorted(expected - before.entries.keys())),
        gone=tuple(sorted(before.entries.keys() - expected)),
        kinds=kinds,
    )


def plan_hash(entry: Facts) -> str | None:
    """The hash of an entry's plan; None: the plan was refused."""
    found: str | None = entry.get(PLAN, {}).get("hash")
    return found


def _kinds(what: Collection[str]) -> list[str]:
    """Of one changed entry, by the keys that differ."""
    if REFUSED in what:
        return ["refused before or now"]
    if not any(key.startswith((f"{PLAN}.", f"{RUN}.")) for key in what):
        return ["result files"]
    if any(key in SAME_PLAN for key in what):
        return ["another plan"]
    return [
        _of_same_plan(aspect) for aspect, keys in ASPECTS.items() if any(key.startswith(keys) for key in what)
    ]


def _of_same_plan(aspect: str) -> str:
    return f"other {aspect} of the same plan"


def _to_the_bit(key: str, old: Any, new: Any) -> bool:
    return bool(old == new)


def _elsewhere(key: str, old: Any, new: Any) -> bool:
    """Of a run on another machine: digests always differ and say nothing."""
    if None in (old, new) or key == REFUSED:
        return bool(old == new)
    return key not in NUMBERS or math.isclose(old, new, rel_tol=REL_TOL)


def _differences(before: Facts, now: Facts, equal: Equal) -> Iterator[tuple[str, str]]:
    """(`part.key`, `before -> now`); `equal` judges what is in a run."""
    if REFUSED in before.keys() | now.keys():
        if before != now:
            reasons = (_short(each.get(REFUSED, "a plan")) for each in (before, now))
            yield REFUSED, " -> ".join(reasons)
        return
    for part in dict.fromkeys([*before, *now]):
        old, new = before.get(part), now.get(part)
        if part == RUN and new is None:  # not executed this time
            continue
        if not isinstance(old, dict) or not isinstance(new, dict):
            old, new = {part: old}, {part: new}
        for key in dict.fromkeys([*old, *new]):
            judge = equal if part == RUN else _to_the_bit
            if not judge(key, old.get(key), new.get(key)):
                name = key if key == part else f"{part}.{key}"
                yield name, f"{_short(old.get(key))} -> {_short(new.get(key))}"


def _short(value: object) -> str:
    text = "nothing" if value is None else str(value)
    return text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN - 3]}..."
