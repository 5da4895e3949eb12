"""Videos in Qwen's vision towers: frames are sampled and resized; each temporal patch is an item."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from workbench.data.corpus import Frame, ItemTokens, Video, qwen2_vl_resize
from workbench.data.videos import qwen3_frame_px, sampled_frames
from workbench.model.config_fields import Config, number, whole

MOST_FRAMES = 16_384  # of a video; released processors allow up to 2,048
_FPS, _LEAST, _MOST = 2.0, 4, 768  # default rate, and numbers of frames
_WORDS = {  # key of a job's configuration -> key of a video processor
    "video_fps": "fps",
    "video_min_frames": "min_frames",
    "video_max_frames": "max_frames",
    "video_min_pixels": "shortest_edge",
    "video_max_pixels": "longest_edge",
}
PATCH_PX_3 = 16
FRAME_PIXELS = 128 * 28**2, 768 * 28**2  # Qwen2-VL, Qwen2.5-VL: least and most, of a frame
VIDEO_PIXELS_3 = 128 * 32**2, 768 * 32**2  # Qwen3-VL: of all frames of a video together
_STAMP, _MARKS = 3, 2  # tokens of "<", " seconds" and ">", and those around a frame


def processed(processor: Config) -> dict[str, Any]:
    """Keys about videos from a checkpoint's video processor, or else from its image processor.

    Source: `BaseVideoProcessor.get_video_processor_dict` of transformers.
    """
    processor_config = processor.get("video_processor")
    processor_config = processor_config if isinstance(processor_config, Mapping) else processor
    size = processor_config.get("size")
    pixel_limits = {
        "shortest_edge": processor_config.get("min_pixels"),
        "longest_edge": processor_config.get("max_pixels"),
    }
    size = size if isinstance(size, Mapping) else {}
    values = {
        **processor_config,
        **size,
        **{key: value for key, value in pixel_limits.items() if value is not None},
    }
    return {word: values[key] for word, key in _WORDS.items() if values.get(key) is not None}


def qwen2(config: Config, height_px: int, width_px: int, duration_s: float) -> Video:
    """A video in Qwen2-VL: the position on the time axis grows by one with every step."""
    step = whole(config, "temporal_patch_size", 2)
    num = _num_frames(config, duration_s, multiple=step)
    tokens = _qwen2_tokens(config, height_px, width_px)
    return Video(tuple(Frame(tokens, (time, time)) for time in range(num // step)))


def qwen2_5(config: Config, height_px: int, width_px: int, duration_s: float) -> Video:
    """A video in Qwen2.5-VL: time positions grow by `tokens_per_second`, in float32 as in transformers."""
    step = whole(config, "temporal_patch_size", 2)
    num = _num_frames(config, duration_s, multiple=step)
    tokens = _qwen2_tokens(config, height_px, width_px)
    step_positions = np.float32(whole(config, "tokens_per_second", 4)) * np.float32(step * duration_s / num)
    times = (np.arange(num // step, dtype=np.float32) * step_positions).astype(int).tolist()
    return Video(tuple(Frame(tokens, time_positions) for time_positions in enumerate(times)))


def qwen3(config: Config, height_px: int, width_px: int, duration_s: float) -> Video:
    """A video in Qwen3-VL: every step is a separate video, between two marks and after its time as text.

    The marks around the first step are the prompt's own.

    Source: `replace_video_token` of transformers' `Qwen3VLProcessor`, as Qwen's tokenizer cuts a number into
    digits.
    Differs: frames are evenly spaced from the beginning to the end.
    """
    step = whole(config, "temporal_patch_size", 2)
    num = _num_frames(config, duration_s, multiple=1)
    patch, merge = whole(config, "patch_size", PATCH_PX_3), whole(config, "spatial_merge_size", 2)
    least, most = _limits(config, *VIDEO_PIXELS_3)
    sides = qwen3_frame_px(
        num, height_px, width_px, multiple_px=patch * merge, min_pixels=least, max_pixels=most
    )
    tokens = _tokens(sides, patch, merge)
    frame_s = [duration_s * min(index, num - 1) / max(num - 1, 1) for index in range(-(-num // step) * step)]
    frames = []
    for first in range(0, len(frame_s), step):
        stamp = f"{(frame_s[first] + frame_s[first + step - 1]) / 2:.1f}"
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
    least, most = _limits(config, *FRAME_PIXELS)
    sides = qwen2_vl_resize(height_px, width_px, multiple_px=patch * merge, min_pixels=least, max_pixels=most)
    return _tokens(sides, patch, merge)


def _limits(config: Config, least: int, most: int) -> tuple[int, int]:
    least, most = whole(config, "video_min_pixels", least), whole(config, "video_max_pixels", most)
    if least > most:
        raise ValueError(f"video_min_pixels must be <= video_max_pixels {most}, got {least}; nearest: {most}")
    return least, most


def _tokens(sides: tuple[int, int], patch: int, merge: int) -> ItemTokens:
    """Tokens of a step whose frames have sides (height, width)."""
    patches = (sides[0] // patch) * (sides[1] // patch)
    return ItemTokens(patches, patches // merge**2)
