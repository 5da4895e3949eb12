"""One page for each paper: drawings of its figures, its rows and claims, what does not hold and why."""

import ast
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from docs.generate.markdown import code, one_line, page, table
from docs.generate.results import RESULTS, ROOT, judged, made
from experiments.harness.outcome import Verdict
from experiments.harness.record import NOT_KNOWN, bound_text, range_text, row_of
from experiments.harness.tally import by_paper, counts

Record = Mapping[str, Any]

PAPERS: Mapping[str, str] = {
    "cornstarch_icml": 'I. Jang et al., "Efficient Distributed MLLM Training with Cornstarch", ICML',
    "cornstarch_v1": 'I. Jang et al., "Cornstarch: Distributed Multimodal Training Must Be '
    'Multimodality-Aware", arXiv v1',
    "disttrain": 'Z. Zhang et al., "DistTrain: Addressing Model and Data Heterogeneity with Disaggregated '
    'Training for Multimodal Large Language Models"',
    "entrain": 'I. Jang, "Efficient Multimodal Model Training at Scale", dissertation, chapter 4 (Entrain)',
    "mimo": 'Y. Karnati et al., "Heterogeneous Parallelism for Multimodal Large Language Model Training" '
    "(Megatron)",
    "oobleck": 'I. Jang, "Efficient Multimodal Model Training at Scale", dissertation, chapter 2 (Oobleck)',
}
TITLES: Mapping[str, str] = {
    "cornstarch_icml": "Cornstarch (ICML)",
    "cornstarch_v1": "Cornstarch (arXiv v1)",
    "disttrain": "DistTrain",
    "entrain": "Entrain",
    "mimo": "Heterogeneous parallelism in Megatron",
    "oobleck": "Oobleck",
}
PLOTS = RESULTS / "plots"
PART = re.compile(r"^(\w+): +", re.MULTILINE)


def pages() -> dict[str, Callable[[], str]]:
    """Makers of the pages by their paths under `docs/`."""
    return {f"papers/{paper.replace('_', '-')}.md": partial(paper_page, paper) for paper in PAPERS}


def paper_page(paper: str) -> str:
    """The page of the paper whose scripts are in `experiments/<paper>/`."""
    records = by_paper(judged())[paper]
    return page(
        TITLES[paper],
        f"{PAPERS[paper]}. {code(f'workbench reproduce {paper}')} reruns the scripts, "
        f"{code('python -m docs.generate')} makes this page from their results. "
        "[Verdicts and kinds of evidence](../guides/reproduce-papers.md) are defined in the guide.",
        "## Summary",
        *_in_short(counts(records)),
        "## Deviations and their causes",
        *_failures(records),
        *(block for record in records for block in _script(record)),
    )


def _in_short(found: Mapping[str, Any]) -> Iterator[str]:
    open_rows, refuted = (found["rows"][verdict] for verdict in (Verdict.UNDETERMINED, Verdict.REFUTED))
    yield (
        f"{found['determined_ok']} of the {found['determined']} numbers that the paper determines are within "
        "tolerance."
        + (f" Undetermined, as the paper leaves settings open: {open_rows}." if open_rows else "")
        + (f" Refuted by the paper's other numbers: {refuted}." if refuted else "")
    )
    verdicts = [verdict for verdict in Verdict if found["rows"][verdict]]
    if verdicts:
        yield table(
            ("evidence", *verdicts),
            ((kind, *(rows.get(v, 0) for v in verdicts)) for kind, rows in found["by_evidence"].items()),
        )
    yield table(
        ("claims about", "hold", "fail"), ((a, c["hold"], c["fail"]) for a, c in found["claims"].items())
    )


def _failures(records: Sequence[Record]) -> Iterator[str]:
    reasons: dict[tuple[str, str], list[str]] = {}
    for record in records:
        for row in record["rows"]:
            reason = _reason(row)
            if reason:
                name = f"{code(record['script'].split('/')[1])} {row['key']}"
                reasons.setdefault((row["verdict"], reason), []).append(name)
    if reasons:
        yield table(
            ("verdict", "cause", "rows", "example"),
            ((verdict, why, len(rows), rows[0]) for (verdict, why), rows in sorted(reasons.items())),
        )
    failed: dict[str, list[str]] = {}
    for record in records:
        for claim in record["claims"]:
            if not claim["holds"]:
                name = code(record["script"].split("/")[1])
                line = f"    - {name} ({claim['about']}): {_sentence(claim['text'])}"
                failed.setdefault(claim["cause"] or NOT_KNOWN, []).append(line)
    if failed:
        yield "Claims that do not hold, by cause:\n\n" + "\n".join(
            line for cause, lines in failed.items() for line in (f"- {cause}:", *lines)
        )


def _reason(row: Record) -> str:
    """Why a row is OFF, refuted or undetermined; empty for others."""
    judged_row = row_of(row)
    if row["verdict"] == Verdict.OFF:
        return row["cause"] or NOT_KNOWN
    if row["verdict"] == Verdict.REFUTED and judged_row.bound is not None:
        return judged_row.bound.what
    if row["verdict"] == Verdict.UNDETERMINED and judged_row.unstated is not None:
        return f"unstated: {judged_row.unstated.what}"
    return ""


def _script(record: Record) -> Iterator[str]:
    about = ast.get_docstring(ast.parse((ROOT / "experiments" / f"{record['script']}.py").read_text())) or ""
    name = record["script"].replace("/", "_")
    yield f"## {_heading(record)}: {one_line(about.splitlines()[0]).rstrip('.')}"
    yield f"{code(record['command'])}, {made(record)}: {record['verdict']}."
    parts = PART.split(about)
    for title, text in zip(parts[1::2], parts[2::2], strict=True):
        if title in ("Differs", "Fitted", "Beside"):
            yield f"{title}: {one_line(text.replace('|', '&#124;'))}"
    for plot in sorted(PLOTS.glob(f"{name}.png")):
        yield f'<img src="../../{plot.relative_to(ROOT)}" alt="{name}: our numbers and the paper\'s">'
    held = [
        f"- holds ({claim['about']}): {_sentence(claim['text'])}"
        for claim in record["claims"]
        if claim["holds"]
    ]
    if held:
        yield "\n".join(held)
    if record["rows"]:
        yield table(("row", "paper", "ours", "range", "tolerance", "verdict"), map(_row, record["rows"]))


def _heading(record: Record) -> str:
    return code(record["script"].split("/")[1])


def _row(row: Record) -> tuple[object, ...]:
    found = row_of(row)
    over = "" if found.unstated is None else range_text(found.unstated)
    if row["verdict"] == Verdict.REFUTED and found.bound is not None:
        over = bound_text(found.bound)
    return (
        row["key"],
        f"{row['paper']:.4g} {row['unit']}",
        "-" if row["ours"] is None else f"{row['ours']:.4g}",
        over,
        f"{100 * row['rel_tol']:.2g} %",
        row["verdict"],
    )


def _sentence(text: str) -> str:
    """A claim as a report has it, without the sign that its verdict follows."""
    return one_line(text).rstrip(",;: ")
