"""Batches: data depend on the seed and the item alone, targets are text, each stage gets only its own."""

from dataclasses import replace

import pytest
import torch

from runtime.data.batches import SyntheticSource, microbatch_data
from runtime.models.adapter import NO_TARGET, PLACEHOLDER
from tests import tiny_models
from workbench.data.sample import Item, Sample, Segment
from workbench.model.model_graph import TEXT
from workbench.plan.plan import Microbatch, Plan
from workbench.plan.runnable import count_targets

SOURCE = SyntheticSource(2)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return tiny_models.plan_of(
        tiny_models.two_encoders(), tiny_models.mixed_batch(), {"vision": (1, 3), "llm": (1, 2, 1)}
    )


def test_data_of_an_item_do_not_depend_on_its_company(plan: Plan) -> None:
    vision = plan.chain["vision", 0][0]
    together = microbatch_data(plan, vision, plan.microbatches[0], SOURCE, dtype=torch.float32)
    for index, item in enumerate(together.items):
        single = Microbatch(module="vision", replica=0, index=5, rows=((item,),))
        alone = microbatch_data(plan, vision, single, SOURCE, dtype=torch.float32)
        assert torch.equal(alone.raw[0], together.raw[index])
    assert len({image.sum().item() for image in together.raw}) == len(together.raw)


def test_another_seed_gives_other_data(plan: Plan) -> None:
    segment = Segment("vision", 0, 9, 9)
    shape = (3, 12, 12)
    first, again, other = (SyntheticSource(seed).raw(0, segment, shape) for seed in (2, 2, 3))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    text = Segment(TEXT, 1, 50, 50)
    ids = SOURCE.token_ids(0, text, 64)
    assert ids.min() >= 0
    assert ids.max() < 64
    assert not torch.equal(ids, SOURCE.token_ids(1, text, 64))


def test_sizes_follow_the_plan(plan: Plan) -> None:
    data = microbatch_data(
        plan, plan.chain["vision", 0][0], plan.microbatches[0], SOURCE, dtype=torch.float64
    )
    assert data.tokens_in == (9, 6, 9, 9)
    assert [tuple(image.shape) for image in data.raw] == [(3, 12, 12), (3, 8, 12), (3, 12, 12), (3, 12, 12)]
    assert data.raw[0].dtype == torch.float64
    audio = plan.model.module("audio")
    data = microbatch_data(
        plan,
        plan.chain["audio", 0][0],
        tiny_models.whole_batch(audio, plan.batch),
        SOURCE,
        dtype=torch.float32,
    )
    assert [tuple(mel.shape) for mel in data.raw] == [(8, 14), (8, 20)]


def test_a_text_of_another_length_than_the_plans_is_refused(plan: Plan) -> None:
    """Also where the lengths of a microbatch add up to the plan's: tokens would be another sample's."""

    class Longer(SyntheticSource):
        def token_ids(self, sample: int, segment: Segment, vocab_size: int) -> torch.Tensor:
            other = replace(segment, tokens_out=segment.tokens_out + (1 if sample == 0 else -1))
            return super().token_ids(sample, other, vocab_size)

    stage, llm = plan.chain["llm", 0][0], plan.microbatches[-1]
    num = plan.sample[0].of(TEXT)[0].tokens_out
    with pytest.raises(ValueError, match=f"sample 0: text 0 has {num + 1} tokens, in the plan {num}"):
        microbatch_data(plan, stage, llm, Longer(2), dtype=torch.float32)


def test_each_stage_gets_only_what_it_reads(plan: Plan) -> None:
    llm = plan.microbatches[-1]
    first, middle, last = (
        microbatch_data(plan, stage, llm, SOURCE, dtype=torch.float32) for stage in plan.chain["llm", 0]
    )
    assert first.input_ids is not None
    assert first.labels is None
    assert set(first.placed) == {"vision>llm", "audio>llm"}
    assert middle.input_ids is None
    assert middle.labels is None
    assert not middle.placed
    assert last.input_ids is None
    assert last.labels is not None
    later = plan.chain["vision", 0][1]
    assert microbatch_data(plan, later, plan.microbatches[0], SOURCE, dtype=torch.float32).raw == ()


def test_targets_are_the_next_tokens_of_the_same_sample_that_are_text(plan: Plan) -> None:
    llm = plan.microbatches[-1]
    first, last = plan.chain["llm", 0][0], plan.chain["llm", 0][-1]
    ids = microbatch_data(plan, first, llm, SOURCE, dtype=torch.float32).input_ids
    labels = microbatch_data(plan, last, llm, SOURCE, dtype=torch.float32).labels
    assert ids is not None
    assert labels is not None
    start = 0
    for sample in plan.batch:
        kinds = [s.modality for s in sample.segments for _ in range(s.tokens_out)]
        for index, kind in enumerate(kinds):
            token, label = int(ids[start + index]), int(labels[start + index])
            assert (token == PLACEHOLDER) == (kind != TEXT)
            is_last = index == len(kinds) - 1
            wanted = NO_TARGET if is_last or kinds[index + 1] != TEXT else int(ids[start + index + 1])
            assert label == wanted, (sample.id, index)
        assert (labels[start : start + len(kinds)] != NO_TARGET).sum() == count_targets(sample)
        start += len(kinds)


def test_text_only_microbatches_have_no_places(plan: Plan) -> None:
    text = Microbatch(module="llm", replica=0, index=0, rows=((Item(4, 0),),))
    data = microbatch_data(plan, plan.chain["llm", 0][0], text, SOURCE, dtype=torch.float32)
    assert data.placed == {}


def test_a_segment_that_nothing_brings_to_the_llm_is_refused() -> None:
    sample = Sample(9, (Segment(TEXT, 0, 2, 2), Segment("video", 0, 4, 4)))
    plan = tiny_models.plan_of(tiny_models.two_encoders(), (sample,))
    with pytest.raises(
        ValueError,
        match="no module encodes 'video' for the LLM or makes it; the plan has audio, text, vision",
    ):
        microbatch_data(plan, plan.stages[-1], plan.microbatches[-1], SOURCE, dtype=torch.float32)
    missing = Microbatch(module="vision", replica=0, index=0, rows=((Item(9, 0),),))
    with pytest.raises(ValueError, match=r"sample 9 has no segment vision\[0\]"):
        microbatch_data(plan, plan.stages[0], missing, SOURCE, dtype=torch.float32)
