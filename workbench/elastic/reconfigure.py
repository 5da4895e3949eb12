"""What becomes of the pipelines when nodes leave or join: who works with whom, and who copies what."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np

from workbench.arrays import Ints
from workbench.elastic.copies import Copy, copies_between, holders_of
from workbench.elastic.layout import NodeLayout, held_layers
from workbench.elastic.node_specification import TemplateSet
from workbench.on_demand import OnDemand

if TYPE_CHECKING:
    from scipy import optimize
else:
    optimize = OnDemand("scipy.optimize")

Held = Mapping[str, Sequence[int]]  # layers by node, consecutive ones


class Places:
    """The least bytes to copy, for any pipelines that the same nodes may make up.

    Args:
        planned: the job's templates.
        held: what each node has now; one that is not in it has nothing.
        layer_bytes: [L] weights and optimizer state of each layer.

    Raises:
        ValueError: byte counts that are not one per layer.
    """

    def __init__(self, planned: TemplateSet, held: Held, layer_bytes: Sequence[int]) -> None:
        planned.check_bytes(layer_bytes)
        self._planned = planned
        self._before = np.concatenate(([0], np.cumsum(np.array(layer_bytes, np.int64))))
        self._runs = {node: _run(layers) for node, layers in held.items()}

    def least_bytes(self, pipelines: Sequence[Sequence[str]]) -> int:
        """To copy when these nodes take the places of pipelines of these sizes, in the best way.

        A pipeline that has fewer nodes than the smallest template counts with the places of that one, of
        which some stay empty.

        Complexity: O(nodes**2 x places).
        """
        missing = self._missing_bytes([node for nodes in pipelines for node in nodes], self._sizes(pipelines))
        rows, columns = optimize.linear_sum_assignment(missing)
        return int(missing[rows, columns].sum())

    def layout(self, pipelines: Sequence[Sequence[str]]) -> NodeLayout:
        """The nodes in the places where the fewest bytes are copied; of equally good ones those they have.

        The Hungarian method, over the places of all pipelines at once.

        Raises:
            ValueError: a pipeline of a size that has no template.

        Complexity: O(nodes**3).
        """
        sizes = [len(nodes) for nodes in pipelines]
        if not all(size in self._planned.specification.sizes for size in sizes):
            raise ValueError(
                f"pipelines of {sizes} nodes: templates have {self._planned.specification.smallest}.."
                f"{self._planned.specification.largest}"
            )
        nodes = [node for pipeline in pipelines for node in pipeline]
        missing = self._missing_bytes(nodes, sizes)
        _, columns = optimize.linear_sum_assignment(missing * (2 * len(nodes) + 1) + _moves(sizes))
        placed = dict(zip(columns.tolist(), nodes, strict=True))
        ends = np.cumsum(sizes).tolist()
        return NodeLayout(
            pipelines=tuple(
                tuple(placed[index] for index in range(end - size, end))
                for size, end in zip(sizes, ends, strict=True)
            )
        )

    def _sizes(self, pipelines: Sequence[Sequence[str]]) -> list[int]:
        return [max(len(nodes), self._planned.specification.smallest) for nodes in pipelines]

    def _missing_bytes(self, nodes: Sequence[str], sizes: Sequence[int]) -> Ints:
        """[nodes][places] of the layers of a place those that a node does not have."""
        had = np.array([self._runs.get(node, (0, 0)) for node in nodes], np.int64).reshape(-1, 1, 2)
        wanted = np.array(
            [_run(layers) for size in sizes for layers in self._planned.of_size(size).layers_by_node()],
            np.int64,
        )
        first, end = np.maximum(had, wanted)[..., 0], np.minimum(had, wanted)[..., 1]
        kept = np.where(end > first, self._before[end] - self._before[first], 0)
        found: Ints = self._before[wanted[:, 1]] - self._before[wanted[:, 0]] - kept
        return found


def _run(layers: Sequence[int]) -> tuple[int, int]:
    """First and end of consecutive layers."""
    return (layers[0], layers[-1] + 1) if layers else (0, 0)


def _moves(sizes: Sequence[int]) -> Ints:
    """[nodes][places] 0 for a node's own place, 1 for another of its pipeline, 2 for one of another."""
    pipeline = np.repeat(np.arange(len(sizes)), sizes)
    found: Ints = 2 - (pipeline[:, None] == pipeline).astype(np.int64) - np.eye(len(pipeline), dtype=np.int64)
    return found


class CannotContinueError(ValueError):
    """Training stops here, until enough nodes are back."""


