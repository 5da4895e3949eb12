"""Attention of a whole microbatch under any mask, on one rank."""

from dataclasses import dataclass

from torch import Tensor, nn

from runtime.models.attention_mask import AttentionMask, attend

# Shape suffixes: T = tokens, H = query heads, G = key/value heads, D = head width.

_NO_MODULE = nn.Identity()


@dataclass(frozen=True, slots=True)
class MaskedAttention:
    """All tokens see each other as the mask says; the bitfield kernels on a GPU."""

    mask: AttentionMask

    def attend(
        self, q_HTD: Tensor, k_GTD: Tensor, v_GTD: Tensor, *, scale: float, window: int | None = None
    ) -> Tensor:
        """[H, T, D]; a query without a key gives 0."""
        y_1THD, _ = attend(
            _NO_MODULE, q_HTD[None], k_GTD[None], v_GTD[None], self.mask, scaling=scale, sliding_window=window
        )
        return y_1THD[0].transpose(0, 1)
