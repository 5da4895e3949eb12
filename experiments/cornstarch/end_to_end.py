"""Figures 9, 10, 13, 14 and 15 of Cornstarch v1: three ways to place encoders, end to end.

Setup:   A40 GPUs, 24 microbatches of one sample (1k text tokens, one 1280x720 image, a 30 s clip, as far as
         the model reads them), encoders and LLM frozen, projectors trained; stages, TP 2 and CP 2 of Tables 5
         and 6. Whether layers are recomputed is not stated; shown: they are.
Given:   printed stage counts and model sizes; 6 stages for replicated encoders -> throughput per GPU of the
         simulated plans with the A40 profile.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from experiments.cornstarch import frozen_tables
from experiments.cornstarch.modelled import RATIO_REL_TOL, Setting
from experiments.cornstarch.models import v1_model
from experiments.cornstarch.planned import Strategy, paper_job
from experiments.harness.outcome import Evidence, PaperNumber
from experiments.harness.printed import PrintedRow, claim_value, printed_rows
from sim.step.engine import simulate
from workbench.cost.model import CostModel
from workbench.float_sum import float_sum
from workbench.memory.account import memory_table, peak_bytes
from workbench.plan.codec import plan_hash
from workbench.plan.lower import lower
from workbench.plan.lowered import Lowered
from workbench.schedule.action import Action, Pass
from workbench.strategies import cornstarch, encoders_colocated, encoders_replicated
from workbench.timing.price import Price, price

NUM_GPUS = 24  # section 6.1
REPLICATED_STAGES = 6  # appendix B.1
TP, CP = 2, 2  # every row of Tables 5 and 6 that prints them
ON_PAR = 0.02
STAGE_REL_TOL = 0.25
UNSTATED = "tokens per image and clip, recompute"
MS = 1e3
_NAMES = {"M": "medium", "S": "small", "L": "large"}


class Method(StrEnum):
    """Placements of encoders, by the names of Tables 5 and 6; the third is in the text."""

    REPLICATED = "encoders_replicated"
    COLOCATED = "encoders_colocated"
    CORNSTARCH = "cornstarch"


STRATEGIES: Mapping[Method, Strategy] = {
    Method.REPLICATED: encoders_replicated.plan,
    Method.COLOCATED: encoders_colocated.plan,
    Method.CORNSTARCH: cornstarch.plan,
}


_BASELINES = (Method.REPLICATED, Method.COLOCATED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """A model with the printed stage counts of its modules by method."""

    llm_size: str
    model: str
    counts: Mapping[Method, Mapping[str, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class EndToEnd:
    """A simulated plan.

    Args:
        tput: inputs a second and GPU.
        iteration_s: seconds of 24 microbatches.
        num_ranks: GPUs of the plan.
        is_fitting: whether it fits on A40s.
        stage_s: seconds of forward, and of forward with backward, of every stage over one microbatch;
            encoders on the same ranks are one stage.
        plan_hash: of the plan.
    """

    tput: float
    iteration_s: float
    num_ranks: int
    is_fitting: bool
    stage_s: tuple[tuple[float, float], ...]
    plan_hash: str


def configurations(llm_size: str, kinds: Sequence[str]) -> tuple[Configuration, ...]:
    """The models of Tables 5 and 6 with that LLM and of these kinds ("VLM", ..), in printed order."""
    tables = ("cornstarch_v1_table5", "cornstarch_v1_table6")
    rows = [row for table in tables for row in printed_rows(table) if row["llm_size"] == llm_size]
    models = dict.fromkeys(row["model"] for row in rows if row["model"].partition("-")[0] in kinds)
    return tuple(_configuration(llm_size, model, rows) for model in models)


def _configuration(llm_size: str, model: str, rows: Iterable[PrintedRow]) -> Configuration:
    printed = {Method(row["method"]): row for row in rows if row["model"] == model}
    counts = {method: stage_counts(row) for method, row in printed.items()}
    one_each = {module: 1 for module in counts[Method.CORNSTARCH] if module != "llm"}
    counts[Method.REPLICATED] = one_each | {"llm": REPLICATED_STAGES}
    return Configuration(llm_size=llm_size, model=model, counts=counts)


def stage_counts(row: PrintedRow) -> dict[str, int]:
    """Stages by module; a single encoder (Table 5) and colocated encoders have one column."""
    kind = row["model"].partition("-")[0]
    encoders = {"VLM": ("vision",), "ALM": ("audio",), "VALM": ("vision", "audio")}[kind]
    cells = {name: row.get("enc_pp") or row.get("coloc_enc_pp") or row[f"{name}_pp"] for name in encoders}
    return {name: int(cell) for name, cell in cells.items()} | {"llm": int(row["llm_pp"])}


def settings(model: str) -> dict[str, Setting]:
    """Settings of Tables 3, 10 and 11, at the degrees of Tables 5 and 6."""
    return frozen_tables.plausible_inputs(model, tp=TP, cp=CP)


def simulated(configuration: Configuration, method: Method, setting: Setting, cost: CostModel) -> EndToEnd:
    """Simulate the method's plan with the printed stages."""
    model = v1_model(configuration.model, configuration.llm_size)
    counts = configuration.counts[method]
    job = paper_job(model, setting, counts, frozen_tables.NUM_MICROBATCHES, cost)
    plan = STRATEGIES[method](job, cost)
    lowered = lower(plan)
    prices = price(lowered, cost)
    iteration_s = simulate(lowered, prices.duration_s, step_s=prices.step_s).iteration_s
    peaks = peak_bytes(lowered, memory_table(lowered))
    memory_bytes = min(node.memory_bytes for node in plan.cluster.nodes)
    return EndToEnd(
        tput=frozen_tables.NUM_MICROBATCHES / iteration_s / len(plan.ranks),
        iteration_s=iteration_s,
        num_ranks=len(plan.ranks),
        is_fitting=max(peaks.values()) <= memory_bytes,
        stage_s=_stage_times(lowered, prices),
        plan_hash=plan_hash(plan),
    )


