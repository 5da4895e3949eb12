"""DeepSeek's latent attention over tensor-parallel ranks; DeepSeek-V2's router and rotation in float64."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as deepseek_v2

from runtime.models.adapter import CutKind, CutRules
from runtime.models.glm import BEST, NO_DIVISION_BY_ZERO, outside_best
from runtime.models.mixture import wide_logits
from runtime.models.wide_float import in_float64

# Shape suffixes: T = tokens, X = experts, G = groups of experts, K = experts of a token, D = hidden width.

_WHOLE = ("q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm")  # what makes latents
CUTS: CutRules = (
    *((f"block.self_attn.{name}", CutKind.PARTIAL) for name in _WHOLE),
    *((f"block.self_attn.{name}", CutKind.COLUMN) for name in ("q_b_proj", "kv_b_proj")),
)


class GroupedRouter(nn.Module):
    """DeepSeek-V2's and Mistral Small 4's router in the wider of float32 and the input's own type.

    A token chooses its K experts by their shares of a softmax, from the groups with the best experts where
    its configuration limits them: the best one of DeepSeek-V2, whose shares do not sum to 1, the best two of
    Mistral Small 4.

    Source: DeepSeek-AI 2024, "DeepSeek-V2", section 2.2.2.
    Differs: no losses that balance experts, as in transformers; transformers rounds DeepSeek-V2's float64
    scores to float32, see `WideRMSNorm`, and computes Mistral Small 4's in the model's type.
    """

    def __init__(self, router: Any) -> None:
        super().__init__()
        self.weight: nn.Parameter = router.weight
        self.top_k: int = router.top_k
        self.num_groups: int = 1 if getattr(router, "topk_method", "") == "greedy" else router.num_group
        self.sums_to_one: bool = getattr(router, "norm_topk_prob", False)
        self.num_best = 1 if hasattr(router, "topk_method") else BEST
        self.num_chosen_groups: int = router.topk_group
        self.scale: float = router.routed_scaling_factor

    def forward(self, hidden_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits [T, X], shares [T, K], experts [T, K]."""
        logits_TX = wide_logits(hidden_TD, self.weight)
        share_TK, expert_TK = self._from_best(logits_TX.softmax(dim=-1)).topk(self.top_k, dim=-1)
        if self.sums_to_one:
            share_TK = share_TK / (share_TK.sum(dim=-1, keepdim=True) + NO_DIVISION_BY_ZERO)
        return logits_TX, share_TK * self.scale, expert_TK

    def _from_best(self, share_TX: Tensor) -> Tensor:
        """[T, X] shares, 0 outside of a token's best groups."""
        if self.num_groups == 1:
            return share_TX
        grouped_TGX = share_TX.unflatten(1, (self.num_groups, -1))
        group_TG = grouped_TGX.detach().topk(self.num_best, dim=-1).values.sum(-1)
        is_out_TG = outside_best(group_TG, self.num_chosen_groups)
        return grouped_TGX.masked_fill(is_out_TG[..., None], 0.0).flatten(1)


def adapt(layer: nn.Module) -> None:
    """Let DeepSeek-V2's attention rotate float64 as it is, instead of rounded to float32."""
    for module in layer.modules():
        if isinstance(module, deepseek_v2.DeepseekV2Attention):
            module.forward = _wide_enough(module.forward)


def _wide_enough(forward: Any) -> Any:
    wide = in_float64(forward)

    def attended(hidden_states: Tensor, **options: Any) -> Any:
        return (wide if hidden_states.dtype is torch.float64 else forward)(hidden_states, **options)

    return attended
