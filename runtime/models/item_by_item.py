"""Recurrent layers of transformers on packed items: every item starts with a state of zeros."""

from typing import Any

import torch
from torch import Tensor, nn

from runtime.models.attention import LengthGroup, Packing
from runtime.models.wide_float import in_float64

# Shape suffixes: T = packed tokens, N = items of one length L, D = hidden width.


class ItemByItem:
    """Replaces the forward of a recurrent layer: its state and its convolution begin anew in every item.

    Items of one length run as one batch, up to the last product, which takes all tokens in their order:
    tensor-parallel ranks sum its results, and may keep a part of the tokens each. Differs: float64 stays
    float64, see `KeepsFloat64`.
    """

    def __init__(self, net: nn.Module) -> None:
        self._net, self._forward = net, net.forward

    def __call__(self, hidden_states: Tensor, attention_mask: Any, **_: object) -> Tensor:
        """[1, T, D]; arguments have the names that transformers' layers give them."""
        if not isinstance(attention_mask, Packing):
            raise ValueError("a recurrent layer runs over whole items on one rank, under no mask")
        packing, x_TD = attention_mask, hidden_states[0]
        self._net.training = False  # where Mamba-2's kernels would run its last product, too
        product, self._net.out_proj = self._net.out_proj, nn.Identity()
        try:
            outputs = [self._run(x_TD, group) for group in packing.groups]
        finally:
            self._net.out_proj = product
        y_TD = outputs[0] if packing.restore is None else torch.cat(outputs).index_select(0, packing.restore)
        y_1TD: Tensor = self._net.get_submodule("out_proj")(y_TD[None])
        return y_1TD

    def _run(self, x_TD: Tensor, group: LengthGroup) -> Tensor:
        own_TD = x_TD if group.index is None else x_TD.index_select(0, group.index)
        x_NLD = own_TD.unflatten(0, (group.count, group.length))
        forward = in_float64(self._forward) if x_NLD.dtype is torch.float64 else self._forward
        return forward(x_NLD).flatten(0, 1)
