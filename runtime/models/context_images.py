"""Images that cross-attention reads, and how their tokens lie in tiles."""

from typing import NamedTuple


class Tiles(NamedTuple):
    """Layout of the tokens of one image that cross-attention reads.

    Args:
        num: number of tiles.
        tokens: of every tile, including padding.
        seen: leading tokens of a tile; the rest is padding.
        filled: leading tiles with a part of the image; the rest is padding.
    """

    num: int
    tokens: int
    seen: int
    filled: int

    @property
    def total(self) -> int:
        """Tokens of the image."""
        return self.num * self.tokens


class ContextImage(NamedTuple):
    """An image that cross-attention reads: its item, its position in that item, and its tokens."""

    item: int  # index in the microbatch
    position: int
    tiles: Tiles
