"""Plan and simulate neighbours of a job: more or fewer ranks and samples, faster or slower links."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from html import escape
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any

from workbench.cost.model import CostModel
from workbench.cost.profile import load_profile
from workbench.job.job import job_from_spec
from workbench.job.machines import cost_of
from workbench.job.schema import JobSpec, LinkSpec
from workbench.metrics import step_metrics
from workbench.plan.plan import Plan
from workbench.report.sortable import Cell, number, sortable_table
from workbench.report.tables import mebibytes, milliseconds
from workbench.search.drive import Candidate, Watch, search
from workbench.strategies.registry import BY_NAME
from workbench.timing.provenance import interval_of
from workbench.trace import Trace
from workbench.units import GB, US_PER_S

HALF, TWICE, FOURFOLD = 0.5, 2.0, 4.0

Predict = Callable[[Plan, CostModel], Trace]
Words = Mapping[str, Any]  # dotted keys of a job file -> values


class OutOfTimeError(Exception):
    """The time for simulations is over: the current one does not count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """A varied quantity. The first value is the job's own.

    Args:
        name: of the quantity.
        values: in its own unit; of links, multiples of the job's.
        labels: as they are shown.
    """

    name: str
    values: tuple[float, ...]
    labels: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One neighbour: its index on every axis, its changes of the job file, and its result."""

    at: tuple[int, ...]
    words: Words
    candidate: Candidate


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """Simulated neighbours of a job, out of `num_neighbours`; the others are unknown.

    Args:
        job: its name.
        strategy: that planned all of them.
        seconds: after which no more were started.
    """

    job: str
    strategy: str
    axes: tuple[Axis, ...]
    points: tuple[Point, ...]
    num_neighbours: int
    seconds: float


def what_if(
    spec: JobSpec,
    strategy: str,
    predict: Predict,
    *,
    folder: Path,
    seconds: float,
    spent_s: Callable[[], float],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> WhatIf:
    """Plan and simulate the neighbours of a job until the time is over, the nearest first.

    With other ranks a plan may have other stages or other replicas: both are tried, the faster one counts.

    Args:
        predict: simulates a plan after all checks; raises ValueError where it is refused.
        folder: base of the job's relative paths.
        seconds: no simulation ends later by more than one step of a search.
        spent_s: seconds since the start.
        progress: called with (neighbours done, number of neighbours).

    Raises:
        ValueError: there is no such strategy.

    Complexity: at most 108 neighbours, two plans each.
    """
    if strategy not in BY_NAME:
        raise ValueError(f"what-if: strategy {strategy!r}: want one of {', '.join(BY_NAME)}")
    axes = axes_of(spec)
    indices = sorted(product(*(range(len(axis.values)) for axis in axes)), key=_distance)
    points: list[Point] = []

    def check_time(*_: object) -> None:
        if spent_s() > seconds:
            raise OutOfTimeError

    try:
        for index in indices:
            check_time()
            progress(len(points), len(indices))
            points.append(_point(spec, strategy, predict, axes, index, folder, check_time))
    except OutOfTimeError:
        pass
    return WhatIf(
        job=spec.name,
        strategy=strategy,
        axes=axes,
        points=tuple(points),
        num_neighbours=len(indices),
        seconds=seconds,
    )


def _distance(index: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    return sum(step > 0 for step in index), index


def axes_of(spec: JobSpec) -> tuple[Axis, ...]:
    """Ranks, samples, samples per microbatch, links, as far as the job can vary them."""
    ranks = _ranks(spec)
    can_grow = spec.cluster.nodes is not None  # processes of one machine and pools do not grow
    has_links = spec.cluster.pools is None and (spec.cluster.local is None or spec.cluster.intra is not None)
    links = (1.0, HALF, TWICE, FOURFOLD) if has_links else (1.0,)
    return (
        _counts("ranks", ranks, (HALF, TWICE) if can_grow else (HALF,)),
        _counts("samples per step", spec.batch.samples, (HALF, TWICE)),
        _counts("samples per microbatch", spec.batch.microbatch_samples, (HALF, TWICE)),
        Axis(name="link speed", values=links, labels=tuple(f"{factor:g} x" for factor in links)),
    )


def _counts(name: str, current: int, factors: tuple[float, ...]) -> Axis:
    values = (current, *(round(current * factor) for factor in factors if current * factor >= 1))
    return Axis(name=name, values=values, labels=tuple(f"{value:,}" for value in values))


def _ranks(spec: JobSpec) -> int:
    cluster = spec.cluster
    if cluster.pools is not None:
        all_ranks = sum(pool.nodes * pool.ranks_per_node for pool in cluster.pools.values())
    elif cluster.local is not None:
        all_ranks = cluster.local.ranks
    else:
        all_ranks = (cluster.nodes or 1) * (cluster.ranks_per_node or 1)
    return min(spec.max_ranks or all_ranks, all_ranks)


def _point(
    spec: JobSpec,
    strategy: str,
    predict: Predict,
    axes: tuple[Axis, ...],
    index: tuple[int, ...],
    folder: Path,
    check_time: Callable[..., None],
) -> Point:
    candidates = []
    for words in words_of(spec, axes, index, folder):
        candidate = _candidate(with_words(spec, words), strategy, predict, folder, check_time)
        candidates.append(Point(at=index, words=words, candidate=candidate))
    return min(candidates, key=_seconds)


def _seconds(point: Point) -> float:
    trace = point.candidate.trace
    return float("inf") if trace is None else trace.iteration_s


def _candidate(
    spec: JobSpec, strategy: str, predict: Predict, folder: Path, check_time: Callable[..., None]
) -> Candidate:
    try:
        job = job_from_spec(spec, folder=folder)
        cost = cost_of(job, None, None)
    except ValueError as error:
        return Candidate(strategy=strategy, refusal=str(error))
    planner = {strategy: BY_NAME[strategy].planner}
    (candidate,) = search(job, cost, planner, lambda plan: predict(plan, cost), Watch(progress=check_time))
    return candidate


def words_of(spec: JobSpec, axes: tuple[Axis, ...], index: tuple[int, ...], folder: Path) -> Iterator[Words]:
    """Changes of the job file for a neighbour; with other ranks, one or two variants."""
    ranks, samples, microbatch, links = (
        axis.values[position] for axis, position in zip(axes, index, strict=True)
    )
    words: dict[str, Any] = {}
    if index[1]:
        words["batch.samples"] = int(samples)
    if index[2]:
        words["batch.microbatch_samples"] = int(microbatch)
    if index[3]:
        words |= _link_words(spec, links, folder)
    if not index[0]:
        yield MappingProxyType(words)
        return
    words |= _rank_words(spec, int(ranks))
    yield MappingProxyType(words)
    replicas, rest = divmod(spec.batch.replicas * int(ranks), int(axes[0].values[0]))
    if replicas and not rest:
        yield MappingProxyType(words | {"batch.replicas": replicas})


def _rank_words(spec: JobSpec, ranks: int) -> dict[str, Any]:
    per_node = spec.cluster.ranks_per_node
    if spec.cluster.nodes is None or per_node is None:
        return {"max_ranks": ranks}
    nodes = -(-ranks // per_node)
    is_all = spec.max_ranks is None and nodes * per_node == ranks
    return {"cluster.nodes": nodes} | ({} if is_all else {"max_ranks": ranks})


def _link_words(spec: JobSpec, factor: float, folder: Path) -> dict[str, Any]:
    """Links faster by a factor; if the job states none, the profile's."""
    return {
        f"cluster.{scope}.{key}": value
        for scope in ("intra", "inter")
        if (link := _link(spec, scope, folder)) is not None
        for key, value in (link | {"gb_per_s": factor * link["gb_per_s"]}).items()
    }