class StepKind(StrEnum):
    REPLACE = "replace"  # a node that waited takes a place in a pipeline that lost too many
    SIMPLE = "simple"  # a smaller template takes the place of a pipeline that lost nodes
    BORROW = "borrow"  # a pipeline gets a node of another
    MERGE = "merge"  # two pipelines become one
    REARRANGE = "rearrange"  # pipelines take the sizes of another instantiation


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One thing done, with the nodes of the pipeline that came of it; places are found after all steps."""

    kind: StepKind
    pipeline: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconfiguration:
    """The new layout, how it came about, and the layers that must be copied before training goes on."""

    layout: NodeLayout
    steps: tuple[Step, ...]
    copies: tuple[Copy, ...]


def survive(
    planned: TemplateSet,
    layout: NodeLayout,
    lost: Collection[str],
    layer_bytes: Sequence[int],
    spares: Sequence[str] = (),
) -> Reconfiguration:
    """Go on without the lost nodes: simple reinstantiation, borrowing, merging.

    Oobleck chapter, section 2.5.1. A pipeline that lost nodes takes the template of what it has left;
    below n0 it borrows nodes one by one, each from the pipeline whose loss of a node makes the fewest bytes
    to copy (of equally good ones the largest, then the later);
    when no pipeline can spare one it is merged with another such pipeline, or else the smallest. Then all
    nodes take the places at which the fewest bytes are copied. So what is copied after the loss of one node
    is the least of all donors and all places.
    Borrowing is tried again after every merge. Then, with N' >= (f + 1) n0 left, f + 1 pipelines or more
    of n0..N - f n0 nodes come out (appendix A): a merge happens only while all have at most n0 and one
    has less, so there were f + 2 of them at least.
    Differs: a pipeline that lost all its nodes borrows like any other; merging all broken ones before
    borrowing again, as appendix A.2 reads, can end below f + 1 (three of 2 left of 3 nodes, f = 1).

    Args:
        planned: the job's templates.
        layout: pipelines before.
        lost: nodes that are gone.
        layer_bytes: [L] weights and optimizer state of each layer.
        spares: nodes that wait and hold nothing; pipelines below n0 take them, first come, before they
            borrow. Those that none needs are left out.

    Raises:
        CannotContinueError: fewer than (f + 1) n0 nodes left, spares included, or a layer that no survivor
            holds.
        ValueError: a lost node that is not in the layout, or one named twice.

    Complexity: O((1 + nodes borrowed x different sizes) x nodes**3 + copies x holders).
    """
    return _without(planned, layout, lost, frozenset(lost), layer_bytes, spares)


def drain(
    planned: TemplateSet, layout: NodeLayout, leaving: Collection[str], layer_bytes: Sequence[int]
) -> Reconfiguration:
    """As `survive`, of nodes that were warned and are still there: they give what they hold before they go.

    Raises:
        CannotContinueError: fewer than (f + 1) n0 nodes will be left.
        ValueError: a leaving node that is not in the layout, or one named twice.
    """
    return _without(planned, layout, leaving, frozenset(), layer_bytes)


def _without(
    planned: TemplateSet,
    layout: NodeLayout,
    leaving: Collection[str],
    silent: Collection[str],
    layer_bytes: Sequence[int],
    spares: Sequence[str] = (),
) -> Reconfiguration:
    """A layout without the leaving nodes, of which the silent ones can send nothing any more."""
    _require_known(layout, leaving)
    specification = planned.specification
    pipelines = [[node for node in pipeline if node not in leaving] for pipeline in layout.pipelines]
    left = sum(map(len, pipelines)) + len(spares)
    if left < specification.threshold:
        raise CannotContinueError(
            f"{left} nodes are left, {specification.num_faults + 1} pipelines of {specification.smallest} "
            f"need {specification.threshold}: training stops"
        )
    holders = holders_of(planned, layout, silent)
    dead = [layer for layer, nodes in enumerate(holders) if not nodes]
    if dead:
        raise CannotContinueError(
            f"all nodes that held layer {dead[0]} are lost ({len(dead)} layers in all): "
            "go back to a checkpoint"
        )
    places = Places(planned, held_layers(planned, layout), layer_bytes)
    steps = [
        Step(kind=StepKind.SIMPLE, pipeline=tuple(now))
        for now, before in zip(pipelines, layout.pipelines, strict=True)
        if specification.smallest <= len(now) < len(before)
    ]
    steps += _replaced(pipelines, spares, specification.smallest)
    steps += _repair(pipelines, specification.smallest, places)
    after = places.layout(pipelines)
    copies = copies_between(planned, layout, after, silent, layer_bytes)
    return Reconfiguration(layout=after, steps=tuple(steps), copies=copies)


def _replaced(pipelines: list[list[str]], spares: Sequence[str], smallest: int) -> list[Step]:
    """Spares for pipelines below `smallest`, as far as they go; the lists are changed in place."""
    waiting, steps = list(spares), []
    for pipeline in pipelines:
        taken = waiting[: max(0, smallest - len(pipeline))]
        if taken:
            pipeline.extend(taken)
            del waiting[: len(taken)]
            steps.append(Step(kind=StepKind.REPLACE, pipeline=tuple(pipeline)))
    return steps


def _repair(pipelines: list[list[str]], smallest: int, places: Places) -> list[Step]:
    """Borrow and merge until every pipeline has `smallest` nodes; the list is changed in place."""
    steps = []
    while (broken := next((p for p in pipelines if len(p) < smallest), None)) is not None:
        donor = _donor(pipelines, broken, smallest, places)
        if donor is not None:
            broken.append(donor.pop())
            steps.append(Step(kind=StepKind.BORROW, pipeline=tuple(broken)))
            continue
        others = [pipeline for pipeline in pipelines if pipeline is not broken]
        partner = min(others, key=lambda p: (len(p) >= smallest, len(p)))
        partner.extend(broken)
        pipelines[:] = others
        steps.append(Step(kind=StepKind.MERGE, pipeline=tuple(partner)))
    return steps


def _donor(
    pipelines: Sequence[list[str]], broken: list[str], smallest: int, places: Places
) -> list[str] | None:
    """The pipeline that should lend a node: fewest bytes, then the largest, then the later; None: none can.

    Which of its nodes goes where is decided when all have their sizes, so equal sizes are equally good.
    """
    latest = {len(pipeline): pipeline for pipeline in pipelines if len(pipeline) > smallest}

    def least_bytes(donor: list[str]) -> int:
        rest = [pipeline for pipeline in pipelines if pipeline is not donor and pipeline is not broken]
        return places.least_bytes([*rest, donor[:-1], [*broken, donor[-1]]])

    return min(latest.values(), key=lambda donor: (least_bytes(donor), -len(donor)), default=None)


def join(
    planned: TemplateSet,
    layout: NodeLayout,
    new: Sequence[str],
    sizes: Sequence[int],
    layer_bytes: Sequence[int],
) -> Reconfiguration:
    """Take in nodes and give the pipelines the sizes of an instantiation, copying as little as that takes.

    Pipelines and sizes are paired by rank, largest with largest; then all nodes, also the new ones, take
    the places at which the fewest bytes are copied. Without new nodes it rearranges.

    Args:
        sizes: nodes of each pipeline afterwards, for example `fastest(...).sizes`.

    Raises:
        ValueError: a new node that is there already or named twice, or sizes that are no instantiation
            of all nodes.
    """
    present = layout.nodes
    twice = [node for node, count in Counter([*present, *new]).items() if count > 1]
    if twice:
        raise ValueError(f"node {twice[0]!r} joins but is there already")
    specification = planned.specification
    wanted = sorted(sizes, reverse=True)
    fits = all(size in specification.sizes for size in wanted)
    if sum(wanted) != len(present) + len(new) or not fits or len(wanted) <= specification.num_faults:
        raise ValueError(
            f"pipelines of {wanted} nodes: want {specification.num_faults + 1} or more of "
            f"{specification.smallest}..{specification.largest} nodes, {len(present) + len(new)} in all"
        )
    ranked = sorted(layout.pipelines, key=len, reverse=True)
    kept = [list(nodes[:size]) for nodes, size in zip(ranked, wanted, strict=False)]
    kept += [[] for _ in range(len(wanted) - len(kept))]
    placed = {node for nodes in kept for node in nodes}
    free = [node for nodes in ranked for node in nodes if node not in placed] + list(new)
    for nodes, size in zip(kept, wanted, strict=True):
        while len(nodes) < size:
            nodes.append(free.pop(0))
    after = Places(planned, held_layers(planned, layout), layer_bytes).layout(kept)
    before = set(layout.pipelines)
    steps = tuple(
        Step(kind=StepKind.REARRANGE, pipeline=pipeline)
        for pipeline in after.pipelines
        if pipeline not in before
    )
    copies = copies_between(planned, layout, after, frozenset(), layer_bytes)
    return Reconfiguration(layout=after, steps=steps, copies=copies)


def _require_known(layout: NodeLayout, lost: Collection[str]) -> None:
    present = set(layout.nodes)
    for node, count in Counter(lost).items():
        if node not in present:
            raise ValueError(f"node {node!r} is lost but is in no pipeline: it left before, or never joined")
        if count > 1:
            raise ValueError(f"node {node!r} is lost {count} times at once: want each node once")
