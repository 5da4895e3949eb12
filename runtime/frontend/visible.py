"""A sample's mask as transformers' language models take it, for the given models in one process."""

import torch
from torch import Tensor

from runtime.data.batches import windows_of
from runtime.models.attention_mask import AttentionMask
from workbench.data.sample import Sample
from workbench.masks.patterns import CAUSAL, sample_bitfield
from workbench.model.model_graph import Module


def visible(sample: Sample, module: Module, device: torch.device) -> Tensor | None:
    """bool [1, 1, T, T] who sees whom; None where transformers' own causal mask says it.

    Raises:
        ValueError: a mask beside layers of several windows, each of which would want its own.
    """
    if sample.mask == CAUSAL:
        return None
    windows = windows_of(module)
    if len(windows) > 1:
        raise ValueError(
            f"sample {sample.id}: mask {sample.mask!r:.60} beside layers of several windows runs on ranks "
            "alone; use `execute`"
        )
    fields = sample_bitfield([[sample]])
    visible_TT = AttentionMask(fields, fields, torch.device("cpu")).dense(*windows)
    return visible_TT[None, None].to(device)
