"""Images of a data folder before every encoder of the composites: counted, shaped, run as in transformers."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD
from transformers.models.internvl import InternVLForConditionalGeneration
from transformers.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from experiments.doors.whole_configs import CONFIGS
from experiments.doors.whole_models import TILED, modules_of, whole_model
from runtime.data.dataset import FolderSource, samples_of
from runtime.data.records import BOS, EOS, PLACEHOLDER_TOKEN, VOCAB_SIZE
from runtime.emulation.emulate import emulate
from runtime.models.choose import adapter_of
from runtime.preprocess.source import rule_of, source_of
from runtime.run_settings import RunSettings
from tests.encoder_cases import widen_vision_rotations
from tests.examples import examples
from tests.plans import disjoint_plan
from workbench.data.corpus import ItemTokens, qwen2_vl_resize
from workbench.model.composites.composite import LLM, VISION
from workbench.model.composites.registry import take_apart
from workbench.model.item_tokens import image_tokens, native_tokens, patch_grid, takes_any_size
from workbench.model.model_graph import ModelGraph, connect
from workbench.model.processor_config import parts_with_processor
from workbench.plan.lower import lower
from workbench.plan.plan import Plan, Precision
from workbench.plan.runnable_items import check_segment

SIZES = ((60, 90), (224, 41), (29, 120), (70, 70))  # (height, width) in px
CROSS_ATTENTION = "mllama"
SEEN = [
    name
    for name, config in CONFIGS.items()
    if not name.startswith((*TILED, CROSS_ATTENTION)) and VISION in take_apart(config).modules
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("images")
    rows = []
    for index, (height, width) in enumerate(SIZES):
        pixels = np.random.default_rng(index).integers(0, 256, (height, width, 3), np.uint8)
        Image.fromarray(pixels).save(target / f"{index}.png")
        rows.append({"id": index, "segments": [{"image": f"{index}.png"}, {"text": f"image {index}"}]})
    (target / "data.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return target


def with_bytes(config: dict[str, Any]) -> dict[str, Any]:
    """The composite with a vocabulary for bytes."""
    return config | {"text_config": config.get("text_config", {}) | {"vocab_size": VOCAB_SIZE}}


def graph(config: dict[str, Any], processor: Mapping[str, Any] = MappingProxyType({})) -> ModelGraph:
    modules = modules_of(dict(parts_with_processor(take_apart(config), processor).modules))
    return connect("images", [modules[VISION], modules[LLM]])


@pytest.mark.parametrize("name", SEEN)
def test_images_have_the_tokens_that_a_job_gives_them(name: str, folder: Path) -> None:
    """And the encoder reads them in that shape."""
    model, source = graph(CONFIGS[name]), FolderSource(folder)
    module = model.module(VISION)
    adapter = adapter_of(module)
    for sample, size_px in zip(samples_of(folder, model), SIZES, strict=True):
        (segment,) = sample.of(VISION)
        expected = image_tokens(module, *size_px) if takes_any_size(module) else native_tokens(module)
        assert (segment.tokens_in, segment.tokens_out) == expected
        check_segment(module, segment)
        shape = adapter.raw_shape(segment)
        assert source.raw(sample.id, segment, shape).shape == shape


@given(height=st.integers(1, 3000), width=st.integers(1, 3000), merged=st.sampled_from([1, 2, 3]))
@examples(400)
def test_the_grid_of_patches_is_the_processors(height: int, width: int, merged: int) -> None:
    patch = 14
    if max(height, width) > 200 * min(height, width):
        return
    sides = qwen2_vl_resize(height, width, multiple_px=patch * merged)
    rows, columns = (px // patch for px in sides)
    tokens = ItemTokens(rows * columns, rows * columns // merged**2)
    assert patch_grid(tokens, height, width) == (rows, columns)


def plan_of(model: ModelGraph, folder: Path) -> Plan:
    cuts = {module.name: (2, len(module.layers) - 2) for module in model.modules}
    return disjoint_plan(model, samples_of(folder, model), cuts)


OF_CLIP = {"image_mean": OPENAI_CLIP_MEAN, "image_std": OPENAI_CLIP_STD}  # Qwen2.5-VL's own
HALVES = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}  # [-1, 1]


@pytest.mark.parametrize(
    ("name", "said", "processor"),
    [("qwen2_5_vl", {}, HALVES), ("internvl", {}, HALVES), ("qwen2_5_vl", OF_CLIP, OF_CLIP)],
    ids=["qwen2_5_vl", "internvl", "scaled as CLIP"],
)
def test_the_first_loss_is_transformers_with_its_processor(
    name: str,
    said: dict[str, Any],
    processor: dict[str, Any],
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In float64; the processor resizes bilinearly, and scales pixels as the job says, or else to [-1, 1]."""
    widen_vision_rotations(monkeypatch)
    config = with_bytes(CONFIGS[name]) | {"image_token_id": PLACEHOLDER_TOKEN}
    torch.manual_seed(1)
    theirs = whole_model(config)
    theirs.save_pretrained(tmp_path)
    plan = plan_of(graph(config, said), folder)
    how = RunSettings(steps=1, warmup=0, weights=tmp_path, precision=Precision.FLOAT64)
    ours = emulate(lower(plan), how, source=source_of(str(folder), None, plan, timeout_s=1.0)).losses[0]
    images = [Image.open(folder / f"{index}.png") for index in range(len(SIZES))]
    losses = [_losses(theirs, image, index, processor) for index, image in enumerate(images)]
    assert ours == pytest.approx(float(torch.cat(losses).mean()), rel=1e-6)


