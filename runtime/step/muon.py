"""Muon over matrices of blocks, and AdamW over all other parameters, as one optimizer."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from runtime.step.flat_part import CutWeight, FlatPart
from runtime.step.muon_matrices import Matrix, muon_matrices
from runtime.step.optimizer import OptimizerSettings, build_adamw, follow_rate, step_count
from runtime.step.pooled_updates import Exchange, PooledMatrix, PooledUpdates
from runtime.step.stage_module import StageModule
from workbench.model.muon import MOMENTUM, RMS
from workbench.plan.optimizer import Optimizer
from workbench.plan.plan import Plan


class Sharded(NamedTuple):
    """Parts of flat tensors that this rank updates, and an all-to-all with the ranks of other parts."""

    parts: Sequence[FlatPart]
    exchange: Exchange


def build_optimizer(
    plan: Plan,
    modules: Iterable[StageModule],
    parameters: Iterable[nn.Parameter],
    settings: OptimizerSettings,
    sharded: Sharded | None = None,
) -> torch.optim.Optimizer | None:
    """The plan's optimizer over the parameters; None where nothing is trainable.

    Args:
        sharded: which of the parameters are parts of flat tensors; None: none are.

    Raises:
        ValueError: as `muon_matrices`.
    """
    if plan.settings.optimizer is Optimizer.ADAMW:
        return build_adamw(parameters, settings)
    trained = list(parameters)
    if not trained:
        return None
    matrices = {id(each.weight): each for module in modules for each in muon_matrices(plan, module)}
    split = [] if sharded is None else _split(sharded.parts, matrices)
    pools = [] if sharded is None else _pools(split, sharded.exchange)
    return MuonAndAdamW(trained, matrices, settings, split, pools)


class _Split(NamedTuple):
    """A part with matrices as the weights that it is cut from: an optimizer updates their pieces."""

    part: FlatPart
    weights: tuple[tuple[CutWeight, Matrix | None], ...]

    @property
    def pieces(self) -> list[nn.Parameter]:
        return [cut.piece for cut, _ in self.weights if cut.piece is not None]

    def set_gradients(self) -> None:
        """Give the pieces views of the part's gradient."""
        gradient_S, start = self.part.own.grad, 0
        assert gradient_S is not None, "parts always have a gradient"
        for piece in self.pieces:
            piece.grad = gradient_S.narrow(0, start, piece.numel()).view_as(piece)
            start += piece.numel()

    def clear_gradients(self) -> None:
        """Take them away again, so that they can be freed."""
        for piece in self.pieces:
            piece.grad = None


def _split(parts: Iterable[FlatPart], matrices: Mapping[int, Matrix]) -> list[_Split]:
    """Parts with matrices; those of experts one by one, as each has an owner."""
    return [
        _split_part(part, matrices) for part in parts if any(id(weight) in matrices for weight in part.held)
    ]


def _split_part(part: FlatPart, matrices: Mapping[int, Matrix]) -> _Split:
    each_of = {id(w): list(matrices[id(w)].each()) for w in part.held if id(w) in matrices}
    matrix_of = {id(matrix.weight): matrix for each in each_of.values() for matrix in each}

    def views_of(weight: nn.Parameter) -> list[nn.Parameter]:
        return [matrix.weight for matrix in each_of[id(weight)]] if id(weight) in each_of else [weight]

    return _Split(part, tuple((cut, matrix_of.get(id(cut.weight))) for cut in part.cut_weights(views_of)))


def _pools(split: Iterable[_Split], exchange: Exchange) -> list[PooledUpdates]:
    """Matrices in parts, by the ranks that hold these; in the same order on all ranks."""
    found = (
        (part, PooledMatrix(matrix, cut))
        for part, weights in split
        for cut, matrix in weights
        if matrix is not None and len(part.ranks) > 1
    )
    by_ranks: dict[tuple[int, ...], tuple[FlatPart, list[PooledMatrix]]] = {}
    for part, pooled in sorted(found, key=lambda each: each[1].matrix.position):
        by_ranks.setdefault(part.ranks, (part, []))[1].append(pooled)
    return [
        PooledUpdates(pooled, ranks, part.member, like=part.own, exchange=exchange)
        for ranks, (part, pooled) in by_ranks.items()
    ]


