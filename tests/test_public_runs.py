"""Published training runs: their cells and conventions, how they are scored, and what rivals are told."""

from dataclasses import replace

import pytest

from experiments.public.all import Scored, score
from experiments.public.published import Target, conventions, counted_flop, filled, published
from experiments.public.rivals import arguments, at_peak, by_llm_analysis, unsayable
from sim.predict import iteration_s
from workbench.cost.profile import load_profile
from workbench.llm_table.columns import check_header, read_row
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
    for rule in (*conventions()["rule"], *conventions()["unscorable"]):
        assert rule["reason"]
    for rule in conventions()["rule"]:
        assert rule["source"]
        assert not rule["column"].startswith(("x_", "measured_"))
    told = {"tp": "2", "gpus": "96", "layers": "24"}
    cells = filled("Megatron-Core", told)
    assert (cells["tp"], cells["pp"], cells["dp"]) == ("2", "6", "8")
    assert told == {"tp": "2", "gpus": "96", "layers": "24"}


def test_a_convention_never_names_a_row():
    """Its conditions are about what a page prints of many rows, not of one."""
    for rule in conventions()["rule"]:
        when = rule.get("when", {})
        same = [row for row in ROWS if all(row.cells.get(k, "") == v for k, v in when.items())]
        assert len(same) > 1, rule


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
