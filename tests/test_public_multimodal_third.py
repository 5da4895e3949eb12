"""The third round of multimodal runs, of production systems: its files, its models and what its rows add."""

from pathlib import Path

import pytest

from experiments.public import expert_loads, multimodal
from experiments.public.unseen_multimodal_third import ROUND
from workbench.model.expert_load import load_cv
from workbench.model.layer import LayerKind

RECORD = Path(__file__).parents[1] / "experiments" / "public" / "record" / "unseen.md"
RUNS = ROUND.runs()
MODELS = multimodal.models_of(ROUND.models)


def _job(name):
    return multimodal.job_of(RUNS[name], MODELS)


def _own_parameters(module):
    """Parameters of a module; of those that layers share, one each."""
    shared = {each for layer in module.layers for _, each in layer.tied}
    counted = 0
    for layer in module.layers:
        sizes = {parameter.name: parameter.num_elements for parameter in layer.parameters()}
        for name, each in layer.tied:
            size = sizes.pop(name)
            counted += size if each in shared else 0
            shared.discard(each)
        counted += sum(sizes.values())
    return counted


@pytest.mark.parametrize(
    ("name", "stated"),
    [
        ("mb-q36-sft-h100", 71_903_645_408 // 2),
        ("mb-q122-sft-h100", 125_086_497_008),
        ("mb-q38-perf-gb200", 27_781_427_952),
    ],
)
def test_models_with_their_predicting_modules_have_the_parameters_that_cards_state(name, stated):
    assert sum(map(_own_parameters, _job(name).model.modules)) == stated


def test_stages_have_the_blocks_of_the_card():
    job = _job("mb-q36-sft-h100")
    (layout,) = (each for each in job.layouts if each.module == "llm")
    first, last = layout.stage_layers
    layers = job.model.llm.layers
    own = [layer for layer in layers if layer.kind is LayerKind.BLOCK and "mtp" not in layer.name]
    assert (first, len(own)) == (1 + 19, 19 + 21)
    assert last == 21 + 3 + 1  # the predicting module's projection, block and head, and the head
    assert layout.ep == 8
    assert multimodal.replicas_of(RUNS["mb-q36-sft-h100"]) == 8


def test_the_tower_is_on_the_first_of_several_stages():
    row = RUNS["mb-q122-sft-h100"]
    assert multimodal.strategy_of(row) == multimodal.PIPELINED
    assert multimodal.strategy_of(row | {"pp": ""}) == multimodal.STRATEGY


def test_rows_say_formats_and_recomputed_parts():
    perf, wan = _job("mb-q36-perf-h100").settings.of("llm"), _job("dfm-h100-64").settings.of("llm")
    assert [str(each) for each in perf.computed_again] == ["core_attn", "moe_act"]
    assert (wan.recompute, wan.recompute_layers) == ("blocks", 10)
    assert _job("ml51-gb300-16").settings.of("llm").products == "mxfp8"


def test_tokens_per_second_and_gpu_are_a_step():
    row = RUNS["dfm-h100-64"]  # 64 samples of 37,440 tokens on 64 GPUs
    assert multimodal.measured_s(row, 1866.47, "tokens/s/GPU") == pytest.approx(37_440 / 1866.47)
    llava = RUNS["fp-7b-pretrain"]  # 256 samples of 602 tokens on 8 GPUs
    assert multimodal.measured_s(llava, 1000.0, "tokens/s/GPU") == pytest.approx(256 * 602 / 8 / 1000)
    assert multimodal.measured_s(llava, 1000.0, "tokens/s") is None


def test_key_heads_of_a_rank_are_copied_where_there_are_fewer():
    two, four = (_job(f"mb-q122-{name}-h100").model.llm.num_parameters for name in ("sft", "pretrain"))
    layers_with_keys = 48 // 4 + 1  # of full attention, and the predicting module's
    assert four - two == layers_with_keys * 2 * (2 * 256) * 3072


def test_memory_of_fused_kernels_is_less_than_that_of_transformers_modules():
    name = "mb-q38-perf-gb200"
    row, job = RUNS[name], _job(name)
    assert multimodal.peak_gib(row, job) < 0.5 * multimodal.peak_gib(row | {"execution": "transformers"}, job)


def test_sharded_state_has_so_many_copies():
    settings = _job("ml51-gb200-512").settings.of("llm")
    assert (settings.sharding, settings.reshard_after, settings.instances) == ("parameters", "step", 8)


def test_loads_of_experts_are_those_that_are_stated():
    """Equal ones leave a step as it was; with all tokens at the same experts it is longer."""
    name = "mb-q122-sft-h100"
    row, job = RUNS[name], _job(name)
    cvs = expert_loads.load_cvs(job, [0.52])
    assert list(cvs) == [expert_loads.EQUAL, "0.52", expert_loads.ONE_PLACE]
    assert expert_loads.with_load(job, 0.0) == job
    errors = [expert_loads.error_of(row, expert_loads.with_load(job, cv), 1.0) for cv in cvs.values()]
    assert errors[0] == ROUND.predicted(row).step.value - 1
    assert errors == sorted(set(errors))
    llm = expert_loads.with_load(job, cvs["0.52"]).model.llm
    assert {load_cv(layer) for layer in llm.layers} == {0.0, cvs["0.52"]}


def test_mixtures_of_the_round_are_its_runs_with_experts():
    degrees = [layout.ep for *_, job, _ in expert_loads.mixtures() for layout in job.layouts]
    assert sorted(degrees) == [1] * 6 + [8] * 6  # of the towers, and of the language models


@pytest.mark.parametrize("texts", [("x",), ("nan",), ("-1",), ("0.5", "inf")])
def test_a_largest_load_is_a_number_from_0(texts):
    with pytest.raises(ValueError, match=r"max.violations: want"):
        expert_loads.run.compute(texts)
