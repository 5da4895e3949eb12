"""How Qwen's processors sample the frames of a video, and how they resize them."""

import math

_STEP = 2  # frames that Qwen3-VL counts together, whatever its configuration states


def sampled_frames(duration_s: float, *, fps: float, least: int, most: int, multiple: int = 1) -> int:
    """Number of frames sampled from a video at `fps` frames per second.

    Source: `sample_frames` of transformers' video processors of Qwen2-VL and, of `multiple` 1, Qwen3-VL.
    Differs: the file has as many frames as requested, and rounding adds none, as it may in transformers.

    Args:
        multiple: to which the number is rounded down.

    Raises:
        ValueError: no duration, no frame rate, or a maximum of frames below the minimum.

    Example:
        >>> sampled_frames(10.7, fps=2.0, least=4, most=768, multiple=2)
        20
    """
    if not 0 < duration_s < math.inf or not 0 < fps < math.inf:
        raise ValueError(f"video: want > 0 s at > 0 frames a second, got {duration_s} s at {fps}")
    if not multiple <= least <= most:
        raise ValueError(f"video: want {multiple} <= least frames <= most frames, got {least} and {most}")
    wanted = min(max(math.floor(duration_s * fps), least), most)
    return wanted // multiple * multiple


def qwen3_frame_px(
    num_frames: int, height_px: int, width_px: int, *, multiple_px: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """(height, width) of every frame in Qwen3-VL: multiples of `multiple_px` with a total area within limits.

    Source: `smart_resize` of transformers' video processor of Qwen3-VL.

    Raises:
        ValueError: a side below 1 px, or sides that differ by more than 200 times.

    Example:
        >>> qwen3_frame_px(20, 720, 1280, multiple_px=32, min_pixels=131_072, max_pixels=786_432)
        (128, 256)
    """
    if 1 <= min(height_px, width_px) < multiple_px:
        grow = max(multiple_px / height_px, multiple_px / width_px)
        height_px, width_px = int(height_px * grow), int(width_px * grow)
    if min(height_px, width_px) < 1 or max(height_px, width_px) > 200 * min(height_px, width_px):
        raise ValueError(
            f"video of {height_px} x {width_px} px: sides must be >= 1 and differ by at most 200 times"
        )
    height, width = (round(side / multiple_px) * multiple_px for side in (height_px, width_px))
    pixels, counted_frames = num_frames * height_px * width_px, round(num_frames / _STEP) * _STEP
    if counted_frames * height * width > max_pixels:
        shrink = math.sqrt(pixels / max_pixels)
        height, width = (
            max(multiple_px, math.floor(side / shrink / multiple_px) * multiple_px)
            for side in (height_px, width_px)
        )
    elif counted_frames * height * width < min_pixels:
        grow = math.sqrt(min_pixels / pixels)
        height, width = (math.ceil(side * grow / multiple_px) * multiple_px for side in (height_px, width_px))
    return height, width
