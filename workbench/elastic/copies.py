"""Which layers must travel after a reconfiguration, from whom to whom."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from workbench.elastic.layout import Layout, held_layers
from workbench.elastic.node_specification import TemplateSet


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """A layer's weights and optimizer state from one node to another."""

    layer: int
    source: str
    destination: str
    num_bytes: int


def holders_of(planned: TemplateSet, layout: Layout, gone: Collection[str]) -> tuple[tuple[str, ...], ...]:
    """[L] surviving nodes that hold each layer."""
    holders: list[list[str]] = [[] for _ in range(planned.templates[0].num_layers)]
    for node, layers in held_layers(planned, layout).items():
        if node not in gone:
            for layer in layers:
                holders[layer].append(node)
    return tuple(tuple(nodes) for nodes in holders)


def copies_between(
    planned: TemplateSet,
    before: Layout,
    after: Layout,
    gone: Collection[str],
    layer_bytes: Sequence[int],
) -> tuple[Copy, ...]:
    """Copies that give every node of `after` the layers of its stages.

    Oobleck chapter, section 2.5: missing layers come from replicas that are whole. Largest layers first,
    each from the survivor that holds it and has sent least so far, ties to the earlier node, so that the
    busiest sender is near the least possible (greedy, Graham 1969).
    Differs: optimizer state travels too (`layer_bytes` counts it); the published code copies
    weights alone, from the first holder.

    Args:
        gone: nodes of `before` that can send nothing.
        layer_bytes: [L].

    Raises:
        ValueError: byte counts that are not one per layer, or a layer that nobody holds.

    Complexity: O(copies x holders).
    """
    planned.check_bytes(layer_bytes)
    had, holders = held_layers(planned, before), holders_of(planned, before, gone)
    missing = [
        (layer, node)
        for node, layers in held_layers(planned, after).items()
        for layer in layers
        if layer not in had.get(node, ())
    ]
    sent: dict[str, int] = {}
    copies = []
    for layer, node in sorted(missing, key=lambda each: -layer_bytes[each[0]]):
        if not holders[layer]:
            raise ValueError(f"layer {layer} is missing on {node!r} and no node holds it")
        source = min(holders[layer], key=lambda each: sent.get(each, 0))
        sent[source] = sent.get(source, 0) + layer_bytes[layer]
        copies.append(Copy(layer=layer, source=source, destination=node, num_bytes=layer_bytes[layer]))
    return tuple(copies)
