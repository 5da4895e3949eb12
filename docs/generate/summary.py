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


def in_short() -> str:
    """What error to expect of a prediction, in two sentences."""
    compared, suite = result("public_all")["ours"], result("fidelity")
    unseen = (
        result("public_unseen")["ours"]["all/mean"],
        result("public_unseen_systems")["ours"]["possible/mean"],
        result("public_unseen_third")["ours"]["all/mean"],
        result("public_unseen_multimodal_third")["ours"]["all/mean"],
        result("public_unseen_multimodal_fourth")["ours"]["all/mean"],
    )
    research = result("public_unseen_multimodal_second")["ours"]
    later = [result(f"public_unseen_multimodal_{name}")["ours"] for name in ("third", "fourth")]
    num = sum(found["all/rows"] for found in later)
    inside = sum(found["all/rows"] * found["all/inside_80_of_trainer_today"] for found in later) / num
    return one_line(
        f"""What to expect: predicted step times are {percent(suite["parts"]["clean"]["mean_abs_error"])} off
        on average where this runtime executes them, {percent(compared["all/mape"])} for training systems with
        published runs that were compared, and {percent(min(unseen), 0)} to {percent(max(unseen), 0)} for
        systems never compared, mostly too fast. Steps of research trainers of multimodal models are predicted
        {percent(research["all/median"], 0)} too fast (median); the interval that `simulate` prints for such
        trainers held {percent(inside, 0)} of {num:.0f} steps that had no part in choosing it."""
    )


def summary_table() -> str:
    """What was tested, the result, and the command that measures it."""
    return table(("what was tested", "result", "command"), _summary())


def _summary() -> Iterator[tuple[str, str, str]]:
    yield from _of_fidelity(result("fidelity"))
    grids = [result("mimo_parity_grid")[encoders] for encoders in ("one_encoder", "two_encoders")]
    executed, enumerated = (sum(grid[key] for grid in grids) for key in ("executed", "enumerated"))
    yield (
        "**Parallel layouts** give the loss, gradients and weights of a single process (float64)",
        f"{executed} of {enumerated} layouts; largest difference {max(g['worst_gap'] for g in grids):.2e}",
        code("python -m experiments.mimo.parity_grid"),
    )
    mutants = result("fidelity_mutants")
    yield (
        "**Plan check**: valid plans with one random change",
        f"{mutants['num_mutants']:,} changed plans: {mutants['false_accepts']} wrong ones accepted, "
        f"{mutants['false_rejects']} harmless ones refused",
        code("python -m experiments.fidelity.mutants --count 10000"),
    )
    manners = result("bench_nccl_manners")
    yield (
        "**Runtime under NCCL's rules** for blocking, completion and timeouts, imitated over gloo",
        f"{manners['nccl_manners_cases']} plans, {manners['nccl_manners_failures']} failures",
        code("python -m experiments.bench.nccl_manners"),
    )
    yield _published_runs(result("public_all")["ours"])
    yield from _published(result("public_vtrain")["ours"], result("public_korthikanti")["ours"])
    blind = ("public_unseen", "public_unseen_systems", "public_unseen_third", "public_unseen_multimodal")
    yield from _unseen(*(result(name)["ours"] for name in blind))
    yield _second_multimodal(result("public_unseen_multimodal_second")["ours"])
    yield _third_multimodal(result("public_unseen_multimodal_third")["ours"])
    yield _fourth_multimodal(result("public_unseen_multimodal_fourth")["ours"])
    yield _papers_in_short()
    yield _joint_search(result("search_joint"))
    yield _joint_executed(result("search_executed"))
    chaos = result("oobleck_chaos")["ours"]
    yield (
        "**Elastic training** continues after nodes are killed",
        f"{chaos['kills']:.0f} kills, {chaos['recoveries']:.0f} recoveries, median "
        f"{chaos['recovery_p50_s']:.2f} s; losses within {chaos['worst_loss_difference']:.2e} of an "
        "undisturbed run",
        code("python -m experiments.oobleck.chaos --kills 50"),
    )
    yield from hostile_in_short()
    yield from _doors(result("doors"))
    yield from gpu_in_short()


