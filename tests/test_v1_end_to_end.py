"""The end-to-end figures of Cornstarch v1: configurations as printed, and one tiny run."""

import json
from dataclasses import replace

import pytest

from experiments.cornstarch.end_to_end import (
    Configuration,
    Method,
    configurations,
    figure_evidence,
    gains,
    most_tokens,
    over,
    reads,
    settings,
    simulated,
)
from experiments.cornstarch.figure_plots import has_throughputs, throughputs
from experiments.cornstarch.frozen_tables import CLIPS, IMAGES, plausible_inputs
from experiments.cornstarch.modality_tables import settings as modality_settings
from experiments.harness.drawing import save
from workbench.cost.model import CostModel
from workbench.cost.profile import load_profile
from workbench.plan.plan import Recompute


@pytest.fixture(scope="module")
def cost():
    return CostModel(load_profile("A40"))


@pytest.mark.parametrize("llm_size", ["S", "M", "L"])
def test_every_llm_has_six_models_of_one_encoder_and_nine_of_two(llm_size):
    assert len(configurations(llm_size, ("VLM", "ALM"))) == 6
    assert len(configurations(llm_size, ("VALM",))) == 9


def test_stage_counts_are_those_of_the_printed_row():
    found = {each.model: each.counts for each in configurations("M", ("VLM", "VALM"))}
    assert found["VLM-L"] == {
        Method.COLOCATED: {"vision": 3, "llm": 2},
        Method.CORNSTARCH: {"vision": 2, "llm": 3},
        Method.REPLICATED: {"vision": 1, "llm": 6},
    }
    assert found["VALM-MM"] == {
        Method.COLOCATED: {"vision": 4, "audio": 4, "llm": 3},
        Method.CORNSTARCH: {"vision": 1, "audio": 1, "llm": 4},
        Method.REPLICATED: {"vision": 1, "audio": 1, "llm": 6},
    }


def test_only_what_a_model_reads_is_varied():
    assert [len(settings(model)) for model in ("VLM-S", "ALM-S", "VALM-SS")] == [4, 3, 5]  # and recompute


def test_a_run_takes_the_ranks_of_its_stages(cost):
    (found,) = (each for each in configurations("S", ("ALM",)) if each.model == "ALM-S")
    run = simulated(found, Method.CORNSTARCH, next(iter(settings("ALM-S").values())), cost)
    assert run.num_ranks == (3 + 1) * 2 * 2
    assert len(run.stage_s) == 4
    assert run.tput == pytest.approx(24 / run.iteration_s / 16)
    slowest_s = max(both for _, both in run.stage_s)
    assert run.iteration_s > 24 * slowest_s  # nobody is faster than the slowest stage's own work
    forward_s, both_s = run.stage_s[0]
    assert forward_s <= both_s < 1.2 * forward_s  # a frozen encoder: only its projector runs backward


def test_gains_are_over_the_better_baseline(cost):
    (found,) = (each for each in configurations("S", ("ALM",)) if each.model == "ALM-S")
    one = simulated(found, Method.CORNSTARCH, next(iter(settings("ALM-S").values())), cost)
    runs = {
        Method.CORNSTARCH: [one],
        Method.COLOCATED: [replace(one, tput=one.tput / 2)],
        Method.REPLICATED: [replace(one, tput=one.tput / 4)],
    }
    assert gains(runs) == [pytest.approx(2)]
    assert over(runs, Method.REPLICATED) == [pytest.approx(4)]


def test_the_most_tokens_of_an_input_are_those_of_its_setting():
    by_index = list(settings("VALM-SS").values())
    assert by_index[most_tokens("VALM-SS", "vision")].tokens("vision") == max(IMAGES)
    assert by_index[most_tokens("VALM-SS", "audio")].tokens("audio") == max(CLIPS)
    assert (reads("ALM-S", "vision"), reads("VLM-S", "audio"), reads("VALM-SS", "audio")) == (
        False,
        False,
        True,
    )


@pytest.mark.parametrize(
    "of_paper",
    [settings("VLM-S"), settings("VALM-SS"), plausible_inputs("ALM-M", tp=4), modality_settings("L")],
)
def test_recompute_is_open_as_only_figure_3b_states_it(of_paper):
    likely, *others = of_paper.values()
    assert likely.recompute is Recompute.FULL
    assert [each.recompute for each in others].count(Recompute.NONE) == 1
    assert replace(likely, recompute=Recompute.NONE) in others


def test_a_tiny_figure_judges_and_draws(cost, monkeypatch, tmp_path):
    first = configurations("S", ("ALM",))[0]
    one = (Configuration(**_of(first)),)
    monkeypatch.setattr("experiments.cornstarch.end_to_end.configurations", lambda *_: one)
    monkeypatch.setattr(
        "experiments.cornstarch.end_to_end.settings", lambda model: dict([*settings(model).items()][:1])
    )
    evidence = figure_evidence("Figure 13", ("S",), ("ALM",), cost)
    (claim,) = evidence.claims
    assert claim.holds == (evidence.ours["modelled/S/ALM-S/cornstarch/tput"] >= 0.98 * _best(evidence.ours))
    record = json.loads(json.dumps({"script": "cornstarch_v1/figure13", "ours": evidence.ours}))
    assert has_throughputs(record)
    assert all(path.stat().st_size > 10_000 for path in save(throughputs(record), tmp_path, "one"))


def _of(found):
    return {"llm_size": found.llm_size, "model": found.model, "counts": found.counts}


def _best(ours):
    return max(ours[f"modelled/S/ALM-S/encoders_{name}/tput"] for name in ("replicated", "colocated"))
