"""Sizes with which the microbenchmark of operators takes a moment."""

from runtime.bench_attention import AttentionSizes, Heads
from runtime.bench_operators import Sizes

SMALL = Sizes(
    products=((8, 16, 16), (16, 16, 16), (32, 16, 32)),
    moved_bytes=(2**14, 2**15, 2**16),
    width=32,
    words=16,
    host_bytes=(2**10, 2**16),
    budget_s=0.0,
)
SHORT = AttentionSizes(lengths=(32, 64), heads=(Heads(heads=4, kv_heads=2, head_dim=16),), budget_s=0.0)
