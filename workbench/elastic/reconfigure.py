"""Reconfigure pipelines when nodes leave or join: which nodes work together, and which copy what."""

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

Held = Mapping[str, Sequence[int]]  # consecutive layers by node


class NodeAssignment:
    """Assigns nodes to positions of pipelines with the fewest bytes to copy.

    Args:
        planned: the job's templates.
        held: layers that each node has now; a missing node has none.
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
        """Bytes of the best assignment of these nodes to pipelines of these sizes.

        A pipeline with fewer nodes than the smallest template counts with the positions of that one, of
        which some stay empty.

        Complexity: O(nodes**2 x positions).
        """
        missing = self._missing_bytes([node for nodes in pipelines for node in nodes], self._sizes(pipelines))
        rows, columns = optimize.linear_sum_assignment(missing)
        return int(missing[rows, columns].sum())

    def layout(self, pipelines: Sequence[Sequence[str]]) -> NodeLayout:
        """The assignment with the fewest bytes to copy; of equally good ones, nodes keep their positions.

        The Hungarian method, over the positions of all pipelines at once.

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
        node_at = dict(zip(columns.tolist(), nodes, strict=True))
        ends = np.cumsum(sizes).tolist()
        return NodeLayout(
            pipelines=tuple(
                tuple(node_at[index] for index in range(end - size, end))
                for size, end in zip(sizes, ends, strict=True)
            )
        )

    def _sizes(self, pipelines: Sequence[Sequence[str]]) -> list[int]:
        return [max(len(nodes), self._planned.specification.smallest) for nodes in pipelines]

    def _missing_bytes(self, nodes: Sequence[str], sizes: Sequence[int]) -> Ints:
        """[nodes][positions] bytes of a position's layers that a node lacks."""
        current = np.array([self._runs.get(node, (0, 0)) for node in nodes], np.int64).reshape(-1, 1, 2)
        wanted = np.array(
            [_run(layers) for size in sizes for layers in self._planned.of_size(size).layers_by_node()],
            np.int64,
        )
        first, end = np.maximum(current, wanted)[..., 0], np.minimum(current, wanted)[..., 1]
        kept = np.where(end > first, self._before[end] - self._before[first], 0)
        missing: Ints = self._before[wanted[:, 1]] - self._before[wanted[:, 0]] - kept
        return missing


def _run(layers: Sequence[int]) -> tuple[int, int]:
    """First and end of consecutive layers."""
    return (layers[0], layers[-1] + 1) if layers else (0, 0)


def _moves(sizes: Sequence[int]) -> Ints:
    """[nodes][positions] 0 for a node's own position, 1 for another in its pipeline, 2 elsewhere."""
    pipeline = np.repeat(np.arange(len(sizes)), sizes)
    distance: Ints = (
        2 - (pipeline[:, None] == pipeline).astype(np.int64) - np.eye(len(pipeline), dtype=np.int64)
    )
    return distance


class CannotContinueError(ValueError):
    """Training stops until enough nodes are back."""


