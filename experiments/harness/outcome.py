"""A paper's numbers against ours: rows, claims and their verdicts.

A script declares what the paper printed (`PaperNumber`, with the tolerance fixed before anything
is compared) and computes its own values. Nothing is filled in from the paper: a number without a
value of ours is MISSING. Keys start with the kind of evidence, see `EVIDENCE`.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from experiments.harness.figure import Grid

EVIDENCE = {
    "printed": "the paper's printed stage times through the simulator",
    "published": "throughputs and recovery times of the authors' published simulator through ours",
    "restated": "the rules of the authors' published simulator, restated, with its constants",
    "modelled": "our own models and cost model, nothing of the paper put in",
    "rule": "closed forms of the frozen rule",
    "itself": "the paper recomputed from its own cells",
}


class Verdict(StrEnum):
    OK = "ok"
    OFF = "OFF"
    MISSING = "MISSING"
    UNDERSPECIFIED = "UNDERSPECIFIED"


@dataclass(frozen=True, slots=True)
class PaperNumber:
    """A printed number. `rel_tol` is fixed here, before ours is known, and never widened to pass."""

    key: str
    value: float
    unit: str
    where: str
    rel_tol: float
    read_off_plot: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        if self.value == 0 or not math.isfinite(self.value):
            raise ValueError(
                f"{self.key}: a printed number must be finite and not 0 (a ratio is taken), got {self.value}"
            )
        if not 0 <= self.rel_tol < 1:
            raise ValueError(f"{self.key}: rel_tol must be in [0, 1), got {self.rel_tol}")

    def near(self, ours: float) -> bool:
        """Within the tolerance; 1e-9 of slack for the rounding of binary fractions."""
        return abs(ours / self.value - 1) <= self.rel_tol + 1e-9


@dataclass(frozen=True, slots=True)
class Claim:
    """Who wins, where the crossover lies: true or false, apart from absolute numbers."""

    text: str
    holds: bool


@dataclass(frozen=True, slots=True)
class Unstated:
    """What the paper leaves open, and how far our value moves over the plausible settings of it."""

    what: str
    low: float
    high: float

    def __post_init__(self) -> None:
        if not self.what:
            raise ValueError("an underspecified number must name what the paper does not state")
        if not self.low <= self.high:
            raise ValueError(f"{self.what}: want a range with low <= high, got {self.low} .. {self.high}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One printed number, ours, and what to make of it."""

    number: PaperNumber
    ours: float | None
    unstated: Unstated | None = None

    @property
    def ratio(self) -> float | None:
        return None if self.ours is None else self.ours / self.number.value

    @property
    def verdict(self) -> Verdict:
        """UNDERSPECIFIED only where some plausible setting gives the paper's number; else OFF."""
        if self.ours is None:
            return Verdict.MISSING
        if self.unstated is None:
            return Verdict.OK if self.number.near(self.ours) else Verdict.OFF
        inside = self.unstated.low <= self.number.value <= self.unstated.high
        near = self.number.near(self.unstated.low) or self.number.near(self.unstated.high)
        return Verdict.UNDERSPECIFIED if inside or near else Verdict.OFF


@dataclass(slots=True)
class Evidence:
    """What one kind of evidence amounts to: numbers of the paper, values of ours, claims, notes, drawings.

    Args:
        ours: every value computed, also those the paper has no number for.
        unstated: ranges over what the paper leaves open.
        plan_hashes, seeds: what the values depend on besides the code.
        figures: what is drawn of it, by the name of its files.
    """

    paper: list[PaperNumber] = field(default_factory=list)
    ours: dict[str, float] = field(default_factory=dict)
    unstated: dict[str, Unstated] = field(default_factory=dict)
    claims: list[Claim] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    plan_hashes: list[str] = field(default_factory=list)
    seeds: tuple[int, ...] = ()
    figures: dict[str, Grid] = field(default_factory=dict)

    def add(self, number: PaperNumber, ours: float, unstated: Unstated | None = None) -> None:
        """One row of the report."""
        self.paper.append(number)
        self.ours[number.key] = ours
        if unstated is not None:
            self.unstated[number.key] = unstated

    def add_range(self, number: PaperNumber, ours: Sequence[float], what: str) -> None:
        """One row that depends on `what`, which the paper leaves open: the likeliest value comes first."""
        self.add(number, ours[0], Unstated(what, min(ours), max(ours)))

    def claim(self, text: str, holds: bool) -> None:  # noqa: FBT001  (the claim's own truth)
        """One claim of the report."""
        self.claims.append(Claim(text, holds))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A finished script: its evidence, row by row; `profile` names the hardware that was priced."""

    script: str
    rows: tuple[Row, ...]
    claims: tuple[Claim, ...]
    ours: Mapping[str, float]
    notes: tuple[str, ...]
    plan_hashes: tuple[str, ...]
    profile: str | None
    seeds: tuple[int, ...]
    figures: Mapping[str, Grid]

    def count(self, verdict: Verdict) -> int:
        return sum(row.verdict is verdict for row in self.rows)

    @property
    def verdict(self) -> Verdict:
        """The worst thing in it; a claim that fails is OFF."""
        if self.count(Verdict.MISSING):
            return Verdict.MISSING
        if self.count(Verdict.OFF) or not all(claim.holds for claim in self.claims):
            return Verdict.OFF
        return Verdict.UNDERSPECIFIED if self.count(Verdict.UNDERSPECIFIED) else Verdict.OK

    @property
    def exit_status(self) -> int:
        return 1 if self.verdict in (Verdict.MISSING, Verdict.OFF) else 0


def outcome_of(script: str, parts: Iterable[Evidence], *, profile: str | None = None) -> Outcome:
    """All evidence of a script, held against the paper.

    Raises:
        ValueError: a key is printed twice, or a range is of a key that is none of the paper's.
    """
    parts = tuple(parts)
    numbers = [number for part in parts for number in part.paper]
    ours = {key: value for part in parts for key, value in part.ours.items()}
    unstated = {key: value for part in parts for key, value in part.unstated.items()}
    twice = [key for key, count in Counter(number.key for number in numbers).items() if count > 1]
    unknown = sorted(set(unstated) - {number.key for number in numbers})
    if twice or unknown:
        raise ValueError(
            f"{script}: keys must be unique and known, twice: {twice}, no number of the paper: {unknown}"
        )
    return Outcome(
        script=script,
        rows=tuple(Row(number=n, ours=ours.get(n.key), unstated=unstated.get(n.key)) for n in numbers),
        claims=tuple(claim for part in parts for claim in part.claims),
        ours=ours,
        notes=tuple(note for part in parts for note in part.notes),
        plan_hashes=tuple(dict.fromkeys(each for part in parts for each in part.plan_hashes)),
        profile=profile,
        seeds=tuple(seed for part in parts for seed in part.seeds),
        figures={name: grid for part in parts for name, grid in part.figures.items()},
    )
