"""The samples of a microbatch of a drafted job: enough tokens of a user's data, and what memory holds."""

from collections.abc import Sequence
from dataclasses import dataclass

from workbench.data.sample import Sample
from workbench.job.drafted_activations import long_value
from workbench.job.drafted_layout import STATE_SHARE, DraftedLayout, activations_of
from workbench.model.model_graph import ModelGraph
from workbench.units import gib

FULL_TOKENS = 4096  # of the LLM's sequence in a microbatch; beyond it, a step gains little per sample


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftedMicrobatch:
    """The samples of a microbatch, and a line that says by which rule they were chosen."""

    samples: int
    rule: str


def drafted_microbatch(
    graph: ModelGraph,
    layout: DraftedLayout,
    data: Sequence[Sample],
    *,
    most: int,
    memory_bytes: int,
    beyond: str = "the data has no more rows for {}",
) -> DraftedMicrobatch:
    """The power of two whose samples come nearest to `FULL_TOKENS`, or a smaller one that fits.

    A microbatch fits where activations of 95 of 100 ones, of consecutive samples of the data, fit in the
    memory that `STATE_SHARE` leaves. At least one sample is taken: if any layout has room for it, so has that
    of `drafted_layout`.

    Args:
        data: samples of the data, in random order.
        most: samples of a microbatch that there may be.
        memory_bytes: of a GPU.
        beyond: why there may not be more, with {} for their number.
    """
    mean = sum(sample.num_tokens for sample in data) / len(data)
    wanted = _nearest_power(FULL_TOKENS / mean)
    room = (1 - STATE_SHARE) * memory_bytes
    samples = wanted
    while samples > 1 and (samples > most or _long_bytes(graph, layout, data, samples) > room):
        samples //= 2
    return DraftedMicrobatch(
        samples=samples, rule=_rule(data, samples, wanted, room, beyond if 2 * samples > most else "")
    )


def _rule(data: Sequence[Sample], samples: int, wanted: int, room_bytes: float, beyond: str) -> str:
    mean = sum(sample.num_tokens for sample in data) / len(data)
    long = long_value([sample.num_tokens for sample in data])
    full = f"the activations of {{}} may exceed {gib(room_bytes):.3g} GiB of a GPU"
    bound = f"; not {wanted}, as {(beyond or full).format(2 * samples)}" if samples < wanted else ""
    return (
        f"microbatch_samples: {samples}, the power of two nearest to {FULL_TOKENS:,} tokens a microbatch, of "
        f"samples of {mean:,.0f} tokens on average and {long:,} at the 95th percentile{bound}"
    )


def _nearest_power(ratio: float) -> int:
    """The power of two from 1 whose distance to the ratio, as a factor, is least."""
    power = 1
    while power * 2**0.5 < ratio:
        power *= 2
    return power


def _long_bytes(graph: ModelGraph, layout: DraftedLayout, data: Sequence[Sample], samples: int) -> float:
    """Activations of the fullest rank under 1F1B, in bytes, of long microbatches."""
    held = activations_of(graph, layout, data, samples)
    return max(layout.activation_bytes(name, each) for name, each in held.items())
