"""Token counts of real encoders' inputs, and functions that make batches."""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from workbench.data.sample import Sample, Segment

TEXT = "text"
MEL_FRAMES_PER_S = 100
WHISPER_FRAME_S = 0.02  # 10 ms mel frames, halved by the stride-2 convolution
WHISPER_WINDOW_TOKENS = 1500
SAMPLES_PER_S = 16_000  # of sound, in every encoder here
MEL_HOP = SAMPLES_PER_S // MEL_FRAMES_PER_S
MEL_WINDOW = 400  # samples of a frame
QWEN_MIN_PIXELS, QWEN_MAX_PIXELS = 56 * 56, 28 * 28 * 1280


class ItemTokens(NamedTuple):
    """Tokens of one image or clip: inside the encoder's blocks, and in the LLM's sequence."""

    tokens_in: int
    tokens_out: int


class Tiled(NamedTuple):
    """An image cut into an overview and a grid of tiles; `Segment` says what grid and unpadded are."""

    tokens: ItemTokens
    grid: tuple[int, int]
    unpadded: tuple[int, int]


class Frame(NamedTuple):
    """What an encoder sees at once of a video: its tokens, its `Segment.frame`, and the number of text
    tokens before it.
    """

    tokens: ItemTokens | Tiled
    at: tuple[int, int] | None = None
    text_tokens: int = 0


class Video(NamedTuple):
    """Consecutive frames in the LLM's sequence; encoders process each on its own, like an image."""

    frames: tuple[Frame, ...]


