"""Pipelines without messages: they obey their bounds, and agree with the simulator."""

from collections import Counter
from itertools import chain

import numpy as np
import pytest

from experiments.entrain.bubble_filling import filled_s
from experiments.entrain.methods import METHODS, assigned, replicas_of
from experiments.entrain.regrouping import iteration_s
from experiments.entrain.replica import Replica, chain_of
from experiments.entrain.series import one_sample_stages
from experiments.entrain.workload import CORPUS_OF, batch_of
from workbench.balance.microbatches.assignment import MicrobatchAssignment

LLM = "Llama3-3b"


def replica(dataset: str = "SynthChartNet", num: int = 32) -> Replica:
    return Replica(llm=LLM, samples=batch_of(dataset, num, 1), stages=(4, 4))


def test_encoder_microbatches_are_cut_by_consumer():
    assignment = MicrobatchAssignment(
        encoder=((0, 1, 2), (3,), (4, 5)), deferred=((1,), (), (4, 5)), llm=((0, 2), (1, 3), (4, 5))
    )
    found = chain_of(assignment)
    assert found.encoder == ((0, 2), (1,), (3,), (4, 5))
    assert found.followers == {1: 0}


@pytest.mark.parametrize("method", METHODS)
def test_every_method_needs_at_least_the_work_of_the_ranks_it_has(method: str):
    given = replica()
    taken = METHODS[method](given)
    work_s = sum(given.encoder_work(1).samples_s()) + sum(given.llm_work(1).samples_s())
    calls_s = sum(float(work.calls_s[:2].sum()) for work in (given.encoder_work(1), given.llm_work(1)))
    assert taken.iteration_s > (work_s - 2 * len(given.samples) * calls_s) / 8
    assert len(taken.encoder_forward_s) >= 1
    assert len(taken.llm_forward_s) >= 1


def test_agrees_with_the_simulator_on_a_batch():
    """Messages and the embedding's own sizes are all that is missing."""
    given = Replica(llm=LLM, samples=batch_of("SynthChartNet", 128, 1), stages=(4, 4))
    for method, system in (("1f1b", "as drawn"), ("disttrain", "disttrain"), ("entrain", "entrain")):
        simulated_s = iteration_s("SynthChartNet", system, 1)
        assert METHODS[method](given).iteration_s == pytest.approx(simulated_s, rel=0.02)


def test_entrain_evens_out_the_encoder_and_disttrain_does_not():
    given = replica()
    plain, sorted_first, even = (METHODS[name](given) for name in ("1f1b", "disttrain", "entrain"))
    assert even.encoder_forward_s.std() < plain.encoder_forward_s.std() / 3
    assert sorted_first.encoder_forward_s.std() > plain.encoder_forward_s.std()
    (assignment,) = [assigned(given)]
    assert Counter(chain(*assignment.llm)) == Counter(range(32))


@pytest.mark.parametrize("method", METHODS)
def test_replicas_share_a_batch_out_evenly(method: str):
    batch = replica(num=64)
    found = replicas_of(method, batch, 4)
    assert [len(each.samples) for each in found] == [16] * 4
    ids = [sample.id for each in found for sample in each.samples]
    assert sorted(ids) == [sample.id for sample in batch.samples]


@pytest.mark.parametrize("dataset", CORPUS_OF)
def test_one_sample_gives_each_module_a_stage(dataset: str):
    found = {one_sample_stages(LLM, sample) for sample in batch_of(dataset, 20, 3)}
    assert all(sum(stages) == 8 and min(stages) >= 1 for stages in found)
    assert len(found) > 1 or dataset == "CocoQA"  # single samples disagree


def test_bubbles_take_encoder_work_for_nothing():
    """One forward per rank is hidden in the warm-up, and with no encoder 1F1B has its closed form."""
    ones = np.ones((6, 4))
    nothing = np.zeros(6)
    assert filled_s((ones, 2 * ones), (nothing, nothing)) == pytest.approx((6 + 3) * 3)
    little = filled_s((ones, 2 * ones), (np.full(6, 0.4), np.full(6, 0.4)))
    assert 27 < little < 27 + 6 * 0.8
    alone = filled_s((np.full((1, 1), 1.0), np.full((1, 1), 2.0)), (np.array([4.0]), np.array([8.0])))
    assert alone == pytest.approx(15.0)
