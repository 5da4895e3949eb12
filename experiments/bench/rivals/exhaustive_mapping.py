"""The best template of a small chain by trying all of them: slow, obviously right."""

from collections.abc import Iterator

from workbench.elastic.chain import LayerChain
from workbench.elastic.template import PLANNED_PER_STAGE

Cut = tuple[int, int, int]  # first layer, end, GPUs


def all_cuts(chain: LayerChain, gpus_per_node: int, num_nodes: int) -> Iterator[tuple[Cut, ...]]:
    """Every sequence of stages that keeps the node rule and memory and uses all layers and GPUs.

    Complexity: exponential in layers and GPUs.
    """
    num_gpus = num_nodes * gpus_per_node

    def grow(first: int, used: int) -> Iterator[tuple[Cut, ...]]:
        if first == chain.num_layers and used == num_gpus:
            yield ()
            return
        for width in chain.widths:
            if used % gpus_per_node + width > gpus_per_node or used + width > num_gpus:
                continue
            for end in range(first + 1, chain.num_layers + 1):
                if chain.stage_bytes(first, end, width) <= chain.capacity_bytes:
                    for rest in grow(end, used + width):
                        yield ((first, end, width), *rest)

    return grow(0, 0)


def planned_s(chain: LayerChain, cuts: tuple[Cut, ...]) -> float:
    """T1 + T2 + T3 of the Oobleck chapter, section 2.4.1.2, in floating point; the last slowest stage."""
    times = [chain.stage_s(*cut) for cut in cuts]
    slowest = max(k for k, time in enumerate(times) if time == max(times))
    steady = PLANNED_PER_STAGE * len(times) - len(times) + slowest - 1
    return sum(times) + steady * times[slowest] + sum(times[slowest:])


def least_planned_s(chain: LayerChain, gpus_per_node: int, num_nodes: int) -> float | None:
    """The least objective over all templates; None where none fits.

    Complexity: that of `all_cuts`.
    """
    return min((planned_s(chain, cuts) for cuts in all_cuts(chain, gpus_per_node, num_nodes)), default=None)
