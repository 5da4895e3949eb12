"""Tokens of images and clips of odd sizes, held against transformers' own processors and models."""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    Phi4MultimodalAudioConfig,
    Phi4MultimodalAudioModel,
    WhisperFeatureExtractor,
)
from transformers.models.glm4v import image_processing_pil_glm4v as glm4v
from transformers.models.glm46v.image_processing_pil_glm46v import Glm46VImageProcessorPil
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniAudioEncoder
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import _get_feat_extract_output_lengths

from tests.command_line import accept, workbench
from tests.test_composites import CONFIGS
from workbench.data.corpus import whisper_tokens
from workbench.job.draft import Train, draft, machines_of
from workbench.job.drafted_batch import WantedBatch
from workbench.job.job import Job, load_job
from workbench.model.composites.registry import take_apart
from workbench.model.hf_config import module_from_config
from workbench.model.item_tokens import clip_tokens, image_tokens
from workbench.model.model_graph import Module

RATE = 16_000
QWEN_2, QWEN_3 = {"min_pixels": 3136, "max_pixels": 12_845_056}, {"min_pixels": 65_536, "max_pixels": 2**24}
EDGES = {"shortest_edge": QWEN_3["min_pixels"], "longest_edge": QWEN_3["max_pixels"]}
SIDES = st.integers(1, 6000) | st.sampled_from([1, 13, 14, 27, 28, 29, 55, 56, 57, 255, 256, 257, 3584, 4096])


def encoder(model_type: str, more: Mapping[str, Any], modality: str = "vision") -> Module:
    return module_from_config(
        {"model_type": model_type, **more}, name=modality, modality=modality, llm_width=64
    )


@cache
def qwen(model_type: str, patch_px: int, limits: tuple[tuple[str, int], ...]) -> Module:
    wide = {"hidden_size": 64, "out_hidden_size": 64, "embed_dim": 64, "num_heads": 8, "depth": 1}
    more = {"deepstack_visual_indexes": [], "patch_size": patch_px, **dict(limits)}
    return encoder(model_type, wide | more)


QWENS = [
    *(("qwen2_vl_vision", 14), ("qwen2_5_vl_vision", 14), ("exaone4_5_vision", 14)),
    *(("qwen3_vl_vision", 16), ("qwen3_5_vision", 16)),
]