def _joint_search(record: Mapping[str, Any]) -> tuple[str, str, str]:
    jobs, longer = record["jobs"], record["longer_overall"]
    never = "yes" if longer["never_worse"] else "no, worse on " + _worse(record)
    return (
        "**Joint search** over layout, order, grouping and tokens, against the best of all strategies, each "
        "with its own search (simulated)",
        f"gain {record['geomean_gain']:.3f}x (geometric mean over {len(jobs)} jobs) in the same search time, "
        f"{longer['geomean_gain']:.3f}x in six times as much ({record['geomean_gain_over_papers']:.3f}x and "
        f"{longer['geomean_gain_over_papers']:.3f}x over the source papers' strategies alone); lower bounds "
        f"allow at most {record['most_geomean_gain']:.3f}x; never worse: {never}",
        code("python -m experiments.search.joint"),
    )


def _joint_executed(record: Mapping[str, Any]) -> tuple[str, str, str]:
    parts = (
        f"{_RANKS.get(name, name).format(part['ranks'])}: gain predicted "
        f"{part['predicted_gain']:.3f}x, measured {part['executed_gain']:.3f}x "
        f"(95 % interval {part['interval_95'][0]:.3f} to {part['interval_95'][1]:.3f})"
        for name, part in record["parts"].items()
        if part["interval_95"] is not None
    )
    return "The same, predicted and then executed", "; ".join(parts), code(record["command"])


_RANKS = {"crowded": "{} ranks on 2 cores", "emulated": "{} ranks, emulated on one device"}


def _worse(record: Mapping[str, Any]) -> str:
    """Jobs on which the longer joint search loses."""
    jobs, longer = record["jobs"], record["longer"]
    return ", ".join(
        name for name in jobs if longer[name]["joint_s"] > jobs[name]["best_single_s"] * (1 + 1e-9)
    )


