"""The exact template search against brute force on small random chains, with memory and without.

Brute force tries all templates: slow, obviously right.
"""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from workbench.elastic.chain import LayerChain
from workbench.elastic.exact_mapping import exact_templates
from workbench.elastic.template import PLANNED_PER_STAGE
from workbench.float_sum import float_sum

Cut = tuple[int, int, int]  # first layer, end, GPUs

NUM_CHAINS, SEED, REL_TOL = 400, 0, 1e-10
MOST_LAYERS, MOST_GPUS, MOST_NODES = 6, 4, 3


def all_cuts(chain: LayerChain, gpus_per_node: int, num_nodes: int) -> Iterator[tuple[Cut, ...]]:
    """Yield every sequence of stages that fits nodes and memory and uses all layers and GPUs.

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
    return float_sum(times) + steady * times[slowest] + float_sum(times[slowest:])


def least_planned_s(chain: LayerChain, gpus_per_node: int, num_nodes: int) -> float | None:
    """The least objective over all templates; None where none fits.

    Complexity: that of `all_cuts`.
    """
    return min((planned_s(chain, cuts) for cuts in all_cuts(chain, gpus_per_node, num_nodes)), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallCases:
    """Counts of compared templates; `num_unfit` of them fit in neither search."""

    num_compared: int
    num_unfit: int
    num_equal: int

    @property
    def all_equal(self) -> bool:
        return self.num_equal == self.num_compared + self.num_unfit


def random_chain(rng: random.Random, num_layers: int, max_width: int) -> LayerChain:
    """A chain of uneven layers with varied speed-up from several GPUs; sometimes short of memory."""
    widths = tuple(w for w in range(1, max_width + 1) if w == 1 or rng.random() < 0.8)
    speedup = rng.choice((0.3, 0.7, 1.0))
    work = [rng.choice((1.0, 1.0, 2.0, rng.uniform(0.1, 5.0))) for _ in range(num_layers)]
    time_s = tuple(tuple(w / width**speedup for width in widths) for w in work)
    held_bytes = tuple(tuple(rng.randint(1, 9) * 12 // width for width in widths) for _ in work)
    capacity = rng.choice((math.inf, sum(row[0] for row in held_bytes) / rng.uniform(1.0, 3.0)))
    return LayerChain(widths=widths, time_s=time_s, held_bytes=held_bytes, capacity_bytes=capacity)


def small_chains(seed: int, num: int) -> Iterator[tuple[LayerChain, int, int]]:
    """Yield (chain, GPUs per node, maximum nodes)."""
    rng = random.Random(seed)
    for _ in range(num):
        gpus = rng.randint(1, MOST_GPUS)
        yield random_chain(rng, rng.randint(1, MOST_LAYERS), gpus), gpus, rng.randint(1, MOST_NODES)


def compare(num_chains: int = NUM_CHAINS) -> SmallCases:
    """Compare the objectives of both searches for every chain and node count."""
    compared = unfit = equal = 0
    for chain, gpus, most_nodes in small_chains(SEED, num_chains):
        templates = exact_templates(chain, gpus, range(1, most_nodes + 1))
        for nodes in range(1, most_nodes + 1):
            best_s = least_planned_s(chain, gpus, nodes)
            if best_s is None:
                unfit += 1
                equal += nodes not in templates
            else:
                compared += 1
                equal += nodes in templates and math.isclose(
                    templates[nodes].planned_s, best_s, rel_tol=REL_TOL
                )
    return SmallCases(num_compared=compared, num_unfit=unfit, num_equal=equal)
