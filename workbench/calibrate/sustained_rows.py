"""Rows of long loops: operators at the rate that a device sustains, with its clock and power."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceNotes:
    """Clock of the compute units and power of the board before, halfway through and after a measurement.

    None if unreadable, as on a CPU.
    """

    clock_before_hz: float | None = None
    clock_during_hz: float | None = None
    clock_after_hz: float | None = None
    power_before_w: float | None = None
    power_during_w: float | None = None
    power_after_w: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SustainedMatmulRow(DeviceNotes):
    """One of training's products, repeated over alternating operands.

    The weight is [n, k], as layers hold it.

    Args:
        direction: "forward" y[m, n] = x[m, k] w^T, "input_grad" dx[m, k] = dy[m, n] w, or
            "weight_grad" dw[n, k] = dy^T x; m, n and k are the forward's.
        seconds: per product, the median of turns in the second half of the loop.
        loop_s: duration of the loop.
        num_sets: of random operands; together they exceed the last-level cache.
    """

    precision: str
    direction: str
    m: int
    n: int
    k: int
    seconds: float
    spread: float = 0.0
    loop_s: float = 0.0
    num_sets: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SustainedAttentionRow(DeviceNotes):
    """Attention as the runtime computes it, repeated over alternating operands.

    Args:
        mask: "causal" or "full".
        direction: "forward", or "backward": gradients of queries, keys and values.
        heads, kv_heads: of all sequences of the launch together.
        length: queries of each, and as many keys.
        pairs: query-key pairs that attend, of one head.
        seconds, loop_s, num_sets: as of a product.
    """

    precision: str
    mask: str
    direction: str
    length: int
    heads: int
    kv_heads: int
    head_dim: int
    pairs: int
    seconds: float
    spread: float = 0.0
    loop_s: float = 0.0
    num_sets: int = 1