ItemSize = ItemTokens | Tiled | Video  # of one position in a sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """How often a modality occurs in a sample, and the sizes of its items.

    Args:
        sizes: possible sizes of an item, equally likely.
        most_items: samples with the modality have 1 to `most_items` of it, equally likely.
        missing: share of samples without the modality.
    """

    sizes: tuple[ItemSize, ...]
    most_items: int = 1
    missing: float = 0.0

    def __post_init__(self) -> None:
        if not self.sizes or self.most_items < 1 or not 0.0 <= self.missing <= 1.0:
            raise ValueError(
                "mixture: want at least one size, most_items >= 1 and 0 <= missing <= 1, "
                f"got {len(self.sizes)} sizes, {self.most_items} and {self.missing}"
            )


def square_image_tokens(
    image_px: int, patch_px: int, *, num_class_tokens: int = 0, merge: int = 1
) -> ItemTokens:
    """CLIP and SigLIP: one fixed square image, cut into whole patches; the rest is dropped.

    The class token stays inside the encoder and does not reach the LLM. `merge` patches
    become one token.

    Example:
        >>> square_image_tokens(336, 14, num_class_tokens=1)
        ItemTokens(tokens_in=577, tokens_out=576)
        >>> square_image_tokens(384, 14)
        ItemTokens(tokens_in=729, tokens_out=729)
    """
    if patch_px < 1 or image_px < patch_px:
        raise ValueError(f"image of {image_px} px: want a patch of 1 to {image_px} px, got {patch_px}")
    num_patches = (image_px // patch_px) ** 2
    if num_patches % merge:
        raise ValueError(f"{num_patches} patches: merge must divide them, got {merge}")
    return ItemTokens(num_patches + num_class_tokens, num_patches // merge)


def qwen2_vl_resize(
    height_px: int,
    width_px: int,
    *,
    multiple_px: int = 28,
    min_pixels: float = QWEN_MIN_PIXELS,
    max_pixels: float = QWEN_MAX_PIXELS,
) -> tuple[int, int]:
    """The size to which Qwen2-VL resizes an image: multiples of 28 px within a range of areas.

    Source: Qwen2-VL (Wang et al. 2024), naive dynamic resolution; sides round half to even.
    The limits are those of transformers' processor if a checkpoint's does not state its own.

    Raises:
        ValueError: a side below 1 px, or sides that differ by more than 200 times.
    """
    if min(height_px, width_px) < 1 or max(height_px, width_px) > 200 * min(height_px, width_px):
        raise ValueError(
            f"image of {height_px} x {width_px} px: sides must be >= 1 and differ by at most 200 times"
        )
    height = round(height_px / multiple_px) * multiple_px  # 0 below half a multiple: too little area
    width = round(width_px / multiple_px) * multiple_px
    if height * width > max_pixels:
        shrink = math.sqrt(height_px * width_px / max_pixels)
        height = max(multiple_px, math.floor(height_px / shrink / multiple_px) * multiple_px)
        width = max(multiple_px, math.floor(width_px / shrink / multiple_px) * multiple_px)
    elif height * width < min_pixels:
        grow = math.sqrt(min_pixels / (height_px * width_px))
        height = math.ceil(height_px * grow / multiple_px) * multiple_px
        width = math.ceil(width_px * grow / multiple_px) * multiple_px
    return height, width


def qwen2_vl_tokens(
    height_px: int,
    width_px: int,
    *,
    patch_px: int = 14,
    merge_side: int = 2,
    min_pixels: float = QWEN_MIN_PIXELS,
    max_pixels: float = QWEN_MAX_PIXELS,
) -> ItemTokens:
    """Qwen2-VL and Qwen2.5-VL: patches after the resize rule; `merge_side` squared become one.

    Example:
        >>> qwen2_vl_tokens(720, 1280)
        ItemTokens(tokens_in=4784, tokens_out=1196)
    """
    height, width = qwen2_vl_resize(
        height_px,
        width_px,
        multiple_px=patch_px * merge_side,
        min_pixels=min_pixels,
        max_pixels=max_pixels,
    )
    num_patches = (height // patch_px) * (width // patch_px)
    return ItemTokens(num_patches, num_patches // merge_side**2)


ANYRES_GRIDS = ((1, 2), (2, 1), (2, 2), (1, 3), (3, 1))  # (rows, columns), as released with LLaVA-NeXT


def anyres_grid(
    height_px: int, width_px: int, *, tile_px: int, grids: Sequence[tuple[int, int]] = ANYRES_GRIDS
) -> tuple[int, int]:
    """(rows, columns) of tiles for an image: most pixels kept, then fewest wasted, then the first.

    Source: Liu et al. 2024, "LLaVA-NeXT", as released: sides of the shrunk image are rounded down.

    Raises:
        ValueError: a side below 1 px, or no grid.

    Example:
        >>> anyres_grid(400, 1000, tile_px=336)
        (1, 3)
    """
    if min(height_px, width_px, tile_px) < 1 or not grids:
        raise ValueError(
            f"image of {height_px} x {width_px} px: want sides and tile >= 1 px and a grid, "
            f"got a tile of {tile_px} px and {len(grids)} grids"
        )

    def preference(grid: tuple[int, int]) -> tuple[int, int]:
        canvas_px = grid[0] * tile_px, grid[1] * tile_px
        scale = min(canvas_px[0] / height_px, canvas_px[1] / width_px)
        kept = min(int(height_px * scale) * int(width_px * scale), height_px * width_px)
        return -kept, canvas_px[0] * canvas_px[1] - kept

    return min(grids, key=preference)


def whisper_tokens(
    duration_s: float, *, window_tokens: int = WHISPER_WINDOW_TOKENS
) -> tuple[ItemTokens, ...]:
    """Whisper: one item per started window (30 s), each padded to full length (1,500 frames of 20 ms).

    Example:
        >>> len(whisper_tokens(45.0))
        2
    """
    if not 0 < duration_s < math.inf or window_tokens < 1:
        raise ValueError(
            "audio clip: want a duration > 0 s and a window >= 1 token, "
            f"got {duration_s} s and {window_tokens}"
        )
    num_windows = -(-sound_samples(duration_s) // (2 * MEL_HOP * window_tokens))
    return (ItemTokens(window_tokens, window_tokens),) * num_windows


def windowed_tokens(
    duration_s: float, *, window_tokens: int = WHISPER_WINDOW_TOKENS, most_windows: int | None = None
) -> tuple[ItemTokens, ...]:
    """Qwen2.5-Omni, Qwen2-Audio, Audio Flamingo 3: one item per started window, the last as long as the clip.

    The rest may be a single token, which averaging in pairs drops: there is no item for it.

    Source: `_get_feat_extract_output_lengths` of transformers' Qwen2-Audio, over the frames of a clip.
    Differs: transformers pads the last window with silence; here the item has only the clip's tokens.

    Args:
        duration_s: of the clip.
        window_tokens: of a full window.
        most_windows: longer clips are truncated; None: no limit.

    Raises:
        ValueError: a clip of a single token or none.

    Example:
        >>> windowed_tokens(2.26, window_tokens=100)
        (ItemTokens(tokens_in=100, tokens_out=100), ItemTokens(tokens_in=13, tokens_out=13))
    """
    num_tokens = -(-sound_samples(duration_s) // (2 * MEL_HOP))
    if num_tokens < 2:
        raise ValueError(f"audio clip: want a duration of more than {WHISPER_FRAME_S} s, got {duration_s} s")
    if most_windows is not None:
        num_tokens = min(num_tokens, most_windows * window_tokens)
    num_full, left = divmod(num_tokens, window_tokens)
    sizes = (window_tokens,) * num_full + ((left,) if left > 1 else ())
    return tuple(ItemTokens(size, size) for size in sizes)


def padded_windows(
    duration_s: float, *, window_tokens: int = WHISPER_WINDOW_TOKENS
) -> tuple[ItemTokens, ...]:
    """MOSS-Transcribe-Diarize: one item per started window, padded to full length; only the clip's are read.

    Source: `input_features_mask` of transformers' feature extractor, and `_get_audio_token_length`.
    """
    num_full, left = divmod(-(-sound_samples(duration_s) // (2 * MEL_HOP)), window_tokens)
    heard = (window_tokens,) * num_full + ((left,) if left else ())
    return tuple(ItemTokens(window_tokens, num) for num in heard)


def conformer_tokens(duration_s: float, *, reduction: int = 8) -> ItemTokens:
    """Phi-4-multimodal's audio encoder: the whole mel frames of a clip of any length, 8 per token.

    Source: `feature_lengths` and `_compute_audio_embed_size` of transformers' Phi-4 feature extractor.

    Raises:
        ValueError: a clip shorter than one frame.

    Example:
        >>> conformer_tokens(30.0)
        ItemTokens(tokens_in=375, tokens_out=375)
    """
    num_samples = sound_samples(duration_s)
    if num_samples < MEL_WINDOW:
        least_s = MEL_WINDOW / SAMPLES_PER_S
        raise ValueError(
            f"audio clip: want a duration of at least {least_s} s, one frame, got {duration_s} s"
        )
    num_frames = (num_samples - MEL_WINDOW) // MEL_HOP + 1
    num_tokens = -(-num_frames // reduction)
    return ItemTokens(num_tokens, num_tokens)


def mel_frames(duration_s: float) -> int:
    """Whole mel frames of a clip of that length by itself, as Whisper's feature extractor counts them.

    Differs: for padded clips (all of a batch but the longest, and all of Qwen3-ASR's), transformers counts a
    started frame as whole.

    Raises:
        ValueError: a clip shorter than a frame.

    Example:
        >>> mel_frames(8.0)
        800
    """
    frames = sound_samples(duration_s) // MEL_HOP
    if frames < 1:
        least_s = 1 / MEL_FRAMES_PER_S
        raise ValueError(f"audio clip: want a duration of at least {least_s} s, got {duration_s} s")
    return frames


def sound_samples(duration_s: float) -> int:
    """Sound samples of a clip, at least one."""
    if not 0 < duration_s < math.inf:
        raise ValueError(f"audio clip: want a duration > 0 s, got {duration_s} s")
    return max(1, round(duration_s * SAMPLES_PER_S))


def sample_of(sample_id: int, text_tokens: Sequence[int], items: Sequence[tuple[str, ItemSize]]) -> Sample:
    """One sample: text[0], item, text[1], item, ..., the last text.

    Args:
        sample_id: its id.
        text_tokens: one count per gap, len(items) + 1; a gap of 0 has no segment.
        items: (modality, size) in sequence order; `k` counts within a modality, and each frame of a video.
    """
    if len(text_tokens) != len(items) + 1:
        raise ValueError(
            f"sample {sample_id}: want one more text than items, "
            f"got {len(text_tokens)} texts and {len(items)} items"
        )
    gaps, frames = [text_tokens[0]], list[tuple[str, Frame]]()
    for (modality, size), text_after in zip(items, text_tokens[1:], strict=True):
        for frame in size.frames if isinstance(size, Video) else (Frame(size),):
            gaps[-1] += frame.text_tokens
            frames.append((modality, frame))
            gaps.append(0)
        gaps[-1] += text_after
    segments: list[Segment] = []
    count: dict[str, int] = {}

    def add(modality: str, size: ItemTokens | Tiled, at: tuple[int, int] | None = None) -> None:
        tokens, grid, unpadded = size if isinstance(size, Tiled) else (size, None, None)
        k = count.get(modality, 0)
        segments.append(Segment(modality, k, *tokens, grid=grid, frame=at, unpadded=unpadded))
        count[modality] = count.get(modality, 0) + 1

    for index, num_tokens in enumerate(gaps):
        if num_tokens:
            add(TEXT, ItemTokens(num_tokens, num_tokens))
        if index < len(frames):
            modality, frame = frames[index]
            add(modality, frame.tokens, frame.at)
    return Sample(sample_id, tuple(segments))


def fixed_samples(
    num: int, *, text_tokens: int, items: Mapping[str, Sequence[ItemSize]]
) -> tuple[Sample, ...]:
    """Equal samples: the items of each modality in turn, the text spread evenly around them.

    Args:
        num: of samples; ids count from 0.
        text_tokens: total of each sample, outside videos. The remainder of the even split goes to the end.
        items: the items of one sample by modality, in sequence order.

    Example:
        >>> image = ItemTokens(729, 729)
        >>> [s.modality for s in fixed_samples(1, text_tokens=9, items={"vision": [image]})[0].segments]
        ['text', 'vision', 'text']
    """
    _check_request(num, text_tokens)
    sequence = [(modality, tokens) for modality, each in items.items() for tokens in each]
    even, rest = divmod(text_tokens, len(sequence) + 1)
    gaps = [even] * len(sequence) + [even + rest]
    return tuple(sample_of(sample_id, gaps, sequence) for sample_id in range(num))


def mixed_samples(
    num: int, *, text_tokens: tuple[int, int], items: Mapping[str, Mixture], seed: int
) -> tuple[Sample, ...]:
    """Samples that differ: some miss a modality, items come in any order, text in any gap.

    Args:
        num: of samples; ids count from 0.
        text_tokens: minimum and maximum of a sample, inclusive, uniform.
        items: the mixture of each modality.
        seed: equal seeds give equal samples.
    """
    low, high = text_tokens
    _check_request(num, low)
    if low > high:
        raise ValueError(f"text_tokens: the least must not exceed the most, got {low} and {high}")
    rng = random.Random(seed)
    return tuple(_mixed_sample(sample_id, rng, text_tokens, items) for sample_id in range(num))


def _mixed_sample(
    sample_id: int, rng: random.Random, text_tokens: tuple[int, int], items: Mapping[str, Mixture]
) -> Sample:
    sequence: list[tuple[str, ItemSize]] = []
    for modality, mixture in items.items():
        is_missing = rng.random() < mixture.missing
        num_items = 0 if is_missing else rng.randint(1, mixture.most_items)
        sequence += [(modality, rng.choice(mixture.sizes)) for _ in range(num_items)]
    rng.shuffle(sequence)
    total = rng.randint(*text_tokens)
    cuts = sorted(rng.randint(0, total) for _ in sequence)
    gaps = [end - start for start, end in zip([0, *cuts], [*cuts, total], strict=True)]
    return sample_of(sample_id, gaps, sequence)


def _check_request(num: int, text_tokens: int) -> None:
    if num < 1 or text_tokens < 1:
        raise ValueError(f"batch: want >= 1 sample and >= 1 text token, got {num} and {text_tokens}")
