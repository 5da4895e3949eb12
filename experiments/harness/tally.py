"""Counts over result files: rows by evidence and verdict, claims by subject, stale results; and changes.

Changes are those of the papers' rows since a commit: how many each paper has determined, and which no longer
are.
"""

import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from experiments.harness.outcome import DETERMINED, FAILING, FITTING, About, MetricKind, Verdict
from experiments.harness.reads import ROOT, changed_since
from experiments.harness.record import RESULTS, bound_text, of_scripts, range_text, row_of

Record = Mapping[str, Any]  # a result


def counts(records: Sequence[Record]) -> dict[str, Any]:
    """Summarise the results as one JSON object.

    `determined`: rows that the papers determine; `determined_ok`: those of them within the tolerance;
    `undetermined_near`: undetermined rows whose likeliest setting is near nonetheless;
    `off_without_cause`: keys of rows that are OFF without a reason; `claims_without_cause`: texts of
    claims that fail without one; `idle_causes`: patterns whose cause explains nothing; `failing`:
    scripts with a row that is OFF or MISSING or a claim that fails; `stale`: scripts whose modules
    or data have changed since.
    """
    rows = [row for record in records for row in record["rows"]]
    verdicts = Counter(row["verdict"] for row in rows)
    return {
        "scripts": len(records),
        "rows": {verdict.value: verdicts[verdict] for verdict in Verdict},
        "by_evidence": by_evidence(rows),
        "determined": sum(verdicts[verdict] for verdict in DETERMINED),
        "determined_ok": sum(verdicts[verdict] for verdict in FITTING),
        "undetermined_near": sum(
            row["verdict"] == Verdict.UNDETERMINED and row_of(row).number.near(row["ours"]) for row in rows
        ),
        "off_without_cause": [
            f"{record['script']}: {row['key']}"
            for record in records
            for row in record["rows"]
            if row["verdict"] == Verdict.OFF and not row["cause"]
        ],
        "claims_without_cause": [
            f"{record['script']}: {claim['text']}"
            for record in records
            for claim in record["claims"]
            if not claim["holds"] and not claim["cause"]
        ],
        "idle_causes": [
            f"{record['script']}: {each}" for record in records for each in record["idle_causes"]
        ],
        "claims": by_subject(claim for record in records for claim in record["claims"]),
        "failing": sorted(record["script"] for record in records if record["verdict"] in FAILING),
        "stale": sorted(record["script"] for record in records if changed_since(record)),
    }


def counts_text(name: str, totals: Mapping[str, Any]) -> str:
    """Format the counts."""
    lines = [
        f"{name}: {totals['determined_ok']} of {totals['determined']} rows that the paper determines fit"
    ]
    for what, verdicts in totals["by_evidence"].items():
        lines.append(f"  {what}: {', '.join(f'{count} {v}' for v, count in verdicts.items()) or 'none'}")
    for about, of_subject in totals["claims"].items():
        lines.append(f"  claims about {about}: {of_subject['hold']} hold, {of_subject['fail']} fail")
    lines.append(
        f"  without a cause: {len(totals['off_without_cause'])} OFF, {len(totals['claims_without_cause'])} "
        f"claims; {len(totals['idle_causes'])} causes of nothing; {len(totals['stale'])} of "
        f"{totals['scripts']} results stale"
    )
    return "\n".join(lines)


def by_evidence(rows: Iterable[Record]) -> dict[str, dict[str, int]]:
    """Count rows by kind of evidence and verdict; verdicts without any are left out."""
    numbers = Counter((row["evidence"], row["verdict"]) for row in rows)
    return {
        kind.value: {v.value: numbers[kind, v] for v in Verdict if numbers[kind, v]} for kind in MetricKind
    }


def by_subject(claims: Iterable[Record]) -> dict[str, dict[str, int]]:
    """Count claims that hold and that fail, by subject."""
    numbers = Counter((claim["about"], bool(claim["holds"])) for claim in claims)
    return {about.value: {"hold": numbers[about, True], "fail": numbers[about, False]} for about in About}


def by_paper(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Group results by the folder of their scripts."""
    papers: dict[str, list[Record]] = {}
    for record in records:
        papers.setdefault(record["script"].split("/")[0], []).append(record)
    return papers


def summary_of(records: Sequence[Record]) -> dict[str, Any]:
    """Each script's verdict and counts; under `papers` those of each paper, under `all` the total."""
    return {
        **{record["script"]: _script_counts(record) for record in records},
        "papers": {paper: counts(results) for paper, results in by_paper(records).items()},
        "all": counts(records),
    }


def _script_counts(record: Record) -> dict[str, Any]:
    verdicts = Counter(row["verdict"] for row in record["rows"])
    num_holding = sum(bool(claim["holds"]) for claim in record["claims"])
    return {
        "verdict": record["verdict"],
        **{f"rows_{verdict.value.replace(' ', '_').lower()}": verdicts[verdict] for verdict in Verdict},
        "claims_hold": num_holding,
        "claims_fail": len(record["claims"]) - num_holding,
        "changed": changed_since(record),
    }


def changes(before: Sequence[Record], now: Sequence[Record]) -> dict[str, Any]:
    """By paper: determined and fitting rows before and now, and rows no longer determined.

    Args:
        before: results with their stored verdicts.
        now: results with today's verdicts.
    """
    old, new = _rows_by_paper(before), _rows_by_paper(now)
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
    """Results of scripts as of a commit; ValueError where git does not know it."""
    folder = RESULTS.relative_to(ROOT)
    listed = _git("ls-tree", "--name-only", commit, f"{folder}/").splitlines()
    return list(of_scripts(_git("show", f"{commit}:{name}") for name in listed if name.endswith(".json")))


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"git {' '.join(arguments)}: {done.stderr.strip().splitlines()[-1]}")
    return done.stdout


def _rows_by_paper(records: Sequence[Record]) -> dict[str, dict[str, Record]]:
    rows_by_paper: dict[str, dict[str, Record]] = {}
    for record in records:
        paper, _, name = record["script"].partition("/")
        rows_by_paper.setdefault(paper, {}).update({f"{name}: {row['key']}": row for row in record["rows"]})
    return rows_by_paper


def _count(rows: Mapping[str, Record], verdicts: Sequence[Verdict]) -> int:
    return sum(row["verdict"] in verdicts for row in rows.values())


def _why(row: Record) -> str:
    """The unstated quantity with both ends, or the bound."""
    outcome_row = row_of(row)
    if row["verdict"] == Verdict.REFUTED and outcome_row.bound is not None:
        return f"refuted, {bound_text(outcome_row.bound)}"
    return (
        ""
        if outcome_row.unstated is None
        else f"{outcome_row.unstated.what}: {range_text(outcome_row.unstated)}"
    )


def changes_text(paper: str, changed: Mapping[str, Any]) -> str:
    """Format a paper's counts, and a line for each row that is no longer determined."""
    head = (
        f"{paper}: determined {changed['determined_before']} -> {changed['determined']}, within tolerance "
        f"{changed['determined_ok_before']} -> {changed['determined_ok']}, {len(changed['left'])} rows left"
    )
    return "\n".join([head, *(f"  {key}: {why}" for key, why in changed["left"].items())])
