"""Times attention per mask and launch: the bitfield kernels on a GPU, SDPA under a dense mask on a CPU."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from runtime.kernels.bitfield_attention.attention import Options, bitfield_attention
from runtime.kernels.bitfield_attention.mask import TokenFields, kernel_mask
from runtime.kernels.bitfield_attention.plan import make_plan
from runtime.kernels.bitfield_attention.reference import attends
from runtime.kernels.bitfield_attention.tasks import Split
from runtime.measure.clock import Clock, summary
from runtime.measure.operators import name_of
from runtime.models.attention_mask import token_fields
from workbench.calibrate.measurement import AttentionRow
from workbench.masks.bitfield import Bitfield
from workbench.masks.builders import causal, causal_document, encoder_embedded, full

# Shape suffixes: B = batch, H = query heads, G = key/value heads, Q = queries, K = keys, D = head width.

SLICE = 1024  # queries per step when counting pairs
LAUNCHES = {"whole": Options(split=Split.NEVER), "split": Options(split=Split.WHERE_IT_PAYS)}
MASKS: dict[str, Callable[[int], Bitfield]] = {
    "causal": causal,
    "full": full,
    "documents": lambda length: causal_document([length // 4] * 4),
    "embedded": lambda length: encoder_embedded(length, seed=0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """Query heads, key/value heads and their width."""

    heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSizes:
    """Lengths of rows and shapes of heads, measured under every mask."""

    lengths: tuple[int, ...]
    heads: tuple[Heads, ...]
    budget_s: float


def attention_sizes(device: torch.device | str) -> AttentionSizes:
    """Sizes that keep such a device busy without filling its memory."""
    if torch.device(device).type == "cuda":
        return AttentionSizes(
            lengths=tuple(2**i for i in range(9, 17)),
            heads=(
                Heads(heads=8, kv_heads=8, head_dim=128),
                Heads(heads=32, kv_heads=8, head_dim=128),
                Heads(heads=32, kv_heads=32, head_dim=128),
                Heads(heads=4, kv_heads=1, head_dim=128),
            ),
            budget_s=0.05,
        )
    return AttentionSizes(
        lengths=(128, 256, 512, 1024),
        heads=(Heads(heads=4, kv_heads=4, head_dim=64), Heads(heads=8, kv_heads=2, head_dim=64)),
        budget_s=0.02,
    )


def time_attention(clock: Clock, sizes: AttentionSizes, dtype: torch.dtype, mask: str) -> list[AttentionRow]:
    """Measure all lengths, heads and launches of one mask."""
    rows = []
    for length in sizes.lengths:
        fields = token_fields(MASKS[mask](length), clock.device)
        pairs = num_pairs(fields)
        for launch, attention in launches(clock, fields).items():
            for heads in sizes.heads:
                q, k, v = (
                    torch.randn(
                        1, count, length, heads.head_dim, dtype=dtype, device=clock.device, requires_grad=True
                    )
                    for count in (heads.heads, heads.kv_heads, heads.kv_heads)
                )
                forward_s, backward_s = _passes(clock, sizes.budget_s, attention, (q, k, v))
                rows.append(
                    AttentionRow(
                        precision=name_of(dtype),
                        mask=mask,
                        launch=launch,
                        length=length,
                        heads=heads.heads,
                        kv_heads=heads.kv_heads,
                        head_dim=heads.head_dim,
                        pairs=pairs,
                        **summary(forward_s),
                        backward_s=statistics.median(backward_s),
                    )
                )
    return rows


def num_pairs(fields: TokenFields) -> int:
    """Number of query-key pairs under the mask. O(tokens squared), a slice of queries at a time."""
    total = 0
    for start in range(0, len(fields), SLICE):
        some = fields.take(torch.arange(start, min(start + SLICE, len(fields)), device=fields.allow.device))
        total += int(attends(some, fields).sum())
    return total


def launches(clock: Clock, fields: TokenFields) -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """Name of launch -> attention of queries, keys and values under the mask, for such a device."""
    if not clock.is_cuda:
        visible_QK = attends(fields, fields)

        def dense(q_BHQD: Tensor, k_BGKD: Tensor, v_BGKD: Tensor) -> Tensor:
            return functional.scaled_dot_product_attention(
                q_BHQD,
                k_BGKD,
                v_BGKD,
                attn_mask=visible_QK,
                enable_gqa=q_BHQD.shape[1] != k_BGKD.shape[1],
            )

        return {"dense": dense}
    mask = kernel_mask(fields, fields)
    plan = make_plan(mask)

    def kernels(options: Options) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        return lambda q_BHQD, k_BGKD, v_BGKD: bitfield_attention(
            q_BHQD, k_BGKD, v_BGKD, mask, plan, options=options
        )

    return {launch: kernels(options) for launch, options in LAUNCHES.items()}


def _passes(
    clock: Clock, budget_s: float, attention: Callable[..., Tensor], inputs: tuple[Tensor, ...]
) -> tuple[list[float], list[float]]:
    forward_s = clock.repeat(lambda: attention(*inputs), budget_s)
    output = attention(*inputs)
    gradient = torch.ones_like(output)
    backward_s = clock.repeat(
        lambda: torch.autograd.grad([output], inputs, [gradient], retain_graph=True), budget_s
    )
    return forward_s, backward_s
