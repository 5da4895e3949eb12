"""Token arithmetic of real encoders, and batches made of it."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
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
    height=st.integers(28, 4000),
    width=st.integers(28, 4000),
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
    assert qwen2_vl_tokens(56, 56) == (16, 4)
    height, width = qwen2_vl_resize(4000, 3000)
    assert height * width <= 28 * 28 * 1280
    assert height > width


@pytest.mark.parametrize(
    ("duration_s", "windows"), [(0.1, 1), (29.9, 1), (30.0, 1), (30.1, 2), (120.0, 4), (0.3, 1)]
)
def test_whisper_windows(duration_s, windows):
    assert whisper_tokens(duration_s) == ((1500, 1500),) * windows


def test_other_audio():
    assert whisper_tokens(2.5, window_tokens=50) == ((50, 50),) * 3
    assert windowed_tokens(0.42, window_tokens=10) == ((10, 10), (10, 10))  # a token is left
    assert windowed_tokens(0.03, window_tokens=10) == ((2, 2),)
    assert conformer_tokens(30.0) == (375, 375)
    assert conformer_tokens(0.01) == (1, 1)


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
        (lambda: windowed_tokens(0.02, window_tokens=10), "want a finite duration of more than 0.02 s"),
        (lambda: windowed_tokens(float("nan"), window_tokens=10), "want a finite duration of more than"),
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
