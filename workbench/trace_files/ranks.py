"""Ranks of a trace that have spans to export."""

from workbench.trace import Trace


def ranks_with_spans(trace: Trace, target: str) -> tuple[int, ...]:
    """Ranks with spans, ascending.

    Args:
        target: the file's kind, for the message.

    Raises:
        ValueError: the trace has no spans.
    """
    ranks = sorted({span.rank for span in trace.spans})
    if not ranks:
        raise ValueError(f"{target}: want a trace with spans")
    return tuple(ranks)
