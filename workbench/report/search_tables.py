"""Results of a search: a record of every strategy, and the table of those with a plan."""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from types import MappingProxyType
from typing import Any

from rich.table import Table

from workbench.metrics import peak_bytes
from workbench.plan.plan import Plan
from workbench.report.figure import Figure
from workbench.report.records import simulated_record
from workbench.report.search_points import front_names
from workbench.report.tables import mebibytes, milliseconds, percent, span_text, titled
from workbench.search.drive import Candidate
from workbench.search.objectives.objective import Objective
from workbench.search.objectives.plan_judge import Judged
from workbench.search.objectives.step_times import standard_error
from workbench.strategies.registry import BY_NAME
from workbench.units import S_PER_HOUR, duration_text

Record = Mapping[str, Any]
TIE = "the interval overlaps the best's"
TIED = " ="  # mark of a candidate that may be as fast as the best
LOW_MFU = 0.1  # of the best plan, below which a search names `explain`: chosen, not measured
DEGREES = ("pp", "tp", "cp", "dp", "ep")
PER_MODULE = (*DEGREES, "microbatches", "sharding")
_STEP_FIGURES = ("iteration_s", "peak_bytes", "ranks", "layout", "step_s")


def search_record(
    job: str, candidates: Sequence[Candidate], asked: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """All candidates, best first.

    A `tie` has an interval that overlaps the best's, of kernels and links alone where it depends on who
    executes the plan; `same_as` names the first strategy with the same plan,
    or the same time, memory, ranks and layout; `behind` is the distance to the best on the same batches,
    with the standard error of the mean; `front` names the plans that no other beats in time, memory, GPUs
    and dollars.

    Args:
        asked: the objective and what determines it; empty: the step's time.
    """
    ties = ({"tie": each.ties(candidates[0])} if each.plan is not None else {} for each in candidates)
    records = [
        candidate_record(each) | tie | _behind(each, candidates[0])
        for each, tie in zip(candidates, ties, strict=True)
    ]
    firsts: list[dict[str, Any]] = []
    for record in records:
        first = next((other for other in firsts if _equal(record, other)), None)
        if first is not None:
            record["same_as"] = first["strategy"]
        else:
            firsts.append(record)
    objective = asked or {"objective": Objective.ITERATION.value}
    return {"job": job, **objective, "candidates": records, "front": front_names(records)}


def _behind(candidate: Candidate, best: Candidate) -> dict[str, Any]:
    """Difference to the best batch by batch, so that common variation cancels; empty for a single batch."""
    if candidate.judged is None or best.judged is None or len(best.judged.times.batches_s) < 2:
        return {}
    pairs = zip(candidate.judged.times.batches_s, best.judged.times.batches_s, strict=True)
    differences = [seconds - best_seconds for seconds, best_seconds in pairs]
    return {"behind": {"mean_s": fmean(differences), "standard_error_s": standard_error(differences)}}


def candidate_record(candidate: Candidate) -> dict[str, Any]:
    """One strategy of a search: its plan's figures, or why it has none."""
    stopped = {"stopped": True} if candidate.is_stopped else {}
    if candidate.plan is None or candidate.trace is None:
        return {"strategy": candidate.strategy, "refusal": candidate.refusal} | stopped
    plan = candidate.plan
    figures = {
        "samples_per_s_per_rank": candidate.samples_per_s_per_rank,
        "ranks": len(plan.ranks),
        "samples": len(plan.batch),
        "step_s": candidate.step_s,
        "memory_bytes": memory_of_fullest(plan, peak_bytes(candidate.trace)),
        "layout": layout_record(plan),
    }
    if candidate.dollars_per_sample is not None:
        figures["dollars_per_sample"] = candidate.dollars_per_sample
    if candidate.judged is not None:
        figures |= judged_record(candidate.judged)
    return simulated_record(plan, candidate.trace) | figures | {"strategy": candidate.strategy} | stopped


def memory_of_fullest(plan: Plan, peaks: Mapping[int, int]) -> int:
    """Bytes that the device of the rank with the largest peak has; without peaks, the least of any device."""
    nodes = {rank: plan.cluster.nodes[plan.cluster.node_of(rank)] for rank in plan.ranks}
    if not peaks:
        return min(node.memory_bytes for node in nodes.values())
    return nodes[max(peaks, key=lambda rank: peaks[rank])].memory_bytes


def judged_record(judged: Judged) -> dict[str, Any]:
    """An objective's figures of a plan; if the plan misses a limit, that as its refusal."""
    times = judged.times
    figures = {
        **judged.figures,
        "value": judged.value,
        "batches_s": list(times.batches_s),
        "mean_s": times.mean_s,
        "standard_error_s": times.standard_error_s,
        "planning_s": times.planning_s,
        "late_plans": times.late,
    }
    return figures | ({"refusal": judged.misses} if judged.misses else {})


def layout_record(plan: Plan) -> dict[str, dict[str, Any]]:
    """Degrees, stages, microbatches and sharding of every module, for its first replica.

    Joint replicas count in dp one by one, as in a job file.
    """
    layouts: dict[str, dict[str, Any]] = {}
    for module in plan.model.modules:
        replicas = plan.replicas(module.name)
        chain = plan.chain[module.name, replicas[0]]
        layouts[module.name] = {
            "pp": len({stage.flat_ranks for stage in chain}),
            "stages": len(chain),
            "tp": chain[0].tp,
            "cp": chain[0].cp,
            "dp": len(replicas) * chain[0].joint_replicas,
            "ep": chain[0].ep,
            "microbatches": len(plan.microbatches_of.get((module.name, replicas[0]), ())),
            "sharding": plan.settings.of(module.name).sharding.value,
        }
    return layouts


def search_table(search: Record) -> Table:
    """Plans of a search, best first, equal ones in one line; refusals in the caption."""
    planned = [record for record in search["candidates"] if "refusal" not in record]
    best = planned[0]
    has_price = any("dollars_per_sample" in record for record in planned)
    headers = ["strategy", "ranks", *PER_MODULE, "iteration", "80 % within", "memory", "idle", "MFU"]
    headers += ["samples/s\nper rank", *(["$/1,000 samples"] if has_price else [])]
    columns = objective_columns(search)
    headers += [header for header, _ in columns]
    table = titled(
        f"job {search['job']}, best first{asked_text(search)}; "
        f"values per module: {', '.join(best['layout'])}",
        headers,
        key="plans",
    )
    for record in planned:
        if "same_as" not in record:
            cells = _cells(record, _names(record, planned), best, has_price=has_price)
            table.add_row(*cells, *(cell(record) for _, cell in columns))
    table.caption = "\n".join(_notes(search)) or None
    table.caption_justify = "left"
    return table


def fits_text(search: Record) -> str:
    """The line before the table: whether a plan fits, and the best one, with what it is the best by."""
    candidates = search["candidates"]
    best = candidates[0]
    num_plans = sum("refusal" not in record for record in candidates)
    within = _interval(best)
    memory = "" if best["peak_bytes"] is None else f", {_of_memory(best)} on the fullest rank"
    kind = "strategies" if all(record["strategy"] in BY_NAME for record in candidates) else "tries"
    return (
        f"fits: {num_plans} of {len(candidates)} {kind} have a plan; best {_aimed_text(search)}, "
        f"{milliseconds(best['iteration_s'])}{'' if within == '-' else f' ({within})'}{memory}"
    )


def _aimed_text(search: Record) -> str:
    """The best plan's strategy; unless plans are ranked by their steps, with the objective and its figure."""
    best, objective = search["candidates"][0], Objective(search["objective"])
    figures: dict[Objective, Callable[[], str]] = {
        Objective.ITERATION: lambda: "",
        Objective.THROUGHPUT: lambda: f"{best['samples_per_s_per_rank']:.4g} samples/s per rank",
        Objective.DOLLARS: lambda: f"${1000 * best['dollars_per_sample']:.4g} for 1,000 samples",
        Objective.TRAINING: lambda: f"${best['dollars']:,.2f}",
        Objective.GOODPUT: lambda: f"{best['useful_samples_per_s']:.4g} useful samples/s",
    }
    figure = figures[objective]()
    return f"by {objective}: {best['strategy']}, {figure}" if figure else best["strategy"]


def _of_memory(record: Record) -> str:
    return f"{mebibytes(record['peak_bytes'])} of {mebibytes(record['memory_bytes'])}"


def _equal(record: Record, other: Record) -> bool:
    if "refusal" in record or "refusal" in other:
        return False
    is_same_plan = record["plan_hash"] == other["plan_hash"]
    return is_same_plan or all(record[name] == other[name] for name in _STEP_FIGURES)


def _names(record: Record, planned: Sequence[Record]) -> list[str]:
    others = [each["strategy"] for each in planned if each.get("same_as") == record["strategy"]]
    return [record["strategy"], *others]


def _cells(record: Record, names: Sequence[str], best: Record, *, has_price: bool) -> list[str]:
    mark = TIED if record is not best and record["tie"] else ""
    peak, dollars = record["peak_bytes"], record.get("dollars_per_sample")
    price = "-" if dollars is None else Figure(f"{1000 * dollars:.4g}", {"": 1000 * dollars})
    rate = record["samples_per_s_per_rank"]
    return [
        Figure("\n".join((names[0] + mark, *names[1:])), {"": ", ".join(names), "tie": record["tie"]}),
        str(record["ranks"]),
        *(per_module(record["layout"], name) for name in PER_MODULE),
        milliseconds(record["iteration_s"]),
        _interval(record),
        "-" if peak is None else mebibytes(peak),
        percent(record["bubble_fraction"], signed=False),
        percent(record["mfu"], signed=False),
        Figure(f"{rate:.4g}", {"": rate}),
        *([price] if has_price else []),
    ]


def _interval(record: Record) -> str:
    interval = record["interval_80"]
    return "-" if interval is None else span_text(interval["low_s"], interval["high_s"])


def per_module(layout: Mapping[str, Mapping[str, Any]], name: str) -> Figure:
    """`1 + 1 + 2`, one of each module; `2` where all are equal."""
    values = [str(module[name]) for module in layout.values()]
    text = values[0] if len(set(values)) == 1 else " + ".join(values)
    return Figure(text, {"": text if not text.isdecimal() else int(text)})


def _notes(search: Record) -> list[str]:
    candidates = search["candidates"]
    is_tied = any(record.get("tie") for record in candidates[1:])
    which = (
        "the intervals of kernels and links overlap the best's"
        if candidates[0]["interval_80_by_executor"]
        else TIE
    )
    ties = [f"{TIED.strip()} {which}: a tie"] if is_tied else []
    strategies_by_refusal: dict[str, list[str]] = {}
    for each in candidates:
        if "refusal" in each:
            strategies_by_refusal.setdefault(each["refusal"], []).append(each["strategy"])
    refusals = [f"{', '.join(names)}: {refusal}" for refusal, names in strategies_by_refusal.items()]
    ranked = [each["strategy"] for each in candidates if each["strategy"] in search["front"]]
    firsts = [name for name in ranked if not _is_double(candidates, name)]
    what = "time, memory, GPUs" + (" and dollars" if "dollars_per_sample" in candidates[0] else "")
    fronts = [f"Pareto front of {what}, best first: {', '.join(firsts)}"] if len(firsts) > 1 else []
    return ties + fronts + _low_mfu(candidates[0]) + _faster_on_fewer(candidates) + refusals


def _low_mfu(best: Record) -> list[str]:
    """What to do where the best plan uses little of its devices."""
    if best["mfu"] is None or best["mfu"] >= LOW_MFU:
        return []
    asks = "`workbench explain PLAN --job JOB` says why and tries changes of the job"
    return [f"the best plan's MFU is low, {best['mfu']:.1%}: {asks}"]


def _faster_on_fewer(candidates: Sequence[Record]) -> list[str]:
    """Why useful samples may exceed a plan's own speed: a part of it, on fewer nodes, is faster."""
    names_by_nodes: dict[int, list[str]] = {}
    for each in candidates:
        if each.get("faster_on_nodes") is not None:
            names_by_nodes.setdefault(each["faster_on_nodes"], []).append(each["strategy"])
    return [
        f"{', '.join(names)}: faster on {nodes} node{'s' * (nodes > 1)} than on all that the plan uses, so "
        f"the share of its speed may exceed 100 %; `workbench search` a job with nodes: {nodes}"
        for nodes, names in names_by_nodes.items()
    ]


def _is_double(candidates: Sequence[Record], name: str) -> bool:
    return any(each["strategy"] == name and "same_as" in each for each in candidates)


Column = tuple[str, Callable[[Record], str]]  # a header, and the cell below it for a candidate's record


def asked_text(search: Record) -> str:
    """`, by goodput over ..., seed 0`; empty if the objective is the step on the job's own batch."""
    parts = [] if search["objective"] == Objective.ITERATION else [f"by {search['objective']}"]
    if "batches" in search:
        many = f"{search['over']} of {search['batches']} batches" if search["batches"] > 1 else "1 batch"
        parts.append(f"{many}, planning {search['planning']}")
    if "mtbf_s" in search:
        parts.append(f"a loss every {duration_text(search['mtbf_s'])}, {search['traces']} traces")
    if "steps" in search:
        limit = "" if search["deadline_s"] is None else f" in {duration_text(search['deadline_s'])}"
        parts.append(f"{search['steps']:,} steps{limit}")
    if "seed" in search:
        parts.append(f"seed {search['seed']}")
    return f", {', '.join(parts)}" if parts else ""


def objective_columns(search: Record) -> list[Column]:
    """Columns for the objective."""
    columns: list[Column] = []
    if "batches" in search:
        if search["over"] != "mean":
            columns.append((search["over"], lambda record: milliseconds(record["step_s"])))
        columns += [("mean of batches", _mean), ("planning", _planning)]
    if search["objective"] == Objective.TRAINING:
        columns += [
            ("training", _training),
            ("dollars", lambda record: Figure(f"{record['dollars']:,.2f}", {"": record["dollars"]})),
            ("idle\nGPUs", lambda record: str(record["idle_gpus"])),
        ]
    if search["objective"] == Objective.GOODPUT:
        columns += [
            ("useful\nsamples/s", _goodput),
            ("of its speed", lambda record: percent(record["useful_share"], signed=False)),
            ("goes on from", _recovery),
            ("spare\nnodes", lambda record: str(record["spare_nodes"])),
        ]
    return columns


def _mean(record: Record) -> Figure:
    error = record["standard_error_s"]
    text = milliseconds(record["mean_s"])
    within = "" if error is None else f" +- {milliseconds(error)}"
    return Figure(f"{text}{within}", {"mean_s": record["mean_s"], "standard_error_s": error})


def _planning(record: Record) -> Figure:
    late = f", late {record['late_plans']}" if record["late_plans"] else ""
    seconds = record["planning_s"]
    return Figure(f"{milliseconds(seconds)}{late}", {"s": seconds, "late": record["late_plans"]})


def _training(record: Record) -> Figure:
    seconds = record["training_s"]
    return Figure(duration_text(seconds), {"h": seconds / S_PER_HOUR})


def _goodput(record: Record) -> Figure:
    rate, error = record["useful_samples_per_s"], record["useful_standard_error"]
    within = "" if error is None else f" +- {error:.2g}"
    return Figure(f"{rate:.4g}{within}", {"": rate, "standard_error": error})


def _recovery(record: Record) -> str:
    every = record["checkpoint_every"]
    return f"{record['recovery']}" if every is None else f"{record['recovery']}, every {every:,} steps"