def _losses(model: Any, image: Image.Image, index: int, scale: dict[str, Any]) -> torch.Tensor:
    """Losses of the tokens of a sample's text, of which there is one segment behind the image."""
    text = [BOS, *f"image {index}".encode(), EOS]
    inputs: dict[str, torch.Tensor] = {}
    if isinstance(model, Qwen2_5_VLForConditionalGeneration):
        vision = model.config.vision_config
        processor = Qwen2VLImageProcessorPil(
            resample=Image.Resampling.BILINEAR,
            **scale,
            patch_size=vision.patch_size,
            merge_size=vision.spatial_merge_size,
            temporal_patch_size=vision.temporal_patch_size,
        )
        made = processor(image, return_tensors="pt")
        inputs = {"pixel_values": made["pixel_values"].double(), "image_grid_thw": made["image_grid_thw"]}
        num = int(made["image_grid_thw"].prod()) // vision.spatial_merge_size**2
    else:
        assert isinstance(model, InternVLForConditionalGeneration)
        side = model.config.vision_config.image_size
        resized = np.array(image.resize((side[1], side[0]), Image.Resampling.BILINEAR))
        inputs = {"pixel_values": torch.from_numpy(resized / 127.5 - 1.0).permute(2, 0, 1)[None]}
        num = int((side[0] // 4 * model.config.downsample_ratio) ** 2)
    ids = torch.tensor([PLACEHOLDER_TOKEN] * num + text)
    if isinstance(model, Qwen2_5_VLForConditionalGeneration):
        inputs["mm_token_type_ids"] = (ids == PLACEHOLDER_TOKEN).int()[None]
    with torch.no_grad():
        logits = model(input_ids=ids[None], **inputs).logits[0]
    return torch.nn.functional.cross_entropy(logits[num - 1 : -1], ids[num:], reduction="none")


def test_a_server_refuses_images_of_any_size(folder: Path) -> None:
    plan = plan_of(graph(with_bytes(CONFIGS["qwen2_5_vl"])), folder)
    words = (
        "'vision' takes images of any size, and a preprocessing server makes them of one; want --data FOLDER"
    )
    with pytest.raises(ValueError, match=words):
        rule_of(plan.model)
    with pytest.raises(ValueError, match=words):
        source_of("tcp://127.0.0.1:9", None, plan, timeout_s=1.0)


def test_a_server_prepares_images_whose_config_has_two_sides() -> None:
    """InternVL's `image_size` and `patch_size` are lists."""
    rule = rule_of(graph(CONFIGS["internvl"]))
    assert (rule.image_px, rule.patch_px) == (16, 4)


def test_an_image_that_the_rule_does_not_resize_is_named(tmp_path: Path) -> None:
    Image.new("RGB", (500, 2)).save(tmp_path / "line.png")
    row = {"id": 0, "segments": [{"image": "line.png"}, {"text": "x"}]}
    (tmp_path / "data.jsonl").write_text(f"{json.dumps(row)}\n")
    with pytest.raises(ValueError, match=r"image .*line\.png: image of 2 x 500 px: sides must be"):
        samples_of(tmp_path, graph(CONFIGS["qwen2_5_vl"]))


def test_an_encoder_that_no_folder_feeds_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"has image segments: want one encoder .* 'images', got none"):
        samples_of(folder, graph(CONFIGS[CROSS_ATTENTION]))
