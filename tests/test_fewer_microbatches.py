"""A row's time and bytes out of a plan of few microbatches are those of the plan of all of them."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.predict import iteration_s
from sim.step.more_microbatches import MoreMicrobatches
from tests.examples import examples
from workbench.cost.model import CostModel
from workbench.cost.profile import load_profile
from workbench.llm_table.columns import read_row
from workbench.llm_table.fewer_microbatches import passes_of_all, with_few
from workbench.llm_table.llm_row import LlmRow
from workbench.llm_table.predict import RowPredictor
from workbench.llm_table.replicas import with_replicas
from workbench.llm_table.row_bytes import row_bytes
from workbench.llm_table.row_plan import plan_of
from workbench.llm_table.row_prices import prices_of
from workbench.plan.lower import lower
from workbench.schedule.action import Action, Pass
from workbench.timing.price import price


@st.composite
def rows(draw: st.DrawFn) -> LlmRow:
    pp = draw(st.integers(1, 6))
    virtual_stages = draw(st.integers(1, 3)) if pp > 1 else 1
    dp, micro_batch = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    microbatches = draw(st.integers(1, 40)) if virtual_stages == 1 else pp * draw(st.integers(1, 7))
    cells = {
        "hidden": draw(st.sampled_from([64, 256, 1024])),
        "layers": pp * virtual_stages * draw(st.integers(1, 2)),
        "heads": 4,
        "sequence": draw(st.sampled_from([32, 512, 2048])),
        "vocab": draw(st.sampled_from([100, 50_000])),
        "global_batch": dp * micro_batch * microbatches,
        "micro_batch": micro_batch,
        "tp": draw(st.sampled_from([1, 2, 4])),
        "cp": draw(st.sampled_from([1, 1, 2])),
        "pp": pp,
        "dp": dp,
        "virtual_stages": virtual_stages,
        "gpus_per_node": draw(st.sampled_from([1, 2, 3, 4, 8])),
        "inter_gbytes_per_s": draw(st.sampled_from([1e-3, 0.1, 1, 50])),
        "tied": draw(st.sampled_from(["yes", "no"])),
        "recompute": draw(st.sampled_from(["none", "full"])),
        "attention": draw(st.sampled_from(["flash", "stored"])),
        "optimizer": draw(st.sampled_from(["plain", "distributed"])),
    }
    return read_row({name: str(value) for name, value in cells.items()})


def by_all(row: LlmRow) -> tuple[float, int]:
    """Seconds and bytes by the plan that holds every microbatch."""
    cost = RowPredictor(iteration_s).cost(row)
    alone = lower(plan_of(row, cost.profile))
    whole = with_replicas(alone, row)
    return iteration_s(whole, prices_of(whole, row, cost)), row_bytes(alone, row)


@examples(200)
@given(rows())
def test_few_microbatches_say_what_all_would(row):
    found = RowPredictor(iteration_s).predict(row)
    seconds, num_bytes = by_all(row)
    assert found.iteration_s == pytest.approx(seconds, rel=1e-12)
    assert found.peak_bytes == num_bytes


@pytest.mark.parametrize("rounds", [4, 7])
def test_stages_that_hold_unequally_much_are_fullest_in_the_third_round(rounds: int):
    """One rank has a dense block and blocks of experts, which keep more than they are given."""
    shape = {"hidden": 64, "heads": 4, "layers": 4, "sequence": 512, "vocab": 100, "architecture": "llama"}
    experts = {"experts": 8, "topk": 2, "expert_ffn": 8, "first_dense_layers": 1, "recompute": "full"}
    cells = shape | experts | {"pp": 2, "virtual_stages": 2, "global_batch": 2 * rounds}
    row = read_row({name: str(value) for name, value in cells.items()})
    assert RowPredictor(iteration_s).predict(row).peak_bytes == by_all(row)[1]


def test_a_long_pipeline_is_planned_with_few():
    cells = {"hidden": 64, "layers": 8, "heads": 4, "sequence": 32, "global_batch": 512, "pp": 8}
    row = read_row({name: str(value) for name, value in cells.items()})
    assert with_few(row).num_microbatches == 9
    assert with_few(replace(row, virtual_stages=2, pp=4)).num_microbatches == 12
    assert with_few(replace(row, global_batch=9)) == replace(row, global_batch=9)
    assert with_few(replace(row, virtual_stages=2, pp=5)) == replace(row, virtual_stages=2, pp=5)


def test_a_plan_in_another_order_is_planned_whole():
    cells = {"hidden": 64, "layers": 2, "heads": 4, "sequence": 32, "global_batch": 16, "pp": 2}
    row = read_row({name: str(value) for name, value in cells.items()})
    plan = plan_of(with_few(row), load_profile(row.gpu))
    orders = passes_of_all(plan, row)
    assert orders is not None
    assert {len(order) for order in orders} == {32}
    first, *others = plan.programs
    swapped = replace(first, actions=(*reversed(first.actions[:2]), *first.actions[2:]))
    assert passes_of_all(replace(plan, programs=(swapped, *others)), row) is None
    sharded = replace(first, actions=(Action(0, Pass.ALL_GATHER, 0), *first.actions))
    assert passes_of_all(replace(plan, programs=(sharded, *others)), row) is None


def test_orders_that_wait_for_each_other_are_refused():
    cells = {"hidden": 64, "layers": 2, "heads": 4, "sequence": 32, "global_batch": 16, "pp": 2}
    row = read_row({name: str(value) for name, value in cells.items()})
    lowered = lower(plan_of(with_few(row), load_profile(row.gpu)))
    orders = passes_of_all(lowered.plan, row)
    assert orders is not None
    backwards_first = tuple(sorted(orders[0], key=lambda action: action.kind))
    prices = price(lowered, CostModel(load_profile(row.gpu)))
    with pytest.raises(ValueError, match="wait for each other"):
        MoreMicrobatches(lowered, (backwards_first, orders[1])).iteration_s(lowered, prices)
