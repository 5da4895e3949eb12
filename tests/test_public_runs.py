"""Published training runs: their cells and conventions, how they are scored, and what rivals are told."""

from dataclasses import replace

import pytest

from experiments.public.all import Scored, score
from experiments.public.published import Target, counted_flop, published
from experiments.public.rivals import arguments, at_peak, by_llm_analysis, unsayable
from sim.predict import iteration_s
from workbench.cost.profile import load_profile
from workbench.llm_table.columns import NAMES, check_header, read_row
from workbench.llm_table.frameworks import filled, fitted_numbers, frameworks, holds
from workbench.llm_table.llm_row import Scores
from workbench.llm_table.predict import RowPredictor

ROWS = published()


def test_every_row_is_counted():
    sizes = {
        name: sum(row.data_set == name for row in ROWS) for name in dict.fromkeys(r.data_set for r in ROWS)
    }
    assert sizes == {
        **{"fms_fsdp": 8, "internevo": 54, "jax_toolbox": 42, "llm_foundry": 133, "megatron_bridge": 48},
        **{"megatron_bridge_ablations": 14, "megatron_core": 11, "megatron_mlsys23": 4, "megatron_sc21": 10},
    }
    assert sum(row.unscorable is not None for row in ROWS) == 15
    assert all(row.measured > 0 and row.cells["source"] for row in ROWS)


def test_every_row_has_its_words():
    for row in ROWS:
        if row.unscorable is None:
            check_header(tuple(row.cells))
            read_row(row.cells)


def test_conventions_fill_blanks_only_and_say_why():
    for rule in (rule for table in frameworks().values() for rule in table):
        assert rule["reason"]
    for rule in frameworks()["rule"]:
        assert rule["source"]
        assert rule["column"] in NAMES
    told = {"framework": "Megatron-Core", "tp": "2", "gpus": "96", "layers": "24"}
    cells = filled(told)
    assert (cells["tp"], cells["pp"], cells["dp"]) == ("2", "6", "8")
    assert told == {"framework": "Megatron-Core", "tp": "2", "gpus": "96", "layers": "24"}


def test_a_row_says_its_framework_and_nothing_else_is_asked():
    """As its users would write it: conventions and fitted numbers follow from the name."""
    cells = {"framework": "InternEvo", "hidden": "4096", "layers": "2", "heads": "32", "sequence": "2048"}
    row = read_row({**cells, "global_batch": "8", "dp": "8"})
    assert (row.attention, row.zero_stage) == (Scores.FLASH1, 0)
    assert dict(row.fitted) == {"matmul_rate": 0.855}
    assert read_row({**cells, "framework": "", "global_batch": "8"}).fitted == ()
    with pytest.raises(
        ValueError, match="framework: nothing is known of 'InternEvolution'; nearest: 'InternEvo'"
    ):
        read_row({**cells, "framework": "InternEvolution", "global_batch": "8"})


def test_numbers_hold_of_the_releases_they_are_said_of():
    cells = {"framework": "Megatron-Bridge", "experts": "128", "model": "Qwen3_30B_a3B"}

    def waits(gpu: str, precision: str) -> list[float]:
        told = cells | {"gpu": gpu, "precision": precision}
        rows = [filled({**told, "release": release}) for release in ("25.11", "26.02.01", "26.06", "")]
        return [fitted_numbers(row).get("host_wait_s", 0.0) for row in rows]

    assert waits("H100", "fp8") == [6.46e-3, 1.52e-3, 1.52e-3, 6.46e-3]
    assert waits("GB200", "mxfp8") == [2.6e-3, 2.6e-3, 0.0, 2.6e-3]
    assert waits("H100", "bf16")[-1] == 0.88e-3
    assert fitted_numbers({**cells, "gpu": "H100", "experts": "", "release": "25.11"}) == {}


