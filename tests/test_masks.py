"""Masks as bit fields: what they allow, and what is refused."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.mask_strategies import CASES, Case, Rule, bitfields, flex_masks, packed_case, packed_rule
from tests.paper_words import from_paper_word, from_released_word
from workbench.data.sample import Sample, Segment
from workbench.masks import builders, patterns
from workbench.masks.bitfield import Bitfield, concatenate, dense, pad, padding, uniform
from workbench.masks.builders import Groups, Mixture, Run
from workbench.masks.tiles import area, classify, row_areas

SEEDS = 150
PACKED_SEEDS = 400
RANDOM = {
    "EP": builders.encoder_prepended,
    "EE": builders.encoder_embedded,
    "MP": builders.multimodal_packed,
}
SMALL = Mixture(shares=(0.3, 0.15, 0.2), spans=(5, 3, 4))


def differing(cases: list[Case], rule: Rule) -> list[int]:
    """Indices of the cases whose mask is not FlexAttention's."""
    masks = flex_masks(cases, rule)
    return [i for i, c in enumerate(cases) if not np.array_equal(dense(c.field, c.field), masks[i])]


@pytest.mark.parametrize("name", CASES)
def test_builders_equal_flex_attention(name: str):
    draw, rule = CASES[name]
    assert differing([draw(np.random.default_rng(seed)) for seed in range(SEEDS)], rule) == []


def test_packed_and_padded_rows_equal_flex_attention():
    cases = [packed_case(np.random.default_rng(seed)) for seed in range(PACKED_SEEDS)]
    assert differing(cases, packed_rule) == []


@pytest.mark.parametrize("name", RANDOM)
@pytest.mark.parametrize("groups", Groups)
def test_random_papers_masks_are_the_rule_over_their_layout(name: str, groups: Groups):
    """Text: causal over all; others: both ways over their own encoder or item; documents apart."""
    for seed in range(20):
        field = RANDOM[name](90 + seed, seed=seed, mixture=SMALL, groups=groups)
        modality = np.log2(field.own.astype(np.float64)).astype(int)
        changes = (np.diff(modality) != 0) | (np.diff(field.segment) != 0)
        run = np.concatenate([[0], np.cumsum(changes)])
        within = run if groups is Groups.PER_ITEM else modality
        index = np.arange(len(field))
        both = (within[:, None] == within) & (modality[:, None] == modality)
        rule = np.where((modality == 0)[:, None], index <= index[:, None], both)
        rule &= field.segment[:, None] == field.segment
        mask = dense(field, field)
        if groups is Groups.PER_ITEM:  # neighbours of one encoder are one run here, and several items there
            assert not (mask & ~rule).any()
            assert np.array_equal(mask[modality == 0], rule[modality == 0])
            assert np.array_equal(mask, np.where((modality == 0)[:, None], mask, mask.T & both))
            assert {int(each) for each in mask[modality == 1].sum(1)} <= set(range(1, 6))
        else:
            assert np.array_equal(mask, rule)


@pytest.mark.parametrize("name", ["EP", "EE"])
def test_mixture_fixes_the_tokens_of_every_encoder(name: str):
    for seed in range(5):
        field = RANDOM[name](101, seed=seed, mixture=SMALL)
        assert [int((field.own == 1 << bit).sum()) for bit in range(4)] == [36, 30, 15, 20]


def test_prepended_text_stands_last_and_embedded_text_anywhere():
    fields = [builders.encoder_prepended(200, seed=seed, mixture=SMALL) for seed in range(10)]
    assert all(field.causal[-70:].all() and not field.causal[:-70].any() for field in fields)
    starts = {int(builders.encoder_embedded(200, seed=s, mixture=SMALL).causal.argmin()) for s in range(10)}
    assert len(starts) > 1


def test_packing_keeps_the_number_of_documents_and_mixes_patterns():
    field = builders.multimodal_packed(5000, seed=3, documents=9, mixture=SMALL)
    starts = np.searchsorted(field.segment, np.arange(9))
    assert field.segment.max() == 8
    assert {bool(field.causal[start]) for start in starts} == {True, False}


@pytest.mark.parametrize("name", RANDOM)
def test_a_seed_is_a_mask(name: str):
    drawn = [dict(RANDOM[name](500, seed=seed, mixture=SMALL).arrays()) for seed in (1, 1, 2, 3, 4)]
    equal = [all(np.array_equal(drawn[0][key], each[key]) for key in each) for each in drawn[1:]]
    assert equal[0]
    assert not all(equal)


@settings(deadline=None)
@given(bitfields(min_length=1), st.data())
def test_any_tokens_in_any_order_mask_as_before(field: Bitfield, data: st.DataObject):
    picks = st.lists(st.integers(0, len(field) - 1), max_size=40)
    rows, columns = data.draw(picks), data.draw(picks)
    picked = dense(field.take(rows), field.take(columns))
    assert np.array_equal(picked, dense(field, field)[np.ix_(rows, columns)])