@given(kind=st.sampled_from(QWENS), limits=st.sampled_from([{}, QWEN_2, QWEN_3]), height=SIDES, width=SIDES)
def test_limits_of_a_processor_bound_an_image(
    kind: tuple[str, int], limits: dict[str, int], height: int, width: int
) -> None:
    module = qwen(*kind, tuple(limits.items()))
    if max(height, width) > 200 * min(height, width):
        with pytest.raises(ValueError, match="differ by at most 200 times"):
            image_tokens(module, height, width)
        return
    high, wide = smart_resize(height, width, factor=2 * kind[1], **limits)
    patches = high * wide // kind[1] ** 2
    assert image_tokens(module, height, width) == (patches, patches // 4)


@cache
def glm(patch_px: int, limits: tuple[tuple[str, int], ...]) -> Module:
    wide = {"hidden_size": 64, "out_hidden_size": 64, "num_heads": 4, "depth": 1, "patch_size": patch_px}
    return encoder("glm4v_vision", wide | dict(limits))


@given(
    patch=st.sampled_from([14, 16]),
    limits=st.sampled_from([{}, QWEN_2, {"min_pixels": 12_544, "max_pixels": 9_633_792}]),
    height=SIDES,
    width=SIDES,
)
def test_glm_grows_narrow_images_and_counts_the_pixels_of_two_frames(
    patch: int, limits: dict[str, int], height: int, width: int
) -> None:
    limited = limits or {"min_pixels": 112 * 112, "max_pixels": 28 * 28 * 15_000}
    module = glm(patch, tuple(limits.items()))
    try:
        high, wide = glm4v.smart_resize(2, height, width, factor=2 * patch, **limited)
    except ValueError:
        with pytest.raises(ValueError, match="differ by at most 200 times"):
            image_tokens(module, height, width)
        return
    patches = high * wide // patch**2
    assert image_tokens(module, height, width) == (patches, patches // 4)


@pytest.mark.parametrize("name", ["glm4v", "glm4v_moe", "glm46v"])
@pytest.mark.parametrize(("height", "width"), [(30, 40), (5, 1000), (1080, 1920), (2400, 3200)])
def test_the_processor_of_a_glm_checkpoint_is_read(
    tmp_path: Path, name: str, height: int, width: int
) -> None:
    size = {"shortest_edge": 1000, "longest_edge": 2_000_000}
    job = init(tmp_path, name, {"size": size}, "--image", f"{width}x{height}")
    image = job.batch[0].of("vision")[0]
    theirs = Glm46VImageProcessorPil(patch_size=CONFIGS[name]["vision_config"]["patch_size"], size=size)
    (grid,) = theirs(images=Image.new("RGB", (width, height)), return_tensors="np")["image_grid_thw"]
    assert (image.tokens_in, image.tokens_out) == (grid.prod(), grid.prod() // 4)
    assert "max_pixels: 2000000" in (tmp_path / "job.yaml").read_text()


@pytest.mark.parametrize("size", [{"size": EDGES}, QWEN_3])
@pytest.mark.parametrize(("height", "width"), [(30, 40), (1080, 1920), (700, 33), (2400, 3200)])
def test_a_checkpoints_processor_is_read(
    tmp_path: Path, size: dict[str, Any], height: int, width: int
) -> None:
    """Of both spellings, by `init` and by a job that names the file."""
    job = init(tmp_path, "qwen3_vl", size, "--image", f"{width}x{height}")
    seen = job.batch[0].of("vision")[0]
    patch = CONFIGS["qwen3_vl"]["vision_config"]["patch_size"]
    theirs = Qwen2VLImageProcessorPil(patch_size=patch, **size)
    (grid,) = theirs(images=Image.new("RGB", (width, height)), return_tensors="np")["image_grid_thw"]
    assert seen.tokens_in == grid.prod()
    named = f"""
name: named
model:
  modules:
    vision: {{config: config.json, modality: vision}}
    llm: {{config: config.json, modality: text}}
cluster: {{device: H100, nodes: 1, ranks_per_node: 4}}
batch: {{samples: 4, fixed: {{text_tokens: 9, items: {{vision: {{images: [[{height}, {width}]]}}}}}}}}
profile: H100
"""
    (tmp_path / "named.yaml").write_text(named)
    assert load_job(tmp_path / "named.yaml").batch[0].of("vision")[0].tokens_in == grid.prod()


def init(folder: Path, name: str, processor: dict[str, Any] | None, *more: str) -> Job:
    (folder / "config.json").write_text(json.dumps(CONFIGS[name]))
    if processor is not None:
        (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    accept("init", str(folder), "--gpus", "4xH100", "-o", str(folder / "job.yaml"), *more)
    return load_job(folder / "job.yaml")


def test_a_job_says_what_is_taken_where_no_processor_says_it(tmp_path: Path) -> None:
    init(tmp_path, "qwen2_vl", None)
    assert "# vision: images are brought to 3136 to 1003520 pixels" in (tmp_path / "job.yaml").read_text()
    init(tmp_path, "qwen2_vl", QWEN_2)
    text = (tmp_path / "job.yaml").read_text()
    assert "images are brought to" not in text
    assert "max_pixels: 12845056" in text


def test_newer_checkpoints_hold_processors_in_one_file(tmp_path: Path) -> None:
    said = {"image_processor": {"size": EDGES}, "feature_extractor": {"chunk_length": 90}}
    (tmp_path / "processor_config.json").write_text(json.dumps(said))
    init(tmp_path, "qwen2_5_omni_thinker", None)
    text = (tmp_path / "job.yaml").read_text()
    assert "max_pixels: 16777216" in text
    assert "chunk_length: 90" in text


@pytest.mark.parametrize(("text", "words"), [("[]", "want a JSON object, got list"), ("{", "not JSON")])
def test_a_bad_processor_file_is_named(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["qwen2_vl"]))
    (tmp_path / "preprocessor_config.json").write_text(text)
    done = workbench("init", str(tmp_path), "--gpus", "4xH100", "-o", str(tmp_path / "job.yaml"))
    assert done.exit_code == 2
    assert words in done.output.replace("\n", " ")


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"max_pixels": "many"}, "max_pixels must be a whole number >= 1"),
        ({"max_pixels": 100}, "min_pixels must be <= max_pixels 100, got 3136; nearest: 100"),
    ],
)
def test_bad_limits_are_named(limits: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        image_tokens(qwen("qwen2_vl_vision", 14, tuple(limits.items())), 100, 100)


def test_pixtral_shrinks_to_what_its_processor_says() -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1, "image_size": 1540}
    module = encoder("pixtral", sizes | {"patch_size": 14, "longest_edge": 700})
    assert image_tokens(module, 1400, 2800) == (25 * 50, 25 * 50)