def _stage_times(lowered: Lowered, prices: Price) -> tuple[tuple[float, float], ...]:
    """Seconds of forwards, and of all passes, of the first microbatch, for each set of ranks."""
    seconds_of: dict[tuple[int, ...], tuple[float, float]] = {}
    for program in lowered.plan.programs:
        first = [action for action in program.actions if action.microbatch == 0]
        forward_s = float_sum(_forward_s(action, prices) for action in first)
        seconds_of[program.ranks] = forward_s, float_sum(prices.duration_s(action) for action in first)
    return tuple(seconds_of.values())


def _forward_s(action: Action, prices: Price) -> float:
    return prices.duration_s(action) if action.kind is Pass.F else 0.0


Runs = Mapping[Method, Sequence[EndToEnd]]  # by method, one run for each setting


def figure_evidence(figure: str, llm_sizes: Sequence[str], kinds: Sequence[str], cost: CostModel) -> Evidence:
    """Evidence: throughput per GPU of the three methods on every model of a figure, and who is ahead."""
    evidence = Evidence()
    evidence.causes["modelled/*"] = (
        "no number of image tokens gives the fastest and the slowest stage together"
    )
    for llm_size in llm_sizes:
        runs: dict[str, Runs] = {}
        for configuration in configurations(llm_size, kinds):
            runs[configuration.model] = {
                method: [
                    simulated(configuration, method, setting, cost)
                    for setting in settings(configuration.model).values()
                ]
                for method in Method
            }
            _add(evidence, llm_size, configuration.model, runs[configuration.model])
        _claim_ahead(evidence, figure, llm_size, runs)
        evidence.notes.append(_size_note(llm_size, runs))
        if llm_size == "M":
            _prose(evidence, runs)
    return evidence


def gains(runs: Runs) -> list[float]:
    """Throughput of Cornstarch over the better baseline, by setting."""
    rivals = zip(runs[Method.REPLICATED], runs[Method.COLOCATED], strict=True)
    best = [max(first.tput, second.tput) for first, second in rivals]
    return [own_run.tput / other for own_run, other in zip(runs[Method.CORNSTARCH], best, strict=True)]


