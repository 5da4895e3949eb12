"""GLM's mixture of experts: a router of sigmoids with a correction of its choice, and a shared expert."""

import torch
from torch import Tensor, nn

from runtime.models.mixture import SHARED_EXPERTS, MixtralMixture, wide_logits

# Shape suffixes: T = tokens, X = experts, G = groups of experts, K = experts of a token, D = hidden width.

CORRECTION = "e_score_correction_bias"
BEST = 2  # experts whose scores rank their group
NO_DIVISION_BY_ZERO = 1e-20


class CorrectedRouter(nn.Module):
    """GLM's router in the wider of float32 and the input's own type.

    A token chooses its K experts by their scores plus a correction, from the groups whose best two experts
    have the highest; their shares are the scores without it. The correction is no weight: training leaves it
    as it is, and checkpoints have it in float32.

    Source: DeepSeek-AI 2024, "DeepSeek-V3", section 2.1.2.
    Differs: the correction is not adapted to the experts' loads, as in transformers; transformers rounds
    float64 scores to float32, see `WideRMSNorm`.
    """

    def __init__(self, router: nn.Module) -> None:
        super().__init__()
        self.weight: Tensor = router.weight  # type: ignore[assignment]
        self.top_k: int = router.top_k  # type: ignore[assignment]
        self.num_groups: int = router.num_group  # type: ignore[assignment]
        self.num_chosen_groups: int = router.topk_group  # type: ignore[assignment]
        self.sums_to_one: bool = router.norm_topk_prob  # type: ignore[assignment]
        self.scale: float = router.routed_scaling_factor  # type: ignore[assignment]
        correction = torch.zeros(self.weight.shape[0], dtype=torch.float32, device="cpu")
        self.register_buffer(CORRECTION, correction)

    def forward(self, hidden_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits [T, X], shares [T, K], experts [T, K]."""
        logits_TX = wide_logits(hidden_TD, self.weight)
        score_TX = logits_TX.sigmoid()
        expert_TK = self._chosen(score_TX.detach())
        share_TK = score_TX.gather(1, expert_TK)
        if self.sums_to_one:
            share_TK = share_TK / (share_TK.sum(dim=-1, keepdim=True) + NO_DIVISION_BY_ZERO)
        return logits_TX, share_TK * self.scale, expert_TK

    def _chosen(self, score_TX: Tensor) -> Tensor:
        """[T, K] experts with the best corrected scores in the best groups."""
        corrected_TX: Tensor = score_TX + self.get_buffer(CORRECTION)
        if self.num_groups > 1:
            grouped_TGX = corrected_TX.unflatten(1, (self.num_groups, -1))
            group_TG = grouped_TGX.topk(BEST, dim=-1).values.sum(-1)
            is_out_TG = outside_best(group_TG, self.num_chosen_groups)
            corrected_TX = grouped_TGX.masked_fill(is_out_TG[..., None], float("-inf")).flatten(1)
        return corrected_TX.topk(self.top_k, dim=-1).indices


def outside_best(group_TG: Tensor, num_chosen: int) -> Tensor:
    """[T, G] whether a group is none of a token's `num_chosen` best."""
    best_TG = group_TG.topk(num_chosen, dim=-1).indices
    return torch.ones_like(group_TG, dtype=torch.bool).scatter(1, best_TG, value=False)


class GlmMixture(MixtralMixture):
    """Experts whose results are multiplied by their shares, and one expert for all tokens."""

    shared = SHARED_EXPERTS