@settings(deadline=None)
@given(st.lists(bitfields(max_length=30), max_size=4))
def test_packed_parts_do_not_see_each_other(parts: list[Bitfield]):
    packed = concatenate(parts)
    expected = np.zeros((len(packed), len(packed)), bool)
    start = 0
    for part in parts:
        end = start + len(part)
        expected[start:end, start:end] = dense(part, part)
        start = end
    assert np.array_equal(dense(packed, packed), expected)


def test_padding_sees_nothing_and_is_not_seen():
    field = pad(builders.full(3), 5)
    assert dense(field, field).sum(0).tolist() == dense(field, field).sum(1).tolist() == [3, 3, 3, 0, 0]
    assert not dense(padding(4), padding(4)).any()


def test_images_beyond_the_number_of_groups():
    """Items need no bit of their own: hundreds of them in one document."""
    runs = [Run(1, 2), Run(0, 1)] * 300
    field = builders.multimodal(runs, Groups.PER_ITEM)
    counts = dense(field, field).sum(1)
    assert counts.tolist() == [n for i in range(300) for n in (2, 2, 3 * i + 3)]


def test_sixty_encoders_fit():
    field = builders.multimodal([Run(modality, 1) for modality in range(61)])
    assert np.array_equal(dense(field, field), np.eye(61, dtype=bool))
    assert int(field.own.max()) == 2**60


def test_released_words_compare_whole_words():
    """An image inside two groups is not seen by an image of one of them: equality, not overlap."""
    field = from_released_word(np.array([0b010, 0b110, 0b011], np.int64))
    assert dense(field, field).astype(int).tolist() == [[1, 0, 0], [0, 1, 0], [1, 1, 1]]


def sample(index: int, mask: str, *segments: tuple[str, int]) -> Sample:
    seen: dict[str, int] = {}
    parts = []
    for modality, size in segments:
        parts.append(Segment(modality, seen.get(modality, 0), size, size))
        seen[modality] = seen.get(modality, 0) + 1
    return Sample(index, tuple(parts), mask)


def test_rows_of_samples_are_packed_patterns():
    parts = (("image", 3), ("text", 2), ("sound", 2), ("image", 1), ("text", 2))
    runs = [Run(1, 3), Run(0, 2), Run(2, 2), Run(1, 1), Run(0, 2)]
    expected = {
        "causal": builders.causal(10),
        "full": builders.full(10),
        "multimodal": builders.multimodal(runs),
        "multimodal_items": builders.multimodal(runs, Groups.PER_ITEM),
        "gemma": builders.gemma_style(runs),
        "prefix_lm": builders.prefix_lm(8, 10),
    }
    samples = [sample(index, mask, *parts) for index, mask in enumerate(expected)]
    packed = patterns.sample_bitfield([samples[:2], samples[2:3], samples[3:]])
    reference = concatenate(list(expected.values()))
    assert np.array_equal(dense(packed, packed), dense(reference, reference))
    assert area(packed, packed) == int(dense(reference, reference).sum())


def test_empty_is_a_mask():
    for field in (concatenate([]), builders.full(0), builders.multimodal([]), patterns.sample_bitfield([])):
        assert dense(field, field).shape == (0, 0)
    assert len(uniform(0, causal=True)) == 0


FIELD = builders.causal(4)