def test_a_tower_of_any_size_without_a_rule_says_so() -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1, "is_native": True}
    with pytest.raises(ValueError, match="no rule says how many tokens one makes; give its 'tokens'"):
        image_tokens(encoder("aimv2_vision_model", sizes), 100, 100)


WHISPER = {"d_model": 64, "encoder_attention_heads": 4, "encoder_layers": 1, "encoder_ffn_dim": 64}


@pytest.mark.parametrize("window", [1, 9, 100, 1500])
@pytest.mark.parametrize("num", [1, 3, 7, 33])
@pytest.mark.parametrize(("more", "windows"), [(-1, 0), (0, 0), (1, 1)])
def test_a_window_ends_at_a_sample(window: int, num: int, more: int, windows: int) -> None:
    """A clip of 0.54 s is three windows of nine tokens, 0.18 s each, though 0.54 / 0.18 rounds up."""
    duration_s = (320 * window * num + more) / RATE
    assert len(whisper_tokens(duration_s, window_tokens=window)) == num + windows


@pytest.mark.parametrize(
    "samples", [321, 800, 31_999, 32_000, 32_001, 32_321, 4_799_999, 4_800_001, 9_600_000]
)
def test_omni_hears_as_long_as_its_extractor(samples: int) -> None:
    """What is longer than 300 s is cut off, as in the released checkpoints."""
    heard = WhisperFeatureExtractor(feature_size=8, chunk_length=300)(
        np.zeros(samples, np.float32), sampling_rate=RATE, return_attention_mask=True, padding="max_length"
    )
    _, expected = Qwen2_5OmniAudioEncoder._get_feat_extract_output_lengths(
        None, torch.tensor(int(heard["attention_mask"].sum()))
    )
    module = encoder("qwen2_5_omni_audio_encoder", WHISPER, "audio")
    assert sum(item.tokens_out for item in clip_tokens(module, samples / RATE)) == expected


@pytest.mark.parametrize("samples", [480, 799, 16_000, 16_159, 16_160, 127_999, 128_000, 128_160, 480_000])
def test_qwen3_omni_hears_as_long_as_its_extractor(samples: int) -> None:
    """A clip by itself, in windows of eight chunks of a second."""
    heard = WhisperFeatureExtractor(feature_size=8)(
        np.zeros(samples, np.float32),
        sampling_rate=RATE,
        return_attention_mask=True,
        padding=True,
        truncation=False,
    )
    expected = _get_feat_extract_output_lengths(torch.tensor(int(heard["attention_mask"].sum())))
    module = encoder("qwen3_omni_moe_audio_encoder", {"encoder_layers": 1}, "audio")
    items = clip_tokens(module, samples / RATE)
    assert sum(item.tokens_out for item in items) == expected
    assert [item.tokens_out for item in items[:-1]] == [104] * (len(items) - 1)


def test_a_clip_without_a_whole_mel_frame_is_refused() -> None:
    module = encoder("qwen3_omni_moe_audio_encoder", {"encoder_layers": 1}, "audio")
    with pytest.raises(ValueError, match=r"want a duration of at least 0\.01 s, got 0\.005 s"):
        clip_tokens(module, 0.005)


PHI_4 = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_blocks": 1,
    "num_attention_heads": 2,
    "nemo_conv_channels": 4,
    "ext_pw_out_channel": 32,
    "depthwise_separable_out_channel": 32,
    "bias_max_distance": 8,
}