def _doors(doors: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    run = code("python -m experiments.doors")
    yield (
        "**Hugging Face models** split into modules as `transformers` builds them",
        f"{doors['families_split_equal']} of {doors['families_total']} model kinds have equal shapes and "
        f"parameter counts; {doors['families_loss_equal']} were also run: first losses equal within 1e-10 "
        "(float64, rotary tables in float64 on both sides)",
        run,
    )
    targets = doors["export_targets_parsed"].values()
    parsed = [each for each in targets if "turned_down" in each]
    tried = max(each["tried"] for each in targets)
    yield (
        "**Exported plans** are accepted by the target system's own parser",
        "; ".join(f"{each['held_by']}: {each['accepted']} of {each['said']}" for each in parsed)
        + f"; the other plans, of {tried} for each target, are refused with a reason",
        run,
    )
    tour = doors["tour"]
    yield (
        "**From a VLM's `config.json` to a launchable folder**: init, search, explain, export",
        f"{tour['wall_s']:.0f} s in total ({tour['cpu_s']:.0f} s of CPU time)",
        code("python -m experiments.doors --part tour"),
    )
    recorded, worst = doors["kineto_ingest_error"], doors["hta_loads"]["worst_error"]
    stages, chakra = max(map(abs, recorded["stages"].values())), doors["chakra_valid"]
    yield (
        "**Recordings** imported, traces exported",
        f"a torch.profiler recording is within {percent(abs(recorded['total']), 2)} of our own trace of the "
        f"run (worst stage {percent(stages, 2)}); HTA reads our traces within {percent(worst, 3)}; "
        f"{chakra['valid']} of {chakra['files']} Chakra files are valid",
        run,
    )


def _of_fidelity(suite: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    run = code("python -m experiments.fidelity.run")
    goals, memory = list(suite["goals"].values()), suite["memory"]
    clean, divided = suite["parts"]["clean"], suite["parts"]["divided"]
    yield (
        "**Step time**, predicted before the run; each rank has a CPU core of its own",
        f"mean error {percent(clean['mean_abs_error'])}, worst {percent(clean['worst_abs_error'])} over "
        f"{clean['num_plans']} plans; steps of one plan vary by {percent(clean['spread'])}; "
        f"{goals.count(False)} of the suite's {len(goals)} goals missed",
        run,
    )
    yield (
        "The same where ranks split weights (tensor, sequence and expert parallelism, FSDP)",
        f"mean error {percent(divided['mean_abs_error'])}, worst {percent(divided['worst_abs_error'])} over "
        f"{divided['num_plans']} plans",
        run,
    )
    yield (
        "**Peak memory** of each rank, predicted before the run",
        f"mean error {percent(memory['mean_abs_error'])}, worst {percent(memory['worst_abs_error'])} over "
        f"{memory['num_ranks']} ranks",
        run,
    )


def _numbers_fitted() -> int:
    """Of training systems; one that stands in several rules counts once."""
    return len({(rule["number"], rule["value"]) for rule in frameworks()["execution"]})


def _published_runs(ours: Mapping[str, float]) -> tuple[str, str, str]:
    sets = sorted(key.removesuffix("/mape") for key in ours if key.endswith("/mape") and key != "all/mape")
    good = [name for name in sets if ours[f"{name}/mape"] <= GOOD]
    mean, median, inside = (percent(ours[f"all/{name}"]) for name in ("mape", "median", "coverage_80"))
    by_set = "each data set" if good == sets else f"{', '.join(good)}: each"
    return (
        "**Published step times**, 8 to 6,144 GPUs, compared with `workbench predict`",
        one_line(
            f"""mean error {mean}, median {median} over {ours["all/rows"]:.0f} runs of {len(sets)} data sets;
            {by_set} at most {percent(GOOD)} (mean); {inside} of the runs lie in their 80 % interval;
            mean error {percent(ours["all/mape_unfitted"])} without the {_numbers_fitted()} numbers fitted to
            training frameworks"""
        ),
        code("python -m experiments.public.all"),
    )


def _published(
    vtrain: Mapping[str, float], korthikanti: Mapping[str, float]
) -> Iterator[tuple[str, str, str]]:
    yield (
        "**Published step times**, 2 to 8 A100 (vTrain), compared with `workbench predict`",
        one_line(
            f"""mean error {percent(vtrain["held_out/mape"])} on {vtrain["num_held_out"]:,.0f} held-out rows
            with {vtrain["num_free"]:.0f} numbers fitted on {vtrain["num_fitted"]:.0f} others,
            {percent(vtrain["unfitted/mape"])} with the shipped profile. Not blind: all rows were seen
            when the model was designed, and two host times of that profile rest on a ninth of them"""
        ),
        code("python -m experiments.public.vtrain"),
    )
    time, memory = (percent(korthikanti[f"{what}/mean_abs_error"]) for what in ("seconds", "bytes"))
    yield (
        "**Published step times and memory** of four GPT models, 8 to 512 A100 (Korthikanti et al.), "
        "compared with `workbench predict`",
        f"mean error {time} for step times, {memory} for memory; nothing fitted",
        code("python -m experiments.public.korthikanti"),
    )


def _unseen(
    text: Mapping[str, float],
    systems: Mapping[str, float],
    third: Mapping[str, float],
    multimodal: Mapping[str, float],
) -> Iterator[tuple[str, str, str]]:
    yield (
        "**Blind**: step times of two training systems to which nothing was fitted (NeMo AutoModel, "
        "torchtitan), predicted before they were seen",
        one_line(
            f"""mean error {percent(text["all/mean"])}, median {percent(text["all/median"])}, worst
            {percent(text["all/worst"])} over {text["all/rows"]:.0f} runs on 1 to 1,024 GPUs;
            {percent(text["all/inside_80"])} lie in their 80 % interval,
            {percent(text["all/inside_80_today"])} since intervals count such systems"""
        ),
        code("python -m experiments.public.unseen"),
    )
    yield (
        f"**Blind**: step times of {_num_judged(systems)} further systems, from MaxText to nanoGPT",
        one_line(
            f"""mean error {percent(systems["possible/mean"])}, median
            {percent(systems["possible/median"])} over {systems["possible/rows"]:.0f} runs;
            {systems["all/rows"] - systems["possible/rows"]:.0f} more would exceed their GPUs' peak as their
            recipes were understood (mean of all: {percent(systems["all/mean"])}).
            {percent(systems["all/inside_80"])} of all lay in their 80 % interval,
            {percent(systems["all/inside_80_today"])} in today's"""
        ),
        code("python -m experiments.public.unseen_systems"),
    )
    yield (
        "**Blind**: step times of a third set of systems, from BLOOM's tries to BERT on V100",
        one_line(
            f"""mean error {percent(third["all/mean"])}, median {percent(third["all/median"])} over
            {third["all/rows"]:.0f} runs, {percent(-third["all/signed"])} too fast on average;
            {percent(third["all/inside_80"])} lay in their 80 % interval,
            {percent(third["all/inside_80_today"])} in today's, which expects such systems to lose time"""
        ),
        code("python -m experiments.public.unseen_third"),
    )
    steps = multimodal["SiQ-VL/rows"]
    runs = multimodal["all/rows"] - steps
    signed = (multimodal["all/signed"] * multimodal["all/rows"] - multimodal["SiQ-VL/signed"] * steps) / runs
    yield (
        "**Blind**: vision-language models that others trained",
        one_line(
            f"""{steps:.0f} timed steps on one GPU (SiQ-VL): median error
            {percent(multimodal["SiQ-VL/median"])}, worst {percent(multimodal["SiQ-VL/worst"])}, where the
            host is the bottleneck, and their peak memory {percent(-multimodal["memory_signed"])} too low;
            {runs:.0f} runs of LLaVA, InternVL and ms-swift, known by their hours or a
            comment: {percent(-signed)} too fast on average"""
        ),
        code("python -m experiments.public.unseen_multimodal"),
    )


def _num_judged(found: Mapping[str, float]) -> int:
    """Systems of which at least one run is judged."""
    return sum(name.endswith("/rows") and name not in ("all/rows", "possible/rows") for name in found)


def _second_multimodal(found: Mapping[str, float]) -> tuple[str, str, str]:
    return (
        "**Blind**: research trainers of vision-language, video and speech models",
        one_line(
            f"""{found["all/rows"]:.0f} steps of five systems: median error {percent(found["all/median"])},
            all too fast, {percent(found["all/inside_80_of_system"])} in the 80 % interval of a system that
            was never compared; from {percent(found["Cosmos-Predict1/mean"])} (Cosmos-Predict1) to
            {percent(found["vlm-training/mean"])} (vlm-training). Peak memory of
            {found["all/memory_rows"]:.0f} runs: {percent(-found["all/memory_signed"])} too low;
            {found["fits/right"]:.0f} of {found["fits/rows"]:.0f} rightly said to fit or not. Of LoRA,
            {found["lora/all/rows"]:.0f} steps: mean error {percent(found["lora/all/mean"])}, and
            {found["lora/all/memory_rows"]:.0f} peaks: {percent(-found["lora/all/memory_signed"])} too low"""
        ),
        code("python -m experiments.public.unseen_multimodal_second"),
    )


def _third_multimodal(found: Mapping[str, float]) -> tuple[str, str, str]:
    return (
        "**Blind**: production systems of multimodal models, on 8 to 1,152 A800, H100, B200, GB200 and GB300",
        one_line(
            f"""{found["all/rows"]:.0f} steps of four systems: mean error {percent(found["all/mean"])}, median
            {percent(found["all/median"])}, {percent(-found["all/signed"])} too fast on average;
            {percent(found["all/inside_80_of_system"])} in the 80 % interval of a system that was never
            compared; mean {percent(found["all/mean_today"])} with overlap that inputs had missed. MLPerf's
            FLUX.1 {percent(found["MLPerf FLUX.1/mean"])}, FlagPerf's LLaVA
            {percent(found["FlagPerf LLaVA/mean"])}, NeMo DFM's Wan {percent(found["NeMo DFM/mean"])},
            Megatron-Bridge's Qwen-VL {percent(found["Megatron-Bridge/mean"])}"""
        ),
        code("python -m experiments.public.unseen_multimodal_third"),
    )


def _fourth_multimodal(found: Mapping[str, float]) -> tuple[str, str, str]:
    return (
        "**Blind**: mixtures and a video generator, inputs by one hand and predictions by another",
        one_line(
            f"""{found["all/rows"]:.0f} steps on 8 to 64 A100, H100, B200 and GB200: mean error
            {percent(found["all/mean"])}, all too fast; {percent(found["all/inside_80_of_system"])} in the
            80 % interval of a system that was never compared,
            {percent(found["all/inside_80_of_trainer_today"])} in that of a research trainer, which
            `simulate` prints, too. Cosmos-Predict2 {percent(found["Cosmos-Predict2/mean"])}, Nemotron 3 Nano
            Omni {percent(found["Sports playbooks Megatron-Bridge/mean"])} by Megatron-Bridge and
            {percent(found["Sports playbooks AutoModel/mean"])} by AutoModel, Super VL
            {percent(found["Megatron-Bridge Super VL/mean"])}"""
        ),
        code("python -m experiments.public.unseen_multimodal_fourth"),
    )


def _papers_in_short() -> tuple[str, str, str]:
    records = judged()
    found = counts(records)
    models = found["by_evidence"][MetricKind.MODELS]
    fits = sum(models.get(verdict, 0) for verdict in FITTING)
    claims = found["claims"][About.PAPER]
    return (
        "**Papers' tables and figures**, reproduced",
        f"{found['determined_ok']} of {found['determined']} numbers within tolerance, {fits} of them by our "
        f"own models; {claims['hold']} of {claims['hold'] + claims['fail']} claims hold. Not counted: "
        f"{found['rows'][Verdict.UNDETERMINED]} numbers that depend on unstated settings, "
        f"{found['rows'][Verdict.REFUTED]} that contradict the paper's other numbers",
        code("workbench reproduce all"),
    )
