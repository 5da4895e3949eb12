"""Which node takes which place of the pipelines, so that as few bytes as possible are copied."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from workbench.elastic.layout import NodeLayout
from workbench.elastic.node_specification import TemplateSet
from workbench.on_demand import OnDemand

if TYPE_CHECKING:
    from scipy import optimize
else:
    optimize = OnDemand("scipy.optimize")

Ints = NDArray[np.int64]
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
                tuple(placed[place] for place in range(end - size, end))
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
