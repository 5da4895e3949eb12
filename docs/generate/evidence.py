"""The page of evidence: every figure out of a result file."""

from collections.abc import Iterator, Mapping
from typing import Any

from docs.generate.gpu_day import gpu_section
from docs.generate.hostile import hostile_section
from docs.generate.joint_search import joint_search_section
from docs.generate.markdown import code, one_line, page, table
from docs.generate.results import count, held, judged, made, percent, result
from docs.generate.summary import summary_table
from experiments.harness.outcome import FITTING, MetricKind, Verdict
from experiments.harness.tally import by_paper, counts

INTRO = """Every figure on this page is read out of `experiments/results/`; the scripts that wrote those
files are named beside them. A commit that ends in `-dirty` had changes that were not committed. What ran,
ran on two cores of a CPU, with gloo between the ranks, but for [One GPU](#one-gpu); `simulated` figures come
from the simulator alone. [Limits](limits.md) says what is not measured, [Benchmarks](benchmarks.md) has
figures of benches that leave no file."""

FIDELITY = """All are predicted, and the predictions written with the plans' hashes, before the first of
them runs. tau is Kendall's, over pairs of plans of a job; in brackets over pairs that runs can tell apart.
Regret is what the plan predicted fastest loses to the fastest."""

PAPERS = """`workbench reproduce all` reruns these and prints the paper's number beside ours. A row is `ok`
within a tolerance that was fixed before anything was compared, and `OFF` outside it. Where a paper leaves
settings open, ours is a range over named ones: `ok at default` means that the likeliest is within the
tolerance, `in range` that two settings at most a factor of two apart enclose the printed number,
`undetermined` that they lie further apart, so that nothing is decided. `refuted`: a bound out of the paper's
own numbers, which the script computes, excludes the printed one. A claim is who wins or where lines cross.
Nothing is filled in from a paper. Only rows by our own models are reproductions; the kinds of evidence are
counted apart."""


def evidence_page() -> str:
    """The page."""
    return page(
        "Evidence",
        INTRO,
        "## In short",
        summary_table(),
        "## Predictions held against runs",
        *_fidelity(),
        "## One GPU",
        *gpu_section(),
        "## Plans that must not run",
        *_mutants(),
        "## Nodes that die",
        *_chaos(),
        "## Hostile input, faults and long runs",
        *hostile_section(),
        "## Data from another process",
        *_preprocess(),
        "## Attention",
        *_attention(),
        "## Samples that differ",
        *_grouping(),
        "## Joint search",
        *joint_search_section(),
        "## Papers",
        PAPERS,
        *_papers(),
    )


_PART_NAMES = {
    "clean": "one rank to a core",
    "context": "ranks that share tokens (context parallelism)",
    "divided": "ranks that divide weights (tensor, sequence, expert parallelism, FSDP)",
    "crowded": "more ranks than cores",
    "emulated": "up to 8 ranks, emulated",
}


def _fidelity() -> Iterator[str]:
    suite = result("fidelity")
    memory = suite["memory"]
    yield f"{code(suite['command'])}, {made(suite)}, {suite['device']}: {suite['num_plans']} plans."
    yield FIDELITY
    headers = ("plans", "number", "mean abs. error", "mean error", "worst", "spread of runs", "tau", "regret")
    yield table(headers, (_part_row(name, part) for name, part in suite["parts"].items()))
    yield one_line(
        f"""Peak memory of {memory["num_ranks"]} ranks: {percent(memory["mean_abs_error"])} off in the mean,
        worst {percent(memory["worst_abs_error"])}; {memory["num_exceeded"]} ranks held more than
        predicted."""
    )
    goals = ((goal, "holds" if holds else "MISSED") for goal, holds in suite["goals"].items())
    yield table(("goal, set before", ""), goals)


def _part_row(name: str, part: dict[str, Any]) -> tuple[object, ...]:
    clear = part["clear_tau"]
    return (
        _PART_NAMES.get(name, name),
        part["num_plans"],
        percent(part["mean_abs_error"]),
        f"{100 * part['mean_error']:+.1f} %",
        percent(part["worst_abs_error"]),
        percent(part["spread"]),
        f"{part['kendall_tau']:.2f} ({'-' if clear is None else f'{clear:.2f}'})",
        percent(part["regret"]),
    )


