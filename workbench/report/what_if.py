"""Neighbours of a job, each planned and simulated: more or fewer ranks, samples, faster or slower links."""

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
from workbench.search.drive import Candidate, search
from workbench.strategies.registry import BY_NAME
from workbench.timing.provenance import interval_of
from workbench.trace import Trace
from workbench.units import GB, US_PER_S

HALF, TWICE, FOURFOLD = 0.5, 2.0, 4.0

Predict = Callable[[Plan, CostModel], Trace]
Words = Mapping[str, Any]  # keys of a job file, with dots, and what they say


class OutOfTimeError(Exception):
    """The time for simulations is over: this one does not count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """What is varied. The first value is the job's own.

    Args:
        name: of what.
        values: in its own unit; of links, times the job's.
        labels: as they are shown.
    """

    name: str
    values: tuple[float, ...]
    labels: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One neighbour: its place on every axis, what its job file says differently, what became of it."""

    at: tuple[int, ...]
    words: Words
    candidate: Candidate


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """What was simulated, of so many neighbours that there are; nothing stands for the others.

    Args:
        job: its name.
        strategy: that planned every one.
        seconds: after which no more were begun.
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
        predict: simulates a plan after every check; ValueError where it is refused.
        folder: where relative paths of the job start.
        seconds: no simulation ends later by more than one step of a search.
        spent_s: seconds since the start.
        progress: called with (neighbours done, of how many).

    Raises:
        ValueError: there is no such strategy.

    Complexity: at most 108 neighbours, two plans each.
    """
    if strategy not in BY_NAME:
        raise ValueError(f"what-if: strategy {strategy!r}: want one of {', '.join(BY_NAME)}")
    axes = axes_of(spec)
    places = sorted(product(*(range(len(axis.values)) for axis in axes)), key=_distance)
    points: list[Point] = []

    def hurry(*_: object) -> None:
        if spent_s() > seconds:
            raise OutOfTimeError

    try:
        for index in places:
            hurry()
            progress(len(points), len(places))
            points.append(_point(spec, strategy, predict, axes, index, folder, hurry))
    except OutOfTimeError:
        pass
    return WhatIf(
        job=spec.name,
        strategy=strategy,
        axes=axes,
        points=tuple(points),
        num_neighbours=len(places),
        seconds=seconds,
    )


def _distance(place: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    return sum(step > 0 for step in place), place


def axes_of(spec: JobSpec) -> tuple[Axis, ...]:
    """Ranks, samples, samples of a microbatch, links: where the job's words leave room."""
    ranks = _ranks(spec)
    more = spec.cluster.nodes is not None  # processes of one machine and pools do not grow
    has_links = spec.cluster.pools is None and (spec.cluster.local is None or spec.cluster.intra is not None)
    links = (1.0, HALF, TWICE, FOURFOLD) if has_links else (1.0,)
    return (
        _counts("ranks", ranks, (HALF, TWICE) if more else (HALF,)),
        _counts("samples per step", spec.batch.samples, (HALF, TWICE)),
        _counts("samples per microbatch", spec.batch.microbatch_samples, (HALF, TWICE)),
        Axis(name="link speed", values=links, labels=tuple(f"{factor:g} x" for factor in links)),
    )


def _counts(name: str, own: int, factors: tuple[float, ...]) -> Axis:
    values = (own, *(round(own * factor) for factor in factors if own * factor >= 1))
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
    place: tuple[int, ...],
    folder: Path,
    hurry: Callable[..., None],
) -> Point:
    tried = []
    for words in words_of(spec, axes, place, folder):
        candidate = _candidate(with_words(spec, words), strategy, predict, folder, hurry)
        tried.append(Point(at=place, words=words, candidate=candidate))
    return min(tried, key=_seconds)


def _seconds(point: Point) -> float:
    trace = point.candidate.trace
    return float("inf") if trace is None else trace.iteration_s


def _candidate(
    spec: JobSpec, strategy: str, predict: Predict, folder: Path, hurry: Callable[..., None]
) -> Candidate:
    try:
        job = job_from_spec(spec, folder=folder)
        cost = cost_of(job, None, None)
    except ValueError as error:
        return Candidate(strategy=strategy, refusal=str(error))
    planner = {strategy: BY_NAME[strategy].planner}
    (found,) = search(job, cost, planner, lambda plan: predict(plan, cost), progress=hurry)
    return found


