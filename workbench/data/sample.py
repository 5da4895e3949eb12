"""A training example described by the sizes of its segments."""

from dataclasses import dataclass, field, replace
from typing import NamedTuple

WHERE_SET = "where set"  # marks a field that plan files omit while it has its default


class Item(NamedTuple):
    """`(sample, k)`: the k-th image or clip of a sample; for the LLM the sample itself, k = 0."""

    sample: int
    k: int


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive tokens of one modality in the LLM's sequence: a text, an image or a clip.

    Args:
        modality: "text" or the modality of an encoder module.
        k: number of the segment among those of its modality in the sample, from 0.
        tokens_in: tokens that enter the encoder's blocks (text: equal to tokens_out).
        tokens_out: tokens in the LLM's sequence.
        grid: (rows, columns) of patches or tiles of an image, if the encoder needs it; None: the encoder
            derives it from the number of tokens.
        frame: for one step of a video, which an encoder sees at once: (number of the step, from 0, its offset
            to step 0 on the LLM's time axis); steps of a video are consecutive segments. None: no video.
        unpadded: for an image cut into an overview and a `grid` of tiles, which do not attend to each other:
            (rows, columns) of the grid's features that the image covers. None: the item is seen at once.
    """

    modality: str
    k: int
    tokens_in: int
    tokens_out: int
    grid: tuple[int, int] | None = field(default=None, metadata={WHERE_SET: True})
    frame: tuple[int, int] | None = field(default=None, metadata={WHERE_SET: True})
    unpadded: tuple[int, int] | None = field(default=None, metadata={WHERE_SET: True})

    def __post_init__(self) -> None:
        if self.tokens_in < 1 or self.tokens_out < 1:
            raise ValueError(
                f"segment {self.modality}[{self.k}]: token counts must be >= 1, "
                f"got {self.tokens_in} in, {self.tokens_out} out"
            )
        if self.grid is not None and min(self.grid) < 1:
            raise ValueError(f"segment {self.modality}[{self.k}]: grid must be >= 1 x 1, got {self.grid}")
        if self.frame is not None and (min(self.frame) < 0 or (self.frame[0] == 0 != self.frame[1])):
            raise ValueError(
                f"segment {self.modality}[{self.k}]: want a frame's number and time >= 0, 0 at 0, "
                f"got {self.frame}"
            )
        if self.unpadded is not None and (
            min(self.unpadded) < 1 or self.grid is None or self.tokens_in % self.num_tiles
        ):
            raise ValueError(
                f"segment {self.modality}[{self.k}]: want an overview and a grid of tiles of equally many "
                f"tokens, and unpadded >= 1 x 1, got {self.tokens_in} tokens, grid {self.grid} and "
                f"{self.unpadded}"
            )

    @property
    def num_tiles(self) -> int:
        """Parts of it, equally long, whose tokens see each other alone; 1: it is seen at once."""
        if self.unpadded is None or self.grid is None:
            return 1
        return 1 + self.grid[0] * self.grid[1]

    @property
    def tile_tokens(self) -> int:
        """That enter the blocks of each of these parts."""
        return self.tokens_in // self.num_tiles


@dataclass(frozen=True, slots=True)
class Sample:
    """One training example.

    Args:
        id: number that is unique in the batch.
        segments: segments in sequence order.
        mask: attention mask.
    """

    id: int
    segments: tuple[Segment, ...]
    mask: str = "causal"

    def __post_init__(self) -> None:
        keys = [(segment.modality, segment.k) for segment in self.segments]
        if not keys:
            raise ValueError(f"sample {self.id}: want at least one segment, got none")
        if len(set(keys)) != len(keys):
            raise ValueError(f"sample {self.id}: segments must differ in (modality, k), got {keys}")
        for before, segment in zip((None, *self.segments), self.segments, strict=False):
            number, time = segment.frame or (0, 0)
            if number and not (before is not None and _is_next_frame(before, segment)):
                raise ValueError(
                    f"sample {self.id}: segment {segment.modality}[{segment.k}] is frame {number} of a video "
                    f"at time {time}; want frame {number - 1} of as many tokens, no later, in front of it"
                )

    @property
    def num_tokens(self) -> int:
        """Length of the LLM's sequence."""
        return sum(segment.tokens_out for segment in self.segments)

    def of(self, modality: str) -> tuple[Segment, ...]:
        return tuple(segment for segment in self.segments if segment.modality == modality)


def _is_next_frame(before: Segment, segment: Segment) -> bool:
    """Whether `segment` is the next frame of the same video as `before`."""
    if before.frame is None or segment.frame is None:
        return False
    (number, time), (next_number, later) = before.frame, segment.frame
    is_same_size = replace(before, k=segment.k, frame=segment.frame) == segment
    return is_same_size and next_number == number + 1 and time <= later
