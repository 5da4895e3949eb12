"""Towers of VideoLLaMA 3, PaddleOCR-VL, Janus and GLM-ASR: sizes of items, refusals, as users give them."""

from collections.abc import Callable
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel
from transformers.models.glmasr import modeling_glmasr as glmasr
from transformers.models.janus import modeling_janus as janus
from transformers.models.ovis2 import modeling_ovis2 as ovis2
from transformers.models.paddleocr_vl import modeling_paddleocr_vl as paddleocr
from transformers.models.video_llama_3 import modeling_video_llama_3 as llama_3

from experiments.doors.whole_configs import CONFIGS
from experiments.doors.whole_models import modules_of
from experiments.doors.whole_sizes import GLMASR_HEARD, JANUS_SEEN, OVIS_SEEN, VIDEO_LLAMA_SEEN, VIT
from runtime.frontend.multimodal import ModalityModule, MultimodalModule
from runtime.frontend.parallel import Ranks
from runtime.models.audio import WhisperAdapter
from runtime.models.choose import adapter_of
from runtime.models.norm import widen_norms
from runtime.step.stage_module import StageInput
from tests import user_models
from tests.encoder_cases import widen_vision_rotations
from tests.test_adapters import build
from tests.test_multimodal import assert_parity, spec_of
from tests.test_multimodal_images import ids, images, model_of
from tests.test_tilings import SIDES, source_of
from workbench.data.sample import Sample, Segment
from workbench.model.composites.composite import AUDIO, VISION
from workbench.model.composites.registry import take_apart
from workbench.model.hf_config import module_from_config
from workbench.model.item_tokens import clip_tokens, image_tokens, video_of
from workbench.model.model_graph import Module
from workbench.model.projector import ProjectorStep
from workbench.plan.runnable import check_family
from workbench.plan.runnable_items import check_segment

F64 = torch.float64


@cache
def part(name: str, called: str, change: tuple[tuple[str, Any], ...] = ()) -> Module:
    """A module of a small composite, with changes of its configuration."""
    key = f"{called}_config"
    config = CONFIGS[name]
    return modules_of(dict(take_apart({**config, key: {**config[key], **dict(change)}}).modules))[called]


LIMITED = (("min_pixels", 3136), ("max_pixels", 200704), ("patch_size", 14))


