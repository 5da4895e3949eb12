"""Compare two plans: what differs between them, and where the difference of their steps comes from."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from workbench.data.sample import Item
from workbench.explain.critical_path import path_of, step_of
from workbench.explain.idle import idle_by_cause, idle_of
from workbench.explain.job_difference import Differs, if_different, job_differs, module_names
from workbench.explain.pass_parts import Parts, path_causes
from workbench.explain.timeline import Piece, Timeline, timeline
from workbench.plan.lowered import Lowered
from workbench.plan.plan import Microbatch, Plan
from workbench.plan.stage import Stage
from workbench.trace import Lane, Trace


class SecondsOf(NamedTuple):
    """Seconds that each plan spends on one cause.

    Args:
        cause: of `Cause` or `IdleCause`, in words.
        where: module or edge.
        first_s, second_s: of each plan's step.
    """

    cause: str
    where: str
    first_s: float
    second_s: float

    @property
    def change_s(self) -> float:
        """Seconds that the second plan takes longer."""
        return self.second_s - self.first_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the two plans, its simulated step, and the parts of its passes."""

    lowered: Lowered
    trace: Trace
    parts: Parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """All differences between two plans.

    Args:
        differs: parts that differ; empty: the plans are equal.
        first_s, second_s: their steps.
        along_path: both critical paths by cause; changes add up to the difference of the steps.
        of_ranks: the mean rank's compute and idle time by cause; changes add up likewise.
    """

    differs: tuple[Differs, ...]
    first_s: float
    second_s: float
    along_path: tuple[SecondsOf, ...]
    of_ranks: tuple[SecondsOf, ...]


def difference(first: Side, second: Side) -> Difference:
    """What differs between two plans, and where the difference of their steps comes from.

    A step's time is the sum of its critical path, and it is also the compute and idle time of each rank,
    averaged over the ranks of the cluster. Both sums are split by cause; a cause's change is its seconds in
    the second plan minus those in the first. So the changes of each decomposition add up to the difference
    of the two steps.

    Complexity: O(ranks x actions + rows + edges) of both plans.
    """
    times = [timeline(side.lowered, side.trace) for side in (first, second)]
    paths = [
        path_causes(path_of(each), side.parts) for each, side in zip(times, (first, second), strict=True)
    ]
    ranks = [
        mean_rank_s(each, side.trace, side.parts) for each, side in zip(times, (first, second), strict=True)
    ]
    return Difference(
        differs=tuple(differing(first.lowered.plan, second.lowered.plan)),
        first_s=first.trace.iteration_s,
        second_s=second.trace.iteration_s,
        along_path=_compared(*paths),
        of_ranks=_compared(*ranks),
    )


_Seconds = tuple[str, str, float]  # a cause, where, and how long


def mean_rank_s(times: Timeline, trace: Trace, parts: Parts) -> tuple[_Seconds, ...]:
    """Seconds of the mean rank by cause, which add up to the step: compute lane and idle time."""
    plan = times.lowered.plan
    steps = [
        step_of(times, Piece(span.start_s, span.end_s, times.node_of(span)))
        for span in trace.spans
        if span.lane is Lane.COMPUTE
    ]
    ranks = plan.cluster.num_ranks
    computed = ((cause, where, total_s / ranks) for cause, where, total_s in path_causes(steps, parts))
    idle = idle_by_cause(plan, idle_of(times, trace))
    return (*computed, *((each.cause, each.where, each.seconds) for each in idle))


def _compared(first: Iterable[_Seconds], second: Iterable[_Seconds]) -> tuple[SecondsOf, ...]:
    """Both sides' seconds by cause, the largest change first."""
    seconds_by_key: dict[tuple[str, str], list[float]] = {}
    for side, seconds_of in enumerate((first, second)):
        for cause, where, seconds in seconds_of:
            seconds_by_key.setdefault((str(cause), where), [0.0, 0.0])[side] += seconds
    rows = (SecondsOf(*key, *seconds) for key, seconds in seconds_by_key.items())
    return tuple(sorted(rows, key=lambda row: -abs(row.change_s)))


def differing(first: Plan, second: Plan) -> Iterator[Differs]:
    """The parts in which two plans differ."""
    yield from job_differs(first, second)
    yield from _stages(first, second)
    yield from _microbatches(first, second)
    yield from _order(first, second)
    yield from _tokens(first, second)
    yield from _settings(first, second)


def _stages(first: Plan, second: Plan) -> Iterator[Differs]:
    for module in module_names(first, second):
        sharded = [_is_sharded(plan, module) for plan in (first, second)]
        part_name = "sharding" if all(sharded) else "stages"
        yield from if_different(part_name, module, *(_layout(plan, module) for plan in (first, second)))
        if not any(sharded):  # else the layout has it all: every rank does every layer
            for about, part in (("layers", _cuts), ("ranks", _ranks)):
                yield from _first_differing(first, second, module, about, part)


def _is_sharded(plan: Plan, module: str) -> bool:
    """Whether every rank does all layers of the module and keeps a shard of their weights, as in FSDP."""
    ranks = {stage.flat_ranks for stage in _chain(plan, module, 0)}
    return len(ranks) == 1 and plan.settings.of(module).shards_parameters


