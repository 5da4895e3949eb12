"""Positions of three axes (M-RoPE): time, row and column of every token of a sample.

Source: Qwen2-VL (Wang et al. 2024, arXiv 2409.12191), section 2.1, as in transformers' `get_rope_index`. Text
moves on all axes together; an image's tokens stand at one time, each at its row and column; what comes behind
an image begins past its longest side.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from runtime.models.choose import adapter_of
from runtime.models.vision_rotary import GridAdapter
from workbench.data.sample import Sample, Segment
from workbench.model.model_graph import TEXT
from workbench.plan.plan import Plan

# Shape suffixes: T = tokens of a packed row.


def axes_of(plan: Plan, samples: Sequence[Sample]) -> Tensor:
    """[3, T] int64, sample after sample, each from 0."""
    grids = {
        module.modality: adapter
        for module in plan.model.modules
        if module.modality != TEXT and isinstance(adapter := adapter_of(module), GridAdapter)
    }
    return torch.cat([_of_sample(sample, grids) for sample in samples], dim=1)


def _of_sample(sample: Sample, grids: dict[str, GridAdapter]) -> Tensor:
    parts, start = [], 0
    for segment in sample.segments:
        rows, columns = _sides(segment, grids.get(segment.modality))
        if rows:
            places = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
            row_T, column_T = (axis.flatten() for axis in places)
            parts.append(start + torch.stack([torch.zeros_like(row_T), row_T, column_T]))
            start += max(rows, columns)
        else:
            parts.append(start + torch.arange(segment.tokens_out).expand(3, -1))
            start += segment.tokens_out
    return torch.cat(parts, dim=1)


def _sides(segment: Segment, adapter: GridAdapter | None) -> tuple[int, int]:
    """Rows and columns of an image in the LLM's sequence; nothing for text and clips."""
    if adapter is None:
        return 0, 0
    rows, columns = adapter.grid(segment.tokens_in, segment.grid)
    return rows // adapter.merge, columns // adapter.merge
