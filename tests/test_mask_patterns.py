"""Masks by name: every builder, its parameters, and what a job, a plan and a data folder do with them."""

import inspect
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.data.sample import Sample, Segment
from workbench.job.job import Job, job_from_spec
from workbench.job.job_file import parse_spec
from workbench.job.schema import JobSpec
from workbench.masks import builders
from workbench.masks.bitfield import Bitfield, dense
from workbench.masks.builders import Groups, Mixture, Run
from workbench.masks.patterns import PATTERNS, canonical, mask, sample_bitfield
from workbench.plan.work import attention_area

SEGMENTS = (
    Segment("text", 0, 4, 4),
    Segment("vision", 0, 6, 6),
    Segment("text", 1, 5, 5),
    Segment("vision", 1, 6, 6),
    Segment("text", 2, 3, 3),
)
RUNS = [Run(0, 4), Run(1, 6), Run(0, 5), Run(1, 6), Run(0, 3)]
DRAWN = {"seed": 3, "mixture": Mixture((0.5,), (3,)), "groups": Groups.PER_ITEM}
CALLS: dict[str, Bitfield] = {
    "causal": builders.causal(24),
    "full()": builders.full(24),
    "multimodal": builders.multimodal(RUNS),
    "multimodal(groups='per_item')": builders.multimodal(RUNS, Groups.PER_ITEM),
    "multimodal_items": builders.multimodal(RUNS, Groups.PER_ITEM),
    "gemma": builders.gemma_style(RUNS),
    "gemma(window=3)": builders.narrowed(builders.gemma_style(RUNS), 3),
    "gemma4": builders.gemma4_style(RUNS),
    "prefix_lm": builders.prefix_lm(21, 24),
    "prefix_lm(prefix=9)": builders.prefix_lm(9, 24),
    "document": builders.document([4, 6, 5, 6, 3]),
    "document(lengths=[20, 4])": builders.document([20, 4]),
    "causal_document(lengths=5)": builders.causal_document([5, 5, 5, 5, 4]),
    "shared_question(question=10, answers=[8, 6])": builders.shared_question(10, [8, 6]),
    "shared_question(question=10, answers=4)": builders.shared_question(10, [4, 4, 3, 3]),
    "sliding_window(window=7)": builders.sliding_window(24, 7),
    "two_sided_window(before=7, after=2)": builders.two_sided_window(24, before=7, after=2),
    "global_window(before=7, after=2, tokens=3)": builders.global_window(24, before=7, after=2, tokens=3),
    "lambda_shaped(sinks=2, window=7)": builders.lambda_shaped(24, sinks=2, window=7),
    "causal_blockwise": builders.causal_blockwise([4, 6, 5, 6, 3]),
    "causal_blockwise(lengths=6, window=2, sinks=1)": builders.causal_blockwise([4] * 6, window=2, sinks=1),
    "encoder_prepended(seed=3, shares=[0.5], spans=[3], groups='per_item')": builders.encoder_prepended(
        24, **DRAWN
    ),
    "encoder_embedded(seed=3, shares=[0.5], spans=[3], groups='per_item')": builders.encoder_embedded(
        24, **DRAWN
    ),
    "multimodal_packed(seed=3, documents=2, shares=[0.5], spans=[3], groups='per_item')": (
        builders.multimodal_packed(24, documents=2, **DRAWN)
    ),
}


@pytest.mark.parametrize("text", CALLS)
def test_a_name_is_its_builder(text: str):
    """The pairs too, which is what work is counted by."""
    sample, wanted = Sample(0, SEGMENTS, text), CALLS[text]
    got = sample_bitfield([[sample]])
    assert np.array_equal(dense(got, got), dense(wanted, wanted))
    assert attention_area(sample) == int(dense(wanted, wanted).sum())


def test_every_builder_has_a_name():
    public = {
        name
        for name, made in inspect.getmembers(builders, inspect.isfunction)
        if made.__module__ == builders.__name__ and not name.startswith("_")
    }
    others = {"gemma_style", "gemma4_style", "narrowed", "chunked"}
    assert public - others == set(PATTERNS) - {"gemma", "gemma4", "multimodal_items"}
    assert {text.partition("(")[0] for text in CALLS} == set(PATTERNS)


