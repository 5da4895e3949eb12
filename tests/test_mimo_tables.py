"""The layout paper's tables: rows are read as printed, and what is judged is judged as stated."""

from dataclasses import replace

import pytest

from experiments.mimo import figure7, figure8, tablea2, tablea3, tablea4, tablea5
from experiments.mimo.compared import gain_evidence, same_sign, step_of, with_whole_encoder
from experiments.mimo.models import LLM, VISION, assumptions, model_of, variations
from experiments.printed import printed_rows
from workbench.plan.plan import Recompute
from workbench.strategies.layout_choice import LayoutChoice


@pytest.mark.parametrize(
    ("name", "billions", "module"),
    [
        *[(size, float(size[:-1]), VISION) for size in ("1B", "3B", "6B", "7.2B", "12B")],
        *[(size, float(size[:-1]), LLM) for size in ("7B", "14B", "32B", "70B", "120B")],
    ],
)
def test_modules_are_as_large_as_they_are_called(name, billions, module):
    model = model_of(name, "7B", 1.0) if module == VISION else model_of("1B", name, 1.0)
    assert model.module(module).num_parameters / 1e9 == pytest.approx(billions, rel=0.06)


def test_every_assumption_with_a_range_is_varied_one_at_a_time():
    names = list(variations())
    assert names == [
        "patches_per_llm_token=0.2",
        "patches_per_llm_token=0.3",
        "size_factor=0.8",
        "size_factor=1.2",
    ]
    assert variations()["size_factor=0.8"] == replace(assumptions(), size_factor=0.8)


@pytest.mark.parametrize(
    ("table", "script"), [("A2", tablea2), ("A3", tablea3), ("A4", tablea4)], ids=["A2", "A3", "A4"]
)
def test_printed_layouts_take_the_printed_gpus(table, script):
    for row in printed_rows(f"mimo_table{table}"):
        found = script.compared(row)
        assert found.baseline_layout.num_ranks == found.baseline.num_gpus
        assert found.other_layout.num_ranks == found.other.num_gpus


def test_encoders_from_3b_on_are_computed_again():
    rows = {row["model"]: tablea2.colocated(row).encoders[0] for row in printed_rows("mimo_tableA2")}
    assert rows["1B+14B"].recompute is Recompute.NONE
    assert rows["3B+14B"].recompute is Recompute.FULL


@pytest.mark.parametrize(
    ("printed", "ours", "same"),
    [(0.1, 0.01, True), (0.1, -0.01, False), (-0.05, -0.2, True), (0.02, -0.02, True), (-0.01, 0.05, False)],
)
def test_on_par_is_within_three_percent(printed, ours, same):
    assert same_sign(printed, ours) is same


def test_a_whole_encoder_under_cp_costs_h_more():
    row = tablea3.compared(printed_rows("mimo_tableA3")[4])
    cut = step_of(row.baseline, row.baseline_layout, assumptions())
    whole = step_of(row.baseline, with_whole_encoder(row.baseline_layout), assumptions())
    assert whole.passes_s > cut.passes_s


def test_a_tiny_run_judges_gains_and_writes_our_numbers_beside(monkeypatch):
    monkeypatch.setattr("experiments.mimo.compared.variations", lambda: {})
    rows = [tablea2.compared(row) for row in printed_rows("mimo_tableA2")[:2]]
    evidence = gain_evidence("Table A2", rows, tablea2.step_s)
    assert [number.value for number in evidence.paper] == [
        pytest.approx(7570 / 6750),
        pytest.approx(7780 / 6840),
    ]
    assert evidence.ours["modelled/A2/1B+14B/50/h_ms"] > 1000
    assert {"sign_share", "kendall_tau", "gain_error_points"} <= evidence.ours.keys()
    for unstated in evidence.unstated.values():
        assert unstated.low <= unstated.high


def test_figure_7_shows_five_bars():
    shown = [row for row in printed_rows("mimo_tableA4") if figure7.is_shown(row)]
    assert [(row["model"], row["seq_len_k"], row["h_n_gpus"]) for row in shown] == [
        ("6B+120B", "8", "256"),
        ("6B+120B", "8", "512"),
        ("6B+120B", "16", "512"),
        ("7.2B+120B", "16", "512"),
        ("12B+120B", "16", "512"),
    ]


def test_figure_8_layouts_have_the_printed_replicas():
    for num_gpus, encoder, mode in figure8.LAYOUTS.values():
        layout = LayoutChoice(mode=mode, encoders=(encoder,), llm=figure8.BACKBONE)
        assert layout.num_ranks == num_gpus
    assert figure8.LAYOUTS["colocated"][1].dp == 2 * figure8.BACKBONE.dp  # pairs gather


def test_table_a5_rows_take_the_printed_gpus(monkeypatch):
    monkeypatch.setattr(tablea5, "step_of", lambda workload, layout, _: _Fake(workload, layout))
    monkeypatch.setattr(tablea5, "fastest_beside", lambda workload, island: 1.0)
    for row in printed_rows("mimo_tableA5"):
        assert tablea5.modes_of(row).best in ("H", "C", "NC")


class _Fake:
    def __init__(self, workload, layout):
        assert layout.num_ranks == workload.num_gpus
        self.step_s = 1.0
