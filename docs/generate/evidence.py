"""The page of evidence: every figure out of a result file."""

from collections.abc import Iterator, Mapping
from typing import Any

from docs.generate.gpu_day import gpu_section
from docs.generate.hostile import hostile_section
from docs.generate.joint_search import joint_search_section
from docs.generate.markdown import code, one_line, page, table
from docs.generate.results import count, held, judged, made, percent, result
from docs.generate.summary import in_short, summary_table
from experiments.harness.outcome import FITTING, MetricKind, Verdict
from experiments.harness.tally import by_paper, counts

INTRO = """Every figure on this page is read from a file in `experiments/results/`. The command that wrote
the file stands beside it. Plans ran on two CPU cores, with gloo between the ranks, except in
[One GPU](#one-gpu). Figures marked *simulated* come from the simulator alone. A commit that ends in `-dirty`
had uncommitted changes.

[Limits](limits.md) lists what is not measured. [Benchmarks](benchmarks.md) has results that leave no file."""

FIDELITY = """All predictions are written, with the hashes of the plans, before the first plan runs.

- *Spread*: (slowest - fastest) / median of the steps of one plan; the median over plans.
- *tau*: Kendall's rank correlation of predicted and measured times over pairs of plans of one job; in
  parentheses, over the pairs that the runs can tell apart.
- *Regret*: how much slower the plan predicted to be fastest is than the fastest plan."""

PAPERS = """`workbench reproduce all` reruns these scripts and prints the paper's number beside ours.
Tolerances were fixed before anything was compared, and no number of ours is filled in from a paper. Where a
paper leaves settings open, our number is a range over named settings. The verdicts:

- `ok`: within the tolerance.
- `ok at default`: within the tolerance at the likeliest of the open settings.
- `in range`: results of two open settings enclose the printed number and differ by at most a factor of two.
- `undetermined`: the results differ by more, so nothing is decided.
- `refuted`: a bound that the script computes from the paper's own numbers excludes the printed one.
- `OFF`: anything else.

A claim is a statement about which method wins or where curves cross. Only rows from our own models are
reproductions, so the tables count the kinds of evidence separately."""


def evidence_page() -> str:
    """The page."""
    return page(
        "Evidence",
        INTRO,
        "## Summary",
        in_short(),
        summary_table(),
        "## Predicted and measured step times",
        *_fidelity(),
        "## One GPU",
        *gpu_section(),
        "## Invalid plans",
        *_mutants(),
        "## Node failures",
        *_chaos(),
        "## Fuzzing, fault injection and soak tests",
        *hostile_section(),
        "## Preprocessing service",
        *_preprocess(),
        "## Attention",
        *_attention(),
        "## Grouping of samples",
        *_grouping(),
        "## Joint search",
        *joint_search_section(),
        "## Papers",
        PAPERS,
        *_papers(),
    )


_PART_NAMES = {
    "clean": "one core for each rank",
    "context": "context parallelism (ranks split tokens)",
    "divided": "tensor, sequence and expert parallelism, FSDP (ranks split weights)",
    "crowded": "more ranks than cores",
    "emulated": "up to 8 ranks, emulated on one device",
}


def _fidelity() -> Iterator[str]:
    suite = result("fidelity")
    memory = suite["memory"]
    yield f"{code(suite['command'])}, {made(suite)}, {suite['device']}: {suite['num_plans']} plans."
    yield FIDELITY
    headers = ("plans of", "plans", "mean error", "mean signed error", "worst", "spread", "tau", "regret")
    yield table(headers, (_part_row(name, part) for name, part in suite["parts"].items()))
    yield one_line(
        f"""Peak memory of {memory["num_ranks"]} ranks: mean error {percent(memory["mean_abs_error"])}, worst
        {percent(memory["worst_abs_error"])}; {memory["num_exceeded"]} ranks used more than predicted."""
    )
    goals = ((goal, "holds" if holds else "MISSED") for goal, holds in suite["goals"].items())
    yield table(("goal, set before the runs", "result"), goals)


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
        f"""{code("python -m experiments.fidelity.mutants --count 10000")} makes one change to one of
        {found["num_plans"]} valid plans. The verdict of the plan check is compared with an independent judge
        that computes the step on sample numbers and shares no code with the check."""
    )
    yield "`same`: the changed plan computes the same as before. `other`: it computes something else."
    yield table(("verdict: effect of the change", "mutants"), found["by_verdict"].items())
    yield "\n".join(
        (
            f"- Of {found['num_accepted']:,} accepted mutants, {found['false_accepts']} should be refused.",
            f"- {found['false_rejects']} mutants were refused although they compute the same.",
            f"- The {found['rows_of_other_meaning']} accepted as `other` are changes to lowered messages, "
            "which no plan file can contain. They are checked for deadlock alone.",
            f"- {found['accepted_run']} accepted mutants were run: {len(found['accepted_that_failed'])} "
            f"failed. {found['deadlocks_run']} mutants refused for deadlock were run: "
            f"{len(found['deadlocks_that_ran'])} finished.",
        )
    )


