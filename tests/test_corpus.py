"""Token arithmetic of real encoders, and batches made of it."""

import math
import re
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import WhisperFeatureExtractor
from transformers.models.phi4_multimodal.feature_extraction_phi4_multimodal import (
    Phi4MultimodalFeatureExtractor,
)
from transformers.models.pixtral.image_processing_pil_pixtral import get_resize_output_image_size
from transformers.models.qwen2_audio.modeling_qwen2_audio import Qwen2AudioEncoder
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from workbench.data.corpus import (
    ItemTokens,
    Mixture,
    conformer_tokens,
    fixed_samples,
    mixed_samples,
    qwen2_vl_resize,
    qwen2_vl_tokens,
    sample_of,
    square_image_tokens,
    whisper_tokens,
    windowed_tokens,
)
from workbench.data.sample import Segment
from workbench.model.hf_config import module_from_config
from workbench.model.item_tokens import clip_tokens, image_tokens
from workbench.model.projector import Merge, ProjectorStep

IMAGE = ItemTokens(64, 16)
CLIP = ItemTokens(50, 50)


@pytest.mark.parametrize(
    ("image_px", "patch_px", "more", "tokens"),
    [
        pytest.param(224, 14, {"num_class_tokens": 1}, (257, 256), id="clip-l-14"),
        pytest.param(336, 14, {"num_class_tokens": 1}, (577, 576), id="clip-l-14-336"),
        pytest.param(384, 14, {}, (729, 729), id="siglip-384-drops-six-pixels"),
        pytest.param(448, 14, {"merge": 4}, (1024, 256), id="phi-4-multimodal"),
    ],
)
def test_square_images(image_px, patch_px, more, tokens):
    assert square_image_tokens(image_px, patch_px, **more) == tokens


@given(
    height=st.integers(1, 4000),
    width=st.integers(1, 4000),
    most=st.sampled_from([28 * 28 * 1280, 28 * 28 * 16384, 28 * 28 * 16]),
)
def test_qwen2_vl_resizes_as_transformers_does(height, width, most):
    if max(height, width) > 200 * min(height, width):
        return
    expected = smart_resize(height, width, factor=28, min_pixels=56 * 56, max_pixels=most)
    assert qwen2_vl_resize(height, width, max_pixels=most) == expected


@given(height=st.integers(1, 5000), width=st.integers(1, 5000))
def test_qwen2_vl_patches_merge_evenly(height, width):
    if max(height, width) > 200 * min(height, width):
        with pytest.raises(ValueError, match="differ by at most 200 times"):
            qwen2_vl_tokens(height, width)
        return
    tokens = qwen2_vl_tokens(height, width)
    assert tokens.tokens_in == 4 * tokens.tokens_out
    assert tokens.tokens_out <= 1280


def test_a_small_image_grows_and_a_large_one_shrinks():
    assert qwen2_vl_resize(30, 30) == (56, 56)
    assert qwen2_vl_resize(14, 145) == (28, 196)  # no side has half a block, so that it has no area
    assert qwen2_vl_tokens(56, 56) == (16, 4)
    height, width = qwen2_vl_resize(4000, 3000)
    assert height * width <= 28 * 28 * 1280
    assert height > width


@cache
def pixtral(*, longest_px: int, patch_px: int, merge: int):
    """Behind it, squares of patches become one as Mistral 3's projector makes them."""
    steps = (ProjectorStep(merge=merge, how=Merge.INTERLEAVE), ProjectorStep(linear_out=True))
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1}
    config = {"model_type": "pixtral", "image_size": longest_px, "patch_size": patch_px} | sizes
    projector = steps if merge > 1 else None
    return module_from_config(config, name="vision", modality="vision", llm_width=8, projector=projector)


TOWERS = {"pixtral": (1024, 16, 1), "mistral 3": (1540, 14, 4)}
SIDES = st.integers(1, 4000)


