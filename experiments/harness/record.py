"""An outcome as the text that a command prints and as the file that it writes to `results/`."""

import json
import os
import platform
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from experiments.harness.outcome import (
    EVIDENCE,
    About,
    Bound,
    Outcome,
    OutcomeRow,
    PaperNumber,
    Unstated,
    Verdict,
    worst,
)
from experiments.harness.reads import modules_of, reads_of

FOLDER = Path(__file__).parents[1]
RESULTS = FOLDER / "results"
NOT_KNOWN = "not known"  # in place of a cause
_ELSEWHERE: ContextVar[Path | None] = ContextVar("results", default=None)


def table(outcome: Outcome) -> str:
    """Format the comparison: one block per kind of evidence, then claims, notes and the verdict."""
    return "\n".join(_lines(outcome))


def as_record(outcome: Outcome) -> dict[str, Any]:
    """Return the outcome as the JSON object that `results/` stores."""
    return {
        "script": outcome.script,
        "verdict": outcome.verdict,
        "command": f"python -m experiments.{outcome.script.replace('/', '.')}",
        "commit": commit(modules_of(outcome.script)),
        "date": datetime.now(UTC).date().isoformat(),
        "device": f"{platform.machine()} CPU, {os.cpu_count()} cores (simulated, no accelerator)",
        "reads": reads_of(outcome.script),
        "plan_hashes": list(outcome.plan_hashes),
        "profile": outcome.profile,
        "seeds": list(outcome.seeds),
        "ours": {key: _rounded(value) for key, value in outcome.ours.items()},
        "rows": [_row_record(row) for row in outcome.rows],
        "claims": [
            {"text": claim.text, "holds": claim.holds, "about": claim.about, "cause": claim.cause}
            for claim in outcome.claims
        ],
        "idle_causes": list(outcome.idle_causes),
        "notes": list(outcome.notes),
    }


def results_folder() -> Path:
    """Folder of result files: the repository's, or the one of `results_in`."""
    return _ELSEWHERE.get() or RESULTS


@contextmanager
def results_in(folder: Path) -> Iterator[None]:
    """Redirect written result files within the block; reads stay with the repository's."""
    token = _ELSEWHERE.set(folder)
    try:
        yield
    finally:
        _ELSEWHERE.reset(token)


def write(outcome: Outcome) -> Path:
    """Write the result file, the only input of plots and the README's table."""
    folder = results_folder()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{outcome.script.replace('/', '_')}.json"
    path.write_text(json.dumps(as_record(outcome), indent=1) + "\n")
    return path


def stored_records() -> list[dict[str, Any]]:
    """Results of scripts that compare numbers or claims of a paper, judged by today's rules.

    In order of file name; other files of the folder are skipped.
    """
    return list(map(judged_again, of_scripts(path.read_text() for path in sorted(RESULTS.glob("*.json")))))


def of_scripts(texts: Iterable[str]) -> list[dict[str, Any]]:
    """Parse the JSON texts, keeping those that are results of scripts."""
    required = {"script", "verdict", "rows", "claims"}
    documents = map(json.loads, texts)
    return [document for document in documents if isinstance(document, dict) and required <= document.keys()]


def judged_again(record: Mapping[str, Any]) -> dict[str, Any]:
    """A result with the verdicts of today's rules, computed only from what it stores."""
    rows = [row_of(stored_row) for stored_row in record["rows"]]
    claims = [{"about": About.PAPER.value, "cause": ""} | claim for claim in record["claims"]]
    return {
        **record,
        "verdict": worst([row.verdict for row in rows], [claim["holds"] for claim in claims]),
        "rows": [_row_record(row) for row in rows],
        "claims": claims,
        "idle_causes": record.get("idle_causes", []),
    }


def commit(paths: Iterable[Path] = ()) -> str | None:
    """The commit of the code, with `-dirty` where files differ from it; None outside a checkout.

    Results that a run has just written do not count as code.

    Args:
        paths: files to compare; all by default.
    """
    head = _git("rev-parse", "--short=12", "HEAD")
    if head is None:
        return None
    return f"{head}-dirty" if uncommitted(paths) else head


def uncommitted(paths: Iterable[Path] = ()) -> list[str]:
    """Files, of these or of all, that differ from the commit; none outside a checkout."""
    root = RESULTS.parents[1]
    kept_out = f":(exclude){RESULTS.relative_to(root)}"
    only = [str(path.relative_to(root)) for path in paths]
    changed = _git(
        "status", "--porcelain", "--untracked-files=all", "--no-renames", "--", *(only or "."), kept_out
    )
    return [line[3:] for line in (changed or "").splitlines()]


