"""A planned mask's token fields as tensors."""

import numpy as np
import torch

from runtime.kernels.bitfield_attention.mask import TokenFields
from workbench.masks.bitfield import Bitfield


def token_fields(tokens: Bitfield, device: torch.device | str) -> TokenFields:
    """The arrays as tensors; words are reinterpreted as int64, which torch can shift and compare."""
    arrays = {
        name: array.view(np.int64) if array.dtype == np.uint64 else array
        for name, array in tokens.arrays()
        if name != "start"
    }
    return TokenFields(**{name: torch.tensor(array, device=device) for name, array in arrays.items()})
