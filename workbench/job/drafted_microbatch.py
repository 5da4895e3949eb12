"""The samples of a microbatch of a drafted job: enough tokens of a user's data, and what memory holds."""

from collections.abc import Sequence
from dataclasses import dataclass

from workbench.cost.roofline import Grid, RowWork, Work
from workbench.data.sample import Sample
from workbench.job.drafted_layout import PRECISION, STATE_SHARE, DraftedLayout
from workbench.memory.layer import saved_bytes
from workbench.model.frozen import gradient_needs
from workbench.model.model_graph import TEXT, ModelGraph, Module
from workbench.units import gib

FULL_TOKENS = 4096  # of the LLM's sequence in a microbatch; beyond it, a step gains little per sample
LONG = 0.95  # quantile of microbatches that must fit


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

    A microbatch fits where 95 of 100 ones, of consecutive samples of the data, keep activations in the
    memory that `STATE_SHARE` leaves. At least one sample is taken, whether it fits or not: `plan` refuses it.

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
    long = _quantile([sample.num_tokens for sample in data])
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
    """Activations that the fullest rank keeps under 1F1B, in bytes, of long microbatches.

    A stage keeps as many microbatches as there are stages, of its share of its module's layers.
    """
    groups = [data[first : first + samples] for first in range(0, len(data) - samples + 1, samples)]
    needs = gradient_needs(graph)
    most = 0.0
    for module in graph.modules:
        cut = layout.cuts[module.name]
        lengths = [_tokens(module, group) for group in groups or [data]]
        tokens_in, tokens_out = (_quantile(list(each)) for each in zip(*lengths, strict=True))
        if not tokens_in:
            continue
        work = Work((RowWork(tokens_in, max(1, tokens_out), attention_area=0),))
        kept = sum(
            saved_bytes(layer, need, work, Grid(tp=cut.tp), PRECISION.num_bytes)
            for layer, need in zip(module.layers, needs[module.name], strict=True)
        )
        most = max(most, kept * layout.num_stages / cut.stages)
    return most


def _tokens(module: Module, samples: Sequence[Sample]) -> tuple[int, int]:
    """Tokens that enter and leave a module's blocks."""
    if module.modality == TEXT:
        total = sum(sample.num_tokens for sample in samples)
        return total, total
    segments = [segment for sample in samples for segment in sample.of(module.modality)]
    return sum(each.tokens_in for each in segments), sum(each.tokens_out for each in segments)


def _quantile(values: Sequence[int]) -> int:
    """The value at `LONG` of the sorted values."""
    return sorted(values)[min(len(values) - 1, int(LONG * len(values)))]
