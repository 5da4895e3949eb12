"""Videos in Qwen's vision towers: frames, sampled and resized, each step of some of which is an item."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from workbench.data.corpus import Frame, ItemTokens, Video, qwen2_vl_resize
from workbench.data.videos import qwen3_frame_px, sampled_frames
from workbench.model.config_fields import Config, number, whole

MOST_FRAMES = 16_384  # of a video; released processors say up to 2,048
_FPS, _LEAST, _MOST = 2.0, 4, 768  # frames, where no processor says them
_WORDS = {  # of a job's configuration: what a processor of videos calls it
    "video_fps": "fps",
    "video_min_frames": "min_frames",
    "video_max_frames": "max_frames",
    "video_min_pixels": "shortest_edge",
    "video_max_pixels": "longest_edge",
}
PATCH_PX_3 = 16
_STAMP, _MARKS = 3, 2  # tokens of "<", " seconds" and ">", and those around a frame


def processed(processor: Config) -> dict[str, Any]:
    """What a checkpoint's files say of videos; its processor of images is asked where none is of videos.

    Source: `BaseVideoProcessor.get_video_processor_dict` of transformers.
    """
    said = processor.get("video_processor")
    said = said if isinstance(said, Mapping) else processor
    size = said.get("size")
    own = {"shortest_edge": said.get("min_pixels"), "longest_edge": said.get("max_pixels")}
    size = size if isinstance(size, Mapping) else {}
    values = {**said, **size, **{key: value for key, value in own.items() if value is not None}}
    return {word: values[key] for word, key in _WORDS.items() if values.get(key) is not None}


def qwen2(config: Config, height_px: int, width_px: int, duration_s: float) -> Video:
    """Qwen2-VL's: a place on the axis of time further with every step."""
    step = whole(config, "temporal_patch_size", 2)
    num = _num_frames(config, duration_s, multiple=step)
    tokens = _qwen2_tokens(config, height_px, width_px)
    return Video(tuple(Frame(tokens, (time, time)) for time in range(num // step)))


def qwen2_5(config: Config, height_px: int, width_px: int, duration_s: float) -> Video:
    """Qwen2.5-VL's: so many places further in a second (`tokens_per_second`), in float32 as transformers."""
    step = whole(config, "temporal_patch_size", 2)
    num = _num_frames(config, duration_s, multiple=step)
    tokens = _qwen2_tokens(config, height_px, width_px)
    each = np.float32(whole(config, "tokens_per_second", 4)) * np.float32(step * duration_s / num)
    times = (np.arange(num // step, dtype=np.float32) * each).astype(int).tolist()
    return Video(tuple(Frame(tokens, at) for at in enumerate(times)))


def qwen3(config: Config, height_px: int, width_px: int, duration_s: float) -> Video:
    """Qwen3-VL's: behind its second as text, between two marks, every step is a video of its own.

    The marks around the first step are the prompt's own.

    Source: `replace_video_token` of transformers' `Qwen3VLProcessor`, as Qwen's tokenizer cuts a number into
    digits.
    Differs: frames lie evenly from the beginning to the end.
    """
    step = whole(config, "temporal_patch_size", 2)
    num = _num_frames(config, duration_s, multiple=1)
    patch, merge = whole(config, "patch_size", PATCH_PX_3), whole(config, "spatial_merge_size", 2)
    least, most = _limits(config, 128 * 32**2, 768 * 32**2)
    sides = qwen3_frame_px(
        num, height_px, width_px, multiple_px=patch * merge, min_pixels=least, max_pixels=most
    )
    tokens = _tokens(sides, patch, merge)
    at_s = [duration_s * min(index, num - 1) / max(num - 1, 1) for index in range(-(-num // step) * step)]
    frames = []
    for first in range(0, len(at_s), step):
        stamp = f"{(at_s[first] + at_s[first + step - 1]) / 2:.1f}"
        frames.append(Frame(tokens, (0, 0), _STAMP + len(stamp) + (_MARKS if first else 0)))
    return Video(tuple(frames))


def _num_frames(config: Config, duration_s: float, *, multiple: int) -> int:
    return sampled_frames(
        duration_s,
        fps=number(config, "video_fps", _FPS),
        least=whole(config, "video_min_frames", _LEAST),
        most=whole(config, "video_max_frames", _MOST, most=MOST_FRAMES),
        multiple=multiple,
    )


def _qwen2_tokens(config: Config, height_px: int, width_px: int) -> ItemTokens:
    patch, merge = whole(config, "patch_size", 14), whole(config, "spatial_merge_size", 2)
    least, most = _limits(config, 128 * 28**2, 768 * 28**2)
    sides = qwen2_vl_resize(height_px, width_px, multiple_px=patch * merge, min_pixels=least, max_pixels=most)
    return _tokens(sides, patch, merge)


def _limits(config: Config, least: int, most: int) -> tuple[int, int]:
    least, most = whole(config, "video_min_pixels", least), whole(config, "video_max_pixels", most)
    if least > most:
        raise ValueError(f"video_min_pixels must be <= video_max_pixels {most}, got {least}; nearest: {most}")
    return least, most


def _tokens(sides: tuple[int, int], patch: int, merge: int) -> ItemTokens:
    """Of a step whose frames have (height, width)."""
    patches = (sides[0] // patch) * (sides[1] // patch)
    return ItemTokens(patches, patches // merge**2)
