"""A training example described by the sizes of its segments."""

from dataclasses import dataclass, field, replace
from typing import NamedTuple

WHERE_SET = "where set"  # marks a field that plan files leave out while it has its default


class Item(NamedTuple):
    """`(sample, k)`: the k-th image or clip of a sample; for the LLM the sample itself, k = 0."""

    sample: int
    k: int


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of one modality in the LLM's sequence.

    Args:
        modality: "text" or the modality of an encoder module.
        k: counts the segments of that modality inside the sample, from 0.
        tokens_in: tokens that enter the encoder's blocks (text: equal to tokens_out).
        tokens_out: tokens that stand in the LLM's sequence.
        grid: (rows, columns) of what an image was cut into, where its encoder asks: patches, or tiles.
            None: as the encoder guesses from the number of tokens.
        time: of a frame of a video, its place on the LLM's axis of time behind the video's first frame, which
            has 0; the frames of a video follow one another. None: a picture, a clip or text.
    """

    modality: str
    k: int
    tokens_in: int
    tokens_out: int
    grid: tuple[int, int] | None = field(default=None, metadata={WHERE_SET: True})
    time: int | None = field(default=None, metadata={WHERE_SET: True})

    def __post_init__(self) -> None:
        if self.tokens_in < 1 or self.tokens_out < 1:
            raise ValueError(
                f"segment {self.modality}[{self.k}]: token counts must be >= 1, "
                f"got {self.tokens_in} in, {self.tokens_out} out"
            )
        if self.grid is not None and min(self.grid) < 1:
            raise ValueError(f"segment {self.modality}[{self.k}]: grid must be >= 1 x 1, got {self.grid}")
        if self.time is not None and self.time < 0:
            raise ValueError(f"segment {self.modality}[{self.k}]: time must be >= 0, got {self.time}")


@dataclass(frozen=True, slots=True)
class Sample:
    """One example.

    Args:
        id: unique in its batch.
        segments: in sequence order.
        mask: name of its attention mask.
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
        for before, frame in zip((None, *self.segments), self.segments, strict=False):
            if frame.time and not (before is not None and _goes_on(before, frame)):
                raise ValueError(
                    f"sample {self.id}: segment {frame.modality}[{frame.k}] is a video's frame at time "
                    f"{frame.time}; want an earlier frame of as many tokens in front of it, or time 0"
                )

    @property
    def num_tokens(self) -> int:
        """Length of the LLM's sequence."""
        return sum(segment.tokens_out for segment in self.segments)

    def of(self, modality: str) -> tuple[Segment, ...]:
        return tuple(segment for segment in self.segments if segment.modality == modality)


def _goes_on(before: Segment, frame: Segment) -> bool:
    """Whether it is the next frame of the same video."""
    if before.time is None or frame.time is None or before.time >= frame.time:
        return False
    return replace(before, k=frame.k, time=frame.time) == frame
