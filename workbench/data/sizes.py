"""Sizes of samples before tokenization, and their conversion by a model's rules."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from workbench.data.corpus import ItemSize, ItemTokens, Tiled, Video, sample_of
from workbench.data.sample import Sample

ImageRule = Callable[[int, int], Sequence[ItemTokens | Tiled]]  # height and width in px -> items
VideoRule = Callable[[int, int, float], Video]  # height and width in px, seconds
AudioRule = Callable[[float], Sequence[ItemTokens]]  # seconds -> items

MOST_TEXT_TOKENS = 10**9  # per sample
MOST_SIDE_PX = 10**6  # of an image
MOST_CLIP_S = 10**6  # of a clip or a video: eleven days


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """One sample: images, videos and clips in sequence order, with text after each of them.

    Args:
        text_tokens: before the first of them, then after each, images first and clips last.
        images: (height, width) in pixels.
        videos: (height, width) in pixels, seconds.
        audio_s: seconds of each clip.
    """

    text_tokens: tuple[int, ...]
    images: tuple[tuple[int, int], ...] = ()
    videos: tuple[tuple[int, int, float], ...] = ()
    audio_s: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if len(self.text_tokens) != 1 + len(self.images) + len(self.videos) + len(self.audio_s):
            raise ValueError(
                f"want one text more than the {len(self.images)} images, {len(self.videos)} videos and "
                f"{len(self.audio_s)} clips, got {len(self.text_tokens)}"
            )
        if min(self.text_tokens) < 0 or not 1 <= sum(self.text_tokens) <= MOST_TEXT_TOKENS:
            raise ValueError(
                f"want >= 1 text token in all, none negative and at most {MOST_TEXT_TOKENS}, "
                f"got {list(self.text_tokens)!r:.60}"
            )
        for what, height, width in (
            *(("an image", *sides) for sides in self.images),
            *(("a video", *video[:2]) for video in self.videos),
        ):
            if not 1 <= min(height, width) <= max(height, width) <= MOST_SIDE_PX:
                raise ValueError(
                    f"{what} must have sides >= 1 px and at most {MOST_SIDE_PX} px, got {height} x {width}"
                )
        for what, seconds in (
            *(("a video", video[2]) for video in self.videos),
            *(("a clip", each) for each in self.audio_s),
        ):
            if not 0 < seconds <= MOST_CLIP_S:
                raise ValueError(f"{what} must last > 0 s and at most {MOST_CLIP_S:,.0f} s, got {seconds}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How a model's encoders cut images, videos and clips into items; None: no such encoder.

    Args:
        beside: for an image that is not alone in its sample; None: as `image`.
    """

    image: ImageRule | None = None
    beside: ImageRule | None = None
    video: VideoRule | None = None
    audio: AudioRule | None = None


def samples_of(
    sizes: Iterable[Sizes], rules: Rules, *, vision: str = "vision", audio: str = "audio"
) -> tuple[Sample, ...]:
    """Samples with ids from 0. A modality without a rule is dropped, and its text stays.

    Args:
        vision, audio: modalities of the model's encoders; videos belong to the first.
    """
    return tuple(
        _sample(number, size, rules, {"vision": vision, "audio": audio}) for number, size in enumerate(sizes)
    )


def _sample(number: int, size: Sizes, rules: Rules, modality: Mapping[str, str]) -> Sample:
    vision, audio = modality["vision"], modality["audio"]
    image_rule = rules.image if len(size.images) == 1 else rules.beside or rules.image
    items_after_text: list[tuple[str, Sequence[ItemSize]]] = [
        *((vision, image_rule(*sides) if image_rule else ()) for sides in size.images),
        *((vision, (rules.video(*video),) if rules.video else ()) for video in size.videos),
        *((audio, rules.audio(seconds) if rules.audio else ()) for seconds in size.audio_s),
    ]
    texts = [size.text_tokens[0]]
    flat: list[tuple[str, ItemSize]] = []
    for (name, items), text in zip(items_after_text, size.text_tokens[1:], strict=True):
        if items:  # several items of one image stand side by side
            texts += [0] * (len(items) - 1) + [text]
            flat += [(name, item) for item in items]
        else:
            texts[-1] += text
    return sample_of(number, texts, flat)
