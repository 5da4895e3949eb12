"""An outcome as the text that a command prints and as the file that it leaves in `results/`."""

import json
import os
import platform
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from experiments.harness.outcome import EVIDENCE, Outcome, Row, Verdict

FOLDER = Path(__file__).parents[1]
RESULTS = FOLDER / "results"
_ELSEWHERE: ContextVar[Path | None] = ContextVar("results", default=None)


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
        "plan_hashes": list(outcome.plan_hashes),
        "profile": outcome.profile,
        "seeds": list(outcome.seeds),
        "ours": {key: _rounded(value) for key, value in outcome.ours.items()},
        "rows": [_row_record(row) for row in outcome.rows],
        "claims": [{"text": claim.text, "holds": claim.holds} for claim in outcome.claims],
        "notes": list(outcome.notes),
    }


def results_folder() -> Path:
    """Where result files are written: the repository's, or the one of `results_in`."""
    return _ELSEWHERE.get() or RESULTS


@contextmanager
def results_in(folder: Path) -> Iterator[None]:
    """Inside, result files are written there; what is read stays the repository's."""
    token = _ELSEWHERE.set(folder)
    try:
        yield
    finally:
        _ELSEWHERE.reset(token)


def write(outcome: Outcome) -> Path:
    """Write the result file; plots and the README's table read only that."""
    folder = results_folder()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{outcome.script.replace('/', '_')}.json"
    path.write_text(json.dumps(as_record(outcome), indent=1) + "\n")
    return path


def commit() -> str | None:
    """The commit the code is at, with `-dirty` where it differs; None outside a checkout.

    Results that a run has just written are no code.
    """
    head = _git("rev-parse", "--short=12", "HEAD")
    if head is None:
        return None
    kept_out = f":(exclude){RESULTS.relative_to(RESULTS.parents[1])}"
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", kept_out)
    return f"{head}-dirty" if changed else head


def _git(*arguments: str) -> str | None:
    done = subprocess.run(
        ["git", *arguments], cwd=RESULTS.parents[1], capture_output=True, text=True, check=False
    )
    return None if done.returncode else done.stdout.strip()


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
