"""Gemma 4 without towers: sizes of images and clips as its processors make them, and refusals."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.gemma4.image_processing_pil_gemma4 import get_aspect_ratio_preserving_size
from transformers.models.gemma4_unified.feature_extraction_gemma4_unified import (
    Gemma4UnifiedAudioFeatureExtractor,
)

from experiments.doors.whole_configs import CONFIGS
from experiments.doors.whole_models import modules_of
from tests.command_line import accept
from tests.test_tilings import SIDES
from workbench.data.corpus import SAMPLES_PER_S
from workbench.data.sample import Segment
from workbench.job.job import load_job
from workbench.model.composites.composite import AUDIO, VISION
from workbench.model.composites.registry import take_apart
from workbench.model.item_tokens import clip_tokens, image_tokens
from workbench.model.model_graph import Module

NAME = "gemma4_unified"
BOTH: dict[str, Any] = {"model_type": NAME, "vision_config": {}, "audio_config": {}}


def part(called: str, **more: Any) -> Module:
    """As in the published model, before a small language model."""
    text = {**CONFIGS[NAME]["text_config"]}
    key = f"{called}_config"
    return modules_of(dict(take_apart({**BOTH, "text_config": text, key: more}).modules))[called]


@given(height=SIDES, width=SIDES, most=st.sampled_from([70, 280, 1120]))
def test_images_are_sized_as_by_its_processor(height: int, width: int, most: int) -> None:
    """Or refused where it does."""
    module = part(VISION, max_soft_tokens=most)
    try:
        high, wide = get_aspect_ratio_preserving_size(height, width, 16, most * 9, 3)
    except ValueError:
        with pytest.raises(ValueError, match="soft tokens"):
            image_tokens(module, height, width)
        return
    num = high // 48 * (wide // 48)
    if num > most:  # its processor would fail at padding
        return
    assert image_tokens(module, height, width) == (num, num)


@given(num_samples=st.integers(1, 200_000) | st.sampled_from([639, 640, 641, 1280]))
def test_a_clip_has_the_tokens_of_its_extractor(num_samples: int) -> None:
    made = Gemma4UnifiedAudioFeatureExtractor()(np.zeros(num_samples, dtype=np.float32))
    num = len(made["input_features"][0])
    assert clip_tokens(part(AUDIO), num_samples / SAMPLES_PER_S) == ((num, num),)


def test_a_module_without_images_or_sound_is_refused() -> None:
    with pytest.raises(ValueError, match="gemma4_unified: vision_config or audio_config must be an object"):
        take_apart({"model_type": NAME})


def test_the_projector_reads_what_the_embedding_gives() -> None:
    config = {**CONFIGS[NAME], "vision_config": {"mm_embed_dim": 24}}
    with pytest.raises(ValueError, match="output_proj_dims must be mm_embed_dim 24, got 3840; nearest: 24"):
        take_apart(config)


def test_embeddings_of_blocks_are_refused() -> None:
    """As in Gemma 4, where they are said."""
    text = {**CONFIGS[NAME]["text_config"], "num_kv_shared_layers": 1}
    parts = take_apart({**CONFIGS[NAME], "text_config": text})
    with pytest.raises(ValueError, match="num_kv_shared_layers must be 0, got 1"):
        modules_of(dict(parts.modules))


def test_a_job_of_images_and_sound_is_drafted(tmp_path: Any) -> None:
    """With the published sizes of both, whose parts have two layers each."""
    target = tmp_path / "job.yaml"
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "gemma4_unified", "vision_config": {}, "audio_config": {}}')
    done = accept("init", config, "--gpus", "8xH100", "-o", target)
    assert "give the mask gemma" in target.read_text()
    job = load_job(target)
    vision, audio = (job.model.module(called) for called in (VISION, AUDIO))
    assert [len(module.layers) for module in (vision, audio)] == [2, 2]
    assert next(iter(job.batch)).of(AUDIO)[0] == Segment(AUDIO, 0, 750, 750)
    assert not done.stderr
