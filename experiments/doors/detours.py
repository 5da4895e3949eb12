"""Detours of transformers' models through float32, and the same in the model's own type."""

from math import isqrt
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.cohere2 import modeling_cohere2 as cohere2
from transformers.models.cohere_compass import modeling_cohere_compass as compass
from transformers.models.cosmos3_edge import modeling_cosmos3_edge as cosmos3_edge
from transformers.models.exaone4_5 import modeling_exaone4_5 as exaone
from transformers.models.gemma4 import modeling_gemma4 as gemma4
from transformers.models.glm4v import modeling_glm4v as glm4v
from transformers.models.glm4v_moe import modeling_glm4v_moe as glm4v_moe
from transformers.models.glm_ocr import modeling_glm_ocr as glm_ocr
from transformers.models.kimi_k25 import modeling_kimi_k25 as kimi
from transformers.models.llama4 import modeling_llama4 as llama4
from transformers.models.nemotron_h import modeling_nemotron_h as nemotron_h
from transformers.models.paddleocr_vl import modeling_paddleocr_vl as paddleocr
from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni as omni
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as qwen2_5
from transformers.models.qwen2_vl import modeling_qwen2_vl as qwen2
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as qwen3_5_moe
from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as omni_3
from transformers.models.qwen3_vl import modeling_qwen3_vl as qwen3
from transformers.models.radio import modeling_radio as radio
from transformers.models.siglip2 import modeling_siglip2 as siglip2
from transformers.models.video_llama_3 import modeling_video_llama_3 as llama_3

from runtime.models.audio_parakeet import StoredBatchNorm
from runtime.models.deepseek import GroupedRouter
from runtime.models.delta_net import DELTA_NETS
from runtime.models.glm import CorrectedRouter
from runtime.models.llama4 import scaled_to_one, turned
from runtime.models.mixture import WideRouter
from runtime.models.patch_attention import rotated
from runtime.models.patch_grid import blockwise
from runtime.models.vision_radio import cropped
from runtime.models.vision_siglip2 import between
from runtime.models.wide_float import in_float64


