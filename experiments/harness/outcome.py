"""A paper's numbers against ours: rows, claims and their verdicts.

A script declares what the paper printed (`PaperNumber`, with the tolerance fixed before anything
is compared) and computes its own values. Nothing is filled in from the paper: a number without a
value of ours is MISSING. Keys start with the kind of evidence, see `EVIDENCE`.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from fnmatch import fnmatchcase
from glob import escape

from experiments.harness.figure import Grid


class MetricKind(StrEnum):
    """The evidence behind a row of ours. Only the first is a reproduction; tables count the four apart."""

    MODELS = "reproduced by our models"
    STAGE_TIMES = "by the paper's stage times"
    REPLAYED = "replayed from the authors' inputs"
    ARITHMETIC = "the paper's own arithmetic"


EVIDENCE: Mapping[str, tuple[MetricKind, str]] = {
    "printed": (MetricKind.STAGE_TIMES, "the paper's printed stage times through the simulator"),
    "published": (
        MetricKind.REPLAYED,
        "throughputs and recovery times of the authors' published simulator through ours",
    ),
    "restated": (
        MetricKind.REPLAYED,
        "the rules of the authors' published simulator, restated, with its constants",
    ),
    "modelled": (MetricKind.MODELS, "our own models and cost model, nothing of the paper put in"),
    "fitted": (
        MetricKind.MODELS,
        "our own models, a constant of which is fitted on other numbers of the paper",
    ),
    "rule": (MetricKind.MODELS, "closed forms of the frozen rule"),
    "itself": (MetricKind.ARITHMETIC, "the paper recomputed from its own cells"),
}

MOST_IN_RANGE = 2.0  # a range that is wider determines nothing


class Verdict(StrEnum):
    """The verdict on a printed number.

    OK: within the tolerance, nothing left open. OK_AT_DEFAULT: within the tolerance at the likeliest of the
    settings that the paper leaves open. IN_RANGE: between our values at two named settings, at most a
    factor of `MOST_IN_RANGE` apart. UNDETERMINED: these are further apart, so that nothing is decided, even
    where the likeliest is near. REFUTED: a bound from the paper's own numbers excludes the printed one.
    """

    OK = "ok"
    OK_AT_DEFAULT = "ok at default"
    IN_RANGE = "in range"
    UNDETERMINED = "undetermined"
    REFUTED = "refuted"
    OFF = "OFF"
    MISSING = "MISSING"


FITTING = (Verdict.OK, Verdict.OK_AT_DEFAULT, Verdict.IN_RANGE)
DETERMINED = (*FITTING, Verdict.OFF, Verdict.MISSING)  # rows that the paper determines

FAILING = (Verdict.OFF, Verdict.MISSING)

_WORST_FIRST = (
    Verdict.MISSING,
    Verdict.OFF,
    Verdict.UNDETERMINED,
    Verdict.REFUTED,
    Verdict.IN_RANGE,
    Verdict.OK_AT_DEFAULT,
    Verdict.OK,
)


class About(StrEnum):
    """The subject of a claim; tables count them apart."""

    PAPER = "the paper"
    METHODS = "our methods"
    BOOKKEEPING = "bookkeeping"


@dataclass(frozen=True, slots=True)
class PaperNumber:
    """A printed number. `rel_tol` is fixed before ours is known, and never widened to pass."""

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
        """Whether the value is within the tolerance, with a slack of 1e-9 for rounding."""
        return abs(ours / self.value - 1) <= self.rel_tol + 1e-9

    @property
    def kind(self) -> MetricKind:
        """The kind by the first word of the key; ValueError for an unknown one."""
        word = self.key.split("/")[0]
        if word not in EVIDENCE:
            raise ValueError(f"{self.key}: a key begins with {', '.join(EVIDENCE)}, got {word!r}")
        return EVIDENCE[word][0]


@dataclass(frozen=True, slots=True)
class Claim:
    """A qualitative statement, such as who wins or where the crossover lies, true or false.

    Args:
        text: the statement.
        holds: its truth.
        about: its subject.
        cause: why it fails, if known. A script may give it before it knows the truth: `outcome_of` drops
            that of a claim that holds.
    """

    text: str
    holds: bool
    about: About = About.PAPER
    cause: str = ""


@dataclass(frozen=True, slots=True)
class Unstated:
    """A quantity the paper leaves open, and the range of our value over its plausible settings.

    Args:
        what: the quantity that the paper does not state.
        low, high: our least and greatest value.
        low_at, high_at: the settings that give them, each a plausible choice. A range without them
            excuses nothing.
    """

    what: str
    low: float
    high: float
    low_at: str = ""
    high_at: str = ""

    def __post_init__(self) -> None:
        if not self.what:
            raise ValueError("an underspecified number must name what the paper does not state")
        if not self.low <= self.high:
            raise ValueError(f"{self.what}: want a range with low <= high, got {self.low} .. {self.high}")

    @classmethod
    def over(cls, what: str, settings: Mapping[str, float]) -> "Unstated":
        """Make the range over named settings."""
        low_at, high_at = min(settings, key=settings.__getitem__), max(settings, key=settings.__getitem__)
        return cls(what, settings[low_at], settings[high_at], low_at, high_at)

    @property
    def is_named(self) -> bool:
        return bool(self.low_at and self.high_at)

    @property
    def is_wide(self) -> bool:
        """Whether the range is too wide to decide anything."""
        return self.low != self.high and (self.low <= 0 or self.high > MOST_IN_RANGE * self.low)

    def holds(self, number: PaperNumber) -> bool:
        """Whether some setting gives the printed number."""
        inside = self.low <= number.value <= self.high
        return inside or number.near(self.low) or number.near(self.high)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """Limits of a printed number, computed by the script from other numbers of the paper.

    Args:
        what: their derivation.
        low, high: None for an open end. Must already allow for the rounding of printed numbers.
    """

    what: str
    low: float | None = None
    high: float | None = None

    def excludes(self, value: float) -> bool:
        return (self.low is not None and value < self.low) or (self.high is not None and value > self.high)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomeRow:
    """One printed number, ours, and the verdict.

    Args:
        number: the printed one.
        ours: None where nothing was computed.
        unstated: the range over what the paper leaves open.
        bound: limits that the paper's own numbers give.
        cause: why ours is off, if known.
    """

    number: PaperNumber
    ours: float | None
    unstated: Unstated | None = None
    bound: Bound | None = None
    cause: str = ""

    @property
    def ratio(self) -> float | None:
        return None if self.ours is None else self.ours / self.number.value

    @property
    def verdict(self) -> Verdict:
        """Verdict on ours and its range; depends only on what the result file keeps of the row."""
        if self.ours is None:
            return Verdict.MISSING
        if self.bound is not None and self.bound.excludes(self.number.value):
            return Verdict.REFUTED
        near, unstated = self.number.near(self.ours), self.unstated
        if unstated is None:
            return Verdict.OK if near else Verdict.OFF
        if not near and not (unstated.is_named and unstated.holds(self.number)):
            return Verdict.OFF
        if unstated.is_wide:
            return Verdict.UNDETERMINED
        return Verdict.OK_AT_DEFAULT if near else Verdict.IN_RANGE


@dataclass(slots=True)
class Evidence:
    """The evidence of one kind: numbers of the paper, values of ours, claims, notes, drawings.

    Args:
        ours: every computed value, including those without a number in the paper.
        unstated: ranges over what the paper leaves open.
        bounds: limits from the paper's own numbers, by key.
        causes: why rows are off and claims fail, by a row's key, a claim's text, or a pattern of either such
            as `modelled/*/iteration` or `LLM-?: cutting rows *`. The first that matches counts.
        plan_hashes, seeds: what the values depend on besides the code.
        figures: drawings by file name.
        about: the subject of claims that name none.
    """

    paper: list[PaperNumber] = field(default_factory=list)
    ours: dict[str, float] = field(default_factory=dict)
    unstated: dict[str, Unstated] = field(default_factory=dict)
    bounds: dict[str, Bound] = field(default_factory=dict)
    causes: dict[str, str] = field(default_factory=dict)
    claims: list[Claim] = field(default_factory=list)
    about: About = About.PAPER
    notes: list[str] = field(default_factory=list)
    plan_hashes: list[str] = field(default_factory=list)
    seeds: tuple[int, ...] = ()
    figures: dict[str, Grid] = field(default_factory=dict)

    def add(self, number: PaperNumber, ours: float, unstated: Unstated | None = None) -> None:
        """Add a row to the report."""
        self.paper.append(number)
        self.ours[number.key] = ours
        if unstated is not None:
            self.unstated[number.key] = unstated

    def add_range(self, number: PaperNumber, ours: Mapping[str, float] | Sequence[float], what: str) -> None:
        """Add a row that depends on `what`, which the paper leaves open; the likeliest value comes first.

        Args:
            number: the printed one.
            ours: values by setting name; without names the range excuses nothing.
            what: the quantity left open.
        """
        if isinstance(ours, Mapping):
            self.add(number, next(iter(ours.values())), Unstated.over(what, ours))
        else:
            self.add(number, ours[0], Unstated(what, min(ours), max(ours)))

    def claim(self, text: str, holds: bool, about: About | None = None, cause: str = "") -> None:  # noqa: FBT001  (its truth)
        """Add a claim to the report; `cause` says why it fails, where it does."""
        self.claims.append(Claim(text, holds, about or self.about, cause))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A finished script: its evidence row by row.

    `profile` names the hardware that was priced. `idle_causes` are patterns whose cause explains nothing:
    none of their rows is off and none of their claims fails, or an earlier pattern matches them all.
    """

    script: str
    rows: tuple[OutcomeRow, ...]
    claims: tuple[Claim, ...]
    idle_causes: tuple[str, ...]
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
        """The worst verdict in it; a claim that fails is OFF."""
        return worst([row.verdict for row in self.rows], [claim.holds for claim in self.claims])

    @property
    def exit_status(self) -> int:
        return 1 if self.verdict in FAILING else 0