@pytest.mark.parametrize(
    ("model", "gpu", "precision", "release", "recompute", "overlap"),
    [
        ("DeepSeekV3", "H100", "fp8", "25.09", "mla_up_proj+mlp", "yes"),
        ("DeepSeek_V3", "GB200", "mxfp8", "26.02", "mla_up_proj", "no"),
        ("DeepSeek_V3", "GB300", "nvfp4", "26.08", "none", "no"),
        ("DeepSeek_V3", "B200", "mxfp8", "26.08", "mla_up_proj", "yes"),
        ("Kimi_K2", "H100", "fp8", "26.08", "mla_up_proj+mlp", "no"),
        ("GPT_OSS_120B", "GB200", "mxfp8", "26.06", "norm+moe_act", "yes"),
        ("GPT_OSS_120B", "GB300", "bf16", "26.06", "none", "no"),
        ("Qwen3_30B_a3B", "GB300", "mxfp8", "26.08", "none", "no"),
    ],
)
def test_models_run_as_their_recipes_say(
    model: str, gpu: str, precision: str, release: str, recompute: str, overlap: str
):
    told = {"framework": "Megatron-Bridge", "model": model, "gpu": gpu, "precision": precision}
    cells = filled({**told, "release": release})
    assert (cells["recompute"], cells["moe_overlap"]) == (recompute, overlap)


def test_a_host_that_waits_adds_to_both_passes_of_a_layer_with_experts():
    row = next(row for row in ROWS if row.cells.get("experts") and row.unscorable is None)
    plain = replace(read_row(row.cells), fitted=())
    waiting = replace(plain, fitted=(("host_wait_s", 1e-3),))
    predictor = RowPredictor(iteration_s)
    times = [predictor.predict(each).iteration_s for each in (plain, waiting)]
    added_s = 2e-3 * plain.layers / plain.pp * plain.num_microbatches
    assert times[1] - times[0] == pytest.approx(added_s, rel=0.02)


def test_a_convention_never_names_a_row():
    """Its conditions are about what a page prints of many rows, or of none here, never of one."""
    for rule in (*frameworks()["rule"], *frameworks()["execution"]):
        when = rule.get("when", {})
        same = [row for row in ROWS if holds(when, row.cells)]
        assert len(same) != 1, rule


def test_flop_are_those_of_the_page():
    """Table 1 of SC21 has 137 TFLOP/s for 1.7B, of which its formula gives the iteration time."""
    row = next(row for row in ROWS if row.data_set == "megatron_sc21")
    seconds = counted_flop(row) / (row.measured * 1e12 * 32)
    assert row.predicted(seconds) == pytest.approx(137)
    assert row.error(seconds) == pytest.approx(0.0, abs=1e-12)
    assert row.error(2 * seconds) == pytest.approx(0.5)  # above zero: too slow


def test_a_score_counts_errors_refusals_and_order():
    one, two = [row for row in ROWS if row.target is Target.SECONDS][:2]
    found = [
        Scored(row=one, iteration_s=1.1 * one.measured),
        Scored(row=two, iteration_s=0.7 * two.measured),
        Scored(row=one, refused="no words"),
        Scored(row=replace(one, unscorable="no cells")),
    ]
    result = score(found)
    assert (result.rows, result.refused, result.unscorable) == (2, 1, 1)
    assert result.mape == pytest.approx(0.2)
    assert result.signed == pytest.approx(-0.1)
    assert result.worst == pytest.approx(0.3)
    assert result.kendall_tau in (-1.0, 1.0)


def test_a_peak_is_faster_than_what_was_measured():
    llm = read_row(next(row for row in ROWS if row.data_set == "internevo").cells)
    ideal = RowPredictor(iteration_s, profile=at_peak(load_profile(llm.gpu))).predict(llm)
    assert ideal.iteration_s < RowPredictor(iteration_s).predict(llm).iteration_s


def test_a_rival_is_told_what_it_has_words_for():
    by_set = {row.data_set: read_row(row.cells) for row in reversed(ROWS) if row.unscorable is None}
    assert unsayable(by_set["megatron_sc21"]) is None
    assert unsayable(by_set["megatron_bridge_ablations"]) == "latent attention"
    told = arguments(by_set["megatron_sc21"])
    run, parallel = told["run"], told["parallelism"]
    assert run["batch_size_per_gpu"] * run["gradient_accumulation_steps"] * parallel["dp_size"] == 512
    with pytest.raises(ValueError, match="want an interpreter with llm-analysis"):
        by_llm_analysis([by_set["megatron_sc21"]], "/bin/false")
