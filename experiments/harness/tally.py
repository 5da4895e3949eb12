"""Counts over result files: rows by evidence and verdict, claims by subject, what is stale; and since when.

What became of the papers' rows since a commit: how many each determines, and which left that set.
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
    """What the results amount to, as one JSON object.

    `determined`: rows that the papers determine, `determined_ok`: of them those within the tolerance;
    `undetermined_near`: undetermined rows whose likeliest setting is near all the same;
    `off_without_cause`: keys of rows that are OFF without a reason; `failing`: scripts with a
    row that is OFF or MISSING or a claim that fails; `stale`: scripts whose modules or data
    have changed since.
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
        "claims": by_subject(claim for record in records for claim in record["claims"]),
        "failing": sorted(record["script"] for record in records if record["verdict"] in FAILING),
        "stale": sorted(record["script"] for record in records if changed_since(record)),
    }


def counts_text(name: str, found: Mapping[str, Any]) -> str:
    """Counts in lines to read."""
    lines = [f"{name}: {found['determined_ok']} of {found['determined']} rows that the paper determines fit"]
    for what, verdicts in found["by_evidence"].items():
        lines.append(f"  {what}: {', '.join(f'{count} {v}' for v, count in verdicts.items()) or 'none'}")
    for about, held in found["claims"].items():
        lines.append(f"  claims about {about}: {held['hold']} hold, {held['fail']} fail")
    lines.append(
        f"  {len(found['off_without_cause'])} OFF without a cause, {len(found['stale'])} of "
        f"{found['scripts']} results stale"
    )
    return "\n".join(lines)


def by_evidence(rows: Iterable[Record]) -> dict[str, dict[str, int]]:
    """Rows of each kind of evidence by verdict; verdicts without any are left out."""
    found = Counter((row["evidence"], row["verdict"]) for row in rows)
    return {kind.value: {v.value: found[kind, v] for v in Verdict if found[kind, v]} for kind in MetricKind}


def by_subject(claims: Iterable[Record]) -> dict[str, dict[str, int]]:
    """Claims that hold and that fail, by what they are about."""
    found = Counter((claim["about"], bool(claim["holds"])) for claim in claims)
    return {about.value: {"hold": found[about, True], "fail": found[about, False]} for about in About}


def by_paper(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Results by the folder of their scripts."""
    papers: dict[str, list[Record]] = {}
    for record in records:
        papers.setdefault(record["script"].split("/")[0], []).append(record)
    return papers


def summary_of(records: Sequence[Record]) -> dict[str, Any]:
    """Each script's verdict and counts; under `papers` those of each paper, under `all` those of all."""
    return {
        **{record["script"]: _script_counts(record) for record in records},
        "papers": {paper: counts(found) for paper, found in by_paper(records).items()},
        "all": counts(records),
    }


def _script_counts(record: Record) -> dict[str, Any]:
    found = Counter(row["verdict"] for row in record["rows"])
    held = sum(bool(claim["holds"]) for claim in record["claims"])
    return {
        "verdict": record["verdict"],
        **{f"rows_{verdict.value.replace(' ', '_').lower()}": found[verdict] for verdict in Verdict},
        "claims_hold": held,
        "claims_fail": len(record["claims"]) - held,
        "changed": changed_since(record),
    }


def changes(before: Sequence[Record], now: Sequence[Record]) -> dict[str, Any]:
    """By paper: rows determined and within tolerance before and now, and those that are no longer determined.

    Args:
        before: results with the verdicts that they held then.
        now: results with today's.
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
    """Results of scripts as a commit has them; ValueError where git does not know it."""
    folder = RESULTS.relative_to(ROOT)
    listed = _git("ls-tree", "--name-only", commit, f"{folder}/").splitlines()
    return list(of_scripts(_git("show", f"{commit}:{name}") for name in listed if name.endswith(".json")))


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"git {' '.join(arguments)}: {done.stderr.strip().splitlines()[-1]}")
    return done.stdout


def _rows_by_paper(records: Sequence[Record]) -> dict[str, dict[str, Record]]:
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