def assert_sized(
    tower: Module, size: tuple[int, int], resize: Callable[[], tuple[int, int]], side: int
) -> None:
    """As their processor does, or refused where it refuses; so many patches are merged each way."""
    try:
        high, wide = resize()
    except ValueError:
        with pytest.raises(ValueError, match="sides must be >= 1 and differ by at most 200 times"):
            image_tokens(tower, *size)
        return
    num = high * wide // 14**2
    assert image_tokens(tower, *size) == (num, num // side**2)


@given(height=SIDES, width=SIDES, side=st.sampled_from([1, 2]))
def test_video_llama_3_sizes_images_as_its_processor_does(height: int, width: int, side: int) -> None:
    """The processor's choice merges patches or leaves them alone."""
    tower = part("video_llama_3", VISION, (*LIMITED, ("spatial_merge_size", side)))
    resize = source_of("qwen2_vl.image_processing_pil_qwen2_vl", "smart_resize").smart_resize
    assert_sized(tower, (height, width), lambda: resize(height, width, 14 * side, 3136, 200704), side)


@given(height=SIDES, width=SIDES)
def test_paddleocr_vl_sizes_images_as_its_processor_does(height: int, width: int) -> None:
    tower = part("paddleocr_vl", VISION, (("patch_size", 14), ("image_size", 56)))
    resize = source_of("paddleocr_vl.image_processing_pil_paddleocr_vl", "smart_resize").smart_resize
    assert_sized(tower, (height, width), lambda: resize(height, width, 28), 2)


def heard_by_glm(samples: int, window: int) -> list[int]:
    """Tokens of a clip's windows by the rule of its processor, of the mel frames that a mask shows."""
    count = source_of("glmasr.processing_glmasr", "_get_audio_token_length")._get_audio_token_length
    frames = -(-samples // 160)
    windows = [min(2 * window, frames - start) for start in range(0, frames, 2 * window)]
    return [num for each in windows if (num := int(count(None, torch.tensor(each)))) > 0]


@given(samples=st.integers(1, 40_000))
def test_glm_asr_hears_as_many_tokens_as_its_processor_says(samples: int) -> None:
    """Of windows that are filled up; of a folder's clip, too."""
    encoder = part("glmasr", AUDIO)
    seconds, expected = samples / 16_000, heard_by_glm(samples, window=12)
    if not expected:
        with pytest.raises(ValueError, match=r"audio clip: want a duration of more than 0\.0\d+ s"):
            clip_tokens(encoder, seconds)
        return
    assert [tuple(each) for each in clip_tokens(encoder, seconds)] == [(12, num) for num in expected]
    adapter = adapter_of(encoder)
    assert isinstance(adapter, WhisperAdapter)
    whole_frames = 2 * (samples // 320)
    assert adapter.clip_size(whole_frames)[:2] == (12, min(12, whole_frames // 2) // 4)


@given(samples=st.integers(1, 40_000))
def test_moss_hears_as_many_tokens_as_its_processor_says(samples: int) -> None:
    """Of windows that are filled up; of a folder's clip, too."""
    encoder, windows = part("moss_transcribe_diarize", AUDIO), -(-samples // (2 * 12 * 160))
    heard = [min(2 * 12 * 160, samples - 2 * 12 * 160 * index) for index in range(windows)]
    frames = torch.tensor([-(-each // 160) for each in heard])
    count = source_of(
        "moss_transcribe_diarize.processing_moss_transcribe_diarize", "_get_audio_token_length"
    )._get_audio_token_length
    expected = count(SimpleNamespace(audio_merge_size=4), frames, torch.arange(windows))
    said = clip_tokens(encoder, samples / 16_000)
    assert [tuple(each) for each in said] == [(12, int(num)) for num in expected]
    adapter = adapter_of(encoder)
    assert isinstance(adapter, WhisperAdapter)
    assert adapter.clip_size(int(frames[0]))[:2] == (12, int(expected[0]))


@pytest.mark.parametrize("frames", [8, 17, 24, 40])
def test_a_folders_clip_before_voxtral_is_of_whole_merged_tokens(frames: int) -> None:
    adapter = adapter_of(part("voxtral", AUDIO))
    assert isinstance(adapter, WhisperAdapter)
    size = adapter.clip_size(frames)
    assert size[:2] == (4 * (min(frames, 24) // 8), min(frames, 24) // 8)
    check_segment(adapter.module, Segment(AUDIO, 0, *size[:2]))


def test_glm_asr_hears_at_most_what_its_processor_keeps() -> None:
    encoder = part("glmasr", AUDIO)
    assert len(clip_tokens(encoder, 0.24 * 100)) == 655 // 30


def test_more_outputs_than_tokens_are_refused() -> None:
    """By a plan's check, and by the projector."""
    segment = Segment(AUDIO, 0, 12, 4)
    with pytest.raises(ValueError, match="its projector makes at most 3 tokens of 12, got 4"):
        check_segment(part("glmasr", AUDIO), segment)
    ours, _, data = build(part("glmasr", AUDIO), F64, Sample(1, (segment,)))
    with pytest.raises(ValueError, match=r"item \(1, 0\): 4 tokens become one, want at most 3 behind the en"):
        ours(StageInput(None, data))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            VIDEO_LLAMA_SEEN | {"model_type": "video_llama_3_vision", "spatial_merge_size": 3},
            "1 or 2, as the",
        ),
        (
            VIDEO_LLAMA_SEEN | {"model_type": "video_llama_3_vision", "num_attention_heads": 4},
            "multiple of 4",
        ),
        (JANUS_SEEN | {"model_type": "janus_vision_model", "use_qk_norm": True}, "use_qk_norm must be false"),
    ],
)
def test_towers_that_cannot_run_are_refused(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_family(module_from_config(config, name="v", modality=VISION, llm_width=48))


@pytest.mark.parametrize(
    ("name", "key", "change", "words"),
    [
        ("janus", "vision_config", {"projection_dim": 40}, "projection_dim must be the LLM's hidden_size 48"),
        ("glmasr", "audio_config", {"intermediate_size": 48}, "must be 96, 4 times hidden_size"),
        (
            "moss_transcribe_diarize",
            "audio_config",
            {"max_source_positions": 10},
            "must divide the 10 tokens of a window, got 4; nearest: 2",
        ),
        (
            "video_llava",
            "vision_config",
            {"model_type": "siglip_vision_model"},
            "must be 'full' behind siglip",
        ),
    ],
)
def test_parts_that_do_not_fit_are_refused(name: str, key: str, change: dict[str, Any], words: str) -> None:
    config = CONFIGS[name]
    with pytest.raises(ValueError, match=words):
        take_apart({**config, key: {**config[key], **change}})


@pytest.mark.parametrize(
    ("share", "ending", "words"),
    [
        (0.2, {"projector": (ProjectorStep(linear_out=True),)}, "projector must have a name, got 1 steps"),
        (0.2, {"feature_layer": -1}, "its features are rotated by time: it has no feature_layer, got -1"),
        (0.6, {}, "partial_rotary_factor must be at most 0.5"),
    ],
)
def test_features_that_are_rotated_by_time_have_one_end(
    share: float, ending: dict[str, Any], words: str
) -> None:
    config = CONFIGS["musicflamingo"] | {"rope_parameters": {"partial_rotary_factor": share}}
    clips = take_apart(config).modules[AUDIO].config
    with pytest.raises(ValueError, match=words):
        module_from_config(clips, name="a", modality=AUDIO, llm_width=48, **ending)


def test_music_flamingo_hears_twenty_minutes() -> None:
    assert len(clip_tokens(part("musicflamingo", AUDIO), 2000.0)) == 40


@pytest.mark.parametrize("name", ["video_llama_3", "llava_next_video", "video_llava"])
def test_videos_are_refused_in_one_line(name: str) -> None:
    with pytest.raises(ValueError, match="module 'vision': no rule says which frames of a video it sees"):
        video_of(part(name, VISION), 64, 64, 2.0)


def made(model: Any, config: Any, sizes: dict[str, Any]) -> PreTrainedModel:
    torch.manual_seed(5)
    tower: PreTrainedModel = model(config(**sizes)).double()
    return tower


TOWERS = {
    "video_llama_3": partial(
        made, llama_3.VideoLlama3VisionModel, llama_3.VideoLlama3VisionConfig, VIDEO_LLAMA_SEEN
    ),
    "paddleocr_vl": partial(made, paddleocr.PaddleOCRVisionModel, paddleocr.PaddleOCRVisionConfig, VIT),
    "janus": partial(made, janus.JanusVisionModel, janus.JanusVisionConfig, JANUS_SEEN),
}


@pytest.mark.parametrize("name", TOWERS)
def test_a_users_tower(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images of unequal sizes, given as pixels."""
    widen_vision_rotations(monkeypatch)
    first, *others = images()
    batch: dict[str, Any] = {"input_ids": ids(), "pixel_values": [first, others, None]}
    assert_parity(model_of(TOWERS[name](), "mlp"), spec_of(num_microbatches=3), batch, ranks=Ranks.EMULATED)


def test_a_users_tower_of_one_size() -> None:
    """Ovis 2's, whose head is left out: the projector reads its patches."""
    tower = made(ovis2.Ovis2VisionModel, ovis2.Ovis2VisionConfig, OVIS_SEEN)
    widen_norms(tower, ovis2.Ovis2RMSNorm)
    first, *others = [user_models.image(16, 16) for _ in images()]
    batch: dict[str, Any] = {"input_ids": ids(), "pixel_values": [first, others, None]}
    model = model_of(tower.double(), "mlp")
    assert_parity(model, spec_of(num_microbatches=3), batch, ranks=Ranks.EMULATED)


def test_a_users_encoder_of_clips() -> None:
    """All tokens of a clip, as without a composite nothing says which are silence."""
    sizes = {key: value for key, value in GLMASR_HEARD.items() if key != "model_type"}
    encoder = made(glmasr.GlmAsrEncoder, glmasr.GlmAsrEncoderConfig, sizes)
    model = MultimodalModule(
        {"audio": ModalityModule(encoder, "linear")},
        user_models.llama(),
        token_ids={"audio": user_models.AUDIO},
    )
    torch.manual_seed(7)
    clips = [torch.randn(8, 24, dtype=F64), torch.randn(8, 10, dtype=F64)]
    texts = [torch.tensor([1, user_models.AUDIO, 2]), torch.tensor([user_models.AUDIO, 3, 4])]
    batch = {"input_ids": texts, "input_features": clips}
    assert_parity(model, spec_of(num_microbatches=2), batch, ranks=Ranks.EMULATED)


def test_a_chain_of_three_matmuls_is_one_pair_and_a_whole_one() -> None:
    """Of Janus's aligner at depth 3."""
    tower = part("janus", VISION)
    shards = {operator.name: str(operator.shard) for operator in tower.layers[-1].operators}
    assert [shards[f"projector.{index}"] for index in (0, 2, 4)] == ["column", "row", "replicated"]