def changed(**arrays: Any) -> Bitfield:
    return Bitfield(**{**dict(FIELD.arrays()), **arrays})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        pytest.param(lambda: changed(own=[1, 1, 1]), r"own has 3 tokens, allow has 4", id="lengths"),
        pytest.param(
            lambda: changed(allow=[1, 1, 1, 2**61]), r"allow: want bits 0 to 60, got 2305", id="high-bit"
        ),
        pytest.param(
            lambda: changed(own=[1, 1, -1, 1]), r"own: want bits 0 to 60, got -1", id="negative-word"
        ),
        pytest.param(lambda: changed(segment=[0, 0, -2, 0]), r"segment: want -1 to .*, got -2", id="segment"),
        pytest.param(
            lambda: changed(position=[0, 1, 2, -3]), r"position: want 0 to .*, got -3", id="position"
        ),
        pytest.param(lambda: changed(first=[0, 0, 0, 2**31]), r"first: want .*, got 2147483648", id="first"),
        pytest.param(lambda: changed(causal=[1, 1, 1, 1]), r"causal must be bool, got int64", id="not-bool"),
        pytest.param(lambda: changed(own=[1.0, 1, 1, 1]), r"own must be integers, got float64", id="float"),
        pytest.param(
            lambda: changed(own=[[1, 1, 1, 1]]), r"own must be one-dimensional.*\[1, 4\]", id="matrix"
        ),
        pytest.param(lambda: FIELD.take([0, 4]), r"index 4: want one of the 4 tokens", id="take-beyond"),
        pytest.param(lambda: FIELD.take([-1]), r"index -1: want one of the 4 tokens", id="take-negative"),
        pytest.param(lambda: FIELD.take([0.5]), r"indices must be .* integers, got float64", id="take-float"),
        pytest.param(lambda: pad(FIELD, 3), r"cannot pad 4 tokens to 3", id="pad"),
        pytest.param(
            lambda: concatenate([changed(position=[0, 0, 0, 2**31 - 1])] * 2), "position: want", id="overflow"
        ),
        pytest.param(lambda: builders.causal(-1), r"length must be >= 0 tokens, got -1", id="length"),
        pytest.param(lambda: builders.document([3, -2]), r"must be >= 0 tokens, got -2", id="document"),
        pytest.param(lambda: builders.prefix_lm(5, 4), r"prefix must be 0 to 4 tokens, got 5", id="prefix"),
        pytest.param(lambda: builders.shared_question(-1, []), r"length 0 .* got -1", id="question"),
        pytest.param(lambda: builders.sliding_window(4, 0), r"window >= 1 .*got window 0", id="window"),
        pytest.param(
            lambda: builders.lambda_shaped(-3, sinks=1, window=1), r">= 0 tokens, got -3", id="lambda"
        ),
        pytest.param(lambda: builders.causal_blockwise([4], sinks=-1), r"sinks >= 0 .*sinks -1", id="sinks"),
        pytest.param(
            lambda: builders.multimodal([Run(61, 1)]),
            r"modality must be 0 \(text\) to 60, got 61",
            id="modality",
        ),
        pytest.param(lambda: builders.gemma_style([Run(-1, 1)]), r"modality .*, got -1", id="modality-below"),
        pytest.param(lambda: builders.multimodal([Run(1, -1)]), r"must be >= 0 tokens, got -1", id="run"),
        pytest.param(lambda: builders.encoder_embedded(-5, seed=0), r">= 0 tokens, got -5", id="embedded"),
        pytest.param(
            lambda: builders.multimodal_packed(5, seed=0, documents=6),
            r"documents must be 1 to 5.*got 6",
            id="docs",
        ),
        pytest.param(
            lambda: Mixture((0.7, 0.4), (1, 1)), r"add up to at most 1, got \(0.7, 0.4\)", id="shares"
        ),
        pytest.param(lambda: Mixture((float("nan"),), (1,)), r"shares must be >= 0", id="nan-share"),
        pytest.param(lambda: Mixture((0.5,), (0,)), r"spans must be >= 1 token, got \(0,\)", id="span"),
        pytest.param(lambda: Mixture((0.5,), (1, 2)), r"got 1 shares and 2 spans", id="share-per-span"),
        pytest.param(
            lambda: patterns.sample_bitfield([[Sample(7, (Segment("text", 0, 1, 1),), "diagonal")]]),
            r"sample 7: mask 'diagonal': want one of causal, full, multimodal",
            id="sample-mask",
        ),
        pytest.param(
            lambda: from_paper_word(np.array([1 << 61], np.int64)), r"allow: want bits 0 to 60", id="word-bit"
        ),
        pytest.param(
            lambda: from_paper_word(np.array([1.0])), r"int64\[T\] or uint64\[T\], got float64", id="word"
        ),
        pytest.param(
            lambda: from_paper_word(np.array([1]), causal_bit=60),
            r"causal_bit must be 61 to 63.*60",
            id="causal-bit",
        ),
        pytest.param(
            lambda: from_released_word(np.arange(1, 71)),
            r"at most 61 distinct words, got 70",
            id="distinct-words",
        ),
        pytest.param(
            lambda: classify(FIELD, FIELD, block_q=96), r"block_q .*power of two.* 96.* 128", id="block-q"
        ),
        pytest.param(
            lambda: classify(FIELD, FIELD, block_k=0), r"block_k .*power of two.*got 0", id="block-k"
        ),
        pytest.param(
            lambda: row_areas(FIELD, FIELD, 8192), r"block_q .*1 to 4096, got 8192", id="large-block"
        ),
    ],
)
def test_bad_input_is_named(call: Callable[[], object], message: str):
    with pytest.raises(ValueError, match=message):
        call()


def test_fields_are_copies_that_nobody_can_write():
    own = np.ones(4, np.uint64)
    field = changed(own=own)
    own[0] = 4
    assert field.own.tolist() == [1, 1, 1, 1]
    for _, array in field.arrays():
        with pytest.raises(ValueError, match="read-only"):
            array[0] = array[0]


def test_narrow_integers_become_the_field_types():
    field = changed(own=np.ones(4, np.int8), segment=np.zeros(4, np.int64))
    assert (field.own.dtype, field.segment.dtype) == (np.uint64, np.int32)
