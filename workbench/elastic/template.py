"""A pipeline template: number of nodes, stages, and iteration time by formula."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from workbench.float_sum import float_sum

PLANNED_PER_STAGE = 4  # microbatches per stage assumed while planning


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateStage:
    """Layers first..end-1 on `num_gpus` GPUs of one node; `time_s` for one forward and one backward."""

    first: int
    end: int
    num_gpus: int
    time_s: float

    def __post_init__(self) -> None:
        if not 0 <= self.first < self.end or self.num_gpus < 1:
            raise ValueError(
                f"a stage holds a layer and a GPU at least, got layers {self.first}..{self.end} "
                f"on {self.num_gpus} GPUs"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """A pipeline over whole nodes. Stages use the nodes' GPUs in order, and none spans two nodes.

    The iteration time is that of the Oobleck chapter, section 2.4.1.2: T1 + T2 + T3 with k* the
    slowest stage, counted from 0; of equally slow ones the last, which is never the cheaper reading.
    """

    num_nodes: int
    gpus_per_node: int
    stages: tuple[TemplateStage, ...]

    def __post_init__(self) -> None:
        if not self.stages or self.stages[0].first != 0:
            raise ValueError("a template starts with layer 0")
        used, layer = 0, 0
        for index, stage in enumerate(self.stages):
            if stage.first != layer:
                raise ValueError(f"stage {index} starts with layer {stage.first}, want {layer}")
            if used % self.gpus_per_node + stage.num_gpus > self.gpus_per_node:
                raise ValueError(
                    f"stage {index} has {stage.num_gpus} GPUs from GPU {used % self.gpus_per_node} of a "
                    f"node on, which spans two nodes of {self.gpus_per_node}"
                )
            used, layer = used + stage.num_gpus, stage.end
        if used != self.num_nodes * self.gpus_per_node:
            raise ValueError(
                f"{self.num_nodes} nodes of {self.gpus_per_node} GPUs: the stages use {used} GPUs, "
                f"want all {self.num_nodes * self.gpus_per_node}"
            )

    @property
    def num_layers(self) -> int:
        return self.stages[-1].end

    @property
    def slowest(self) -> int:
        """k*: the last of the slowest stages."""
        times = [stage.time_s for stage in self.stages]
        return len(times) - 1 - times[::-1].index(max(times))

    @property
    def bottleneck_s(self) -> float:
        return self.stages[self.slowest].time_s

    @property
    def t1_s(self) -> float:
        """One forward and one backward of every stage."""
        return float_sum(stage.time_s for stage in self.stages)

    @property
    def t3_s(self) -> float:
        """One forward and one backward of the slowest stage and all after it."""
        return float_sum(stage.time_s for stage in self.stages[self.slowest :])

    @property
    def planned_s(self) -> float:
        """The planning objective: the iteration with four microbatches per stage."""
        return self.iteration_s(PLANNED_PER_STAGE * len(self.stages))

    @property
    def microbatch_s(self) -> float:
        """Share of one microbatch in the planned iteration."""
        return self.planned_s / (PLANNED_PER_STAGE * len(self.stages))

    def iteration_s(self, num_microbatches: int) -> float:
        """T1 + T2 + T3, at most T1 + (microbatches - 1) x bottleneck.

        Differs: with fewer microbatches than stages after the slowest, T2 of the source is negative; here
        it is 0, and the limit, which is the time of equal stages, makes one microbatch cost T1.
        """
        if num_microbatches < 1:
            raise ValueError(f"an iteration needs at least one microbatch, got {num_microbatches}")
        steady = max(0, num_microbatches - len(self.stages) + self.slowest - 1)
        by_terms = self.t1_s + steady * self.bottleneck_s + self.t3_s
        return min(by_terms, self.t1_s + (num_microbatches - 1) * self.bottleneck_s)

    def iterations_s(self, most: int) -> NDArray[np.float64]:
        """[most] `iteration_s` of 1..most microbatches, bit for bit."""
        count = np.arange(1, most + 1)
        steady = np.maximum(0, count - len(self.stages) + self.slowest - 1)
        by_terms = self.t1_s + steady * self.bottleneck_s + self.t3_s
        least: NDArray[np.float64] = np.minimum(by_terms, self.t1_s + (count - 1) * self.bottleneck_s)
        return least

    def layers_by_node(self) -> tuple[tuple[int, ...], ...]:
        """[nodes] layers of each node of the pipeline, ascending."""
        layers_of_node: list[list[int]] = [[] for _ in range(self.num_nodes)]
        used = 0
        for stage in self.stages:
            layers_of_node[used // self.gpus_per_node].extend(range(stage.first, stage.end))
            used += stage.num_gpus
        return tuple(tuple(node_layers) for node_layers in layers_of_node)
