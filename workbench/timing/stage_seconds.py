"""Seconds of a stage's passes over every kind of microbatch, as differences of sums over layers."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from workbench.arrays import Flags
from workbench.cost.layer_time import LayerTime, slowest
from workbench.cost.model import CostModel, Work
from workbench.data.sample import Item
from workbench.model.block_modules import part_of
from workbench.model.frozen import Needs
from workbench.model.layer import Layer
from workbench.model.model_graph import Module
from workbench.model.trained import is_trained
from workbench.plan.narrow_products import multiplying
from workbench.plan.plan import Microbatch, Plan
from workbench.plan.recomputed_layers import recomputed_of
from workbench.plan.routing import routing_of
from workbench.plan.sequence import dividing
from workbench.plan.stage import Stage
from workbench.plan.work import works_of
from workbench.schedule.action import Pass
from workbench.timing.grid_links import GridCost, GridLinks, grid_links
from workbench.timing.pass_times import pace, pass_times

Seconds = NDArray[np.float64]
KINDS = (Pass.F, Pass.B, Pass.I, Pass.W)


class StageKind(NamedTuple):
    """A kind of microbatch: all of one kind take equally long in every stage of their module.

    Args:
        works: tokens and query-key pairs of each context-parallel rank that may be the slowest.
        needs: gradients of every layer.
        present: modules upstream that have items in them.
    """

    works: tuple[Work, ...]
    needs: tuple[Needs, ...]
    present: frozenset[str]


class PassSeconds(NamedTuple):
    """[kinds] of one stage, executor overhead included.

    Args:
        forward_s, whole_s: F and B.
        through_s, weights_s: I and W.
        has_backward: whether any gradient runs in the stage, if its microbatch is read.
        trains_all: whether gradients of all its trainable layers run.
    """

    forward_s: Seconds
    whole_s: Seconds
    through_s: Seconds
    weights_s: Seconds
    has_backward: Flags
    trains_all: Flags


class StageSeconds:
    """Prices stages of one draft's modules: a stage is a difference of two prefix sums over layers.

    Times are those of `price`, except that where tensor-parallel ranks split tokens, a layer takes the
    shorter of its split and unsplit times, and gathers are free.

    Args:
        draft: with microbatches; those of the plans that are asked about may be copies of them.
        cost: the machine, and others beside it.
    """

    def __init__(self, draft: Plan, cost: CostModel) -> None:
        self._draft, self._cost = draft, cost
        self._kinds: dict[str, tuple[StageKind, ...]] = {}
        self._kind_index: dict[tuple[str, tuple[tuple[Item, ...], ...]], int] = {}
        self._sums: dict[tuple[object, ...], Seconds] = {}
        routing = routing_of(draft)
        for module in draft.model.modules:
            kind_index: dict[StageKind, int] = {}
            for microbatch in draft.microbatches:
                if microbatch.module == module.name:
                    flow = routing.flow(microbatch)
                    present = routing.present(microbatch)
                    kind = StageKind(works_of(draft, microbatch), flow.needs[module.name], present)
                    self._kind_index[module.name, microbatch.rows] = kind_index.setdefault(
                        kind, len(kind_index)
                    )
            self._kinds[module.name] = tuple(kind_index)

    def kinds(self, module: str) -> tuple[StageKind, ...]:
        """Return the kinds of the module's microbatches, in order of appearance."""
        return self._kinds[module]

    def kind_of(self, microbatch: Microbatch) -> int:
        """Return the index of a microbatch's kind in `kinds`."""
        return self._kind_index[microbatch.module, microbatch.rows]

    def passes(self, plan: Plan, stage: Stage) -> PassSeconds:
        """Return the seconds of a stage on its ranks; ValueError where these are of several kinds.

        Complexity: O(kinds), and once O(layers x kinds) for every grid, link and device.
        """
        cost = self._cost.on(plan.cluster.device_of(stage.flat_ranks))
        sums = self._sums_of(plan.model.module(stage.module), stage, grid_links(plan.cluster, stage), cost)
        first, last = stage.layers
        of_stage = sums[:, last] - sums[:, first]
        profile = cost.profile
        times = [
            profile.overhead_s(kind) + pace(plan, stage, profile, kind) * of_stage[index]
            for index, kind in enumerate(KINDS)
        ]
        forward_s, whole_s, through_s, weights_s = times
        forward_s = forward_s + pace(plan, stage, profile, Pass.F) * np.where(
            of_stage[4] > 0, of_stage[6], 0.0
        )
        return PassSeconds(forward_s, whole_s, through_s, weights_s, of_stage[4] > 0, of_stage[5] == 0)

    def _sums_of(self, module: Module, stage: Stage, links: GridLinks, cost: CostModel) -> Seconds:
        """[7, layers + 1, kinds] prefix sums over layers.

        Of F, B, I, W, layers with a gradient, trainable layers without theirs, and what checkpoints add to F
        of layers without a gradient if others have one.
        """
        key = (module.name, stage.tp, stage.cp, stage.ep, links, cost.profile.device)
        if key not in self._sums:
            cost = multiplying(cost, self._draft.settings, module.name)
            costs = [cost]
            if stage.tp > 1 and self._draft.settings.divides_tokens(module.name):
                costs.append(dividing(cost, self._draft.settings, module.name))
            costs = [model.with_expert_parallel(stage.ep, links.experts) for model in costs]
            precision = self._draft.settings.precision
            machines = [GridCost(model, stage.tp, stage.cp, precision, links) for model in costs]
            kinds = self._kinds[module.name]
            again = recomputed_of(self._draft, module.name)
            parts = self._draft.settings.of(module.name).computed_again
            values = np.zeros((7, len(module.layers) + 1, len(kinds)))
            for column, kind in enumerate(kinds):
                for row, (layer, need) in enumerate(zip(module.layers, kind.needs, strict=True), 1):
                    times = [_slowest(machine, layer, kind) for machine in machines]
                    part = part_of(layer, parts)
                    again_s = [0.0 if part is None else _slowest(m, part, kind).forward_s for m in machines]
                    passes = [
                        pass_times([time], [need], [again[row - 1]], [seconds])
                        for time, seconds in zip(times, again_s, strict=True)
                    ]
                    for index, pass_kind in enumerate(KINDS):
                        values[index, row, column] = min(of_layer.of(pass_kind) for of_layer in passes)
                    values[4, row, column] = need.any
                    values[5, row, column] = is_trained(layer) and not need.weight_grad
                    if again[row - 1]:
                        values[6, row, column] = min(time.idle_checkpoint_s(need) for time in times)
            self._sums[key] = values.cumsum(axis=1)
        return self._sums[key]


def _slowest(machine: GridCost, layer: Layer, kind: StageKind) -> LayerTime:
    """A layer's time on the ranks that take longest."""
    return slowest([machine.layer_time(layer, work) for work in kind.works])