def worst(rows: Iterable[Verdict], claims: Iterable[bool]) -> Verdict:
    """The worst verdict of rows and claims; OK where there is neither."""
    verdicts = {*rows, *(Verdict.OK if holds else Verdict.OFF for holds in claims), Verdict.OK}
    return next(verdict for verdict in _WORST_FIRST if verdict in verdicts)


def outcome_of(script: str, parts: Iterable[Evidence], *, profile: str | None = None) -> Outcome:
    """Compare all evidence of a script with the paper.

    Raises:
        ValueError: a key is printed twice, or a range or bound has a key that the paper does not print.
    """
    parts = tuple(parts)
    numbers = [number for part in parts for number in part.paper]
    ours = {key: value for part in parts for key, value in part.ours.items()}
    unstated = {key: value for part in parts for key, value in part.unstated.items()}
    bounds = {key: value for part in parts for key, value in part.bounds.items()}
    causes = {pattern: cause for part in parts for pattern, cause in part.causes.items()}
    twice = [key for key, count in Counter(number.key for number in numbers).items() if count > 1]
    unknown = sorted({*unstated, *bounds} - {number.key for number in numbers})
    if twice or unknown:
        raise ValueError(
            f"{script}: keys must be unique and known, twice: {twice}, no number of the paper: {unknown}"
        )
    rows = tuple(
        OutcomeRow(
            number=number,
            ours=ours.get(number.key),
            unstated=unstated.get(number.key),
            bound=bounds.get(number.key),
            cause=_cause(number.key, causes),
        )
        for number in numbers
    )
    stated = [claim for part in parts for claim in part.claims]
    own = {escape(claim.text): claim.cause for claim in stated if claim.cause}
    failing = {row.number.key for row in rows if row.verdict is Verdict.OFF}
    failing |= {claim.text for claim in stated if not claim.holds}
    explaining = {_pattern(name, own | causes) for name in failing}
    return Outcome(
        script=script,
        rows=rows,
        claims=tuple(
            replace(claim, cause="" if claim.holds else _cause(claim.text, own | causes)) for claim in stated
        ),
        idle_causes=tuple(pattern for pattern in causes if pattern not in explaining),
        ours=ours,
        notes=tuple(note for part in parts for note in part.notes),
        plan_hashes=tuple(dict.fromkeys(each for part in parts for each in part.plan_hashes)),
        profile=profile,
        seeds=tuple(seed for part in parts for seed in part.seeds),
        figures={name: grid for part in parts for name, grid in part.figures.items()},
    )


def _cause(name: str, causes: Mapping[str, str]) -> str:
    """The cause of a row's key or a claim's text; empty where none is known."""
    return causes.get(_pattern(name, causes), "")


def _pattern(name: str, causes: Mapping[str, str]) -> str:
    """The first pattern that matches; empty where none does."""
    return next((pattern for pattern in causes if fnmatchcase(name, pattern)), "")