def _link(spec: JobSpec, scope: str, folder: Path) -> dict[str, Any] | None:
    """The link's words; None if there is no such link."""
    cluster = spec.cluster
    stated: LinkSpec | None = getattr(cluster, scope)
    if stated is not None:
        return stated.model_dump(exclude_none=True)
    if cluster.local is not None or (scope == "inter" and cluster.nodes == 1):
        return None
    file = folder / spec.profile
    machine = load_profile(str(file) if file.is_file() else spec.profile).machine_link(scope)
    words = {"gb_per_s": machine.link.bytes_per_s / GB, "latency_us": machine.link.latency_s * US_PER_S}
    cards = machine.per_node if machine.per_node is not None else cluster.ranks_per_node
    return words | ({"cards": cards} if scope == "inter" else {})


def with_words(spec: JobSpec, words: Words) -> JobSpec:
    """The job file with other values."""
    document = spec.model_dump(exclude_unset=True, exclude_none=True)
    for key, value in words.items():
        *path, last = key.split(".")
        inside = document
        for part in path:
            inside = inside.setdefault(part, {})
        inside[last] = value
    return JobSpec.model_validate(document)


def what_if_html(result: WhatIf | None) -> str:
    """The section of the page, with the number of neighbours tried."""
    if result is None:
        return (
            '<h3>What if</h3><p class="faint">Name the job, and its neighbours are simulated: '
            "workbench report FOLDER --job JOB</p>"
        )
    num_tried = len(result.points)
    refused = sum(point.candidate.plan is None for point in result.points)
    summary = (
        f"{num_tried} of {result.num_neighbours} neighbours of job {result.job} were planned by "
        f"{result.strategy}, the nearest first, in at most {result.seconds:g} s: {num_tried - refused} were "
        f"simulated, {refused} have no plan. Sliders stop only there; nothing in between is guessed."
    )
    if not num_tried:
        return f"<h3>What if</h3><p>{escape(summary)}</p>"
    sliders = "".join(_slider(index, axis) for index, axis in enumerate(result.axes))
    return (
        f'<section id="what-if"><h3>What if</h3><p class="faint">{escape(summary)}</p>'
        f'<div class="sliders">{sliders}</div><p class="snapped" role="status"></p>'
        f'<div class="cards outcome" aria-live="polite"></div><pre class="words faint"></pre>'
        f"<details><summary>All {num_tried} neighbours</summary>{_table(result)}</details></section>"
    )


