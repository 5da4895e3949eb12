"""All templates of a small chain, one by one: slow, obviously right."""

import random
from collections.abc import Iterator

from workbench.resilience.chain import LayerChain


def random_chain(rng: random.Random, num_layers: int, max_width: int) -> LayerChain:
    """A chain of uneven layers that gain more or less from several GPUs; sometimes short of memory."""
    widths = tuple(w for w in range(1, max_width + 1) if w == 1 or rng.random() < 0.8)
    speedup = rng.choice((0.3, 0.7, 1.0))
    work = [rng.choice((1.0, 1.0, 2.0, rng.uniform(0.1, 5.0))) for _ in range(num_layers)]
    time_s = tuple(tuple(w / width**speedup for width in widths) for w in work)
    held = tuple(tuple(rng.randint(1, 9) * 12 // width for width in widths) for _ in work)
    capacity = rng.choice((float("inf"), sum(row[0] for row in held) / rng.uniform(1.0, 3.0)))
    return LayerChain(widths=widths, time_s=time_s, held_bytes=held, capacity_bytes=capacity)


def all_cuts(
    chain: LayerChain, gpus_per_node: int, num_nodes: int
) -> Iterator[tuple[tuple[int, int, int], ...]]:
    """Every (first, end, GPUs) sequence that keeps the node rule, memory, and uses all GPUs."""

    def grow(first, used):
        if first == chain.num_layers and used == num_nodes * gpus_per_node:
            yield ()
            return
        for width in chain.widths:
            if used % gpus_per_node + width > gpus_per_node or used + width > num_nodes * gpus_per_node:
                continue
            for end in range(first + 1, chain.num_layers + 1):
                if chain.stage_bytes(first, end, width) <= chain.capacity_bytes:
                    for rest in grow(end, used + width):
                        yield ((first, end, width), *rest)

    return grow(0, 0)


def planned_s(chain: LayerChain, cuts: tuple[tuple[int, int, int], ...]) -> float:
    """T1 + T2 + T3 with four microbatches per stage, in floating point, the last slowest stage."""
    times = [chain.stage_s(*cut) for cut in cuts]
    slowest = max(k for k, time in enumerate(times) if time == max(times))
    steady = 4 * len(times) - len(times) + slowest - 1
    return sum(times) + steady * times[slowest] + sum(times[slowest:])


def optimal_s(chain: LayerChain, gpus_per_node: int, num_nodes: int) -> float | None:
    """The least objective over all templates; None where none fits."""
    return min((planned_s(chain, cuts) for cuts in all_cuts(chain, gpus_per_node, num_nodes)), default=None)
