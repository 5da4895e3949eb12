"""Counts over result files: rows by evidence and verdict, claims by what they are about, what is stale."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from experiments.harness.outcome import DETERMINED, FAILING, FITTING, About, Kind, Verdict
from experiments.harness.reads import changed_since
from experiments.harness.record import row_of

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
    return {kind.value: {v.value: found[kind, v] for v in Verdict if found[kind, v]} for kind in Kind}


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