def wide_rotation(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return rotated(q, cos, sin), rotated(k, cos, sin)


def wide_turns(q: Tensor, k: Tensor, freqs_ci: Tensor) -> tuple[Tensor, Tensor]:
    """Rotations of Llama 4's tower in the model's type."""
    angles = freqs_ci[:, 0][None]
    return turned(q, angles), turned(k, angles)


def wide_router(router: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """Llama 4's router without its conversion to float32."""
    logits = nn.functional.linear(hidden_states, router.weight)
    value, index = torch.topk(logits, router.top_k, dim=1)
    return torch.full_like(logits, float("-inf")).scatter_(1, index, value).sigmoid(), logits


def wide_layer_norm(norm: Any, hidden_states: Tensor) -> Tensor:
    """Cohere 2's norm in the model's type."""
    return nn.functional.layer_norm(
        hidden_states, norm.weight.shape, norm.weight, None, norm.variance_epsilon
    )


def wide_pairs(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """Cohere 2's rotation in the model's type."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + cohere2.rotate_half(q) * sin, k * cos + cohere2.rotate_half(k) * sin


def wide_table(table: Tensor, spatial_shapes: Tensor, max_length: int) -> Tensor:
    """Positions of SigLIP 2's tower, of images without padding, in the model's type."""
    own = [between(table, *map(int, shape)) for shape in spatial_shapes]
    assert all(len(each) == max_length for each in own), "without padding"
    return torch.stack(own)


def wide_blocks(table: Tensor, grid_thw: Tensor, spatial_merge_size: int) -> Tensor:
    """Positions of Cosmos 3 Edge's tower, square by square of patches that merge, in the model's type."""
    own = [
        blockwise(between(table, height, width).unflatten(0, (height, width)), spatial_merge_size)
        for _steps, height, width in grid_thw.tolist()
    ]
    return torch.cat(own)


def wide_crop(embeddings: Any, input_dims: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Positions of RADIO's tower in the model's type."""
    square = embeddings.position_embedding[0].unflatten(0, (embeddings.max_rows, embeddings.max_cols))
    return cropped(square, *input_dims)[None]


def wide_positions(
    table: Any, embeddings: Tensor, lengths: Tensor, image_shapes: Tensor, h_coords: Tensor, w_coords: Tensor
) -> Tensor:
    """Positions of GLM-4V's tower, interpolated in the model's type from coordinates in float32."""
    image = torch.arange(len(lengths)).repeat_interleave(lengths)
    places = ((w_coords + 0.5) / image_shapes[image, 2], (h_coords + 0.5) / image_shapes[image, 1])
    grid = torch.stack(places, dim=-1) * 2 - 1
    weight = table.position_embedding.weight
    square = weight.T.unflatten(1, 2 * (table.image_size // table.patch_size,))[None]
    between = nn.functional.grid_sample(
        square, grid.to(weight)[None, :, None], mode="bicubic", align_corners=False, padding_mode="border"
    )
    return embeddings + between[0, :, :, 0].T


def wide_kimi_positions(table: Any, hidden_states: Tensor, grid_thw: Tensor, **_: Any) -> Tensor:
    """Positions of images in Kimi K2.5's tower, interpolated in the model's type from rows in float32."""
    side, weight = table.num_grid_per_side, table.position_embeddings
    square = weight.permute(2, 0, 1)[None]
    between = []
    for _steps, height, width in grid_thw.tolist():
        rows = [(torch.arange(n, dtype=torch.float32) + 0.5) * side / n - 0.5 for n in (height, width)]
        down, across = ((2 * each.to(weight) + 1) / side - 1 for each in rows)
        grid = torch.stack((across.expand(height, -1), down[:, None].expand(-1, width)), dim=-1)[None]
        image = nn.functional.grid_sample(
            square, grid, mode="bicubic", align_corners=False, padding_mode="border"
        )
        between.append(image[0].flatten(1).T)
    return hidden_states + torch.cat(between)


def wide_pool(
    pooler: Any,
    hidden_states: Tensor,
    pixel_position_ids: Tensor,
    padding_positions: Tensor,
    output_length: int,
) -> tuple[Tensor, Tensor]:
    """Soft tokens of Gemma 4's tower, of images without padding, in the model's type."""
    assert not padding_positions.any()
    num, columns = hidden_states.shape[1], 1 + int(pixel_position_ids[..., 0].max())
    side = isqrt(num // output_length)
    squares = hidden_states.unflatten(1, (num // columns // side, side, columns // side, side))
    soft = squares.mean((2, 4)).flatten(1, 2) * pooler.root_hidden_size
    return soft, torch.ones(soft.shape[:2], dtype=torch.bool)


QWENS = (omni, qwen2, qwen2_5, qwen3, qwen3_5, qwen3_5_moe, omni_3)
ROTATED = (*QWENS, compass, exaone, glm4v, glm4v_moe, glm_ocr, kimi, llama_3, paddleocr)
OWN_PARTS = (  # ending of a class of transformers' -> ours; the first counts
    ("Mistral4TopkRouter", GroupedRouter),
    ("TopKRouter", WideRouter),
    ("TopkRouter", CorrectedRouter),
    ("BatchNorm1d", StoredBatchNorm),
)
DETOURS: tuple[tuple[Any, str, Any], ...] = (  # of transformers through float32, and what goes without
    *((each, "apply_rotary_pos_emb_vision", wide_rotation) for each in ROTATED),
    (glm4v.Glm4vVisionEmbeddings, "forward", wide_positions),
    (glm4v_moe.Glm4vMoeVisionEmbeddings, "forward", wide_positions),
    (kimi.Kimi_K25VisionPositionEmbeddings, "forward", wide_kimi_positions),
    (gemma4.Gemma4VisionPooler, "forward", wide_pool),
    (gemma4.Gemma4TextRouter, "forward", in_float64(gemma4.Gemma4TextRouter.forward)),
    (cohere2, "apply_rotary_pos_emb", wide_pairs),
    (cohere2.Cohere2LayerNorm, "forward", wide_layer_norm),
    (compass.CohereCompassLayerNorm, "forward", wide_layer_norm),
    (siglip2.Siglip2VisionEmbeddings, "resize_positional_embeddings", staticmethod(wide_table)),
    (cosmos3_edge.Cosmos3EdgeVisionEmbeddings, "resize_positional_embeddings", staticmethod(wide_blocks)),
    (radio.RadioPatchEmbeddings, "_interpolate_position_embedding", wide_crop),
    (llama4, "vision_apply_rotary_emb", wide_turns),
    (llama4, "apply_rotary_emb", lambda q, k, angles: (turned(q, angles), turned(k, angles))),
    (llama4.Llama4TextL2Norm, "forward", lambda norm, x: scaled_to_one(x, norm.eps)),
    (llama4.Llama4Router, "forward", wide_router),
    *((each, "forward", in_float64(each.forward)) for each in (*DELTA_NETS, nemotron_h.NemotronHForCausalLM)),
)
