"""DeepSeek's latent attention over tensor-parallel ranks; DeepSeek-V2's router and rotation in float64."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as deepseek_v2

from runtime.models.adapter import CutKind, CutRules
from runtime.models.glm import outside_best
from runtime.models.wide_float import in_float64

# Shape suffixes: T = tokens, X = experts, G = groups of experts, K = experts of a token, D = hidden width.

_WHOLE = ("q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm")  # what makes latents
CUTS: CutRules = (
    *((f"block.self_attn.{name}", CutKind.PARTIAL) for name in _WHOLE),
    *((f"block.self_attn.{name}", CutKind.COLUMN) for name in ("q_b_proj", "kv_b_proj")),
)


class GroupedRouter(nn.Module):
    """DeepSeek-V2's router in the wider of float32 and the input's own type.

    A token chooses its K experts by their shares of a softmax, from the groups with the best expert where its
    configuration limits them; shares do not sum to 1.

    Source: DeepSeek-AI 2024, "DeepSeek-V2", section 2.2.2.
    Differs: no losses that balance experts, as in transformers; transformers rounds float64 scores to
    float32, see `WideRMSNorm`.
    """

    def __init__(self, router: Any) -> None:
        super().__init__()
        self.weight: nn.Parameter = router.weight
        self.top_k: int = router.top_k
        self.num_groups: int = 1 if router.topk_method == "greedy" else router.num_group
        self.num_chosen_groups: int = router.topk_group
        self.scale: float = router.routed_scaling_factor

    def forward(self, hidden_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits [T, X], shares [T, K], experts [T, K]."""
        flat_TD = hidden_TD.reshape(-1, self.weight.shape[1])
        wide = torch.promote_types(flat_TD.dtype, torch.float32)
        logits_TX = functional.linear(flat_TD.to(wide), self.weight.to(wide))
        share_TK, expert_TK = self._from_best(logits_TX.softmax(dim=-1)).topk(self.top_k, dim=-1)
        return logits_TX, share_TK * self.scale, expert_TK

    def _from_best(self, share_TX: Tensor) -> Tensor:
        """[T, X] shares, 0 outside of a token's best groups."""
        if self.num_groups == 1:
            return share_TX
        grouped_TGX = share_TX.unflatten(1, (self.num_groups, -1))
        is_out_TG = outside_best(grouped_TGX.detach().amax(-1), self.num_chosen_groups)
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