def _slider(axis_index: int, axis: Axis) -> str:
    name = escape(axis.name)
    return (
        f'<label data-axis="{axis_index}"><span>{name}<output></output></span>'
        f'<input type="range" min="0" max="0" step="1" value="0" aria-label="{name}"></label>'
    )


def _table(result: WhatIf) -> str:
    headers = (*(axis.name for axis in result.axes), "iteration", "samples/s", "peak memory", "ranks used")
    rows = [(*_place_cells(result, point), *_outcome_cells(point)) for point in result.points]
    return sortable_table(headers, [rows], marks=lambda index: f' data-point="{index}"')


def _place_cells(result: WhatIf, point: Point) -> tuple[Cell, ...]:
    pairs = zip(result.axes, point.at, strict=True)
    return tuple(Cell(axis.labels[index], axis.values[index]) for axis, index in pairs)


def _outcome_cells(point: Point) -> tuple[Cell, ...]:
    candidate = point.candidate
    if candidate.trace is None or candidate.plan is None:
        return Cell("no plan"), Cell("-"), Cell("-"), Cell("-")
    rate = len(candidate.plan.batch) / candidate.trace.iteration_s
    return (
        number(candidate.trace.iteration_s, milliseconds),
        number(rate, "{:.3g}".format),
        number(step_metrics(candidate.trace).peak_bytes, mebibytes),
        number(len(candidate.plan.ranks)),
    )


def what_if_record(result: WhatIf | None) -> dict[str, Any] | None:
    """Axes and points for the page's script: seconds, bytes; None without a job."""
    if result is None:
        return None
    return {
        "axes": [{"name": a.name, "values": a.values, "labels": a.labels} for a in result.axes],
        "points": [_point_record(point) for point in result.points],
    }


def _point_record(point: Point) -> dict[str, Any]:
    candidate = point.candidate
    words = "\n".join(f"{key}: {value:g}" for key, value in point.words.items())
    words_text = f"In the job file:\n{words}" if words else "The job file as it is."
    record: dict[str, Any] = {"at": point.at, "words": words_text, "refusal": candidate.refusal or None}
    if candidate.trace is None or candidate.plan is None:
        return record
    interval = interval_of(candidate.trace)
    return record | {
        "iteration_s": candidate.trace.iteration_s,
        "low_s": None if interval is None else interval.low_s,
        "high_s": None if interval is None else interval.high_s,
        "samples_per_s": len(candidate.plan.batch) / candidate.trace.iteration_s,
        "peak_bytes": step_metrics(candidate.trace).peak_bytes,
        "ranks": len(candidate.plan.ranks),
        "stages": _stage_counts(candidate.plan),
    }


def _stage_counts(plan: Plan) -> str:
    """`1 + 1 + 10`: stages of the first replica of every module."""
    firsts = {module.name: plan.replicas(module.name)[0] for module in plan.model.modules}
    return " + ".join(str(len(plan.chain[name, replica])) for name, replica in firsts.items())