def over(runs: Runs, baseline: Method) -> list[float]:
    """Throughput of Cornstarch over a baseline, by setting."""
    pairs = zip(runs[Method.CORNSTARCH], runs[baseline], strict=True)
    return [own_run.tput / other.tput for own_run, other in pairs]


def _add(evidence: Evidence, llm_size: str, model: str, runs: Runs) -> None:
    for method, method_runs in runs.items():
        key = f"modelled/{llm_size}/{model}/{method}"
        values = [run.tput for run in method_runs]
        evidence.ours |= {
            f"{key}/tput": values[0],
            f"{key}/tput_low": min(values),
            f"{key}/tput_high": max(values),
            f"{key}/iteration_ms": method_runs[0].iteration_s * MS,
            f"{key}/gpus": method_runs[0].num_ranks,
        }
        evidence.plan_hashes.append(method_runs[0].plan_hash)


def _claim_ahead(evidence: Evidence, figure: str, llm_size: str, runs: Mapping[str, Runs]) -> None:
    """Claim that Cornstarch is ahead; section 6.2.1 excepts VLM-S with the medium LLM."""
    behind = [model for model, method_runs in runs.items() if gains(method_runs)[0] < 1 - ON_PAR]
    except_s = figure == "Figure 9" and llm_size == "M"
    if except_s:
        lost = gains(runs["VLM-S"])[0]
        evidence.claim(f"VLM-S is the exception, Cornstarch loses on it (ours {lost:.2f});", lost < 1)
    ahead_models = [model for model in runs if not (except_s and model == "VLM-S")]
    ahead = [model for model in ahead_models if model not in behind]
    lost_names = ", ".join(
        f"{model} {gains(runs[model])[0]:.2f}" for model in ahead_models if model in behind
    )
    evidence.claim(
        f"{_NAMES[llm_size]} LLM: Cornstarch is not behind the better baseline in {len(ahead)} of "
        f"{len(ahead_models)} models (want all{'; behind: ' + lost_names if lost_names else ''});",
        len(ahead) == len(ahead_models),
        cause=_why_behind({model: runs[model] for model in ahead_models if model in behind}),
    )
    for modality, item in (("vision", "an image"), ("audio", "a clip")):
        values = [
            gains(method_runs)[most_tokens(model, modality)]
            for model, method_runs in runs.items()
            if reads(model, modality)
        ]
        if values:
            evidence.notes.append(
                f"{_NAMES[llm_size]} LLM with the most tokens of {item}: not behind in "
                f"{sum(gain >= 1 - ON_PAR for gain in values)} of {len(values)}, {min(values):.2f} to "
                f"{max(values):.2f}"
            )
    for baseline in _BASELINES:
        ratios = {model: over(method_runs, baseline)[0] for model, method_runs in runs.items()}
        evidence.notes.append(
            f"{_NAMES[llm_size]} LLM, Cornstarch over {baseline}: {min(ratios.values()):.2f} to "
            f"{max(ratios.values()):.2f}; below 1 by more than {ON_PAR:.0%}: "
            f"{', '.join(m for m, r in ratios.items() if r < 1 - ON_PAR) or 'none'}"
        )


def _why_behind(runs: Mapping[str, Runs]) -> str:
    """GPUs and slowest stages of Cornstarch and of the better baseline, where Cornstarch is behind."""
    lost = []
    for model, by_method in runs.items():
        best = max(_BASELINES, key=lambda method: by_method[method][0].tput)
        sides = (by_method[Method.CORNSTARCH][0], by_method[best][0])
        own, other = (
            f"{run.num_ranks} GPUs and {max(both for _, both in run.stage_s) * MS:.0f} ms" for run in sides
        )
        lost.append(f"{model} {own} against {other} of {best.value.replace('_', ' ')}")
    return (
        "by Tables 5 and 6 its stages are more or no shorter; GPUs and slowest stage by our model: "
        f"{'; '.join(lost)}"
    )


def reads(model: str, modality: str) -> bool:
    """Whether a model has an encoder of the modality."""
    return not model.startswith({"vision": "ALM", "audio": "VLM"}[modality])