def _mutants() -> Iterator[str]:
    found = result("fidelity_mutants")
    yield one_line(
        f"""{code("python -m experiments.fidelity.mutants --count 10000")}: one thing is changed in one of
        {found["num_plans"]} valid plans, and the check's answer is held against a judge of its own,
        which pushes numbers through the plan."""
    )
    yield table(("answer: meaning", "mutants"), found["by_verdict"].items())
    yield one_line(
        f"""`other` computes something else, `same` does not. The {found["rows_of_other_meaning"]} accepted
        ones with another meaning are edits of the lowered rows, which no file can hold and which are
        judged for deadlock alone. Of {found["num_accepted"]:,} accepted mutants
        {found["false_accepts"]} should have been refused; {found["false_rejects"]} were refused though
        they would compute the same. {found["accepted_run"]} accepted ones were run,
        {len(found["accepted_that_failed"])} failed; of {found["deadlocks_run"]} said to deadlock
        {len(found["deadlocks_that_ran"])} ran to its end, with another loss."""
    )


def _chaos() -> Iterator[str]:
    runs = [result("oobleck_chaos"), result("oobleck_chaos_sharded")]
    yield "Nodes are killed with SIGKILL while they train; an undisturbed run says what the losses must be."
    rows = [(code(key), *(shape.format(run["ours"][key]) for run in runs)) for key, shape in _CHAOS.items()]
    yield table(("", "whole weights on every node", "sharded parameters"), rows)
    yield "; ".join(f"{code(run['command'])}, {made(run)}" for run in runs) + "."
    saved = result("disttrain_checkpoints")
    claims = " ".join(claim["text"] for claim in saved["claims"]).rstrip(";")
    yield f"Checkpoints ({code(saved['command'])}, {made(saved)}): {claims}."


_CHAOS = {
    "kills": "{:.0f}",
    "recoveries": "{:.0f}",
    "recoveries_of_several_nodes": "{:.0f}",
    "joined": "{:.0f}",
    "steps": "{:.0f}",
    "worst_loss_difference": "{:.1e}",
    "recovery_p50_s": "{:.2f}",
    "recovery_p95_s": "{:.2f}",
    "planning_p50_s": "{:.3f}",
}


def _preprocess() -> Iterator[str]:
    found, chaos = result("bench_preprocess"), result("bench_preprocess")["chaos"]
    yield one_line(
        f"""{code("python -m experiments.bench.preprocess")}, {made(found)}, {found["device"]}. Milliseconds
        that a trainer waits for its batch; `starved`: the step is shorter than the decode."""
    )
    headers = (
        "images x pixels",
        "decodes itself, p50",
        "predicted",
        "p99",
        "is served, p50",
        "predicted",
        "p99",
    )
    keys = [
        (part, f"{kind}_ms_{quantile}")
        for kind in ("colocated", "disaggregated")
        for part, quantile in (("executed", "p50"), ("predicted", "p50"), ("executed", "p99"))
    ]
    cells = ((cell, *(f"{found[part][cell][key]:.1f}" for part, key in keys)) for cell in found["executed"])
    yield table(headers, cells)
    claims = ((text, "holds" if holds else "does not hold") for text, holds in found["claims"].items())
    yield table(("claim", ""), claims)
    yield one_line(
        f"""With {chaos["producers_killed"]} producers, {chaos["trainers_killed"]} trainers and
        {chaos["servers_killed"]} servers killed in {chaos["iterations"]:,} iterations, every one of
        {chaos["examples"]:,} examples was seen exactly once:
        {"yes" if chaos["exactly_once"] else "no"}."""
    )


