"""A layer measured as a whole: its sizes and their seconds."""

from dataclasses import dataclass, field

from workbench.cost.roofline import RowWork
from workbench.data.sample import WHERE_SET

MOST_ROWS = 2**20  # of a microbatch
MOST_COUNT = 2**53  # that a float holds exactly
DIGITS = 20  # that a message writes out


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPoint:
    """Times of a layer at one size: `rows` packed sequences of equal size.

    Args:
        rows: packed sequences of the call.
        tokens_in: tokens of each sequence.
        attention_area: query-key pairs of each sequence.
        forward_s: forward that keeps activations for the backward.
        input_grad_s: input gradients.
        weight_grad_s: weight gradients.
        weight_only_s: backward that computes only weight gradients; None: not measured.
        forward_only_s: forward that keeps nothing for a backward; None: as `forward_s`.
        split_input_s: input gradients of a split backward; None: as `input_grad_s`.
        split_weight_s: weight gradients of a split backward; None: as `weight_grad_s`.
        recompute_forward_s: forward with activation checkpointing; None: as `forward_only_s`.
        recompute_backward_s: full backward with activation checkpointing, recomputation included; None: as
            the sum of these.
        recompute_idle_s: forward with activation checkpointing where no gradient is needed; None: as
            `forward_only_s`.
        context_tokens: for cross-attention: tokens that other modules provide.
        reader_tokens: for cross-attention: own tokens of the items that read them.
        context_area: for cross-attention: query-key pairs with those tokens.
    """

    rows: int
    tokens_in: int
    attention_area: int
    forward_s: float
    input_grad_s: float
    weight_grad_s: float
    weight_only_s: float | None = None
    forward_only_s: float | None = None
    split_input_s: float | None = None
    split_weight_s: float | None = None
    recompute_forward_s: float | None = field(default=None, metadata={WHERE_SET: True})
    recompute_backward_s: float | None = field(default=None, metadata={WHERE_SET: True})
    recompute_idle_s: float | None = field(default=None, metadata={WHERE_SET: True})
    context_tokens: int = 0
    reader_tokens: int = 0
    context_area: int = 0

    def __post_init__(self) -> None:
        areas = self.attention_area, self.context_tokens, self.reader_tokens, self.context_area
        if min(self.rows, self.tokens_in) < 1 or min(areas) < 0:
            raise ValueError(f"measured layer: want >= 1 row and token, area >= 0, got {self}")
        counts = ("tokens_in", "attention_area", "context_tokens", "reader_tokens", "context_area")
        for name, most in (("rows", MOST_ROWS), *((name, MOST_COUNT) for name in counts)):
            if getattr(self, name) > most:
                value = str(getattr(self, name))
                written = value if len(value) <= DIGITS else f"a number of {len(value)} digits"
                raise ValueError(f"measured layer, {name}: want at most {most:,}, got {written}")

    @property
    def row(self) -> RowWork:
        """One of its rows; how many tokens leave the module decides nothing."""
        read = self.context_tokens, self.reader_tokens, self.context_area
        return RowWork(self.tokens_in, self.tokens_in, self.attention_area, *read)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTable:
    """Times of a layer measured as a whole.

    Args:
        signature: identifies layers that take the same time.
        precision: precision of the measurement.
        tp: tensor-parallel ranks.
        cp: context-parallel ranks.
        ep: expert-parallel ranks.
        sequence_parallel: whether sequence parallelism was on.
        points: measured sizes.
    """

    signature: str
    precision: str
    tp: int = 1
    cp: int = 1
    ep: int = field(default=1, metadata={WHERE_SET: True})
    sequence_parallel: bool = field(default=False, metadata={WHERE_SET: True})
    points: tuple[LayerPoint, ...]
