"""How far a query sees among its row's own tokens."""

from typing import NamedTuple


class Reach(NamedTuple):
    """How far a query sees among its row's own tokens, whatever else the samples' masks hide.

    Args:
        window: tokens back, its own among them; None: as far as the mask does.
        chunk: tokens of a chunk, in front of which it sees nothing (Llama 4); None: there are no chunks.
    """

    window: int | None = None
    chunk: int | None = None


ANY = Reach()