def words_of(spec: JobSpec, axes: tuple[Axis, ...], place: tuple[int, ...], folder: Path) -> Iterator[Words]:
    """What a job file of that neighbour says differently; with other ranks, in one way or two."""
    ranks, samples, microbatch, links = (axis.values[at] for axis, at in zip(axes, place, strict=True))
    words: dict[str, Any] = {}
    if place[1]:
        words["batch.samples"] = int(samples)
    if place[2]:
        words["batch.microbatch_samples"] = int(microbatch)
    if place[3]:
        words |= _link_words(spec, links, folder)
    if not place[0]:
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
    """Links that many times as fast; where the job gives none, the profile's."""
    return {
        f"cluster.{scope}.{key}": value
        for scope in ("intra", "inter")
        if (link := _link(spec, scope, folder)) is not None
        for key, value in (link | {"gb_per_s": factor * link["gb_per_s"]}).items()
    }


def _link(spec: JobSpec, scope: str, folder: Path) -> dict[str, Any] | None:
    """The link's words; None where there is none to speak of."""
    cluster = spec.cluster
    given: LinkSpec | None = getattr(cluster, scope)
    if given is not None:
        return given.model_dump(exclude_none=True)
    if cluster.local is not None or (scope == "inter" and cluster.nodes == 1):
        return None
    file = folder / spec.profile
    machine = load_profile(str(file) if file.is_file() else spec.profile).machine_link(scope)
    words = {"gb_per_s": machine.link.bytes_per_s / GB, "latency_us": machine.link.latency_s * US_PER_S}
    cards = machine.per_node if machine.per_node is not None else cluster.ranks_per_node
    return words | ({"cards": cards} if scope == "inter" else {})


def with_words(spec: JobSpec, words: Words) -> JobSpec:
    """The job file with other words in it."""
    document = spec.model_dump(exclude_unset=True, exclude_none=True)
    for key, value in words.items():
        *path, last = key.split(".")
        inside = document
        for part in path:
            inside = inside.setdefault(part, {})
        inside[last] = value
    return JobSpec.model_validate(document)


def what_if_html(found: WhatIf | None) -> str:
    """The section of the page; says how many neighbours were tried, of how many."""
    if found is None:
        return (
            '<h3>What if</h3><p class="faint">Name the job, and its neighbours are simulated: '
            "workbench report FOLDER --job JOB</p>"
        )
    tried = len(found.points)
    refused = sum(point.candidate.plan is None for point in found.points)
    told = (
        f"{tried} of {found.num_neighbours} neighbours of job {found.job} were planned by {found.strategy}, "
        f"the nearest first, in at most {found.seconds:g} s: {tried - refused} were simulated, {refused} "
        "have no plan. Sliders stop only there; nothing in between is guessed."
    )
    if not tried:
        return f"<h3>What if</h3><p>{escape(told)}</p>"
    sliders = "".join(_slider(index, axis) for index, axis in enumerate(found.axes))
    return (
        f'<section id="what-if"><h3>What if</h3><p class="faint">{escape(told)}</p>'
        f'<div class="sliders">{sliders}</div><p class="snapped" role="status"></p>'
        f'<div class="cards outcome" aria-live="polite"></div><pre class="words faint"></pre>'
        f"<details><summary>All {tried} neighbours</summary>{_table(found)}</details></section>"
    )


def _slider(place: int, axis: Axis) -> str:
    name = escape(axis.name)
    return (
        f'<label data-axis="{place}"><span>{name}<output></output></span>'
        f'<input type="range" min="0" max="0" step="1" value="0" aria-label="{name}"></label>'
    )


def _table(found: WhatIf) -> str:
    headers = (*(axis.name for axis in found.axes), "iteration", "samples/s", "peak memory", "ranks used")
    rows = [(*_place_cells(found, point), *_outcome_cells(point)) for point in found.points]
    return sortable_table(headers, [rows], marks=lambda index: f' data-point="{index}"')


def _place_cells(found: WhatIf, point: Point) -> tuple[Cell, ...]:
    pairs = zip(found.axes, point.at, strict=True)
    return tuple(Cell(axis.labels[at], axis.values[at]) for axis, at in pairs)


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


def what_if_record(found: WhatIf | None) -> dict[str, Any] | None:
    """Axes and points for the page's script: seconds, bytes; None where nothing was asked."""
    if found is None:
        return None
    return {
        "axes": [{"name": a.name, "values": a.values, "labels": a.labels} for a in found.axes],
        "points": [_point_record(point) for point in found.points],
    }


def _point_record(point: Point) -> dict[str, Any]:
    candidate = point.candidate
    words = "\n".join(f"{key}: {value:g}" for key, value in point.words.items())
    told = f"In the job file:\n{words}" if words else "The job file as it is."
    record: dict[str, Any] = {"at": point.at, "words": told, "refusal": candidate.refusal or None}
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
