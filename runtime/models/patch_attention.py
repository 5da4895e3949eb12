"""Attention of packed items; of patches rotated by their positions in an image, and the blocks around it."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from runtime.models.adapter import ONE_ROTATION
from runtime.models.attention import Attends, Packing, packed_sdpa
from runtime.models.encoder import EncoderBlock

# Shape suffixes: T = packed tokens, H = heads, D = width.


def rotated(x_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Rotate pairs (i, i + D/2), in the wider of float32 and the input's type."""
    wide = x_THD.to(torch.promote_types(x_THD.dtype, torch.float32))
    first, second = wide.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (wide * cos_TD[:, None] + turned * sin_TD[:, None]).to(x_THD.dtype)


class PackedAttention(nn.Module):
    """Full attention inside each item of a packing, by the matmuls of a module of transformers."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        for name, product in attention.named_children():
            self.add_module(name, product)
        self.head_dim: int = attention.head_dim
        self.scaling: float = attention.scaling

    def attend(self, heads_THD: Sequence[Tensor], packing: Packing) -> Tensor:
        """[T, H * D] of queries, keys and values."""
        q_1HTD, k_1HTD, v_1HTD = (x_THD.transpose(0, 1)[None] for x_THD in heads_THD)
        y_1THD, _ = packed_sdpa(self, q_1HTD, k_1HTD, v_1HTD, packing, scaling=self.scaling, is_causal=False)
        return y_1THD[0].flatten(1)


class PatchAttention(PackedAttention):
    """Attention of patches, rotated in the wider of float32 and the input's type (transformers: float32)."""

    out = "proj"  # name of the output's product

    def __init__(self, attention: Any) -> None:
        super().__init__(attention)
        self.num_key_value_groups: int = getattr(attention, "num_key_value_groups", 1)

    def heads(self, x_TD: Tensor) -> tuple[Tensor, ...]:
        """[T, H, D] of queries, keys and values."""
        module: Any = self
        if hasattr(self, "qkv"):
            fused: Tensor = module.qkv(x_TD).unflatten(-1, (-1, self.head_dim))
            num_keys = fused.shape[1] // (self.num_key_value_groups + 2)
            return fused.split((self.num_key_value_groups * num_keys, num_keys, num_keys), dim=1)
        named = "{}_proj" if hasattr(self, "q_proj") else "{}"
        products = (self.get_submodule(named.format(letter)) for letter in "qkv")
        return tuple(product(x_TD).unflatten(-1, (-1, self.head_dim)) for product in products)

    def forward(
        self, hidden_states: Tensor, cu_seqlens: Packing, position_embeddings: tuple[Tensor, Tensor]
    ) -> Tensor:
        """[T, D]; arguments are named as in transformers' blocks."""
        q_THD, k_THD, v_THD = self.heads(hidden_states)
        q_THD, k_THD = (rotated(x_THD, *position_embeddings) for x_THD in (q_THD, k_THD))
        y_TD: Tensor = self.get_submodule(self.out)(self.attend((q_THD, k_THD, v_THD), cu_seqlens))
        return y_TD


class NormedPatchAttention(PatchAttention):
    """With norms of every head's queries and keys before they are rotated."""

    def heads(self, x_TD: Tensor) -> tuple[Tensor, ...]:
        q_THD, k_THD, v_THD = super().heads(x_TD)
        return self.get_submodule("q_norm")(q_THD), self.get_submodule("k_norm")(k_THD), v_THD


class PatchBlock(EncoderBlock):
    """One encoder layer on all patches of an image, with an attention of ours under transformers' name."""

    attention_name: ClassVar[str] = "attn"
    attention_class: ClassVar[type[PatchAttention]] = PatchAttention

    def __init__(self, block: nn.Module, index: int, std: float) -> None:
        super().__init__(block, index, std)
        theirs = block.get_submodule(self.attention_name)
        block.add_module(self.attention_name, self.attention_class(theirs))

    def packing(self, context: Any) -> Packing | Attends:
        """What attends to each other."""
        packing: Packing | Attends = context.packing
        return packing

    def run(self, x_TD: Tensor, context: Any) -> Tensor:
        rotation = context.rotary[ONE_ROTATION]
        y_TD: Tensor = self.block(x_TD, cu_seqlens=self.packing(context), position_embeddings=rotation)
        return y_TD
