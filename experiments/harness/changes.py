"""What became of the papers' rows since a commit: how many each paper determines, and which left that set."""

import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.harness.outcome import DETERMINED, FITTING, Verdict
from experiments.harness.reads import ROOT
from experiments.harness.record import RESULTS, bound_text, of_scripts, range_text, row_of

Record = Mapping[str, Any]


def changes(before: Sequence[Record], now: Sequence[Record]) -> dict[str, Any]:
    """By paper: rows determined and within tolerance before and now, and those that are no longer determined.

    Args:
        before: results with the verdicts that they held then.
        now: results with today's.
    """
    old, new = _by_paper(before), _by_paper(now)
    return {
        paper: {
            "determined_before": _count(old.get(paper, {}), DETERMINED),
            "determined_ok_before": _count(old.get(paper, {}), FITTING),
            "determined": _count(rows, DETERMINED),
            "determined_ok": _count(rows, FITTING),
            "left": {
                key: _why(row)
                for key, row in rows.items()
                if old.get(paper, {}).get(key, {"verdict": ""})["verdict"] in DETERMINED
                and row["verdict"] not in DETERMINED
            },
        }
        for paper, rows in new.items()
    }


def records_at(commit: str) -> list[Record]:
    """Results of scripts as a commit has them; ValueError where git does not know it."""
    folder = RESULTS.relative_to(ROOT)
    listed = _git("ls-tree", "--name-only", commit, f"{folder}/").splitlines()
    return list(of_scripts(_git("show", f"{commit}:{name}") for name in listed if name.endswith(".json")))


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"git {' '.join(arguments)}: {done.stderr.strip().splitlines()[-1]}")
    return done.stdout


def _by_paper(records: Sequence[Record]) -> dict[str, dict[str, Record]]:
    found: dict[str, dict[str, Record]] = {}
    for record in records:
        paper, _, name = record["script"].partition("/")
        found.setdefault(paper, {}).update({f"{name}: {row['key']}": row for row in record["rows"]})
    return found


def _count(rows: Mapping[str, Record], verdicts: Sequence[Verdict]) -> int:
    return sum(row["verdict"] in verdicts for row in rows.values())


def _why(row: Record) -> str:
    """The unstated quantity with both ends, or the bound."""
    found = row_of(row)
    if row["verdict"] == Verdict.REFUTED and found.bound is not None:
        return f"refuted, {bound_text(found.bound)}"
    return "" if found.unstated is None else f"{found.unstated.what}: {range_text(found.unstated)}"


def changes_text(paper: str, found: Mapping[str, Any]) -> str:
    """A paper's counts, and a line for each row that left."""
    head = (
        f"{paper}: determined {found['determined_before']} -> {found['determined']}, within tolerance "
        f"{found['determined_ok_before']} -> {found['determined_ok']}, {len(found['left'])} rows left"
    )
    return "\n".join([head, *(f"  {key}: {why}" for key, why in found["left"].items())])
