"""Muon over matrices of blocks, and AdamW over all other parameters, as one optimizer."""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from runtime.step.optimizer import OptimizerSettings, build_adamw, follow_rate, step_count
from runtime.step.stage_module import StageModule
from workbench.model.muon import NEWTON_SCHULZ_STEPS
from workbench.plan.lowered import Weights
from workbench.plan.muon import matrices_of
from workbench.plan.optimizer import Optimizer
from workbench.plan.plan import Plan

MOMENTUM = 0.95
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # a, b, c of X <- a X + (b A + c A A) X with A = X X^T
LEAST_NORM = 1e-7
RMS = 0.2  # of an update, as AdamW's are: the same learning rate and decay serve both


def build_optimizer(
    plan: Plan,
    modules: Iterable[StageModule],
    parameters: Iterable[nn.Parameter],
    settings: OptimizerSettings,
) -> torch.optim.Optimizer | None:
    """The plan's optimizer over the parameters; None where nothing is trainable.

    Raises:
        ValueError: as `muon_matrices`, or matrices that are updated as parts of other tensors.
    """
    if plan.settings.optimizer is Optimizer.ADAMW:
        return build_adamw(parameters, settings)
    trained = list(parameters)
    matrices = {id(matrix) for module in modules for matrix in muon_matrices(plan, module)}
    if missing := len(matrices - set(map(id, trained))):
        raise ValueError(
            f"optimizer 'muon' wants whole matrices, got {missing} that are updated as parts of flat tensors"
        )
    return MuonAndAdamW(trained, matrices, settings) if trained else None


def muon_matrices(plan: Plan, module: StageModule) -> list[nn.Parameter]:
    """Trained weights of a stage that Muon updates: the 2-D ones of blocks.

    Raises:
        ValueError: their shapes are not those that the plan is priced with.
    """
    found: list[nn.Parameter] = []
    weights: Mapping[Weights, list[nn.Parameter]] = module.weights()
    for index in range(*module.stage.layers):
        layer = plan.model.module(module.stage.module).layers[index]
        priced = sorted(matrix.shape for matrix in matrices_of(plan.settings, layer))
        own = weights.get(Weights(module.stage.module, index), []) if priced else []
        matrices = [weight for weight in own if weight.requires_grad and weight.ndim == 2]
        if (shapes := sorted(tuple(matrix.shape) for matrix in matrices)) != priced:
            raise ValueError(
                f"module {module.stage.module!r}, layer {layer.name!r}: optimizer 'muon' wants matrices "
                f"{priced}, the model's are {shapes}; nearest: optimizer {Optimizer.ADAMW.value!r}"
            )
        found += matrices
    return found


class MuonAndAdamW(torch.optim.Optimizer):
    """One momentum of every matrix, and AdamW's two moments of every other parameter.

    Source: Jordan et al. 2024, "Muon", as `torch.optim.Muon` with Nesterov's momentum, and the learning rate
    of Liu et al. 2025, "Muon is Scalable for LLM Training", equation 4, by which rate and decay of AdamW
    serve both. Differs: float64 matrices are orthogonalised in float64, others in bfloat16 as there.

    Args:
        parameters: all, each once.
        matrices: identities of those that Muon updates.
        settings: rate, decay and schedule of both rules; betas and epsilon of AdamW.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], matrices: Collection[int], settings: OptimizerSettings
    ) -> None:
        trained = list(parameters)
        self._adamw = build_adamw([p for p in trained if id(p) not in matrices], settings, follows=False)
        fused = self._adamw is not None and bool(self._adamw.defaults["fused"])
        super().__init__(
            trained, {"lr": settings.learning_rate, "weight_decay": settings.weight_decay, "fused": fused}
        )
        self._matrices = [p for p in trained if id(p) in matrices]
        if self._adamw is not None:
            self._adamw.state = self.state
        if settings.schedule is not None:
            follow_rate(self, settings, settings.schedule)

    def first_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """State of a parameter before its first step."""
        if any(parameter is matrix for matrix in self._matrices):
            return {"step": step_count(self, parameter, 0), "momentum_buffer": torch.zeros_like(parameter)}
        return adamw_state(self, parameter)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        assert closure is None, "gradients are there already"
        (group,) = self.param_groups
        for matrix in self._matrices:
            if matrix.grad is not None:
                self._update(matrix, matrix.grad, group["lr"], group["weight_decay"])
        if self._adamw is not None:
            for of_adamw in self._adamw.param_groups:
                of_adamw["lr"] = group["lr"]
            self._adamw.step()

    def _update(self, matrix: Tensor, gradient: Tensor, rate: float, decay: float) -> None:
        if not self.state[matrix]:
            self.state[matrix] |= self.first_state(matrix)
        state = self.state[matrix]
        state["step"] += 1
        momentum = state["momentum_buffer"].lerp_(gradient, 1 - MOMENTUM)
        update = orthogonalised(gradient.lerp(momentum, MOMENTUM))
        matrix.mul_(1 - rate * decay)
        matrix.add_(update, alpha=-rate * RMS * max(matrix.shape) ** 0.5)


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


def orthogonalised(update: Tensor) -> Tensor:
    """[m, n] nearly U V^T of the update U S V^T, by Newton-Schulz steps; its work: `newton_schulz_flop`."""
    a, b, c = COEFFICIENTS
    is_tall = update.size(0) > update.size(1)
    x = update if update.dtype == torch.float64 else update.bfloat16()
    x = x.T if is_tall else x
    x = x / x.norm().clamp(min=LEAST_NORM)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.T
        gram = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, gram, x, beta=a)
    return x.T if is_tall else x