def _attention() -> Iterator[str]:
    yield "Work of the busiest context-parallel rank over the mean (`python -m experiments.bench.attention`):"
    masks = result("bench_attention")["max_over_mean"]
    cases = [(mask, length) for mask, lengths in masks.items() for length in lengths]
    policies = list(masks[cases[0][0]][cases[0][1]])
    rows = [
        (code(policy), *(f"{masks[m][length][policy]:.3f}" for m, length in cases)) for policy in policies
    ]
    yield table(("policy", *(f"{mask} {length}" for mask, length in cases)), rows)
    compiled = result("bench_kernel_compile")
    yield one_line(
        f"""What the compiler makes of the kernels for Hopper (`python -m experiments.bench.kernel_compile`,
        {made(compiled)}, Triton {compiled["versions"]["triton"]}); [One GPU](#one-gpu) has their speed:"""
    )
    keys = [key for key in compiled if key.startswith(("forward_", "backward_"))]
    yield table(
        ("figure", "", "goal"), ((code(key), compiled[key], compiled["verdicts"][key]) for key in keys)
    )


_METHODS = {
    "1f1b": "random order, 1F1B",
    "disttrain": "DistTrain's reordering",
    "exchanges": "exchanges (ours)",
    "dip": "DIP",
    "entrain": "Entrain",
    "entrain-zb": "Entrain, zero-bubble",
}
_CORPORA = ("SynthChartNet", "LLaVA-150k", "ChartQA", "CocoQA")


def _grouping() -> Iterator[str]:
    found, executed = result("entrain_figure4_12"), result("entrain_executed")
    yield one_line(
        f"""{code(found["command"])}, {made(found)}, simulated: batches of 512 samples of four corpora,
        Llama 3.2 3B with a vision encoder, A40 profile. How many times as fast a step is as with
        another way to group samples."""
    )
    yield table(
        ("", *_CORPORA), (row for ours in ("entrain-graded", "entrain") for row in _ratios(found, ours))
    )
    yield one_line(
        f"""{code(executed["command"])}, {made(executed)}, {executed["device"]}: two ranks,
        {executed["rounds"]} rounds, predicted before; over random orders:"""
    )
    headers = ("", "predicted", "executed", "95 % interval")
    yield table(headers, (_executed_row(name, plan) for name, plan in executed["plans"].items()))


def _ratios(found: Mapping[str, Any], ours: str) -> Iterator[tuple[str, ...]]:
    for method, name in _METHODS.items():
        keys = [f"modelled/Llama3-3b/{corpus}/{ours}_over_{method}" for corpus in _CORPORA]
        if keys[0] in found["ours"]:
            yield f"{code(ours)} over {name}", *(f"{found['ours'][key]:.3f}" for key in keys)


def _executed_row(name: str, plan: Mapping[str, Any]) -> tuple[str, ...]:
    low, high = plan["interval_95"]
    speedups = plan["predicted_speedup"], plan["executed_speedup"]
    return name, *(f"{speedup:.3f}" for speedup in speedups), f"{low:.3f} .. {high:.3f}"


def _papers() -> Iterator[str]:
    records = judged()
    yield table(_COUNTED, (_counts_row(paper, counts(found)) for paper, found in by_paper(records).items()))
    yield "Rows by what they rest on, of all papers:"
    verdicts = [verdict for verdict in Verdict if verdict is not Verdict.MISSING]
    found = counts(records)
    yield table(
        ("evidence", *verdicts),
        ((kind, *(rows.get(v, 0) for v in verdicts)) for kind, rows in found["by_evidence"].items()),
    )
    yield "Claims by what they are about:"
    yield table(("about", "hold", "fail"), ((a, c["hold"], c["fail"]) for a, c in found["claims"].items()))
    yield table(("script", "verdict", *verdicts, "claims hold", "fail", "made"), map(_paper_row, records))


_COUNTED = (
    "paper",
    "rows it determines",
    "within tolerance",
    "of these by our models",
    "undetermined",
    "refuted",
)


def _counts_row(paper: str, found: Mapping[str, Any]) -> tuple[object, ...]:
    models = found["by_evidence"][MetricKind.MODELS]
    return (
        paper,
        found["determined"],
        found["determined_ok"],
        sum(models.get(verdict, 0) for verdict in FITTING),
        found["rows"][Verdict.UNDETERMINED],
        found["rows"][Verdict.REFUTED],
    )


def _paper_row(record: dict[str, Any]) -> tuple[object, ...]:
    rows = [count(record, verdict) for verdict in Verdict if verdict is not Verdict.MISSING]
    claims = [held(record, holds=holds) for holds in (True, False)]
    return (code(record["script"]), record["verdict"], *rows, *claims, made(record))
