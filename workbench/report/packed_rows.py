"""What packed rows of a batch hold, and samples and tokens per second of its step."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from workbench.data.sample import Sample
from workbench.masks.patterns import document_lengths


@dataclass(frozen=True, slots=True)
class Content:
    """Samples and tokens of a step: samples that a mask packs as documents of a row count one by one."""

    samples: int
    tokens: int

    def rates(self, seconds: float) -> dict[str, float]:
        """Of a step that takes so many seconds."""
        return {"samples_per_s": self.samples / seconds, "tokens_per_s": self.tokens / seconds}


def content_of(batch: Sequence[Sample]) -> Content:
    """What the rows of a batch hold, in tokens of the LLM's sequence."""
    lengths = [length for row in batch for length in document_lengths(row)]
    return Content(len(lengths), sum(lengths))


def packed_record(batch: Sequence[Sample], row_tokens: int) -> dict[str, Any]:
    """What rows of at most so many tokens hold, and the share of them that is empty."""
    content = content_of(batch)
    empty = 1 - content.tokens / (row_tokens * len(batch))
    return {"rows": len(batch), "row_tokens": row_tokens, **asdict(content), "empty_fraction": empty}


def packed_line(record: dict[str, Any]) -> str:
    """`packed_record` in one line."""
    return (
        f"packed: {record['samples']:,} samples with {record['tokens']:,} tokens in {record['rows']:,} rows "
        f"of at most {record['row_tokens']:,}; {record['empty_fraction']:.1%} of the rows is empty"
    )


def rates_line(batch: Sequence[Sample], seconds: float) -> str | None:
    """Samples and tokens per second where rows pack several samples; None where none does."""
    content = content_of(batch)
    if content.samples == len(batch):
        return None
    rates = content.rates(seconds)
    return (
        f"packed: {content.samples:,} samples with {content.tokens:,} tokens in {len(batch):,} rows a step; "
        f"{rates['samples_per_s']:,.4g} samples/s, {rates['tokens_per_s']:,.0f} tokens/s"
    )