@given(st.integers(0, 40), st.integers(0, 45), st.integers(0, 45), st.integers(0, 45))
def test_two_sided_and_global_windows_are_their_rule(length: int, before: int, after: int, tokens: int):
    field = builders.global_window(length, before=before, after=after, tokens=tokens)
    query, key = np.ogrid[:length, :length]
    near = (key >= query - before) & (key <= query + after)
    assert np.array_equal(dense(field, field), near | (query < tokens) | (key < tokens))
    window = builders.two_sided_window(length, before=before, after=after)
    assert np.array_equal(dense(window, window), near)


def test_equal_masks_have_one_text():
    assert canonical(" sliding_window( window = 7 )") == mask("sliding_window", window=7)
    assert canonical("global_window(tokens=3, after=2, before=7)") == (
        "global_window(before=7, after=2, tokens=3)"
    )
    assert canonical("causal()") == "causal"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("diagonal", "want one of causal, full, .*nearest: "),
        ("sliding_windw(window=3)", "nearest: sliding_window"),
        ("sliding_window", "mask sliding_window: want window, a whole number"),
        ("sliding_window(widow=3)", "unknown parameter 'widow'; nearest: window"),
        ("sliding_window(window=-3)", "window must be a whole number >= 0, got -3"),
        ("sliding_window(window=True)", "window must be a whole number"),
        ("sliding_window(3)", r"want name\(parameter=value"),
        ("sliding_window(window=open('x'))", r"want name\(parameter=value"),
        ("sliding_window(window=3", r"want name\(parameter=value"),
        ("sliding_window(window=" + "(" * 5000 + ")" * 5000 + ")", r"want name\(parameter=value"),
        ("multimodal(groups='items')", "groups must be 'per_encoder' or 'per_item'"),
        ("causal(window=3)", "mask causal: unknown parameter 'window'; it has none"),
        ("causal" * 20_000, "at most 100000 characters"),
    ],
)
def test_what_is_no_mask_is_refused_in_one_line(text: str, words: str):
    with pytest.raises(ValueError, match=words) as caught:
        canonical(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("document(lengths=[3, 4])", "sample 0: mask: the parts must add up to the 24 tokens, got 7"),
        ("document(lengths=25)", "want 1 to 24 parts of 24 tokens, got 25"),
        ("shared_question(question=25, answers=1)", "at most the 24 tokens, got 25"),
        ("prefix_lm(prefix=25)", "prefix must be 0 to 24 tokens, got 25"),
        ("sliding_window(window=0)", "want a window >= 1"),
    ],
)
def test_what_does_not_fit_a_sample_names_it(text: str, words: str):
    with pytest.raises(ValueError, match=words):
        sample_bitfield([[Sample(0, SEGMENTS, text)]])


JOB = """
name: masked
model: {modules: {llm: {zoo: qwen2.5-0.5b}}}
cluster: {device: A100-80GB, nodes: 1, ranks_per_node: 2}
batch: {samples: 5, mask: MASK, fixed: {text_tokens: 64}}
profile: A100-80GB
"""


def job_of(said: str) -> Job:
    return job_from_spec(parse_spec(JOB.replace("MASK", said)), folder=Path())


def test_a_job_says_masks_by_batch_or_by_sample():
    assert {sample.mask for sample in job_of("full").batch} == {"full"}
    masks = [sample.mask for sample in job_of("[causal, prefix_lm( prefix=8)]").batch]
    assert masks == ["causal", "prefix_lm(prefix=8)", "causal", "prefix_lm(prefix=8)", "causal"]


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("diagonal", "batch.mask: mask 'diagonal': want one of causal, full"),
        ("[causal, 3]", "batch.mask: want a name or a call"),
        ("prefix_lm(prefix=65)", "job 'masked': sample 0: prefix must be 0 to 64 tokens, got 65"),
        ("[]", "batch.mask"),
    ],
)
def test_a_jobs_mask_that_is_none_is_one_line(said: str, words: str):
    with pytest.raises(ValueError, match=words):
        job_of(said)


def test_the_schema_knows_the_names():
    said = str(JobSpec.model_json_schema()["$defs"]["BatchSpec"]["properties"]["mask"])
    assert all(name in said for name in PATTERNS)
