"""What a search found: a record of every strategy, and the table of those that have a plan."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
from workbench.units import S_PER_HOUR, duration_text

Record = Mapping[str, Any]
TIED = " ="  # behind a candidate that the best does not beat for sure
DEGREES = ("pp", "tp", "cp", "dp", "ep")
PER_MODULE = (*DEGREES, "microbatches", "sharding")
_STEP_FIGURES = ("iteration_s", "peak_bytes", "ranks", "layout", "step_s")


def search_record(
    job: str, candidates: Sequence[Candidate], asked: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """All candidates, best first.

    A `tie` has an interval that overlaps the best's; `same_as` names the first strategy whose plan is the
    same, or takes the same time, memory, ranks and layout; `behind` says how far behind the best it is on the
    same batches, with the standard error of the mean; `front` names the plans that no other beats in time,
    memory, GPUs and dollars.

    Args:
        asked: the objective and what decides it; empty: the step's time.
    """
    ties = ({"tie": each.ties(candidates[0])} if each.plan is not None else {} for each in candidates)
    found = [
        candidate_record(each) | tie | _behind(each, candidates[0])
        for each, tie in zip(candidates, ties, strict=True)
    ]
    firsts: list[dict[str, Any]] = []
    for record in found:
        first = next((other for other in firsts if _equal(record, other)), None)
        if first is not None:
            record["same_as"] = first["strategy"]
        else:
            firsts.append(record)
    said = asked or {"objective": Objective.ITERATION.value}
    return {"job": job, **said, "candidates": found, "front": front_names(found)}


def _behind(candidate: Candidate, best: Candidate) -> dict[str, Any]:
    """Batch by batch, so that what all plans have in common falls out; nothing of a single batch."""
    if candidate.judged is None or best.judged is None or len(best.judged.times.batches_s) < 2:
        return {}
    pairs = zip(candidate.judged.times.batches_s, best.judged.times.batches_s, strict=True)
    differences = [own - others for own, others in pairs]
    return {"behind": {"mean_s": fmean(differences), "standard_error_s": standard_error(differences)}}


def candidate_record(candidate: Candidate) -> dict[str, Any]:
    """One strategy of a search: its plan's figures, or why it has none."""
    if candidate.plan is None or candidate.trace is None:
        return {"strategy": candidate.strategy, "refusal": candidate.refusal}
    plan = candidate.plan
    found = {
        "samples_per_s_per_rank": candidate.samples_per_s_per_rank,
        "ranks": len(plan.ranks),
        "samples": len(plan.batch),
        "step_s": candidate.step_s,
        "memory_bytes": memory_of_fullest(plan, peak_bytes(candidate.trace)),
        "layout": layout_record(plan),
    }
    if candidate.dollars_per_sample is not None:
        found["dollars_per_sample"] = candidate.dollars_per_sample
    if candidate.judged is not None:
        found |= judged_record(candidate.judged)
    return simulated_record(plan, candidate.trace) | found | {"strategy": candidate.strategy}


def memory_of_fullest(plan: Plan, peaks: Mapping[int, int]) -> int:
    """Bytes that the device of the rank with the largest peak has; without peaks, the least of any device."""
    nodes = {rank: plan.cluster.nodes[plan.cluster.node_of(rank)] for rank in plan.ranks}
    if not peaks:
        return min(node.memory_bytes for node in nodes.values())
    return nodes[max(peaks, key=lambda rank: peaks[rank])].memory_bytes


def judged_record(judged: Judged) -> dict[str, Any]:
    """What an objective says of a plan, and where it is a limit that the plan misses, that as its refusal."""
    times = judged.times
    found = {
        **judged.figures,
        "value": judged.value,
        "batches_s": list(times.batches_s),
        "mean_s": times.mean_s,
        "standard_error_s": times.standard_error_s,
        "planning_s": times.planning_s,
        "late_plans": times.late,
    }
    return found | ({"refusal": judged.misses} if judged.misses else {})


def layout_record(plan: Plan) -> dict[str, dict[str, Any]]:
    """Degrees, stages, microbatches and sharding of every module, of its first replica."""
    found: dict[str, dict[str, Any]] = {}
    for module in plan.model.modules:
        replicas = plan.replicas(module.name)
        chain = plan.chain[module.name, replicas[0]]
        found[module.name] = {
            "pp": len({stage.flat_ranks for stage in chain}),
            "stages": len(chain),
            "tp": chain[0].tp,
            "cp": chain[0].cp,
            "dp": len(replicas),
            "ep": chain[0].ep,
            "microbatches": len(plan.microbatches_of.get((module.name, replicas[0]), ())),
            "sharding": plan.settings.of(module.name).sharding.value,
        }
    return found


