"""The example of masks: planned, simulated and run on context-parallel ranks as one process would."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from runtime.data.dataset import with_data
from runtime.world.pool import Pool
from sim.predict import predict_within
from tests.test_parity import assert_same
from workbench.balance.tokens.policies import longest_first
from workbench.cost.model import CostModel
from workbench.cost.profile import load_profile
from workbench.job.job import Job, load_job
from workbench.masks.bitfield import dense
from workbench.masks.patterns import sample_bitfield
from workbench.plan.check import check
from workbench.plan.plan import Plan
from workbench.plan.token_shards import Scope, token_shards
from workbench.plan.work import attention_area, work_of
from workbench.strategies import cornstarch
from workbench.timing.accept import accept

COST = CostModel(load_profile("examples/elastic-cpu.json"))


def job_of(*masks: str) -> Job:
    """The example's, with other masks where some are given."""
    job = load_job("examples/masks.yaml")
    if not masks:
        return job
    return replace(job, batch=tuple(replace(s, mask=masks[s.id % len(masks)]) for s in job.batch))


def plan_of(*masks: str) -> Plan:
    return cornstarch.plan(job_of(*masks), COST, lambda *_: None)


def test_the_example_trains_as_one_process_does(pool: Pool):
    """Losses, gradients and weights, in float64; zigzag shares, and shares balanced under the mask."""
    plan = plan_of()
    assert {stage.cp for stage in plan.stages} == {1, 2}
    assert [sample.mask for sample in plan.batch] == ["gemma", "causal_document(lengths=3)"] * 2
    assert_same(plan, pool)
    shards = token_shards(plan, "llm", longest_first, block_tokens=16, scope=Scope.ROW)
    balanced = replace(plan, token_shards=shards)
    check(balanced)
    assert_same(balanced, pool)


def test_work_and_time_follow_the_mask():
    """Pairs by counting them; a smaller mask is a shorter step."""
    times = {}
    for mask in ("sliding_window(window=4)", "causal", "full"):
        plan = plan_of(mask)
        microbatch = plan.microbatches_of["llm", 0][0]
        (sample,) = (plan.sample[item.sample] for item in microbatch.items)
        field = sample_bitfield([[sample]])
        pairs = int(np.sum(dense(field, field)))
        assert attention_area(sample) == pairs
        assert pairs <= work_of(plan, microbatch).attention_area <= 2 * pairs  # the busier rank's, twice
        times[mask] = predict_within(*accept(plan), COST).iteration_s
    assert times["sliding_window(window=4)"] < times["causal"] < times["full"]


def test_a_folder_says_its_masks_itself():
    with pytest.raises(ValueError, match=r"sets the masks; remove mask 'gemma' from job 'masks'"):
        with_data(job_of("gemma"), Path("examples"))