@given(tower=st.sampled_from(sorted(TOWERS)), height=SIDES, width=SIDES)
def test_pixtral_scales_down_before_it_fills_up_squares(tower, height, width):
    """As transformers does, in which a side may vanish: such an image is refused, its nearest is not."""
    longest_px, patch_px, merge = TOWERS[tower]
    square_px = patch_px * (2 if merge == 4 else 1)
    pixels = np.broadcast_to(np.uint8(0), (3, height, width))
    size = get_resize_output_image_size(pixels, (longest_px,) * 2, (square_px,) * 2)
    rows, columns = (side // square_px for side in size)
    module = pixtral(longest_px=longest_px, patch_px=patch_px, merge=merge)
    if rows * columns == 0:
        with pytest.raises(ValueError, match="its shorter side must keep a pixel") as refused:
            image_tokens(module, height, width)
        (least,) = re.findall(r"nearest: a shorter side of (\d+) px", str(refused.value))
        assert image_tokens(module, max(height, int(least)), max(width, int(least)))
        return
    assert image_tokens(module, height, width) == (rows * columns * merge, rows * columns)


def test_mistral_3_reads_a_full_hd_image():
    """1080 x 1920 shrinks to 866 x 1540: 31 x 55 squares of 28 px."""
    module = pixtral(longest_px=1540, patch_px=14, merge=4)
    assert image_tokens(module, 1080, 1920) == (4 * 31 * 55, 31 * 55)


@pytest.mark.parametrize(
    ("duration_s", "windows"), [(0.1, 1), (29.9, 1), (30.0, 1), (30.1, 2), (120.0, 4), (0.3, 1)]
)
def test_whisper_windows(duration_s, windows):
    assert whisper_tokens(duration_s) == ((1500, 1500),) * windows


DURATIONS = [0.03, 1.0, 1.1, 3.3, 3.333, 10.0, 29.99, 30.0, 45.0]


@pytest.mark.parametrize("duration_s", DURATIONS)
def test_qwen2_audio_hears_what_transformers_does(duration_s):
    """As many tokens of a clip reach the LLM as frames of its sound, of one window, make."""
    extractor, encoder = WhisperFeatureExtractor(feature_size=8), Qwen2AudioEncoder
    heard = extractor(
        np.zeros(round(duration_s * 16_000), np.float32),
        sampling_rate=16_000,
        return_attention_mask=True,
        padding="max_length",
    )
    tokens_in, expected = encoder._get_feat_extract_output_lengths(None, heard["attention_mask"].sum())
    (item,) = clip_tokens(qwen2_audio(), duration_s)
    assert item.tokens_out == expected
    assert 2 * item.tokens_out <= item.tokens_in <= min(tokens_in, 2 * item.tokens_out + 1)


@pytest.mark.parametrize("duration_s", [*DURATIONS, 65.3, 700.0])
def test_audio_flamingo_hears_every_window(duration_s):
    """20 windows of 30 s; its processor counts the tokens of a clip from all of its frames."""
    windows = clip_tokens(qwen2_audio(most_windows=20), duration_s)
    frames = math.ceil(round(min(duration_s, 600) * 16_000) / 160)
    assert len(windows) == min(20, math.ceil(duration_s / 30))
    assert sum(window.tokens_out for window in windows) == (((frames - 1) // 2 + 1) - 2) // 2 + 1


def qwen2_audio(**more: int):
    sizes = {"d_model": 64, "encoder_attention_heads": 4, "encoder_layers": 1}
    config = {"model_type": "qwen2_audio_encoder"} | sizes | more
    return module_from_config(config, name="audio", modality="audio", llm_width=8)


@pytest.mark.parametrize("duration_s", DURATIONS)
def test_phi_4_hears_whole_frames(duration_s):
    """Lengths of features and of embeddings in transformers' feature extractor."""
    samples = round(duration_s * 16_000)
    features = Phi4MultimodalFeatureExtractor()(np.zeros(samples, np.float32), sampling_rate=16_000)
    assert conformer_tokens(duration_s).tokens_out == features["audio_embed_sizes"][0]


def test_other_audio():
    assert whisper_tokens(2.5, window_tokens=50) == ((50, 50),) * 3
    assert windowed_tokens(2.26, window_tokens=100, most_windows=3) == ((100, 100), (13, 13))
    assert windowed_tokens(9.0, window_tokens=100, most_windows=3) == ((100, 100),) * 3
    assert windowed_tokens(0.42, window_tokens=10) == ((10, 10), (10, 10))  # a token is left
    assert windowed_tokens(0.03, window_tokens=10) == ((2, 2),)
    assert conformer_tokens(30.0) == (375, 375)
    assert conformer_tokens(0.025) == (1, 1)


def test_text_surrounds_the_items_of_a_fixed_sample():
    (sample,) = fixed_samples(1, text_tokens=10, items={"vision": [IMAGE, IMAGE], "audio": [CLIP]})
    assert sample.segments == (
        Segment("text", 0, 2, 2),
        Segment("vision", 0, 64, 16),
        Segment("text", 1, 2, 2),
        Segment("vision", 1, 64, 16),
        Segment("text", 2, 2, 2),
        Segment("audio", 0, 50, 50),
        Segment("text", 3, 4, 4),
    )
    assert sample.num_tokens == 10 + 16 + 16 + 50


@given(
    num=st.integers(1, 5),
    text=st.integers(1, 40),
    images=st.integers(0, 4),
    clips=st.integers(0, 3),
)
def test_fixed_samples_hold_what_was_asked_for(num, text, images, clips):
    items = {"vision": [IMAGE] * images, "audio": [CLIP] * clips}
    samples = fixed_samples(num, text_tokens=text, items=items)
    assert [sample.id for sample in samples] == list(range(num))
    for sample in samples:
        assert sum(segment.tokens_out for segment in sample.of("text")) == text
        assert [segment.k for segment in sample.of("vision")] == list(range(images))
        assert [segment.k for segment in sample.of("audio")] == list(range(clips))


@given(
    seed=st.integers(0, 2**32),
    low=st.integers(1, 20),
    more=st.integers(0, 20),
    most=st.integers(1, 4),
    missing=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_mixed_samples_stay_inside_their_bounds(seed, low, more, most, missing):
    sizes = (IMAGE, ItemTokens(8, 2))
    items = {
        "vision": Mixture(sizes=sizes, most_items=most, missing=missing),
        "audio": Mixture(sizes=(CLIP,)),
    }
    samples = mixed_samples(6, text_tokens=(low, low + more), items=items, seed=seed)
    assert samples == mixed_samples(6, text_tokens=(low, low + more), items=items, seed=seed)
    for sample in samples:
        images = sample.of("vision")
        assert low <= sum(segment.tokens_out for segment in sample.of("text")) <= low + more
        assert len(images) <= most
        assert missing != 0.0 or images
        assert missing != 1.0 or not images
        assert {(s.tokens_in, s.tokens_out) for s in images} <= set(sizes)
        assert len(sample.of("audio")) == 1
        for modality in ("text", "vision"):
            assert [s.k for s in sample.of(modality)] == list(range(len(sample.of(modality))))


def test_a_mixture_really_mixes():
    items = {"vision": Mixture(sizes=(IMAGE,), most_items=3, missing=0.25), "audio": Mixture(sizes=(CLIP,))}
    samples = mixed_samples(400, text_tokens=(5, 50), items=items, seed=3)
    assert samples != mixed_samples(400, text_tokens=(5, 50), items=items, seed=4)
    without = sum(not sample.of("vision") for sample in samples) / len(samples)
    assert without == pytest.approx(0.25, abs=0.07)
    orders = {tuple(s.modality for s in sample.segments if s.modality != "text") for sample in samples}
    assert {("audio", "vision"), ("vision", "audio"), ("vision", "audio", "vision")} <= orders
    assert {len(sample.of("text")) for sample in samples} > {1, 2}


def test_no_two_texts_meet():
    samples = mixed_samples(
        50, text_tokens=(1, 30), items={"vision": Mixture(sizes=(IMAGE,), most_items=3)}, seed=0
    )
    for sample in samples:
        assert ("text", "text") not in [(a.modality, b.modality) for a, b in pairwise(sample.segments)]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: square_image_tokens(10, 14), "want a patch of 1 to 10 px, got 14"),
        (lambda: square_image_tokens(42, 14, merge=4), "merge must divide them, got 4"),
        (lambda: qwen2_vl_tokens(0, 10), "sides must be >= 1"),
        (lambda: whisper_tokens(0.0), "want a duration > 0 s"),
        (lambda: whisper_tokens(float("inf")), "want a duration > 0 s"),
        (lambda: conformer_tokens(-1.0), "want a duration > 0 s"),
        (lambda: conformer_tokens(0.0249), "want a duration of at least 0.025 s, one frame"),
        (lambda: windowed_tokens(0.02, window_tokens=10), "want a duration of more than 0.02 s"),
        (lambda: windowed_tokens(float("nan"), window_tokens=10), "want a duration > 0 s"),
        (lambda: fixed_samples(0, text_tokens=1, items={}), "want >= 1 sample and >= 1 text token"),
        (lambda: fixed_samples(1, text_tokens=0, items={}), "want >= 1 sample and >= 1 text token"),
        (
            lambda: mixed_samples(1, text_tokens=(5, 4), items={}, seed=0),
            "the least must not exceed the most, got 5 and 4",
        ),
        (lambda: Mixture(sizes=()), "want at least one size"),
        (lambda: Mixture(sizes=(IMAGE,), missing=1.5), "0 <= missing <= 1"),
        (lambda: sample_of(3, [1], [("vision", IMAGE)]), "sample 3: want one more text than items"),
    ],
)
def test_refusals(call, message):
    with pytest.raises(ValueError, match=message):
        call()
