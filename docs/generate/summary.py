"""The table of evidence in the README: every figure out of a result file."""

from collections.abc import Iterator, Mapping
from typing import Any

from docs.generate.gpu_day import gpu_in_short
from docs.generate.hostile import hostile_in_short
from docs.generate.markdown import code, one_line, table
from docs.generate.results import judged, percent, result
from experiments.harness.outcome import FITTING, About, MetricKind, Verdict
from experiments.harness.tally import counts
from workbench.llm_table.frameworks import frameworks

GOOD = 0.08  # mean error of a data set that meets the goal


def summary_table() -> str:
    """Claims, the command that shows each, and its figure."""
    return table(("claim", "command", "figure"), _summary())


def _summary() -> Iterator[tuple[str, str, str]]:
    yield from _of_fidelity(result("fidelity"))
    grids = [result("mimo_parity_grid")[encoders] for encoders in ("one_encoder", "two_encoders")]
    executed, enumerated = (sum(grid[key] for grid in grids) for key in ("executed", "enumerated"))
    yield (
        "every layout trains as one process does, float64",
        code("python -m experiments.mimo.parity_grid"),
        f"{executed} of {enumerated} layouts, largest difference {max(g['worst_gap'] for g in grids):.2e}",
    )
    mutants = result("fidelity_mutants")
    yield (
        "plans that compute something else are refused",
        code("python -m experiments.fidelity.mutants --count 10000"),
        f"{mutants['num_mutants']:,} mutants: {mutants['false_accepts']} accepted wrongly, "
        f"{mutants['false_rejects']} refused without need",
    )
    manners = result("bench_nccl_manners")
    yield (
        "the runtime bears NCCL's manners, played over gloo",
        code("python -m experiments.bench.nccl_manners"),
        f"{manners['nccl_manners_cases']} plans, {manners['nccl_manners_failures']} failures",
    )
    yield _published_runs(result("public_all")["ours"])
    yield from _published(result("public_vtrain")["ours"], result("public_korthikanti"))
    yield _papers_in_short()
    yield _joint_search(result("search_joint"))
    yield _joint_executed(result("search_executed"))
    chaos = result("oobleck_chaos")["ours"]
    yield (
        "training goes on after nodes are killed",
        code("python -m experiments.oobleck.chaos --kills 50"),
        f"{chaos['kills']:.0f} kills, {chaos['recoveries']:.0f} recoveries, median "
        f"{chaos['recovery_p50_s']:.2f} s, largest loss difference {chaos['worst_loss_difference']:.2e}",
    )
    yield from hostile_in_short()
    yield from _doors(result("doors"))
    yield from gpu_in_short()


def _joint_search(record: Mapping[str, Any]) -> tuple[str, str, str]:
    jobs, longer = record["jobs"], record["longer_overall"]
    return (
        "one search over all questions against every strategy's own",
        code("python -m experiments.search.joint"),
        f"{len(jobs)} jobs: {record['geomean_gain']:.3f} times the best strategy with the same time, "
        f"{longer['geomean_gain']:.3f} with six times as much, where bounds leave room for "
        f"{record['most_geomean_gain']:.3f}; never worse: "
        f"{'yes' if longer['never_worse'] else 'no, worse on ' + _worse(record)}",
    )


def _joint_executed(record: Mapping[str, Any]) -> tuple[str, str, str]:
    parts = (
        f"{part['ranks']} ranks, {name}: predicted {part['predicted_gain']:.3f} times the best strategy, "
        f"executed {part['executed_gain']:.3f} ({part['interval_95'][0]:.3f} to {part['interval_95'][1]:.3f})"
        for name, part in record["parts"].items()
        if part["interval_95"] is not None
    )
    return "the same, executed, predicted before", code(record["command"]), "; ".join(parts)


def _worse(record: Mapping[str, Any]) -> str:
    """Jobs on which the longer joint search loses."""
    jobs, longer = record["jobs"], record["longer"]
    return ", ".join(
        name for name in jobs if longer[name]["joint_s"] > jobs[name]["best_single_s"] * (1 + 1e-9)
    )