def _chaos() -> Iterator[str]:
    runs = [result("oobleck_chaos"), result("oobleck_chaos_sharded")]
    yield "Nodes are killed with SIGKILL in training. Losses are compared with those of an undisturbed run."
    rows = [
        (what, *(shape.format(run["ours"][key]) for run in runs)) for key, (what, shape) in _CHAOS.items()
    ]
    yield table(("", "unsharded weights", "sharded parameters"), rows)
    yield "; ".join(f"{code(run['command'])}, {made(run)}" for run in runs) + "."
    saved = result("disttrain_checkpoints")
    claims = " ".join(claim["text"] for claim in saved["claims"]).rstrip(";")
    yield f"Checkpoints ({code(saved['command'])}, {made(saved)}): {claims}."


_CHAOS = {
    "kills": ("nodes killed", "{:.0f}"),
    "recoveries": ("recoveries", "{:.0f}"),
    "recoveries_of_several_nodes": ("recoveries from several lost nodes", "{:.0f}"),
    "joined": ("nodes joined", "{:.0f}"),
    "steps": ("steps", "{:.0f}"),
    "worst_loss_difference": ("largest loss difference", "{:.1e}"),
    "recovery_p50_s": ("recovery, median", "{:.2f} s"),
    "recovery_p95_s": ("recovery, 95th percentile", "{:.2f} s"),
    "planning_p50_s": ("planning, median", "{:.3f} s"),
}


def _preprocess() -> Iterator[str]:
    found, chaos = result("bench_preprocess"), result("bench_preprocess")["chaos"]
    yield one_line(
        f"""{code("python -m experiments.bench.preprocess")}, {made(found)}, {found["device"]}:
        milliseconds that a trainer waits for its batch. Colocated: the trainer decodes the images itself.
        Disaggregated: a preprocessing server does. Starved: the step is shorter than the decode."""
    )
    headers = (
        "images x pixels",
        "colocated, p50",
        "predicted p50",
        "p99",
        "disaggregated, p50",
        "predicted p50",
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
    yield table(("claim", "result"), claims)
    yield one_line(
        f"""Fault injection: {chaos["producers_killed"]} producers, {chaos["trainers_killed"]} trainers and
        {chaos["servers_killed"]} servers were killed in {chaos["iterations"]:,} iterations. Every one of
        {chaos["examples"]:,} examples was seen exactly once:
        {"yes" if chaos["exactly_once"] else "no"}."""
    )


def _attention() -> Iterator[str]:
    yield one_line(
        """Load imbalance of context parallelism by token distribution: work of the busiest rank over the mean
        (`python -m experiments.bench.attention`). Cornstarch's masks: EP has the encoders' tokens before the
        text, EE has them among the text, MP packs sequences of both kinds."""
    )
    masks = result("bench_attention")["max_over_mean"]
    cases = [(mask, length) for mask, lengths in masks.items() for length in lengths]
    policies = list(masks[cases[0][0]][cases[0][1]])
    rows = [
        (code(policy), *(f"{masks[m][length][policy]:.3f}" for m, length in cases)) for policy in policies
    ]
    yield table(("policy", *(f"{mask} {length}" for mask, length in cases)), rows)
    compiled = result("bench_kernel_compile")
    yield one_line(
        f"""Code that Triton generates for the kernels on Hopper
        (`python -m experiments.bench.kernel_compile`, {made(compiled)}, Triton
        {compiled["versions"]["triton"]}). For their speed see [One GPU](#one-gpu)."""
    )
    keys = [key for key in compiled if key.startswith(("forward_", "backward_"))]
    yield table(
        ("figure", "value", "goal"), ((code(key), compiled[key], compiled["verdicts"][key]) for key in keys)
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
        f"""{code(found["command"])}, {made(found)}, simulated: speedup of our grouping of samples over
        other methods. Batches of 512 samples of four corpora, Llama 3.2 3B with a vision encoder, A40
        profile."""
    )
    yield table(
        ("", *_CORPORA), (row for ours in ("entrain-graded", "entrain") for row in _ratios(found, ours))
    )
    yield one_line(
        f"""{code(executed["command"])}, {made(executed)}, {executed["device"]}, two
        ranks, {executed["rounds"]} rounds: speedup over random orders, predicted before the runs."""
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
    yield "All papers, rows by kind of evidence:"
    verdicts = [verdict for verdict in Verdict if verdict is not Verdict.MISSING]
    found = counts(records)
    yield table(
        ("evidence", *verdicts),
        ((kind, *(rows.get(v, 0) for v in verdicts)) for kind, rows in found["by_evidence"].items()),
    )
    yield "All papers, claims by subject:"
    yield table(
        ("claims about", "hold", "fail"), ((a, c["hold"], c["fail"]) for a, c in found["claims"].items())
    )
    yield table(("script", "verdict", *verdicts, "claims hold", "fail", "made"), map(_paper_row, records))


_COUNTED = (
    "paper",
    "determined rows",
    "within tolerance",
    "of these, by our models",
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