def _first_differing(
    first: Plan, second: Plan, module: str, about: str, part: Callable[[Plan, str, int], str]
) -> Iterator[Differs]:
    """Difference in the first replica that has one."""
    for replica in range(max(len(plan.replicas(module)) for plan in (first, second))):
        texts = [part(plan, module, replica) for plan in (first, second)]
        if texts[0] != texts[1] and (not replica or all(texts)):
            whose = "its first replica" if not replica else f"replica {replica}"
            yield Differs("stages", f"{module}, {about} of {whose}", *texts)
            return


def _chain(plan: Plan, module: str, replica: int) -> Sequence[Stage]:
    replicas = plan.replicas(module)
    return plan.chain[module, replicas[replica]] if len(replicas) > replica else ()


def _layout(plan: Plan, module: str) -> str:
    """`dp 2 x 4 stages of cp 1 x tp 2`, or `18 units sharded over 8 ranks`."""
    chain = _chain(plan, module, 0)
    if not chain:
        return "none"
    if _is_sharded(plan, module):
        ranks = {rank for stage in plan.stages if stage.module == module for rank in stage.flat_ranks}
        instances = plan.settings.of(module).instances
        copies = "" if instances == 1 else f" in {instances} instances"
        replicas = f", cp {chain[0].cp}{chain[0].joint_words}" if len(chain[0].flat_ranks) > 1 else ""
        return f"{len(chain)} units sharded over {len(ranks)} ranks{copies}{replicas}"
    grids = dict.fromkeys(f"cp {stage.cp} x tp {stage.tp}{stage.joint_words}" for stage in chain)
    return f"dp {len(plan.replicas(module))} x {len(chain)} stages of {' and '.join(grids)}"


def _cuts(plan: Plan, module: str, replica: int) -> str:
    return " ".join(str(stage.layers[1] - stage.layers[0]) for stage in _chain(plan, module, replica))


def _ranks(plan: Plan, module: str, replica: int) -> str:
    """Ranks of a replica in the order of its stages."""
    ranks = dict.fromkeys(rank for stage in _chain(plan, module, replica) for rank in stage.flat_ranks)
    return " ".join(map(str, ranks))


def _microbatches(first: Plan, second: Plan) -> Iterator[Differs]:
    for module in module_names(first, second):
        part = (
            "accumulation" if all(_is_sharded(plan, module) for plan in (first, second)) else "microbatches"
        )
        sizes = [_sizes(plan, module) for plan in (first, second)]
        yield from if_different(part, module, *sizes)
        contents = [
            [(each.replica, _rows(each)) for each in _microbatches_of(plan, module)]
            for plan in (first, second)
        ]
        if sizes[0] == sizes[1] and contents[0] != contents[1]:
            same = sum(one == other for one, other in zip(*contents, strict=False))
            yield Differs(part, f"{module}, samples", f"{len(contents[0])}", f"{same} of them the same")


def _microbatches_of(plan: Plan, module: str) -> list[Microbatch]:
    return [each for each in plan.microbatches if each.module == module]


def _sizes(plan: Plan, module: str) -> str:
    """`8 of 1 to 2 items`, or `1 pass of 2 items on each of 8 replicas`."""
    microbatches = _microbatches_of(plan, module)
    if not microbatches:
        return "none"
    items = f"{_span([len(each.items) for each in microbatches])} items"
    if not _is_sharded(plan, module):
        return f"{len(microbatches)} of {items}"
    replicas = Counter(each.replica for each in microbatches)
    passes = _span(list(replicas.values()))
    of_each = "1 pass" if passes == "1" else f"{passes} passes"
    return f"{of_each} of {items} on each of {len(replicas)} replicas"


def _span(numbers: Sequence[int]) -> str:
    few, many = min(numbers), max(numbers)
    return f"{few}" if few == many else f"{few} to {many}"


def _rows(microbatch: Microbatch) -> frozenset[frozenset[Item]]:
    return frozenset(map(frozenset, microbatch.rows))


def _order(first: Plan, second: Plan) -> Iterator[Differs]:
    """Number of programs with the same actions in another order, and of actions if they differ."""
    programs = [{rank: plan.program[rank] for rank in sorted(plan.program)} for plan in (first, second)]
    if programs[0] == programs[1]:
        return
    common = programs[0].keys() & programs[1].keys()
    moved = sum(
        programs[0][rank] != programs[1][rank] and set(programs[0][rank]) == set(programs[1][rank])
        for rank in common
    )
    if moved:
        yield Differs("order", "the same actions in another order", "", f"on {moved} ranks")
    yield from if_different("order", "ranks", *(str(len(each)) for each in programs))
    yield from if_different(
        "order", "actions of all ranks", *(str(sum(map(len, p.values()))) for p in programs)
    )


def _tokens(first: Plan, second: Plan) -> Iterator[Differs]:
    shards = [plan.token_shard for plan in (first, second)]
    yield from if_different("tokens", "rows with owners of their own", *(str(len(each)) for each in shards))
    common = shards[0].keys() & shards[1].keys()
    moved = sum(shards[0][key].owners != shards[1][key].owners for key in common)
    if moved:
        yield Differs("tokens", "rows whose blocks have other owners", "", str(moved))


def _settings(first: Plan, second: Plan) -> Iterator[Differs]:
    for name in ("precision", "kernels", "optimizer", "optimizer_precision"):
        yield from if_different("settings", name, *(str(getattr(p.settings, name)) for p in (first, second)))
    for module in module_names(first, second):
        settings = [plan.settings.of(module) for plan in (first, second)]
        for name in settings[0].__dataclass_fields__:
            values = [str(getattr(each, name)).lower() for each in settings]
            yield from if_different("settings", f"{module} {name}", *values)