def _doors(doors: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    run = code("python -m experiments.doors")
    yield (
        "composite models are taken apart as transformers has them",
        run,
        f"{doors['families_split_equal']} of {doors['families_total']} kinds with equal shapes and counts; "
        f"first losses of {doors['families_loss_equal']} equal within 1e-10, float64, with "
        "rotation tables in float64 on both sides",
    )
    targets = doors["export_targets_parsed"].values()
    parsed = [each for each in targets if "turned_down" in each]
    tried = max(each["tried"] for each in targets)
    yield (
        "plans go to other systems, read by these themselves",
        run,
        "; ".join(f"{each['held_by']}: {each['accepted']} of {each['said']} folders" for each in parsed)
        + f"; the rest of {tried} plans each is refused with a reason",
    )
    tour = doors["tour"]
    yield (
        "a VLM's configuration becomes a folder that launches: init, search, explain, export",
        code("python -m experiments.doors --part tour"),
        f"{tour['wall_s']:.0f} s in all, {tour['cpu_s']:.0f} s of one CPU",
    )
    recorded, worst = doors["kineto_ingest_error"], doors["hta_loads"]["worst_error"]
    stages, chakra = max(map(abs, recorded["stages"].values())), doors["chakra_valid"]
    yield (
        "recordings come back, traces go out",
        run,
        f"torch.profiler against our own trace of one run: {percent(abs(recorded['total']), 2)} off, worst "
        f"stage {percent(stages, 2)}; HTA within {percent(worst, 3)}; {chakra['valid']} of {chakra['files']} "
        "Chakra files read back",
    )


def _of_fidelity(suite: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    run = code("python -m experiments.fidelity.run")
    goals, memory = list(suite["goals"].values()), suite["memory"]
    clean, divided = suite["parts"]["clean"], suite["parts"]["divided"]
    yield (
        "step times are predicted before plans run, one rank to a core",
        run,
        f"{clean['num_plans']} plans: {percent(clean['mean_abs_error'])} off in the mean, worst "
        f"{percent(clean['worst_abs_error'])}, runs of one plan spread by {percent(clean['spread'])}; "
        f"{goals.count(False)} of {len(goals)} goals of the suite missed",
    )
    yield (
        "the same where ranks divide weights",
        run,
        f"{divided['num_plans']} plans: {percent(divided['mean_abs_error'])} off in the mean, worst "
        f"{percent(divided['worst_abs_error'])}",
    )
    yield (
        "peak memory is predicted",
        run,
        f"{memory['num_ranks']} ranks: {percent(memory['mean_abs_error'])} off in the mean, worst "
        f"{percent(memory['worst_abs_error'])}",
    )


def _numbers_fitted() -> int:
    """Of training systems; one that stands in several rules counts once."""
    return len({(rule["number"], rule["value"]) for rule in frameworks()["execution"]})


def _published_runs(ours: Mapping[str, float]) -> tuple[str, str, str]:
    sets = sorted(key.removesuffix("/mape") for key in ours if key.endswith("/mape") and key != "all/mape")
    good = [name for name in sets if ours[f"{name}/mape"] <= GOOD]
    mean, median, inside = (percent(ours[f"all/{name}"]) for name in ("mape", "median", "coverage_80"))
    return (
        "step times that others published, from 8 to 6,144 GPUs",
        code("python -m experiments.public.all"),
        one_line(
            f"""{len(sets)} data sets, {ours["all/rows"]:.0f} rows, none refused: {mean} off in the mean,
            {median} in the median, {percent(ours["all/mape_unfitted"])} without the
            {_numbers_fitted()} numbers fitted to frameworks; at most {percent(GOOD)} on {", ".join(good)}
            alone; {inside} lie inside their 80 % interval"""
        ),
    )


def _published(vtrain: Mapping[str, float], korthikanti: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    yield (
        "step times that others measured on A100, part of them fitted",
        code("python -m experiments.public.vtrain"),
        one_line(
            f"""{vtrain["num_free"]:.0f} numbers fitted on {vtrain["num_fitted"]:.0f} rows; the other
            {vtrain["num_held_out"]:,.0f} are {percent(vtrain["held_out/mape"])} off in the mean,
            {percent(vtrain["unfitted/mape"])} as shipped. The model's form was chosen after looking at all
            rows, two host times of the A100's profile on a ninth of them"""
        ),
    )
    yield (
        "the same, nothing fitted",
        code("python -m experiments.public.korthikanti"),
        korthikanti["notes"][0].removesuffix("; nothing fitted"),
    )


def _papers_in_short() -> tuple[str, str, str]:
    records = judged()
    found = counts(records)
    models = found["by_evidence"][MetricKind.MODELS]
    fits = sum(models.get(verdict, 0) for verdict in FITTING)
    claims = found["claims"][About.PAPER]
    return (
        "tables and figures of papers are made again",
        code("workbench reproduce all"),
        f"{len(records)} scripts: {found['determined_ok']} of {found['determined']} numbers that papers "
        f"determine are within tolerance, {fits} of them by our own models; "
        f"{found['rows'][Verdict.UNDETERMINED]} not determined, {found['rows'][Verdict.REFUTED]} refuted; "
        f"of the papers' claims {claims['hold']} hold, {claims['fail']} do not",
    )
