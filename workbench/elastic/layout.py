"""Assignment of nodes to pipelines."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from workbench.elastic.node_specification import TemplateSet


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLayout:
    """Nodes by pipeline, each in the order of its template.

    Raises:
        ValueError: no pipeline, an empty one, or a node that appears twice.
    """

    pipelines: tuple[tuple[str, ...], ...]

    def __post_init__(self) -> None:
        if not self.pipelines or not all(self.pipelines):
            raise ValueError(f"want pipelines of one node or more, got {self.pipelines}")
        counts = Counter(self.nodes)
        for node, count in counts.items():
            if count > 1:
                raise ValueError(f"node {node!r} stands in {count} places of the layout")

    @property
    def nodes(self) -> tuple[str, ...]:
        """All nodes, pipeline by pipeline."""
        return tuple(node for pipeline in self.pipelines for node in pipeline)

    @property
    def num_nodes(self) -> int:
        return len(self.nodes)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(map(len, self.pipelines))


def first_layout(nodes: Sequence[str], sizes: Sequence[int]) -> NodeLayout:
    """Assign nodes in their order to pipelines of the given sizes.

    Raises:
        ValueError: the sizes do not add up to all nodes.
    """
    if sum(sizes) != len(nodes):
        raise ValueError(f"pipelines of {list(sizes)} nodes use {sum(sizes)}, there are {len(nodes)}")
    ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    return NodeLayout(
        pipelines=tuple(tuple(nodes[end - size : end]) for size, end in zip(sizes, ends, strict=True))
    )


def held_layers(planned: TemplateSet, layout: NodeLayout) -> dict[str, tuple[int, ...]]:
    """Layers by node, from the template of each pipeline's size."""
    held: dict[str, tuple[int, ...]] = {}
    for pipeline in layout.pipelines:
        held.update(zip(pipeline, planned.of_size(len(pipeline)).layers_by_node(), strict=True))
    return held
