"""Data folders: their index, images and clips; and key files of the preprocessing server."""

import json
import wave
from collections.abc import Callable, Sequence
from functools import partial
from io import BytesIO
from pathlib import Path

import torch
from PIL import Image

from experiments.fuzz.target import Ready, Target, naming
from experiments.fuzz.targets.writing import CORPUS, JSON, JSON_LINES, Form, folder_in, reading
from runtime.data.dataset import FolderSource, read_image, read_wave, with_data
from runtime.data.records import INDEX, Record, read_records
from runtime.data.scenes import make
from runtime.preprocess.images import QwenRule, SquareRule, preprocess_image
from runtime.preprocess.keys import PRIVATE, read_client_keys, read_server_keys, write_keys
from workbench.data.sample import Segment
from workbench.job.job import load_job

NUM_SAMPLES = 4
SQUARE = SquareRule(image_px=32, patch_px=8)
NATIVE = QwenRule(patch_px=4, merge_side=2, min_pixels=64, max_pixels=4096)


def _index(folder: Path) -> Ready:
    data_folder = folder / "data"
    make(data_folder, num_samples=NUM_SAMPLES, seed=0)
    job = load_job(CORPUS / "job.yaml")

    def read(path: Path) -> tuple[Sequence[Record], FolderSource]:
        records = read_records(path.parent)
        with_data(job, data_folder)
        return records, FolderSource(data_folder)

    def use(opened: tuple[Sequence[Record], FolderSource]) -> None:
        records, source = opened
        for record in records[:NUM_SAMPLES]:
            with naming(data_folder.name):
                source.token_ids(record.id, Segment("text", 0, 1, 1), 259)
                if record.of("image"):
                    source.raw(record.id, Segment("vision", 0, 1, 1), (3, 32, 32))

    seeds = [JSON_LINES.parse((data_folder / INDEX).read_bytes())]
    return reading(JSON_LINES, data_folder / INDEX, seeds, read, use, called=data_folder.name)


def _image_bytes(form: str, size: tuple[int, int], mode: str = "RGB") -> bytes:
    sink = BytesIO()
    Image.radial_gradient("L").resize(size).convert(mode).save(sink, form)
    return sink.getvalue()


def _image(form: str, folder: Path) -> Ready:
    modes = ("RGB", "L") if form == "JPEG" else ("RGB", "L", "RGBA", "P", "1")
    sizes = ((40, 24), (7, 90))

    def read(path: Path) -> None:
        for rule in (SQUARE, NATIVE):
            preprocess_image(path, rule)
        read_image(path, (3, 16, 16))

    seeds = [_image_bytes(form, size, mode) for size in sizes for mode in modes]
    return reading(
        Form(None, lambda content: Image.open(BytesIO(content))), folder / "image.bin", seeds, read
    )


def _clip(folder: Path) -> Ready:
    data_folder = folder / "data"
    make(data_folder, num_samples=NUM_SAMPLES, seed=0, kinds=("audio",))
    seeds = [clip.read_bytes()[:2000] for clip in sorted(data_folder.rglob("*.wav"))]
    form = Form(None, lambda content: wave.open(BytesIO(content)))  # noqa: SIM115  (in memory)
    return reading(form, folder / "clip.wav", seeds, read_wave, lambda parsed: torch.set_num_threads(1))


def _keys(name: str, folder: Path) -> Ready:
    good = folder_in(folder, "good")
    write_keys(good)
    path = folder / name
    path.touch(mode=PRIVATE)

    read: Callable[[Path], object] = read_server_keys if name == "server.json" else read_client_keys
    return reading(JSON, path, [json.loads((good / name).read_bytes())], read)


TARGETS = (
    Target(name="data-index", make=_index, readers=("runtime.data.records:read_records",)),
    Target(
        name="image-png",
        make=partial(_image, "PNG"),
        readers=("runtime.preprocess.images:read_pixels", "runtime.data.dataset:opened_image"),
    ),
    Target(
        name="image-jpeg", make=partial(_image, "JPEG"), readers=("runtime.preprocess.images:read_pixels",)
    ),
    Target(name="clip", make=_clip, readers=("runtime.data.dataset:_open_wave",)),
    Target(
        name="keys-server", make=partial(_keys, "server.json"), readers=("runtime.preprocess.keys:_read",)
    ),
    Target(
        name="keys-client", make=partial(_keys, "trainer.json"), readers=("runtime.preprocess.keys:_read",)
    ),
)
