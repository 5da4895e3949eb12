"""Stages whose routers choose experts as a test wants, whatever the tokens are."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from runtime.step.stage_module import StageModule, build_stage_module
from workbench.plan.plan import Plan
from workbench.plan.stage import Stage

Choose = Callable[[int, int, int], Tensor]  # (tokens, experts, of a token) -> [tokens, of a token] experts


class ForcedRouter(torch.nn.Module):
    """A router with forced experts, and the shares that it would give them."""

    def __init__(self, router: Any, choose: Choose) -> None:
        super().__init__()
        self.weight, self._num_chosen, self._choose = router.weight, router.top_k, choose

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scores_TX = x_TD @ self.weight.t()
        experts_TK = self._choose(len(x_TD), scores_TX.shape[1], self._num_chosen)
        return scores_TX, scores_TX.gather(1, experts_TK).softmax(-1), experts_TK


def last_experts(num_tokens: int, num_experts: int, num_chosen: int) -> Tensor:
    """Every token's are the last ones: the first ones' ranks get nothing."""
    return torch.arange(num_experts - 1, num_experts - 1 - num_chosen, -1).expand(num_tokens, num_chosen)


def experts_in_turn(num_tokens: int, num_experts: int, num_chosen: int) -> Tensor:
    """Each expert gets equally many rows."""
    return torch.arange(num_tokens * num_chosen).view(-1, num_chosen) % num_experts


def _build(choose: Choose, plan: Plan, stage: Stage, **how: Any) -> StageModule:
    built = build_stage_module(plan, stage, **how)
    for layer in built.layers:
        for mixture in layer.mixtures().values():
            mixture.module.gate = ForcedRouter(mixture.module.gate, choose)
    return built


build_with_last = partial(_build, last_experts)
build_in_turn = partial(_build, experts_in_turn)