def most_tokens(model: str, modality: str) -> int:
    """The index of the first setting with the most tokens of an image or a clip."""
    totals = [sum(setting.tokens(modality)) for setting in settings(model).values()]
    return totals.index(max(totals))


def _size_note(llm_size: str, runs: Mapping[str, Runs]) -> str:
    all_runs = [(model, m, method_runs[0]) for model, by in runs.items() for m, method_runs in by.items()]
    large = [
        f"{model}/{method} {run.num_ranks}" for model, method, run in all_runs if run.num_ranks > NUM_GPUS
    ]
    unfit = [f"{model}/{method}" for model, method, run in all_runs if not run.is_fitting]
    return (
        f"{_NAMES[llm_size]} LLM: layouts of more than {NUM_GPUS} GPUs: {', '.join(large) or 'none'}; "
        f"that do not fit A40s by our account: {', '.join(unfit) or 'none'}"
    )


def _prose(evidence: Evidence, runs: Mapping[str, Runs]) -> None:
    """Add the numbers of sections 6.2.1 and 6.2.2."""
    if "VLM-S" in runs:
        ratios = [over(by, baseline) for by in runs.values() for baseline in _BASELINES]
        most = [max(pick(values) for values in ratios) for pick in (lambda values: values[0], min, max)]
        ends = ("likeliest inputs", "inputs of the least gains", "inputs of the greatest gains")
        gain_of = dict(zip(ends, most, strict=True))
        _number(evidence, "largest_gain", "cs_v1_e2e_max", gain_of, "x", RATIO_REL_TOL)
        _iteration(evidence, runs["VLM-S"])
        _stages(evidence, "VLM-S", runs["VLM-S"][Method.COLOCATED], "vlms_coloc")
        _stages(evidence, "VLM-S", runs["VLM-S"][Method.CORNSTARCH], "vlms_cs")
    if "VALM-MM" in runs:
        both = over(runs["VALM-MM"], Method.COLOCATED)
        gain_of_setting = dict(zip(settings("VALM-MM"), both, strict=True))
        _number(evidence, "VALM-MM/gain", "cs_v1_valmmm_tput", gain_of_setting, "x", RATIO_REL_TOL)
        _stages(evidence, "VALM-MM", runs["VALM-MM"][Method.COLOCATED], "valmmm_coloc_fb")
        _stages(evidence, "VALM-MM", runs["VALM-MM"][Method.CORNSTARCH], "valmmm_cs_fb")


def _iteration(evidence: Evidence, runs: Runs) -> None:
    """Add the shorter iteration on VLM-S in spite of a lower throughput per GPU."""
    pairs = zip(runs[Method.CORNSTARCH], runs[Method.COLOCATED], strict=True)
    shorter = [100 * (1 - own_run.iteration_s / other.iteration_s) for own_run, other in pairs]
    shorter_of_setting = dict(zip(settings("VLM-S"), shorter, strict=True))
    _number(evidence, "VLM-S/iteration_shorter", "cs_v1_vlms_iter", shorter_of_setting, "%", STAGE_REL_TOL)
    evidence.claim(
        f"VLM-S: an iteration of Cornstarch is shorter (ours by {shorter[0]:.0f} %);", shorter[0] > 0
    )


def _stages(evidence: Evidence, model: str, method_runs: Sequence[EndToEnd], claim: str) -> None:
    """Add forward and backward of the fastest and the slowest stage."""
    for end, pick in (("low", min), ("high", max)):
        of_runs = (pick(both for _, both in run.stage_s) * MS for run in method_runs)
        values = dict(zip(settings(model), of_runs, strict=True))
        _number(evidence, f"{model}/{claim}_stage_{end}", f"cs_v1_{claim}_{end}", values, "ms", STAGE_REL_TOL)


def _number(
    evidence: Evidence, key: str, claim: str, values: Mapping[str, float], unit: str, rel_tol: float
) -> None:
    number = PaperNumber(f"modelled/{key}", claim_value(claim), unit, "section 6.2", rel_tol)
    evidence.add_range(number, values, UNSTATED)
