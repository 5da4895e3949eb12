"""What a search found: a record of every strategy, and the table of those that have a plan."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from workbench.plan.plan import Plan
from workbench.report.figure import Figure
from workbench.report.records import simulated_record
from workbench.report.tables import mebibytes, milliseconds, percent, span_text, titled
from workbench.search.drive import Candidate

Record = Mapping[str, Any]
TIED = " ="  # behind a candidate that the best does not beat for sure
DEGREES = ("pp", "tp", "cp", "dp", "ep")
PER_MODULE = (*DEGREES, "microbatches", "sharding")
_STEP_FIGURES = ("iteration_s", "peak_bytes", "ranks", "layout")


def search_record(job: str, candidates: Sequence[Candidate]) -> dict[str, Any]:
    """All candidates, best first.

    A `tie` has an interval that overlaps the best's; `same_as` names the first strategy whose plan is the
    same, or takes the same time, memory, ranks and layout.
    """
    ties = ({"tie": each.ties(candidates[0])} if each.plan is not None else {} for each in candidates)
    found = [candidate_record(each) | tie for each, tie in zip(candidates, ties, strict=True)]
    firsts: list[dict[str, Any]] = []
    for record in found:
        first = next((other for other in firsts if _equal(record, other)), None)
        if first is not None:
            record["same_as"] = first["strategy"]
        else:
            firsts.append(record)
    return {"job": job, "candidates": found}


def candidate_record(candidate: Candidate) -> dict[str, Any]:
    """One strategy of a search: its plan's figures, or why it has none."""
    if candidate.plan is None or candidate.trace is None:
        return {"strategy": candidate.strategy, "refusal": candidate.refusal}
    plan = candidate.plan
    found = {
        "samples_per_s_per_rank": candidate.samples_per_s_per_rank,
        "ranks": len(plan.ranks),
        "memory_bytes": min(
            plan.cluster.nodes[plan.cluster.node_of(rank)].memory_bytes for rank in plan.ranks
        ),
        "layout": layout_record(plan),
    }
    if candidate.dollars_per_sample is not None:
        found["dollars_per_sample"] = candidate.dollars_per_sample
    return simulated_record(plan, candidate.trace) | found | {"strategy": candidate.strategy}


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
    table = titled(
        f"job {found['job']}, best first; a figure for each of {', '.join(best['layout'])}", headers
    )
    for record in planned:
        if "same_as" not in record:
            table.add_row(*_cells(record, _names(record, planned), best, has_price=has_price))
    table.caption = "\n".join(_notes(found["candidates"])) or None
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


def _notes(candidates: Sequence[Record]) -> list[str]:
    is_tied = any(record.get("tie") for record in candidates[1:])
    ties = [f"{TIED.strip()} the interval overlaps the best's: a tie"] if is_tied else []
    refusals = [f"{each['strategy']}: {each['refusal']}" for each in candidates if "refusal" in each]
    return ties + refusals