class MuonAndAdamW(torch.optim.Optimizer):
    """One momentum of every matrix, and AdamW's two moments of every other parameter.

    Source: Jordan et al. 2024, "Muon", as `torch.optim.Muon` with Nesterov's momentum, and the learning rate
    of Liu et al. 2025, "Muon is Scalable for LLM Training", equation 4, by which rate and decay of AdamW
    serve both. Differs: float64 matrices are orthogonalised in float64, others in bfloat16 as there.

    Args:
        parameters: all, each once.
        matrices: by identity of the weight, those that Muon updates.
        settings: rate, decay and schedule of both rules; betas and epsilon of AdamW.
        split: parameters that are parts of flat tensors with matrices.
        pools: of the matrices in them of which other ranks hold parts.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        matrices: Mapping[int, Matrix],
        settings: OptimizerSettings,
        split: Sequence[_Split] = (),
        pools: Sequence[PooledUpdates] = (),
    ) -> None:
        self._split, self._pools = split, pools
        pieces_of = {id(each.part.own): each.pieces for each in split}
        trained = [piece for each in parameters for piece in pieces_of.get(id(each), (each,))]
        self._matrix_of = {id(each): matrices[id(each)] for each in trained if id(each) in matrices}
        whole = set(self._matrix_of)
        for cut, matrix in (weight for each in split for weight in each.weights):
            if matrix is not None and cut.piece is not None:
                self._matrix_of[id(cut.piece)] = matrix
                whole |= {id(cut.piece)} if len(cut.spans) == 1 else set()
        self._whole = sorted(
            (each for each in trained if id(each) in whole),
            key=lambda each: self._matrix_of[id(each)].position,  # on all tensor-parallel ranks
        )
        self._adamw = build_adamw(
            [p for p in trained if id(p) not in self._matrix_of], settings, follows=False
        )
        fused = self._adamw is not None and bool(self._adamw.defaults["fused"])
        defaults = {"lr": settings.learning_rate, "weight_decay": settings.weight_decay, "fused": fused}
        super().__init__([{"params": trained}], defaults)  # a rank may have nothing but padding
        if self._adamw is not None:
            self._adamw.state = self.state
        if settings.schedule is not None:
            follow_rate(self, settings, settings.schedule)

    def first_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """State of a parameter before its first step."""
        if id(parameter) in self._matrix_of:
            return {"step": step_count(self, parameter, 0), "momentum_buffer": torch.zeros_like(parameter)}
        return adamw_state(self, parameter)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient.

        Raises:
            RankError: as `PooledUpdates.orthogonalised` and `Matrix.orthogonalised`.
        """
        assert closure is None, "gradients are there already"
        (group,) = self.param_groups
        for split in self._split:
            split.set_gradients()
        for weight in self._whole:
            if weight.grad is not None:
                matrix = self._matrix_of[id(weight)]
                self._apply(weight, matrix.orthogonalised(self._update_of(weight)))
        for pool in self._pools:
            for piece, update in pool.orthogonalised(self._update_of):
                self._apply(piece, update)
        if self._adamw is not None:
            for of_adamw in self._adamw.param_groups:
                of_adamw["lr"] = group["lr"]
            self._adamw.step()
        for split in self._split:
            split.clear_gradients()

    def _update_of(self, matrix: nn.Parameter) -> Tensor:
        """Add the gradient of a matrix, or of a piece of one, to its momentum; returns Nesterov's mean."""
        gradient = matrix.grad
        assert gradient is not None, "a part of weights that others hold too has one"
        if not self.state[matrix]:
            self.state[matrix] |= self.first_state(matrix)
        state = self.state[matrix]
        state["step"] += 1
        momentum: Tensor = state["momentum_buffer"].lerp_(gradient, 1 - MOMENTUM)
        return gradient.lerp(momentum, MOMENTUM)

    def _apply(self, matrix: nn.Parameter, update: Tensor) -> None:
        (group,) = self.param_groups
        rate, decay = group["lr"], group["weight_decay"]
        longest = max(self._matrix_of[id(matrix)].shape[-2:])
        matrix.mul_(1 - rate * decay)
        matrix.add_(update, alpha=-rate * RMS * longest**0.5)


def adamw_state(adamw: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """AdamW's state of a parameter before its first step."""
    return {
        "step": step_count(adamw, parameter, 0),
        "exp_avg": torch.zeros_like(parameter),
        "exp_avg_sq": torch.zeros_like(parameter),
    }


def first_state(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """State of a parameter before its first step, by its rule."""
    if isinstance(optimizer, MuonAndAdamW):
        return optimizer.first_state(parameter)
    return adamw_state(optimizer, parameter)
