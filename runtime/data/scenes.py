"""A small synthetic data set: drawings, beeps, and sentences that describe them."""

import json
import math
import random
import shutil
import wave
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from runtime.data.mel import SAMPLE_HZ
from runtime.data.records import INDEX
from workbench.whole_file import naming

MOST_SAMPLES = 1_000_000
IMAGE_PX = 64
COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 170, 60),
    "blue": (50, 80, 220),
    "yellow": (235, 205, 40),
    "white": (245, 245, 245),
}
SHAPES = ("circle", "square", "triangle")
TONES_HZ = {"low": 220.0, "middle": 660.0, "high": 1760.0}
NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


@dataclass(frozen=True, slots=True)
class Made:
    """Number of samples, images and clips that `make` wrote."""

    num_samples: int
    num_images: int
    num_clips: int


def make(folder: Path, *, num_samples: int, seed: int, kinds: tuple[str, ...] = ("image", "audio")) -> Made:
    """Write a folder of `num_samples` examples, atomically.

    An example has up to two drawings and up to one clip, in this order between its texts; some
    have neither. Each depends only on (seed, its number, kinds).

    Args:
        folder: a new folder, for `data.jsonl`, `images/*.png`, `audio/*.wav`.
        num_samples: >= 1.
        seed: of all random choices.
        kinds: which of "image" and "audio" may appear.

    Raises:
        ValueError: the folder exists, or an invalid count or kind.
        OSError: it cannot be written; names a file or the folder.
    """
    if folder.exists():
        raise ValueError(f"data folder {folder} exists already; give a new one")
    if not 1 <= num_samples <= MOST_SAMPLES:
        raise ValueError(f"data set: want 1 to {MOST_SAMPLES:,} samples, got {num_samples}")
    unknown = [kind for kind in kinds if kind not in ("image", "audio")]
    if unknown:
        raise ValueError(f"data set: kinds are image and audio, got {unknown[0]!r}")
    part = folder.with_name(folder.name + ".part")
    if part.exists():
        shutil.rmtree(part)
    try:
        with naming(folder):
            (part / "images").mkdir(parents=True)
            (part / "audio").mkdir()
            records = [_example(part, number, seed, kinds) for number in range(num_samples)]
            lines = [json.dumps(record) for record in records]
            (part / INDEX).write_text("\n".join(lines) + "\n", encoding="utf-8")
            part.rename(folder)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    segments = [segment for record in records for segment in record["segments"]]
    return Made(num_samples, *(sum(kind in segment for segment in segments) for kind in ("image", "audio")))


def _example(folder: Path, number: int, seed: int, kinds: tuple[str, ...]) -> dict[str, Any]:
    rng = random.Random(f"{seed}/{number}/{'+'.join(kinds)}")
    num_images = rng.choice((0, 1, 1, 2)) if "image" in kinds else 0
    has_clip = "audio" in kinds and rng.random() < 0.5
    segments: list[dict[str, str]] = []
    descriptions: list[str] = []
    for k in range(num_images):
        colour, shape = rng.choice(list(COLOURS)), rng.choice(SHAPES)
        path = f"images/{number:05d}-{k}.png"
        _draw(rng, colour, shape).save(folder / path)
        segments += [{"text": "Look: "}, {"image": path}]
        descriptions.append(f"a {colour} {shape}")
    if has_clip:
        count, tone = rng.randint(1, 3), rng.choice(list(TONES_HZ))
        path = f"audio/{number:05d}-0.wav"
        _write_wave(folder / path, _beeps(rng, count, TONES_HZ[tone]))
        segments += [{"text": "Hear: "}, {"audio": path}]
        descriptions.append(f"{NUMBERS[count - 1]} {tone} beep{'s' if count > 1 else ''}")
    if descriptions:
        segments.append({"text": f"There is {' and '.join(descriptions)}."})
    else:
        first, second = rng.randint(1, 5), rng.randint(1, 5)
        total = NUMBERS[first + second - 1]
        segments.append({"text": f"{NUMBERS[first - 1]} and {NUMBERS[second - 1]} make {total}."})
    return {"id": number, "segments": segments}


def _draw(rng: random.Random, colour: str, shape: str) -> Image.Image:
    dark = tuple(rng.randint(0, 60) for _ in range(3))
    image = Image.new("RGB", (IMAGE_PX, IMAGE_PX), dark)
    size = rng.randint(IMAGE_PX // 4, IMAGE_PX // 2)
    left, top = rng.randint(0, IMAGE_PX - size), rng.randint(0, IMAGE_PX - size)
    right, bottom = left + size - 1, top + size - 1
    pen = ImageDraw.Draw(image)
    if shape == "circle":
        pen.ellipse((left, top, right, bottom), fill=COLOURS[colour])
    elif shape == "square":
        pen.rectangle((left, top, right, bottom), fill=COLOURS[colour])
    else:
        pen.polygon(((left, bottom), (right, bottom), ((left + right) / 2, top)), fill=COLOURS[colour])
    return image


def _beeps(rng: random.Random, count: int, frequency_hz: float) -> list[float]:
    """`count` short tones with pauses, in [-1, 1]."""
    frequency_hz *= rng.uniform(0.95, 1.05)
    tone, pause = SAMPLE_HZ * 15 // 100, SAMPLE_HZ * rng.randint(8, 14) // 100
    one = [
        0.5 * math.sin(math.pi * i / tone) * math.sin(2 * math.pi * frequency_hz * i / SAMPLE_HZ)
        for i in range(tone)
    ]
    silence = [0.0] * pause
    return [*silence, *(value for _ in range(count) for value in (*one, *silence))]


def _write_wave(path: Path, values: list[float]) -> None:
    samples = array("h", (round(value * 32767) for value in values))
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(SAMPLE_HZ)
        file.writeframes(samples.tobytes())
