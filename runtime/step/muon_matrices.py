"""Weights of a stage that Muon updates, and how ranks that cut them make them whole."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn

from runtime.parallel.tensor.cuts import Cut
from runtime.parallel.tensor.group import TensorGroup
from runtime.step.newton_schulz import ortho_dtype, orthogonalised
from runtime.step.stage_module import StageModule
from workbench.plan.lowered import Weights
from workbench.plan.muon import matrices_of
from workbench.plan.optimizer import Optimizer
from workbench.plan.plan import Plan


class Position(NamedTuple):
    """Of a matrix in the model: the same order on all ranks."""

    module: str
    layer: int
    number: int


@dataclass(frozen=True, slots=True)
class TensorCut:
    """How tensor-parallel ranks cut a matrix."""

    cut: Cut
    group: TensorGroup


@dataclass(frozen=True, slots=True, eq=False)
class Matrix:
    """A weight that Muon updates.

    Args:
        weight: [m, n] of this rank.
        position: its place in the model.
        parts: how tensor-parallel ranks cut it; None: each has it whole.
    """

    weight: nn.Parameter
    position: Position
    parts: TensorCut | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the whole matrix."""
        shape = list(self.weight.shape)
        if self.parts is not None:
            shape[self.parts.cut.dim] = sum(self.parts.cut.blocks)
        return tuple(shape)

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
    """Yield the matrices of a stage: its blocks' trained 2-D weights.

    Raises:
        ValueError: their shapes are not those that the plan is priced with.
    """
    weights: Mapping[Weights, list[nn.Parameter]] = module.weights()
    name, parts_of = module.stage.module, _tensor_cuts(module)
    for index in range(*module.stage.layers):
        layer = plan.model.module(name).layers[index]
        priced = sorted(tuple(sorted(matrix.shape)) for matrix in matrices_of(plan.settings, layer))
        own = weights.get(Weights(name, index), []) if priced else []
        found = [
            Matrix(weight, Position(name, index, number), parts_of.get(id(weight)))
            for number, weight in enumerate(own)
            if weight.requires_grad and weight.ndim == 2
        ]
        if (shapes := sorted(tuple(sorted(matrix.shape)) for matrix in found)) != priced:
            raise ValueError(
                f"module {name!r}, layer {layer.name!r}: optimizer 'muon' wants matrices "
                f"{priced}, the model's are {shapes}; nearest: optimizer {Optimizer.ADAMW.value!r}"
            )
        yield from found


def _tensor_cuts(module: StageModule) -> dict[int, TensorCut]:
    """Identity of a weight -> its cut, where tensor-parallel ranks cut it."""
    if module.shared is None:
        return {}
    cuts, group = module.cuts, module.shared.group
    return {
        id(weight): TensorCut(cuts[name], group) for name, weight in module.named_weights() if name in cuts
    }