def _git(*arguments: str) -> str | None:
    done = subprocess.run(
        ["git", *arguments], cwd=RESULTS.parents[1], capture_output=True, text=True, check=False
    )
    return None if done.returncode else done.stdout.rstrip()


def _lines(outcome: Outcome) -> Iterator[str]:
    yield outcome.script
    kinds = dict.fromkeys(row.number.key.split("/")[0] for row in outcome.rows)
    width = max((len(row.number.key) for row in outcome.rows), default=6)
    for kind in kinds:
        yield f"[{kind}] {': '.join(EVIDENCE[kind])}"
        yield f"{'metric':<{width}}  {'paper':>9} {'ours':>9} {'ratio':>6}  allowed  verdict"
        for row in outcome.rows:
            if row.number.key.split("/")[0] == kind:
                yield _row_line(row, width)
    for claim in outcome.claims:
        yield f"claim: {claim.text} {'holds' if claim.holds else f'FAILS; cause: {claim.cause or NOT_KNOWN}'}"
    for pattern in outcome.idle_causes:
        yield f"idle cause: nothing of {pattern} is off or fails"
    for note in outcome.notes:
        yield f"note: {note}"
    counts = [f"{outcome.count(v)} {v}" for v in Verdict if outcome.count(v)]
    for what, holds in (("hold", True), ("fail", False)):
        if number := sum(claim.holds is holds for claim in outcome.claims):
            counts.append(f"{number} claims {what}")
    yield f"{outcome.script}: {outcome.verdict} ({', '.join(counts) or 'nothing compared'})"


def _row_line(row: OutcomeRow, width: int) -> str:
    number = row.number
    ours = "-" if row.ours is None else f"{row.ours:.4g}"
    ratio = "-" if row.ratio is None else f"{row.ratio:.2f}"
    allowed = f"+-{100 * number.rel_tol:.2g}%"
    text = f"{number.key:<{width}}  {number.value:>9.4g} {ours:>9} {ratio:>6}  {allowed:<7}  "
    text += row.verdict
    if row.verdict is not Verdict.OK:
        text += f" ({number.where}{', read off a plot' if number.read_off_plot else ''})"
    if row.unstated is not None:
        text += f"; unstated: {row.unstated.what}; ours {range_text(row.unstated)}"
    if row.verdict is Verdict.REFUTED and row.bound is not None:
        text += f"; {bound_text(row.bound)}"
    if row.verdict is Verdict.OFF:
        text += f"; cause: {row.cause or NOT_KNOWN}"
    return text


def range_text(unstated: Unstated) -> str:
    """Format both ends with their settings."""
    low, high = f"{unstated.low:.4g}", f"{unstated.high:.4g}"
    if not unstated.is_named:
        return f"{low} .. {high}"
    return f"{low} ({unstated.low_at}) .. {high} ({unstated.high_at})"


def bound_text(bound: Bound) -> str:
    """Format the limits and their origin."""
    ends = [f"at least {bound.low:.4g}"] if bound.low is not None else []
    ends += [f"at most {bound.high:.4g}"] if bound.high is not None else []
    return f"by the paper's own numbers {', '.join(ends)}: {bound.what}"


def _row_record(row: OutcomeRow) -> dict[str, Any]:
    number, unstated, bound = row.number, row.unstated, row.bound
    return {
        "key": number.key,
        "evidence": number.kind,
        "paper": number.value,
        "unit": number.unit,
        "where": number.where,
        "read_off_plot": number.read_off_plot,
        "ours": None if row.ours is None else _rounded(row.ours),
        "ratio": None if row.ratio is None else _rounded(row.ratio),
        "rel_tol": number.rel_tol,
        "verdict": row.verdict,
        "unstated": None if unstated is None else _rounded_fields(asdict(unstated)),
        "bound": None if bound is None else _rounded_fields(asdict(bound)),
        "cause": row.cause,
    }


def row_of(record: Mapping[str, Any]) -> OutcomeRow:
    """Parse a row of a result file to judge it again; older files lack some keys."""
    unstated, bound = record["unstated"], record.get("bound")
    return OutcomeRow(
        number=PaperNumber(
            record["key"],
            record["paper"],
            record["unit"],
            record["where"],
            record["rel_tol"],
            read_off_plot=record["read_off_plot"],
        ),
        ours=record["ours"],
        unstated=None if unstated is None else Unstated(**unstated),
        bound=None if bound is None else Bound(**bound),
        cause=record.get("cause", ""),
    )


def _rounded_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _rounded(value) if isinstance(value, float) else value for name, value in fields.items()}


def _rounded(value: float) -> float:
    """Round to six digits: enough to compare, few enough to read in a diff."""
    return float(f"{value:.6g}")