class StepKind(StrEnum):
    REPLACE = "replace"  # a spare node joins a pipeline that lost too many
    SIMPLE = "simple"  # a pipeline that lost nodes continues with a smaller template
    BORROW = "borrow"  # a pipeline gets a node of another
    MERGE = "merge"  # two pipelines become one
    REARRANGE = "rearrange"  # pipelines get the sizes of another instantiation


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step, with the nodes of the resulting pipeline; their positions are chosen after all steps."""

    kind: StepKind
    pipeline: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconfiguration:
    """The new layout, the steps that led to it, and the layers to copy before training continues."""

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
    """Continue without the lost nodes: simple reinstantiation, borrowing, merging.

    Oobleck chapter, section 2.5.1. A pipeline that lost nodes takes the template of its remaining size;
    below n0 it borrows nodes one by one, each from the pipeline for which that costs the fewest bytes to
    copy (ties: the largest, then the later); if no pipeline can spare one, it is merged with another such
    pipeline, or else the smallest. Then all nodes are assigned to the positions with the fewest bytes to
    copy, so the copies after the loss of one node are minimal over all donors and all assignments.
    Borrowing is tried again after every merge. With N' >= (f + 1) n0 nodes left this yields at least f + 1
    pipelines of n0..N - f n0 nodes (appendix A): a merge happens only while all have at most n0 and one has
    fewer, so there were at least f + 2 of them. Differs: a pipeline that lost all its nodes borrows like
    any other; merging all broken ones before borrowing again, as appendix A.2 reads, can end below f + 1
    (three of 2 left of 3 nodes, f = 1).

    Args:
        planned: the job's templates.
        layout: pipelines before.
        lost: nodes that are gone.
        layer_bytes: [L] weights and optimizer state of each layer.
        spares: waiting nodes without state; pipelines below n0 take them, first come, before they borrow.
            Unused ones are left out.

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
    """As `survive`, for nodes that were warned and are still there: they can send what they hold.

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
    """The layout without the leaving nodes, of which the silent ones cannot send any more."""
    _require_known(layout, leaving)
    specification = planned.specification
    pipelines = [[node for node in pipeline if node not in leaving] for pipeline in layout.pipelines]
    count = sum(map(len, pipelines)) + len(spares)
    if count < specification.threshold:
        raise CannotContinueError(
            f"{count} nodes are left, {specification.num_faults + 1} pipelines of {specification.smallest} "
            f"need {specification.threshold}: training stops"
        )
    holders = holders_of(planned, layout, silent)
    lost_layers = [layer for layer, nodes in enumerate(holders) if not nodes]
    if lost_layers:
        raise CannotContinueError(
            f"all nodes that held layer {lost_layers[0]} are lost ({len(lost_layers)} layers in all): "
            "go back to a checkpoint"
        )
    assignment = NodeAssignment(planned, held_layers(planned, layout), layer_bytes)
    steps = [
        Step(kind=StepKind.SIMPLE, pipeline=tuple(now))
        for now, before in zip(pipelines, layout.pipelines, strict=True)
        if specification.smallest <= len(now) < len(before)
    ]
    steps += _with_spares(pipelines, spares, specification.smallest)
    steps += _repair(pipelines, specification.smallest, assignment)
    after = assignment.layout(pipelines)
    copies = copies_between(planned, layout, after, silent, layer_bytes)
    return Reconfiguration(layout=after, steps=tuple(steps), copies=copies)


def _with_spares(pipelines: list[list[str]], spares: Sequence[str], smallest: int) -> list[Step]:
    """Add spares to pipelines below `smallest`, as far as they go; the lists are changed in place."""
    available, steps = list(spares), []
    for pipeline in pipelines:
        added = available[: max(0, smallest - len(pipeline))]
        if added:
            pipeline.extend(added)
            del available[: len(added)]
            steps.append(Step(kind=StepKind.REPLACE, pipeline=tuple(pipeline)))
    return steps


def _repair(pipelines: list[list[str]], smallest: int, assignment: NodeAssignment) -> list[Step]:
    """Borrow and merge until every pipeline has `smallest` nodes; the list is changed in place."""
    steps = []
    while (broken := next((p for p in pipelines if len(p) < smallest), None)) is not None:
        donor = _donor(pipelines, broken, smallest, assignment)
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
    pipelines: Sequence[list[str]], broken: list[str], smallest: int, assignment: NodeAssignment
) -> list[str] | None:
    """The pipeline that should lend a node: fewest bytes, then the largest, then the later; None: none can.

    Positions are assigned when all pipelines have their sizes, so pipelines of equal size are equally good.
    """
    latest = {len(pipeline): pipeline for pipeline in pipelines if len(pipeline) > smallest}

    def least_bytes(donor: list[str]) -> int:
        rest = [pipeline for pipeline in pipelines if pipeline is not donor and pipeline is not broken]
        return assignment.least_bytes([*rest, donor[:-1], [*broken, donor[-1]]])

    return min(latest.values(), key=lambda donor: (least_bytes(donor), -len(donor)), default=None)


def join(
    planned: TemplateSet,
    layout: NodeLayout,
    new: Sequence[str],
    sizes: Sequence[int],
    layer_bytes: Sequence[int],
) -> Reconfiguration:
    """Add nodes and give the pipelines the sizes of an instantiation, with the fewest bytes to copy.

    Pipelines and sizes are paired by rank, largest with largest; then all nodes, the new ones included, are
    assigned to the positions with the fewest bytes to copy. Without new nodes it only rearranges.

    Args:
        sizes: nodes of each pipeline afterwards, for example `fastest(...).sizes`.

    Raises:
        ValueError: a new node that is present already or named twice, or sizes that are no instantiation of
            all nodes.
    """
    present = layout.nodes
    duplicates = [node for node, count in Counter([*present, *new]).items() if count > 1]
    if duplicates:
        raise ValueError(f"node {duplicates[0]!r} joins but is there already")
    specification = planned.specification
    new_sizes = sorted(sizes, reverse=True)
    fits = all(size in specification.sizes for size in new_sizes)
    if sum(new_sizes) != len(present) + len(new) or not fits or len(new_sizes) <= specification.num_faults:
        raise ValueError(
            f"pipelines of {new_sizes} nodes: want {specification.num_faults + 1} or more of "
            f"{specification.smallest}..{specification.largest} nodes, {len(present) + len(new)} in all"
        )
    ranked = sorted(layout.pipelines, key=len, reverse=True)
    new_pipelines = [list(nodes[:size]) for nodes, size in zip(ranked, new_sizes, strict=False)]
    new_pipelines += [[] for _ in range(len(new_sizes) - len(new_pipelines))]
    assigned = {node for nodes in new_pipelines for node in nodes}
    free = [node for nodes in ranked for node in nodes if node not in assigned] + list(new)
    for nodes, size in zip(new_pipelines, new_sizes, strict=True):
        while len(nodes) < size:
            nodes.append(free.pop(0))
    after = NodeAssignment(planned, held_layers(planned, layout), layer_bytes).layout(new_pipelines)
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
