"""DistTrain's rivals by hand, and what frozen modules save."""

from dataclasses import replace
from math import ceil

import pytest

from experiments.disttrain.gains import Experiment
from experiments.disttrain.systems import (
    FABRIC_BYTES_PER_S,
    MODELS,
    SEQUENCE,
    STEPCCL,
    TOKENS,
    Calls,
    Images,
    Systems,
    Trained,
    Workload,
    plausible_images,
)
from experiments.harness.printed import claim_value
from workbench.cost.execution import Execution

SMALL = Workload(model="MLLM-9B", images=Images(read=4, drawn=2))


def test_monolithic_is_the_closed_form():
    systems = Systems(SMALL)
    encoder, llm, generator = systems._parts
    cost = systems._monolithic_cost
    result = systems.monolithic(48, 10, 1)
    stages_s = [
        encoder.passes_s(cost, 1, 1).total_s,  # 4 images on 8 GPUs: one each
        llm.sample_s(cost, 8),
        generator.passes_s(cost, 1, 1).total_s,
    ]
    rounds = ceil(10 / 2)  # two replicas of three stages of 8
    gradients = llm.num_parameters / 8 * 1 / 2 + (encoder.num_parameters + generator.num_parameters) * 15 / 16
    expected_s = sum(stages_s) + (rounds - 1) * max(stages_s) + 4 * gradients / FABRIC_BYTES_PER_S
    assert result.iteration_s == pytest.approx(expected_s)
    assert result.samples_per_s == pytest.approx(10 / expected_s)
    assert result.num_gpus == 48


def test_a_replica_must_fit():
    with pytest.raises(ValueError, match="want at least 96 GPUs for one replica, got 88"):
        Systems(SMALL).monolithic(88, 10, 10)


@pytest.mark.parametrize("trained", Trained)
def test_flop_is_of_what_runs(trained: Trained):
    parts = Systems(Workload(model="MLLM-9B", images=SMALL.images, trained=trained))._parts
    whole = Systems(SMALL)._parts
    for part, every in zip(parts, whole, strict=True):
        passes = 1 + part.needs.input_grad + part.needs.weight_grad
        assert part.sample_flop == pytest.approx(every.sample_flop * passes / 3)
        assert (part.reduction_bytes > 0) == part.needs.weight_grad


def test_flop_of_a_language_model_is_six_times_its_weights_and_attention():
    _, llm, _ = Systems(SMALL)._parts
    matmul = 6 * (llm.num_parameters - 32000 * 4096) * TOKENS  # the table of tokens is looked up
    attention = 3 * 4 * 4096 * 32 * TOKENS * (TOKENS + 1) / 2
    assert llm.sample_flop == pytest.approx(matmul + attention, rel=0.002)


@pytest.mark.parametrize("num_gpus", [96, 160])
def test_no_rival_is_faster(num_gpus: int):
    """Neither what DistMM* may choose nor fewer GPUs can beat the best of all choices."""
    systems = Systems(SMALL)
    best = systems.disttrain(num_gpus, 128)
    assert best.iteration_s <= systems.by_flop(num_gpus, 128).iteration_s * (1 + 1e-9)
    assert best.iteration_s <= systems.disttrain(num_gpus - 8, 128).iteration_s * (1 + 1e-9)
    assert best.num_gpus <= num_gpus
    assert 0 < best.mfu < 1


@pytest.mark.parametrize("model", MODELS)
def test_images_fit_into_a_sample(model: str):
    for images in plausible_images(model).values():
        pixels = images.read_px or Workload(model=model, images=images).pixels
        assert images.read * (pixels // 16) ** 2 <= TOKENS


def test_fewer_gpus_are_taken_for_a_little_time():
    systems = Systems(SMALL)
    best, frugal = systems.disttrain(96, 128), systems.frugal(96, 128, 0.05)
    assert frugal.num_gpus < best.num_gpus
    assert best.iteration_s < frugal.iteration_s <= 1.05 * best.iteration_s
    assert systems.disttrain(frugal.num_gpus - 1, 128).iteration_s > 1.05 * best.iteration_s


def test_overlapped_collectives_and_cut_activations_are_faster():
    """By what DistTrain has and Megatron-LM has not; the generator has no tensor parallelism to gain by."""
    serial, cut, together = (
        Systems(SMALL, execution=execution, monolithic=execution)
        for execution in (Execution(), SEQUENCE, STEPCCL)
    )
    seconds = [[stage.total_s for stage in each.monolithic_stages(1)] for each in (serial, cut, together)]
    assert seconds[0][1] > seconds[1][1] > seconds[2][1]
    assert seconds[0][2] == seconds[1][2] == seconds[2][2]
    assert Systems(SMALL).monolithic_stages(1) == cut.monolithic_stages(1)


def test_what_is_not_printed_is_named():
    with pytest.raises(ValueError, match="nothing is printed of megatron and MLLM-9B"):
        Experiment(name="overall", budget=8).printed("megatron", "MLLM-9B")
    with pytest.raises(ValueError, match="no claim 'dt_x' in disttrain_claims"):
        claim_value("dt_x")


def test_images_together_take_less_than_one_by_one():
    """As much work in fewer and larger kernels."""
    each = replace(SMALL, images=replace(SMALL.images, calls=Calls.EACH))
    together, apart = (Systems(workload)._parts for workload in (SMALL, each))
    cost = Systems(SMALL)._cost
    for one, other in zip(together, apart, strict=True):
        assert one.sample_flop == other.sample_flop
        faster = one.sample_s(cost, 1) < other.sample_s(cost, 1)
        assert faster == (one.name != "llm")
