"""Attention's backward by head width: fitted on one printed row a width, and what follows for the others."""

import pytest

from experiments.cornstarch.modelled import a40_cost
from experiments.cornstarch.modelled_tables import stage_times
from experiments.cornstarch_icml.table2 import FITTED_ON, head_dim, modelled_table, published_kernel
from workbench.cost.execution import Execution, HeadRate, load_execution, write_execution
from workbench.cost.model import CostModel
from workbench.cost.roofline import RowWork, Work
from workbench.model.layer import Layer, LayerKind
from workbench.model.zoo_cornstarch import cornstarch_module

WORK = Work((RowWork(2048, 2048, 2048 * 2049 // 2),))


def block(size: str) -> Layer:
    llm = cornstarch_module(f"cornstarch-llama-{size}")
    return next(layer for layer in llm.layers if layer.kind is LayerKind.BLOCK)


def test_a_rate_slows_the_backward_of_its_width_alone() -> None:
    cost = a40_cost()
    slow = CostModel(cost.profile, Execution(attention_backward_rates=(HeadRate(head_dim=128, rate=0.5),)))
    for size, is_slowed in (("medium", True), ("small", False)):
        before, after = (
            each.layer_time(block(size), WORK, tp=1, cp=1, precision="bfloat16") for each in (cost, slow)
        )
        assert after.forward_s == before.forward_s
        assert (after.input_grad_s > before.input_grad_s) == is_slowed


def test_the_fit_gives_its_own_rows_and_the_large_llm_follows() -> None:
    table, cost = modelled_table(), a40_cost()
    rows = {row.name: row for row in table.rows}
    fitted = [rows[name] for name in FITTED_ON]
    assert [head_dim(row) for row in fitted] == [64, 128]
    theirs = CostModel(cost.profile, published_kernel(table, fitted, cost).execution)

    def ratio(name: str) -> float:
        row = rows[name]
        return stage_times(table, row, table.guesses_of(row)[0], theirs)[1].backward_s / row.llm.backward_s

    assert [ratio(name) for name in FITTED_ON] == pytest.approx([1.0, 1.0], rel=1e-3)
    assert ratio("LLL/aware") == pytest.approx(1.0, rel=0.25)


def test_rates_are_kept_in_the_file_and_refused_where_wrong(tmp_path) -> None:
    run = Execution(attention_backward_rates=(HeadRate(head_dim=64, rate=0.5),))
    write_execution(run, tmp_path / "run.json")
    assert load_execution(tmp_path / "run.json") == run
    with pytest.raises(ValueError, match="head width"):
        HeadRate(head_dim=64, rate=0.0)
