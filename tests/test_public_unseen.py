"""Runs that were predicted before they were seen: files that belong together, and predictions of today."""

import csv
import math
from dataclasses import replace

import pytest

from experiments.public import (
    multimodal,
    unseen,
    unseen_multimodal,
    unseen_multimodal_second,
    unseen_systems,
    unseen_third,
)
from experiments.public.blind import Estimate, Prediction, figures, rows_of
from experiments.public.multimodal_round import Measured
from experiments.public.text_round import TextRound
from experiments.public.video_transformers import network_of
from sim.predict import iteration_s
from workbench.cost.eager_traffic import PointwiseKernels
from workbench.cost.execution import Execution, GradientSum
from workbench.cost.traffic import LossKernel
from workbench.llm_table.columns import read_row
from workbench.llm_table.frameworks import is_compared
from workbench.llm_table.predict import RowPredictor
from workbench.llm_table.row_interval import SYSTEM, unsaid_of
from workbench.timing.systems import LOST_BY_SYSTEM, OF_SYSTEM

ROUNDS = (unseen.ROUND, unseen_systems.ROUND, unseen_third.ROUND)
RUNS = unseen.ROUND.runs()
SHARED = next(run for run in RUNS.values() if run.full_share)


@pytest.mark.parametrize(
    ("found", "count"), [(unseen.ROUND, 100), (unseen_systems.ROUND, 202), (unseen_third.ROUND, 112)]
)
def test_every_run_has_a_prediction_from_before(found, count):
    every = found.runs()
    assert set(found.before()) == set(every)
    assert len(every) == count
    assert set(found.took_s()) <= set(every)
    assert all(run.cells["source"] for run in every.values())


def test_predictions_are_not_written_beside_measurements():
    rounds = (*ROUNDS, unseen_multimodal.ROUND, unseen_multimodal_second.ROUND, unseen_multimodal_second.LORA)
    before = [found.predictions.read_bytes() for found in rounds]
    for found in rounds:
        with pytest.raises(ValueError, match="predictions are written before it"):
            found.seal()
    assert [found.predictions.read_bytes() for found in rounds] == before


def test_predictions_are_sealed_and_read_again(tmp_path, monkeypatch):
    sealed = replace(unseen.ROUND, predictions=tmp_path / "predictions.csv", measured=tmp_path / "none.csv")
    name, refused = "one", Prediction(refused='no such device "X"')
    whole = Prediction(
        step=Estimate(1.0, {"inside_80": (0.5, 2.0), "inside_80_of_system": (0.25, 4.0)}), peak=Estimate(40.0)
    )
    predictions = {name: whole, "two": refused}
    monkeypatch.setattr(TextRound, "runs", lambda _: {each: each for each in predictions})
    monkeypatch.setattr(TextRound, "predicted", lambda _, run: predictions[run])
    sealed.seal()
    assert sealed.before() == predictions
    sealed.measured.write_text("id,measured_s\ntwo,1.0\n")
    with pytest.raises(ValueError, match="two: predictions are written before it"):
        sealed.seal()


def test_a_recomputed_share_lies_on_the_way_to_full_recomputation():
    ends = [replace(SHARED, full_share=share).predicted().step.value for share in (0.0, 1.0)]
    value = SHARED.predicted().step.value
    assert value == pytest.approx(ends[0] + SHARED.full_share * (ends[1] - ends[0]))


def test_figures_by_hand():
    found = figures([(Estimate(mid, {"inside_80": (mid - 0.1, mid + 0.1)}), 1.0) for mid in (1.1, 0.8)])
    assert found["mean"] == pytest.approx(0.15)
    assert found["signed"] == pytest.approx(-0.05)
    assert (found["rows"], found["inside_80"], found["worst"]) == (2.0, 0.5, pytest.approx(0.2))


