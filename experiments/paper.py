"""A paper's numbers against ours: the table, its verdicts, and the file it leaves behind.

A script declares what the paper printed (`PaperNumber`, with the tolerance fixed before anything
is compared), computes its own values, and hands both to `judge`. Nothing is filled in from the
paper: a number without a value of ours is MISSING. Keys start with the kind of evidence, see
`EVIDENCE`.
"""

import argparse
import importlib
import json
import math
import os
import platform
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results"

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """What a result depends on besides the code."""

    plan_hashes: tuple[str, ...] = ()
    profile: str | None = None
    seeds: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A finished script. `ours` holds every value computed, also those the paper has no number for."""

    script: str
    rows: tuple[Row, ...]
    claims: tuple[Claim, ...]
    ours: Mapping[str, float]
    notes: tuple[str, ...]
    provenance: Provenance

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


def judge(
    script: str,
    paper: Sequence[PaperNumber],
    ours: Mapping[str, float],
    claims: Sequence[Claim] = (),
    *,
    underspecified: Mapping[str, Unstated] | None = None,
    notes: Sequence[str] = (),
    provenance: Provenance | None = None,
) -> Outcome:
    """Hold ours against the paper's.

    Raises:
        ValueError: a key is printed twice, or an `underspecified` key is none of the paper's.
    """
    unstated = underspecified or {}
    twice = [key for key, count in Counter(number.key for number in paper).items() if count > 1]
    unknown = sorted(set(unstated) - {number.key for number in paper})
    if twice or unknown:
        raise ValueError(
            f"{script}: keys must be unique and known, twice: {twice}, no number of the paper: {unknown}"
        )
    rows = tuple(
        Row(number=number, ours=ours.get(number.key), unstated=unstated.get(number.key)) for number in paper
    )
    return Outcome(
        script=script,
        rows=rows,
        claims=tuple(claims),
        ours=dict(ours),
        notes=tuple(notes),
        provenance=provenance or Provenance(),
    )


def table(outcome: Outcome) -> str:
    """The comparison as text: one block per kind of evidence, then claims, notes and the verdict."""
    return "\n".join(_lines(outcome))


def as_record(outcome: Outcome) -> dict[str, Any]:
    """The outcome as the JSON object that `results/` keeps."""
    return {
        "script": outcome.script,
        "verdict": outcome.verdict,
        "command": f"python -m experiments.{outcome.script.replace('/', '.')}",
        "commit": commit(),
        "date": datetime.now(UTC).date().isoformat(),
        "device": f"{platform.machine()} CPU, {os.cpu_count()} cores (simulated, no accelerator)",
        "plan_hashes": list(outcome.provenance.plan_hashes),
        "profile": outcome.provenance.profile,
        "seeds": list(outcome.provenance.seeds),
        "ours": {key: _rounded(value) for key, value in outcome.ours.items()},
        "rows": [_row_record(row) for row in outcome.rows],
        "claims": [{"text": claim.text, "holds": claim.holds} for claim in outcome.claims],
        "notes": list(outcome.notes),
    }


def report(outcome: Outcome) -> int:
    """Print the table, write `results/<paper>_<script>.json`; the exit status is 1 on OFF or MISSING."""
    print(table(outcome))
    write(outcome)
    return outcome.exit_status


def write(outcome: Outcome) -> Path:
    """Write the result file; plots and the README's table read only that."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{outcome.script.replace('/', '_')}.json"
    path.write_text(json.dumps(as_record(outcome), indent=1) + "\n")
    return path


