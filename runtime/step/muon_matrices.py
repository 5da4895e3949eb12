"""Weights of a stage that Muon updates, and how tensor-parallel ranks make them whole."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from runtime.models.mixture import Experts
from runtime.parallel.tensor.cuts import Cut
from runtime.parallel.tensor.group import TensorGroup
from runtime.step.newton_schulz import ortho_dtype, orthogonalised
from runtime.step.stage_module import StageModule
from workbench.model.experts import is_of_expert
from workbench.plan.lowered import Weights
from workbench.plan.muon import matrices_of
from workbench.plan.optimizer import Optimizer
from workbench.plan.plan import Plan


class Position(NamedTuple):
    """Of a matrix in the model: the same order on all ranks."""

    module: str
    layer: int
    experts: bool
    number: int
    expert: int = 0


@dataclass(frozen=True, slots=True)
class TensorCut:
    """How tensor-parallel ranks cut a matrix."""

    cut: Cut
    group: TensorGroup


@dataclass(frozen=True, slots=True, eq=False)
class Matrix:
    """A weight that Muon updates: a matrix, or those of all experts of a layer on this rank.

    Args:
        weight: [m, n] or [experts, m, n].
        position: its place in the model.
        parts: how tensor-parallel ranks cut it; None: each has it whole.
    """

    weight: nn.Parameter
    position: Position
    parts: TensorCut | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the whole weight."""
        shape = list(self.weight.shape)
        if self.parts is not None:
            shape[self.parts.cut.dim] = sum(self.parts.cut.blocks)
        return tuple(shape)

    def each(self) -> Iterator["Matrix"]:
        """Yield the matrices of a weight one by one; of experts without values, as sharded weights are."""
        if self.weight.ndim == 2:
            yield self
            return
        parts = self.parts
        if parts is not None:
            parts = replace(parts, cut=replace(parts.cut, dim=parts.cut.dim - 1))
        for expert in range(len(self.weight)):
            weight = nn.Parameter(torch.empty(self.weight.shape[1:], device="meta"))
            yield Matrix(weight, self.position._replace(expert=expert), parts)

    def orthogonalised(self, update: Tensor) -> Tensor:
        """This rank's part of the orthogonalised update, from its part of the update.

        Tensor-parallel ranks gather the whole update, and each orthogonalises it.

        Raises:
            RankError: the others did not come in time, or one is gone.
        """
        if self.parts is None:
            return orthogonalised(update)
        cut, group = self.parts.cut, self.parts.group
        own = update.to(ortho_dtype(update.dtype))
        whole = cut.join(group.collect(own, cut.shapes(own.shape, group.size)))
        return cut.own(orthogonalised(whole), group.member, group.size)


def muon_matrices(plan: Plan, module: StageModule) -> Iterator[Matrix]:
    """Yield the matrices of a stage: its blocks' trained 2-D weights, and those of experts.

    Raises:
        ValueError: their shapes are not those that the plan is priced with.
    """
    stage, weights, parts_of = module.stage, module.weights(), _tensor_cuts(module)
    of_experts = {id(w) for each in module.modules() if isinstance(each, Experts) for w in each.parameters()}
    for index in range(*stage.layers):
        layer = plan.model.module(stage.module).layers[index]
        matrices = matrices_of(plan.settings, layer)
        if not matrices:
            continue
        found = [
            Matrix(weight, Position(stage.module, index, experts, number), parts_of.get(id(weight)))
            for experts in (False, True)
            for number, weight in enumerate(weights.get(Weights(stage.module, index, experts=experts), []))
            if weight.requires_grad and weight.ndim == (3 if id(weight) in of_experts else 2)
        ]
        priced = Counter(_sides(matrix.shape) for matrix in matrices if not is_of_expert(matrix))
        for sides, count in Counter(_sides(each.shape) for each in matrices if is_of_expert(each)).items():
            priced[sides] += count // stage.ep
        shapes = Counter(_sides(each.shape) for weight in found for each in weight.each())
        if shapes != priced:
            raise ValueError(
                f"module {stage.module!r}, layer {layer.name!r}: optimizer 'muon' wants matrices "
                f"{_listed(priced)}, the model's are {_listed(shapes)}; nearest: optimizer "
                f"{Optimizer.ADAMW.value!r}"
            )
        yield from found


def _sides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a matrix, whichever of its dims comes first."""
    return tuple(sorted(shape))


def _listed(counts: Mapping[tuple[int, ...], int]) -> str:
    return ", ".join(f"{count} of {list(sides)}" for sides, count in sorted(counts.items())) or "none"


def _tensor_cuts(module: StageModule) -> dict[int, TensorCut]:
    """Identity of a weight -> its cut, where tensor-parallel ranks cut it."""
    if module.shared is None:
        return {}
    cuts, group = module.cuts, module.shared.group
    return {
        id(weight): TensorCut(cuts[name], group) for name, weight in module.named_weights() if name in cuts
    }
