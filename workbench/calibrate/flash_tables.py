"""Published rates of fused attention by head width and mask, as tables of a profile.

Shah et al. 2024, "FlashAttention-3", figures 5 and 6: H100 SXM5, float16, 16,384 tokens, width 2,048; FLOP
of a causal forward are half, of a backward 2.5 times those of a forward. Backward is printed without a mask
for widths 64 and 128, and known here up to 2,048 tokens at width 64. What is missing keeps its neighbour's
ratio.
"""

from collections.abc import Callable

from workbench.cost.profile import SustainedHeads, Table

TOKENS, WIDTH = 16384, 2048
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
_FORWARD = {  # TFLOP/s without a mask, by head width
    64: (333, 392, 460, 476, 496, 497),
    128: (467, 565, 625, 638, 646, 648),
    256: (482, 639, 707, 736, 746, 756),
}
_CAUSAL = {128: (292, 423, 521, 579, 602, 616), 256: (286, 427, 537, 612, 628, 642)}
_BACKWARD = {64: (272, 363, 422), 128: (316, 424, 501, 542, 559, 561)}
# The same figures have FlashAttention-2, with a mask, width 64 over 128: 324 over 370 TFLOP/s.
NARROW_HEADS = 324 / 370
_FLASH3 = "Shah et al. 2024 (FlashAttention-3), figures 5 and 6"
_FLASH2 = "this table at width 128; 64 over 128 and backward over forward as of FlashAttention-2 (Dao 2023)"


def flash3_heads() -> tuple[SustainedHeads, ...]:
    """Of Hopper, for widths 64, 128 and 256, with a causal mask and without."""
    found = []
    for width in (64, 128, 256):
        for causal in (False, True):
            forward = tuple(_forward(width, place, causal=causal) for place in range(len(LENGTHS)))
            backward = tuple(rate * _backward_ratio(width, place) for place, rate in enumerate(forward))
            measured = not causal and width == 128
            found.append(_heads(width, causal, (forward, backward), _FLASH3, measured))
    return tuple(found)


def flash2_heads(
    flop_per_s: Callable[[float, float, float], float], backward_rate: float
) -> tuple[SustainedHeads, ...]:
    """Of Ampere and Ada, for widths 64 and 128 with a causal mask, from a table at width 128."""
    found = []
    for width, share in ((64, NARROW_HEADS), (128, 1.0)):
        forward = tuple(share * flop_per_s(*_at(length, width)) / 1e12 for length in LENGTHS)
        backward = tuple(rate * backward_rate for rate in forward)
        found.append(_heads(width, True, (forward, backward), _FLASH2, False))  # noqa: FBT003
    return tuple(found)


def _forward(width: int, place: int, *, causal: bool) -> float:
    if not causal:
        return _FORWARD[width][place]
    if width in _CAUSAL:
        return _CAUSAL[width][place]
    return _CAUSAL[128][place] * _FORWARD[width][place] / _FORWARD[128][place]


def _backward_ratio(width: int, place: int) -> float:
    known = _BACKWARD.get(width, _BACKWARD[128])
    nearest = min(place, len(known) - 1)
    return known[nearest] / _FORWARD[width if width in _BACKWARD else 128][nearest]


def _at(length: int, width: int) -> tuple[float, float, float]:
    return float(length), WIDTH / width * TOKENS / length, 1.0


def _heads(
    width: int,
    causal: bool,  # noqa: FBT001
    rates: tuple[tuple[float, ...], tuple[float, ...]],
    source: str,
    measured: bool,  # noqa: FBT001
) -> SustainedHeads:
    tables = [
        Table(
            axes=("length", "heads", "queries_per_key"),
            points=tuple(
                (*_at(length, width), float(f"{rate * 1e12:.4g}"))
                for length, rate in zip(LENGTHS, direction, strict=True)
            ),
            measured=measured,
            source=source,
        )
        for direction in rates
    ]
    return SustainedHeads(head_dim=width, causal=causal, forward=tables[0], backward=tables[1])
