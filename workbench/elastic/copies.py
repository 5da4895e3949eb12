"""Which parts of layers are copied in a reconfiguration, from which node to which."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from workbench.elastic.layout import NodeLayout, held_layers
from workbench.elastic.node_specification import TemplateSet


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """Bytes of a layer's weights and optimizer state, from `first_byte` on, from one node to another."""

    layer: int
    source: str
    destination: str
    first_byte: int
    num_bytes: int


def holders_of(
    planned: TemplateSet, layout: NodeLayout, gone: Collection[str]
) -> tuple[tuple[str, ...], ...]:
    """[L] surviving nodes that hold each layer."""
    holders: list[list[str]] = [[] for _ in range(planned.templates[0].num_layers)]
    for node, layers in held_layers(planned, layout).items():
        if node not in gone:
            for layer in layers:
                holders[layer].append(node)
    return tuple(tuple(nodes) for nodes in holders)


def copies_between(
    planned: TemplateSet,
    before: NodeLayout,
    after: NodeLayout,
    gone: Collection[str],
    layer_bytes: Sequence[int],
) -> tuple[Copy, ...]:
    """Copies that give every node of `after` the layers of its stages.

    Oobleck chapter, section 2.5: missing layers come from intact replicas. Each is striped over all nodes
    that hold it: those that have sent least so far send until they are as busy as the others, then all send
    equally much. Layers with the fewest holders come first, since these have the least choice; of those the
    largest; ties to the earlier node. Differs: optimizer state is copied too (`layer_bytes` counts it), and
    every holder sends; the published code copies weights alone, from the first holder.

    Args:
        gone: nodes of `before` that can send nothing.
        layer_bytes: [L].

    Returns:
        For every layer that a node misses, its parts in ascending order, none of them empty; one empty part
            for a layer without bytes.

    Raises:
        ValueError: byte counts that are not one per layer, or a layer that no node holds.

    Complexity: O(copies x log holders).
    """
    planned.check_bytes(layer_bytes)
    layers_before, holders = held_layers(planned, before), holders_of(planned, before, gone)
    missing = [
        (layer, node)
        for node, layers in held_layers(planned, after).items()
        for layer in layers
        if layer not in layers_before.get(node, ())
    ]
    sent = dict.fromkeys(layers_before, 0)
    copies = []
    for layer, node in sorted(missing, key=lambda each: (len(holders[each[0]]), -layer_bytes[each[0]])):
        if not holders[layer]:
            raise ValueError(f"layer {layer} is missing on {node!r} and no node holds it")
        first = 0
        sources = [(sent[each], each) for each in holders[layer]]
        for source, num_bytes in _stripes(sources, layer_bytes[layer]):
            copies.append(
                Copy(layer=layer, source=source, destination=node, first_byte=first, num_bytes=num_bytes)
            )
            sent[source] += num_bytes
            first += num_bytes
    return tuple(copies)


def _stripes(holders: Sequence[tuple[int, str]], num_bytes: int) -> list[tuple[str, int]]:
    """Nonzero bytes that each holder sends, minimising the total sent by the busiest of them.

    Args:
        holders: (bytes sent so far, node).
    """
    idle_first = sorted(holders, key=lambda each: each[0])
    level, count = idle_first[0][0] + num_bytes, 1
    while count < len(idle_first) and idle_first[count][0] < level:
        count += 1
        level = -(-(sum(sent for sent, _ in idle_first[:count]) + num_bytes) // count)
    stripes, left = [], num_bytes
    for sent, node in idle_first[:count]:
        stripes.append((node, min(left, level - sent)))
        left -= stripes[-1][1]
    return [(node, part) for node, part in stripes if part] or [(idle_first[0][1], 0)]


def busiest_bytes(copies: Sequence[Copy]) -> int:
    """The most bytes that any node sends or receives."""
    bytes_of_port: dict[tuple[str, str], int] = {}
    for copy in copies:
        for end in (("from", copy.source), ("to", copy.destination)):
            bytes_of_port[end] = bytes_of_port.get(end, 0) + copy.num_bytes
    return max(bytes_of_port.values(), default=0)
