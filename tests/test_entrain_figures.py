"""Entrain's and DistTrain's figures: what they compute besides drawing."""

from itertools import pairwise

import numpy as np
import pytest

from experiments.disttrain import figure5, figure16
from experiments.entrain import figure4_5, figure4_6, figure4_13, figure4_15, series
from experiments.entrain.replica import Replica
from experiments.entrain.stage_work import layer_quadratics, shared_cuts
from experiments.entrain.workload import batch_of
from experiments.harness.figure import Box

LLM = "Llama3-3b"


def test_every_pair_of_model_and_data_set_is_printed():
    cells = series.printed_stages()
    assert len(cells) == 2 * 4 * 3
    assert cells["SynthChartNet", "Llama3-1b", "entrain"] == (5, 3)
    assert cells["CocoQA", "Llama3-3b", "entrain"] == (3, 5)
    assert all(sum(cell) == 8 for key, cell in cells.items() if key[2] != "dip")


def test_idle_is_what_the_passes_leave_of_the_step():
    drawn = [
        Box(0, "vision", True, 0.0, 1.0),
        Box(0, "vision", False, 3.0, 4.0),
        Box(1, "llm", True, 1.0, 2.0),
    ]
    assert figure4_13.idle_fractions(drawn) == [0.5, 0.75]


def test_reordering_even_work_changes_nothing():
    groups = [[1.0, 1.0, 1.0]] * 2
    plain = figure16.step_s(groups, 2, reorders=False)
    assert plain == figure16.step_s(groups, 2, reorders=True) == pytest.approx(3 + 4 - 1)


def test_image_work_is_relative_to_the_mean():
    work = figure16.image_work(300, 3)
    assert np.mean(work) == pytest.approx(1, rel=0.15)
    assert min(work) >= 0


def test_subsequences_fill_a_sample():
    found = figure5.distributions()
    assert min(found["text tokens of a subsequence"]) >= 1
    assert max(found["image tokens of a subsequence"]) <= 64 * 64


def test_a_split_far_from_the_ratio_is_slower():
    found = figure4_15.steps_s("CocoQA", LLM, num_batches=1)
    assert len(found) == 7
    assert found[4, 4] < min(found[1, 7], found[7, 1])


def test_shared_cuts_hold_all_layers_and_share_one_block():
    samples = batch_of("LLaVA-150k", 32, 1)
    encoder, llm = shared_cuts(LLM, samples, 8, 8)
    for module, cuts in (("vision", encoder), ("llm", llm)):
        assert cuts[0][0] == 0
        assert cuts[-1][1] == len(layer_quadratics(LLM, module))
        assert all(a[1] == b[0] for a, b in pairwise(cuts))
    replica = Replica(llm=LLM, samples=samples, stages=(3, 5))
    pipeline = replica.pipeline(encoder, llm, is_shared=True)
    assert len(pipeline.groups) == 8 == len(encoder) + len(llm) - 1
    assert pipeline.groups[len(encoder) - 1] == (len(encoder) - 1, len(encoder))


def test_idle_shares_are_what_work_leaves_of_the_ranks_time() -> None:
    found = figure4_6.idle_shares("CocoQA", num_batches=2)
    assert all(len(shares) == 2 and 0 < min(shares) <= max(shares) < 1 for shares in found.values())
    replica = figure4_6.drawn("CocoQA", 1)
    assert replica.num_microbatches == figure4_6.MICROBATCHES
    assert sum(replica.stages) == figure4_6.STAGES
    alone_s = sum(work.samples_s()[0] for work in (replica.encoder_work(), replica.llm_work()))
    assert figure4_6.busy_s(replica) > alone_s
    assert figure4_6.IDLE_OF_EVEN_WORK == 3 / 19
    assert figure4_6.ideal_idle("disttrain", replica) == 3 / 19
    assert 0 <= figure4_6.ideal_idle("optimus", replica) < figure4_6.ideal_idle("dip", replica) < 3 / 19


def test_printed_means_lie_outside_what_the_printed_allocations_allow():
    assert figure4_5.allocated("C_3").excludes(2.43)
    assert figure4_5.allocated("4_2").excludes(1.27)
    assert not figure4_5.allocated("C_3").excludes(9 / 7)
