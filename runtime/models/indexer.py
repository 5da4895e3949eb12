"""Indexers of learned sparse attention: the keys that every query attends to, chosen item by item."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.deepseek_v32 import modeling_deepseek_v32 as deepseek_v32
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as glm_moe_dsa

from runtime.models import deepseek
from runtime.models.adapter import CutKind, CutRules
from runtime.models.attention import LengthGroup, Packing
from runtime.models.dense_attention import wide
from workbench.model.families.sparse_attention import FULL, SHARED

# Shape suffixes: T = packed tokens, N = items of one length L, S = keys of an item (as many), H = heads of
# the indexer, I = width of a head, D = hidden width, Q = width of the latent of queries, K = chosen keys.

Rotation = Callable[..., tuple[Tensor, Tensor]]
_WEIGHTS = ("wq_b", "wk", "k_norm", "weights_proj")
CUTS: CutRules = (
    *deepseek.CUTS,
    *((f"block.self_attn.indexer.{name}", CutKind.WHOLE) for name in _WEIGHTS),  # every rank chooses all keys
)


class Indexer(nn.Module):
    """transformers' indexer over packed items, head by head; nothing of it has a gradient.

    Source: DeepSeek-AI 2025, "DeepSeek-V3.2", section 2.1.
    Differs: scores are in the wider of float32 and the input's own type, while transformers rounds float64
    ones; weights of heads have the type of the others, while transformers keeps them in float32.

    Args:
        theirs: transformers' indexer.
        rotate: turns queries and keys, by cosine and sine.
    """

    def __init__(self, theirs: Any, rotate: Rotation) -> None:
        super().__init__()
        self.wq_b: nn.Linear = theirs.wq_b
        self.wk: nn.Linear = theirs.wk
        self.k_norm: nn.LayerNorm = theirs.k_norm
        self.weights_proj: nn.Linear = theirs.weights_proj
        self.num_heads: int = theirs.n_heads
        self.turned_dim: int = theirs.qk_rope_head_dim
        self.top_k: int = theirs.index_topk
        self.scale = float((self.num_heads * theirs.head_dim) ** -0.5)  # both of transformers' scales
        self._rotate = rotate

    @torch.no_grad()
    def forward(
        self,
        hidden_1TD: Tensor,
        latent_1TQ: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        packing: Packing,
        *_: object,
        **__: object,
    ) -> tuple[Tensor, ...]:
        """[N, L, S] True where a query attends to a key, for each of the packing's groups."""
        q_THI = self.wq_b(latent_1TQ)[0].unflatten(-1, (self.num_heads, -1))
        k_TI = self.k_norm(self.wk(hidden_1TD))[0]
        q_THI, k_TI = self._turned(q_THI, k_TI, position_embeddings)
        weight_TH = self.weights_proj(hidden_1TD)[0].to(q_THI.dtype) * self.scale
        return tuple(
            self._chosen(*(_items(x, group) for x in (q_THI, k_TI, weight_TH))) for group in packing.groups
        )

    def _turned(self, q_THI: Tensor, k_TI: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Queries and keys in the wide type, their first numbers turned by positions."""
        q_1THI, k_1T1I = q_THI[None], k_TI[None, :, None]
        parts = [x.split([self.turned_dim, x.shape[-1] - self.turned_dim], dim=-1) for x in (q_1THI, k_1T1I)]
        turned = self._rotate(parts[0][0], parts[1][0], *angles, unsqueeze_dim=2)
        q, k = (torch.cat([new, old[1]], dim=-1)[0] for new, old in zip(turned, parts, strict=True))
        return q.to(wide(q.dtype)), k[:, 0].to(wide(k.dtype))

    def _chosen(self, q_NLHI: Tensor, k_NSI: Tensor, weight_NLH: Tensor) -> Tensor:
        """[N, L, S] whether a key is among the K with the highest scores of those that a query sees."""
        score_NLS = q_NLHI.new_zeros(*q_NLHI.shape[:2], k_NSI.shape[1])
        for head in range(self.num_heads):
            of_head_NLS = torch.relu_(q_NLHI[:, :, head] @ k_NSI.transpose(1, 2))
            score_NLS += of_head_NLS.mul_(weight_NLH[:, :, head, None])
        length = k_NSI.shape[1]
        sees_LS = torch.ones((length, length), dtype=torch.bool, device=score_NLS.device).tril_()
        score_NLS.masked_fill_(~sees_LS, float("-inf"))
        best_NLK = score_NLS.topk(min(self.top_k, length), dim=-1).indices
        chosen_NLS = torch.zeros_like(score_NLS, dtype=torch.bool).scatter_(-1, best_NLK, True)  # noqa: FBT003
        return chosen_NLS.logical_and_(sees_LS)


def _items(x_T: Tensor, group: LengthGroup) -> Tensor:
    """[N, L, ...] the tokens of items of one length."""
    own = x_T if group.index is None else x_T.index_select(0, group.index)
    return own.unflatten(0, (group.count, group.length))


def adapt(layer: nn.Module) -> None:
    """Give DeepSeek-V3.2's attention our indexer; transformers' hands what it chose on to our attention."""
    for module in _of_kind(layer, deepseek_v32.DeepseekV32Attention):
        module.indexer = Indexer(module.indexer, deepseek_v32.apply_rotary_pos_emb)


def adapt_shared(layer: nn.Module) -> None:
    """The same of GLM-5, some of whose blocks read the keys that an earlier one chose."""
    for module in _of_kind(layer, glm_moe_dsa.GlmMoeDsaAttention):
        if module.indexer is not None:
            module.indexer = Indexer(module.indexer, glm_moe_dsa.apply_rotary_pos_emb_interleave)
    for block in _of_kind(layer, glm_moe_dsa.GlmMoeDsaDecoderLayer):
        attention = block.self_attn
        block.forward = _Chosen(block.forward, attention.config.indexer_types, attention.layer_idx)


class _Chosen:
    """A block's forward that keeps its choice for the blocks behind it, or reads an earlier one.

    Args:
        forward: transformers', which returns the hidden state and the choice.
        kinds: of all blocks.
        index: of this one.
    """

    def __init__(self, forward: Callable[..., Any], kinds: Sequence[str], index: int) -> None:
        self._forward, self._index = forward, index
        self._source = max(place for place in range(index + 1) if kinds[place] == FULL)
        self._is_read = kinds[index : index + 2] == [FULL, SHARED]

    def __call__(self, hidden_1TD: Tensor, attention_mask: Packing, **options: Any) -> Tensor:
        earlier = attention_mask.choices.get(self._source)
        y_1TD: Tensor
        y_1TD, choice = self._forward(
            hidden_1TD, attention_mask=attention_mask, prev_topk_indices=earlier, **options
        )
        if self._is_read:
            attention_mask.choices[self._index] = choice
        return y_1TD


def _of_kind(layer: nn.Module, kind: type[nn.Module]) -> Iterator[Any]:
    """The layer's modules of a class, which may be replaced meanwhile."""
    return (module for module in list(layer.modules()) if isinstance(module, kind))
