"""Masks refuse bad input by name, rule and value, and keep what they are given from changing."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.paper_words import from_paper_word, from_released_word
from workbench.data.sample import Sample, Segment
from workbench.masks import builders, patterns
from workbench.masks.bitfield import Bitfield, concatenate, pad
from workbench.masks.builders import Mixture, Run
from workbench.masks.tiles import classify, row_areas

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
