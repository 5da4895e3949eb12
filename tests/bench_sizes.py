"""Sizes with which the microbenchmark of operators takes a moment."""

from runtime.measure.attention import AttentionSizes, Heads
from runtime.measure.cells import CellSizes
from runtime.measure.operators import Sizes
from runtime.measure.sustained import SustainedSizes

SMALL = Sizes(
    products=((8, 16, 16), (16, 16, 16), (32, 16, 32)),
    moved_bytes=(2**14, 2**15, 2**16),
    width=32,
    words=16,
    host_bytes=(2**10, 2**16),
    budget_s=0.0,
)
SHORT = AttentionSizes(lengths=(32, 64), heads=(Heads(heads=4, kv_heads=2, head_dim=16),), budget_s=0.0)
LOOPS = SustainedSizes(
    products=((8, 16, 16), (32, 16, 32)),
    lengths=(16, 32),
    tokens=32,
    width=32,
    cache_bytes=2**14,
    loop_s=0.0,
    head_dims=(8, 16),
)
CELLS = CellSizes(short=SMALL, attention=SHORT, sustained=LOOPS)