def test_systems_that_were_not_compared_have_wider_intervals():
    cells = {
        "hidden": "4096",
        "layers": "4",
        "heads": "32",
        "sequence": "2048",
        "global_batch": "8",
        "gpus": "8",
    }
    assert not is_compared(cells)
    assert is_compared(cells | {"framework": "llm-foundry"})
    assert SYSTEM in unsaid_of(cells | {"framework": "torchtitan"})
    open_cells = unsaid_of(cells)
    row = read_row(cells)
    predictor = RowPredictor(iteration_s)
    known = predictor.predict(row, {name: size for name, size in open_cells.items() if name != SYSTEM})
    unknown = predictor.predict(row, open_cells)
    assert unknown.iteration_s == known.iteration_s
    assert unknown.interval.high_s > known.interval.high_s
    assert (OF_SYSTEM, LOST_BY_SYSTEM) in [
        (doubt.deviation, doubt.centre) for doubt in unknown.interval.doubts
    ]
    middle_s = (unknown.interval.low_s * unknown.interval.high_s) ** 0.5
    assert math.log(middle_s / unknown.iteration_s) == pytest.approx(LOST_BY_SYSTEM)
    assert unknown.interval.low_s < unknown.iteration_s


def test_a_multimodal_run_becomes_a_job_of_its_layouts():
    found = unseen_multimodal.ROUND
    row = found.runs()["m42"]
    job = multimodal.job_of(row, multimodal.models_of(found.models))
    assert (len(job.batch), job.settings.of("llm").recompute) == (16, "blocks")
    whole_s = multimodal.step_of({**row, "covers": "step"}, job).value
    assert 0 < found.predicted(row).step.value < whole_s  # without the optimizer's step


def test_the_execution_of_transformers_prices_its_kernels():
    execution = multimodal.EXECUTIONS["transformers"]
    assert execution.pointwise is PointwiseKernels.EAGER
    assert execution == Execution(
        pointwise=PointwiseKernels.EAGER, loss=LossKernel.TORCH, gradient_sum=GradientSum.OWN
    )


SECOND_ROUND, LORA_ROUND = unseen_multimodal_second.ROUND, unseen_multimodal_second.LORA
SECOND, ADAPTED = SECOND_ROUND.runs(), LORA_ROUND.runs()
SECOND_MODELS = multimodal.models_of(SECOND_ROUND.models)


def _parameters(layers):
    return sum(parameter.num_elements for layer in layers for parameter in layer.parameters())


def test_every_judged_run_of_the_second_multimodal_round_has_a_prediction_or_a_reason():
    before = rows_of(SECOND_ROUND.predictions)
    assert [row["id"] for row in before] == list(SECOND)
    for row in before:
        asked = [] if SECOND[row["id"]]["covers"] == "memory" else ["predicted_s", "low_s", "system_high_s"]
        asked += ["peak_gib"] * (SECOND[row["id"]]["memory"] == "yes")
        assert row["refused"] or all(float(row[name]) > 0 for name in asked)
        assert SECOND[row["id"]]["source"]


def test_runs_with_adapters_have_predictions_of_their_own():
    before = rows_of(LORA_ROUND.predictions)
    assert [row["id"] for row in before] == list(ADAPTED)
    first = {row["id"]: row for row in rows_of(SECOND_ROUND.predictions)}
    for row in before:
        assert first[row["id"]]["refused"] == "waits: lora"
        asked = [] if ADAPTED[row["id"]]["covers"] == "memory" else ["predicted_s", "low_s", "system_high_s"]
        asked += ["peak_gib"] * (ADAPTED[row["id"]]["memory"] == "yes")
        assert row["refused"] == ADAPTED[row["id"]]["unsaid"]
        assert row["refused"] or all(float(row[name]) > 0 for name in asked)


@pytest.mark.parametrize(
    ("name", "trained"),
    [
        ("cvx-5b-ckpt1-r64", 42 * 64 * 8 * 3072),  # q, k, v, o
        ("ftr-ltx-lora", 28 * 128 * 16 * 2048),  # of the cross-attention, too
        ("ftr-hunyuan-lora", 128 * (20 * 8 + 40 * 6) * 3072),  # the image's; blocks of one stream have no o
        ("svi-wan-i2v", 40 * 64 * (16 * 5120 + 2 * (5120 + 13824))),
        ("qvl-chat-384", 32 * 64 * (8 * 4096 + 2 * (4096 + 11008))),  # without the MLP's second product
    ],
)
def test_adapters_of_published_runs_have_rank_times_both_widths(name, trained):
    module = multimodal.job_of(ADAPTED[name], SECOND_MODELS).model.llm
    assert module.num_trained == trained