@pytest.mark.parametrize("samples", [400, 639_999, 640_240, 640_400, 720_000, 1_280_400, 1_281_680])
def test_phi_4_attends_inside_windows(samples: int) -> None:
    """As many items as sequences reach a block of transformers' model."""
    frames = (samples - 400) // 160 + 1
    shapes: list[torch.Size] = []
    config = Phi4MultimodalAudioConfig(**PHI_4)
    model = Phi4MultimodalAudioModel(config).eval()
    model.encoders[0].register_forward_hook(lambda module, given, out: shapes.append(given[0].shape))
    with torch.no_grad():
        heard = model(torch.zeros(1, frames, config.input_size), mask=None)
    items = clip_tokens(encoder("phi4_multimodal_audio", PHI_4, "audio"), samples / RATE)
    assert len(items) == shapes[0][0]
    assert max(item.tokens_in for item in items) <= shapes[0][1]
    assert sum(item.tokens_out for item in items) == heard.shape[1]


@pytest.mark.parametrize("name", ["qwen2_5_omni_thinker", "voxtral", "qwen2_audio"])
def test_a_batch_like_long_clips_has_all_their_windows(name: str, tmp_path: Path) -> None:
    data, seconds = tmp_path / "sizes.jsonl", (59.5, 70.5)
    data.write_text("\n".join(json.dumps({"text_tokens": 8, "audio_seconds": each}) for each in seconds * 8))
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    made = draft(
        str(tmp_path),
        machines_of("4xH100", None),
        train=Train.ALL,
        wanted=WantedBatch(data=data),
        folder=tmp_path,
    )
    (tmp_path / "job.yaml").write_text(made.text)
    batch = load_job(tmp_path / "job.yaml").batch
    windows = [clip_tokens(made.model.module("audio"), each) for each in seconds]
    assert (len(windows[0]) > 1) == (name != "qwen2_audio")
    assert [len(sample.of("audio")) for sample in batch[:2]] == list(map(len, windows))


@pytest.mark.parametrize("strategy", ["default", "full"])
@pytest.mark.parametrize("kind", ["clip_vision_model", "siglip_vision_model"])
def test_what_llava_drops_behind_an_encoder_is_its_class_token(kind: str, strategy: str) -> None:
    """Where transformers drops a patch, or lets the class token go on, the composite is refused."""
    seen = {**CONFIGS["llava"]["vision_config"], "model_type": kind, "vision_use_head": False}
    config = {**CONFIGS["llava"], "vision_config": seen, "vision_feature_select_strategy": strategy}
    made: Any = AutoModelForImageTextToText.from_config(AutoConfig.for_model(**config))
    side = seen["image_size"]
    with torch.no_grad():
        found = made.model.get_image_features(torch.zeros(1, 3, side, side)).pooler_output[0]
    if len(found) != (side // seen["patch_size"]) ** 2:
        with pytest.raises(ValueError, match=f"vision_feature_select_strategy must be .* behind {kind}, got"):
            take_apart(config)
        return
    assert take_apart(config)


TWO_IMAGES = """
name: two
model:
  modules:
    vision: {config: {model_type: siglip_vision_model, image_size: 16, patch_size: 4, hidden_size: 24,
      num_attention_heads: 2, intermediate_size: 40, num_hidden_layers: 2, image_newline: true, SAID}}
    llm: {config: {model_type: llama, hidden_size: 48, intermediate_size: 80, num_hidden_layers: 2,
      num_attention_heads: 4, vocab_size: 96}}
cluster: {device: H100, nodes: 1, ranks_per_node: 2}
batch: {samples: 2, fixed: {text_tokens: 9, items: {vision: {each: EACH, images: [[32, 32]]}}}}
profile: H100
"""


@pytest.mark.parametrize(
    ("said", "each", "tokens"),
    [
        ("vision_aspect_ratio: anyres_max_9", 1, [(80, 88)]),
        ("vision_aspect_ratio: anyres_max_9", 2, [(16, 17)] * 2),
        ("hidden_act: gelu", 2, [(80, 88)] * 2),
    ],
    ids=["onevision", "onevision, two", "next, two"],
)
def test_images_in_tiles_that_share_a_sample_are_a_tile_each_where_their_model_says_so(
    said: str, each: int, tokens: list[tuple[int, int]], tmp_path: Path
) -> None:
    (tmp_path / "job.yaml").write_text(TWO_IMAGES.replace("SAID", said).replace("EACH", str(each)))
    for sample in load_job(tmp_path / "job.yaml").batch:
        assert [(part.tokens_in, part.tokens_out) for part in sample.of("vision")] == tokens