def command(run: Callable[[], Outcome]) -> int:
    """What `main` of a script does: run, report, with `--json` one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=sys.modules[run.__module__].__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args()
    outcome = run()
    status = report(outcome)
    if arguments.json:
        print(json.dumps(as_record(outcome)))
    return status


def scripts() -> tuple[str, ...]:
    """Scripts found on disk, as `<paper>/<script>`: modules of a sub-package that define `run()`."""
    found = FOLDER.glob("*/*.py")
    return tuple(
        sorted(
            f"{path.parent.name}/{path.stem}"
            for path in found
            if "\ndef run() -> Outcome:" in path.read_text()
        )
    )


def reproduce(
    names: Sequence[str] = (), *, show: Callable[[str], None] | None = None
) -> dict[str, dict[str, str | int]]:
    """Run scripts, write their results, and return the counts of their verdicts.

    Args:
        names: `<paper>/<script>` or `<paper>` each; empty for all.
        show: called with the table of each script as it ends.

    Raises:
        ValueError: no script has that name.
    """
    known = scripts()
    for name in names:
        if not any(script == name or script.startswith(f"{name}/") for script in known):
            raise ValueError(f"no script {name!r}: the scripts are {', '.join(known)}")
    chosen = [s for s in known if not names or s in names or s.split("/")[0] in names]
    summary: dict[str, dict[str, str | int]] = {}
    for script in chosen:
        module = importlib.import_module(f"experiments.{script.replace('/', '.')}")
        outcome: Outcome = module.run()
        write(outcome)
        if show is not None:
            show(table(outcome))
        summary[script] = {
            "verdict": outcome.verdict.value,
            "rows_ok": outcome.count(Verdict.OK),
            "rows_off": outcome.count(Verdict.OFF),
            "rows_underspecified": outcome.count(Verdict.UNDERSPECIFIED),
            "rows_missing": outcome.count(Verdict.MISSING),
            "claims_hold": sum(claim.holds for claim in outcome.claims),
            "claims_fail": sum(not claim.holds for claim in outcome.claims),
        }
    return summary


def _lines(outcome: Outcome) -> Iterator[str]:
    yield outcome.script
    kinds = dict.fromkeys(row.number.key.split("/")[0] for row in outcome.rows)
    width = max((len(row.number.key) for row in outcome.rows), default=6)
    for kind in kinds:
        yield f"[{kind}] {EVIDENCE.get(kind, kind)}"
        yield f"{'metric':<{width}}  {'paper':>9} {'ours':>9} {'ratio':>6}  allowed  verdict"
        for row in outcome.rows:
            if row.number.key.split("/")[0] == kind:
                yield _row_line(row, width)
    for claim in outcome.claims:
        yield f"claim: {claim.text} {'holds' if claim.holds else 'FAILS'}"
    for note in outcome.notes:
        yield f"note: {note}"
    counts = ", ".join(f"{outcome.count(v)} {v}" for v in Verdict if outcome.count(v))
    yield f"{outcome.script}: {outcome.verdict} ({counts})"


def _row_line(row: Row, width: int) -> str:
    number = row.number
    ours = "-" if row.ours is None else f"{row.ours:.4g}"
    ratio = "-" if row.ratio is None else f"{row.ratio:.2f}"
    allowed = f"+-{100 * number.rel_tol:.2g}%"
    text = f"{number.key:<{width}}  {number.value:>9.4g} {ours:>9} {ratio:>6}  {allowed:<7}  "
    text += row.verdict
    if row.verdict is not Verdict.OK:
        text += f" ({number.where}{', read off a plot' if number.read_off_plot else ''})"
    if row.unstated is not None:
        text += f"; unstated: {row.unstated.what}; ours {row.unstated.low:.4g} .. {row.unstated.high:.4g}"
    return text


def _row_record(row: Row) -> dict[str, Any]:
    number, unstated = row.number, row.unstated
    return {
        "key": number.key,
        "paper": number.value,
        "unit": number.unit,
        "where": number.where,
        "read_off_plot": number.read_off_plot,
        "ours": None if row.ours is None else _rounded(row.ours),
        "ratio": None if row.ratio is None else _rounded(row.ratio),
        "rel_tol": number.rel_tol,
        "verdict": row.verdict,
        "unstated": None
        if unstated is None
        else {"what": unstated.what, "low": _rounded(unstated.low), "high": _rounded(unstated.high)},
    }


def _rounded(value: float) -> float:
    """Six digits: enough to compare, few enough to read in a diff."""
    return float(f"{value:.6g}")


def commit() -> str | None:
    """The commit the code is at, with `-dirty` where it differs; None outside a checkout."""
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
        cwd=FOLDER,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or None