def test_what_trains_beside_adapters_is_trained_in_full():
    chat, base = (multimodal.job_of(ADAPTED[f"qvl-{name}-384"], SECOND_MODELS) for name in ("chat", "base"))
    tables = 2 * 151_936 * 4096
    assert base.model.llm.num_trained - chat.model.llm.num_trained == tables + 4096  # and the final norm
    of_chat, of_base = (
        multimodal.peak_gib(ADAPTED[f"qvl-{name}-384"], job) for name, job in (("chat", chat), ("base", base))
    )
    state = 2 + 2 + 4  # a frozen copy, gradients, moments
    assert of_base - of_chat == pytest.approx(tables * state / 2**30, rel=0.2)
    tower = multimodal.job_of(ADAPTED["mcv-lora-2"], SECOND_MODELS).model.module("vision")
    assert tower.num_trained == tower.num_parameters


def test_products_in_parts_have_the_parameters_of_the_whole():
    row = ADAPTED["ftr-hunyuan-lora"]
    adapted = multimodal.job_of(row, SECOND_MODELS).model.llm
    whole = network_of(SECOND_MODELS["dit"]["hunyuan-video"], 19_968)
    assert adapted.num_parameters - adapted.num_trained == _parameters(whole)


def test_measured_runs_with_adapters_are_scored_apart(monkeypatch, tmp_path):
    name, other = "cvx-5b-ckpt1-r64", "cvx-5b-full-b1"
    measured = tmp_path / "measured.csv"
    measured.write_text(f"id,value,unit\n{name},{LORA_ROUND.before()[name].peak.value / 2},GiB\n")
    inputs = tmp_path / "inputs.csv"
    with inputs.open("w") as file:
        writer = csv.DictWriter(file, list(SECOND[name]))
        writer.writeheader()
        writer.writerows([SECOND[name], SECOND[other]])
    for which in ("ROUND", "LORA"):
        few = replace(getattr(unseen_multimodal_second, which), inputs=inputs, measured=measured)
        monkeypatch.setattr(unseen_multimodal_second, which, few)
    ours = unseen_multimodal_second.run().ours
    assert ours["lora/all/memory_signed"] == ours["lora/cogvideox-factory/memory_signed"] == 1.0
    assert (ours["lora/predicted"], ours["lora/not_said"]) == (1.0, 0.0)
    assert (ours["predicted"], ours["not_said"]) == (1.0, 1.0)
    assert "all/memory_rows" not in ours


@pytest.mark.parametrize(
    ("name", "stated"), [("vt-clevr-hybrid-16n", 9_409_813_744), ("vt-clevr-full-16n", 9_201_416_944)]
)
def test_models_have_the_parameters_that_a_source_states(name, stated):
    job = multimodal.job_of(SECOND[name], SECOND_MODELS)
    assert sum(_parameters(module.layers) for module in job.model.modules) == stated


def test_networks_over_videos_have_the_parameters_that_sources_state():
    stated = {"ltx-video": 1_923_385_472, "cogvideox-5b": 5.57e9, "f5-tts-base": 335e6}
    for name, total in stated.items():
        assert _parameters(network_of(SECOND_MODELS["dit"][name], 2688)) == pytest.approx(total, rel=0.03)


def test_what_was_printed_is_read_in_its_unit():
    row = SECOND["mv1-pt-3b"]
    assert multimodal.measured_s(row, 3.0, "hours") == pytest.approx(3 * 3600 / 2181)
    assert multimodal.measured_s(row, 250.0, "ms/step") == pytest.approx(0.25)
    assert multimodal.measured_s(row, 128.0, "samples/s") == pytest.approx(2.0)
    assert multimodal.measured_s(row, 4.0, "steps/s") == pytest.approx(0.25)
    assert multimodal.measured_s(row, 250.0, "ms of forward") is None
    name = row["id"]
    lines = [{"value": "24", "unit": "GB"}, {"value": "20", "unit": "GiB"}, {"value": "does not fit"}]
    found = Measured.read({name: row}, [{"id": name} | line for line in lines])
    assert found == Measured({}, {name: 20.0}, {name})


def test_a_packed_row_is_a_microbatch_of_documents():
    job = multimodal.job_of(SECOND["vt-plotqa-stock-hybrid-4n"], SECOND_MODELS)
    tokens = [sample.num_tokens for sample in job.batch[: job.microbatch_samples]]
    assert sum(tokens) == pytest.approx(10_240, rel=0.001)
    assert not job.settings.of("llm").sequence_parallel
