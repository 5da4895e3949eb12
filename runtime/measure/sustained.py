"""Times products and attention at the device's sustained rate, in each pass of training."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from runtime.measure.attention import MASKS, launches, num_pairs
from runtime.measure.clock import Clock, Loop, summary
from runtime.measure.operators import name_of
from runtime.models.attention_mask import token_fields
from workbench.calibrate.sustained_rows import SustainedAttentionRow, SustainedMatmulRow
from workbench.plan.kernel_heads import HEAD_DIMS

RUN_LAUNCH = {"cpu": "dense", "cuda": "split"}  # how the runtime launches attention
CACHES = 2  # total size of operands, in multiples of the last cache
UNKNOWN_CACHE_BYTES = 2**26
CPU_CACHE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")


@dataclass(frozen=True, slots=True, kw_only=True)
class SustainedSizes:
    """Sizes of measurements in long loops.

    Args:
        products: (m, n, k) of products.
        lengths: of attention's sequences, for every head width and mask.
        tokens: of all sequences of a launch, which sets their number.
        width: of all heads together.
        cache_bytes: of the device's last cache.
        loop_s: seconds per loop.
    """

    products: tuple[tuple[int, int, int], ...]
    lengths: tuple[int, ...]
    tokens: int
    width: int
    cache_bytes: int
    loop_s: float
    head_dims: tuple[int, ...]
    masks: tuple[str, ...] = ("causal", "full")


def sustained_sizes(device: torch.device | str) -> SustainedSizes:
    """Sizes as in training on such a device; on a GPU so large that no call waits for its launch."""
    if torch.device(device).type == "cuda":
        wide: tuple[tuple[int, int], ...] = (
            (2048, 2048),
            (1024, 4096),
            (8192, 2048),
            (2048, 8192),
            (4096, 4096),
            (16384, 4096),
        )
        return SustainedSizes(
            products=tuple((m, n, k) for m in (2048, 16384) for n, k in wide),
            lengths=(1024, 4096, 16384),
            tokens=16384,
            width=2048,
            cache_bytes=torch.cuda.get_device_properties(device).L2_cache_size,
            loop_s=1.0,
            head_dims=HEAD_DIMS,
        )
    wide = ((256, 256), (1024, 256), (256, 1024), (512, 512))
    return SustainedSizes(
        products=tuple((m, n, k) for m in (64, 512) for n, k in wide),
        lengths=(64, 128, 256),
        tokens=256,
        width=256,
        cache_bytes=_cpu_cache_bytes(),
        loop_s=0.2,
        head_dims=(32, 64, 128),  # plain PyTorch, without preferred widths
    )


def _cpu_cache_bytes() -> int:
    """Bytes of the cache that this machine's cores share, from Linux."""
    text = CPU_CACHE.read_text().strip() if CPU_CACHE.is_file() else ""
    return int(text[:-1]) * 1024 if text.endswith("K") else UNKNOWN_CACHE_BYTES


def num_sets(sizes: SustainedSizes, set_bytes: int) -> int:
    """Number of sets of operands that together exceed the last cache; at least two."""
    return max(2, math.ceil(CACHES * sizes.cache_bytes / set_bytes))


@dataclass(frozen=True, slots=True, eq=False)
class _Operands:
    """Operands of one product and its gradients: x [m, k], weight [n, k] and dy [m, n]."""

    x: Tensor
    weight: Tensor
    dy: Tensor

    def forward(self) -> Tensor:
        return functional.linear(self.x, self.weight)

    def input_grad(self) -> Tensor:
        return self.dy @ self.weight

    def weight_grad(self) -> Tensor:
        return self.dy.t() @ self.x


DIRECTIONS: dict[str, Callable[[_Operands], Tensor]] = {
    "forward": _Operands.forward,
    "input_grad": _Operands.input_grad,
    "weight_grad": _Operands.weight_grad,
}


def time_sustained_product(
    clock: Clock, sizes: SustainedSizes, dtype: torch.dtype, shape: tuple[int, int, int]
) -> list[SustainedMatmulRow]:
    """Time a layer's product, its input gradient and its weight gradient, with a loop each."""
    m, n, k = shape
    count = num_sets(sizes, (m * k + n * k + m * n) * dtype.itemsize)
    sets = [_Operands(*(_random(clock, dtype, s) for s in ((m, k), (n, k), (m, n)))) for _ in range(count)]
    rows = []
    for direction, call in DIRECTIONS.items():
        loop = clock.loop([partial(call, operands) for operands in sets], sizes.loop_s)
        sizes_of_row = {"m": m, "n": n, "k": k, "num_sets": count}
        rows.append(
            SustainedMatmulRow(
                precision=name_of(dtype), direction=direction, **sizes_of_row, **_measured(loop)
            )
        )
    return rows


def time_sustained_attention(
    clock: Clock, sizes: SustainedSizes, dtype: torch.dtype, head_dim: int, mask: str, length: int
) -> list[SustainedAttentionRow]:
    """Time forward and backward of attention with heads of one width, launched as in a run, a loop each."""
    heads = max(1, sizes.width // head_dim) * max(1, sizes.tokens // length)
    fields = token_fields(MASKS[mask](length), clock.device)
    attention = launches(clock, fields)[RUN_LAUNCH[clock.device.type]]
    shape = (1, heads, length, head_dim)
    count = num_sets(sizes, 5 * math.prod(shape) * dtype.itemsize)  # includes the output and its gradient
    sets = [tuple(_random(clock, dtype, shape).requires_grad_() for _ in range(3)) for _ in range(count)]

    def row(direction: str, loop: Loop) -> SustainedAttentionRow:
        return SustainedAttentionRow(
            precision=name_of(dtype),
            mask=mask,
            direction=direction,
            length=length,
            heads=heads,
            kv_heads=heads,
            head_dim=head_dim,
            pairs=num_pairs(fields),
            num_sets=count,
            **_measured(loop),
        )

    forward = [partial(attention, *qkv) for qkv in sets]
    backward = [partial(_gradients, attention(*qkv), qkv, _random(clock, dtype, shape)) for qkv in sets]
    return [
        row("forward", clock.loop(forward, sizes.loop_s)),
        row("backward", clock.loop(backward, sizes.loop_s)),
    ]


def _gradients(output: Tensor, inputs: Sequence[Tensor], gradient: Tensor) -> object:
    return torch.autograd.grad([output], inputs, [gradient], retain_graph=True)


def _random(clock: Clock, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """Random operands: power, and so the clock, depends on toggling bits; zeros would run too fast."""
    return torch.randn(*shape, dtype=dtype, device=clock.device)


def _measured(loop: Loop) -> dict[str, Any]:
    seconds = summary(loop.seconds)
    return {**seconds, "loop_s": loop.loop_s, **asdict(loop.notes)}