def search_table(found: Record) -> Table:
    """Plans of a search, best first, equal ones in one line; a strategy without a plan says why."""
    planned = [record for record in found["candidates"] if "refusal" not in record]
    best = planned[0]
    has_price = any("dollars_per_sample" in record for record in planned)
    headers = ["strategy", "ranks", *PER_MODULE, "iteration", "80 % within", "memory", "idle", "MFU"]
    headers += ["samples/s\nper rank", *(["$/1,000 samples"] if has_price else [])]
    columns = objective_columns(found)
    headers += [column.header for column in columns]
    table = titled(
        f"job {found['job']}, best first{asked_text(found)}; values per module: {', '.join(best['layout'])}",
        headers,
    )
    for record in planned:
        if "same_as" not in record:
            own = (column.cell(record) for column in columns)
            table.add_row(*_cells(record, _names(record, planned), best, has_price=has_price), *own)
    table.caption = "\n".join(_notes(found)) or None
    table.caption_justify = "left"
    return table


def fits_text(found: Record) -> str:
    """Whether there is a plan that fits, and how the best one is: what stands before the table."""
    candidates = found["candidates"]
    best = candidates[0]
    num_plans = sum("refusal" not in record for record in candidates)
    within = _interval(best)
    memory = "" if best["peak_bytes"] is None else f", {_of_memory(best)} on the fullest rank"
    return (
        f"fits: {num_plans} of {len(candidates)} strategies have a plan; best {best['strategy']}, "
        f"{milliseconds(best['iteration_s'])}{'' if within == '-' else f' ({within})'}{memory}"
    )


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
    found = record["interval_80"]
    return "-" if found is None else span_text(found["low_s"], found["high_s"])


def per_module(layout: Mapping[str, Mapping[str, Any]], name: str) -> Figure:
    """`1 + 1 + 2`, one of each module; `2` where all are equal."""
    values = [str(module[name]) for module in layout.values()]
    text = values[0] if len(set(values)) == 1 else " + ".join(values)
    return Figure(text, {"": text if not text.isdecimal() else int(text)})


def _notes(found: Record) -> list[str]:
    candidates = found["candidates"]
    is_tied = any(record.get("tie") for record in candidates[1:])
    ties = [f"{TIED.strip()} the interval overlaps the best's: a tie"] if is_tied else []
    named: dict[str, list[str]] = {}
    for each in candidates:
        if "refusal" in each:
            named.setdefault(each["refusal"], []).append(each["strategy"])
    refusals = [f"{', '.join(names)}: {refusal}" for refusal, names in named.items()]
    firsts = [name for name in found["front"] if not _is_double(candidates, name)]
    what = "time, memory, GPUs" + (" and dollars" if "dollars_per_sample" in candidates[0] else "")
    fronts = [f"Pareto front of {what}: {', '.join(firsts)}"] if len(firsts) > 1 else []
    return ties + fronts + refusals


def _is_double(candidates: Sequence[Record], name: str) -> bool:
    return any(each["strategy"] == name and "same_as" in each for each in candidates)


@dataclass(frozen=True, slots=True)
class Column:
    """A header, and what stands below it for a candidate's record."""

    header: str
    cell: Callable[[Record], str]


def asked_text(found: Record) -> str:
    """`, by goodput over ..., seed 0`; empty where the objective is the step on the job's own batch."""
    parts = [] if found["objective"] == Objective.ITERATION else [f"by {found['objective']}"]
    if "batches" in found:
        many = f"{found['over']} of {found['batches']} batches" if found["batches"] > 1 else "1 batch"
        parts.append(f"{many}, planning {found['planning']}")
    if "mtbf_s" in found:
        parts.append(f"a loss every {duration_text(found['mtbf_s'])}, {found['traces']} traces")
    if "steps" in found:
        limit = "" if found["deadline_s"] is None else f" in {duration_text(found['deadline_s'])}"
        parts.append(f"{found['steps']:,} steps{limit}")
    if "seed" in found:
        parts.append(f"seed {found['seed']}")
    return f", {', '.join(parts)}" if parts else ""


def objective_columns(found: Record) -> list[Column]:
    """Those of what was asked."""
    columns = []
    if "batches" in found:
        if found["over"] != "mean":
            columns.append(Column(found["over"], lambda record: milliseconds(record["step_s"])))
        columns += [Column("mean of batches", _mean), Column("planning", _planning)]
    if found["objective"] == Objective.TRAINING:
        columns += [Column("training", _training), Column("dollars", _dollars), Column("idle\nGPUs", _idle)]
    if found["objective"] == Objective.GOODPUT:
        columns += [Column("useful\nsamples/s", _goodput), Column("of its speed", _useful)]
        columns += [Column("goes on from", _recovery), Column("spare\nnodes", _spare)]
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


def _dollars(record: Record) -> Figure:
    return Figure(f"{record['dollars']:,.2f}", {"": record["dollars"]})


def _idle(record: Record) -> str:
    return str(record["idle_gpus"])


def _goodput(record: Record) -> Figure:
    rate, error = record["useful_samples_per_s"], record["useful_standard_error"]
    within = "" if error is None else f" +- {error:.2g}"
    return Figure(f"{rate:.4g}{within}", {"": rate, "standard_error": error})


def _useful(record: Record) -> str:
    return percent(record["useful_share"], signed=False)


def _recovery(record: Record) -> str:
    every = record["checkpoint_every"]
    return f"{record['recovery']}" if every is None else f"{record['recovery']}, every {every:,} steps"


def _spare(record: Record) -> str:
    return str(record["spare_nodes"])
