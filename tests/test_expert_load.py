"""Unequal loads of experts: the busiest rank's rows against draws, what a plan and a row make of them."""

from dataclasses import replace
from math import log, sqrt
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.predict import iteration_s, predict
from tests import tiny_models
from tests.test_expert_cost import MEASURED, WORK, measured
from tests.test_expert_plan import EXAMPLE, MIXTRAL, moe_plan
from workbench.cost.collectives import Collective
from workbench.cost.expert_load import busiest_share, load_cv_of
from workbench.cost.expert_parallel import exchanges_of, on_rank
from workbench.cost.model import CostModel
from workbench.cost.profile import ideal_profile, load_profile
from workbench.cost.roofline import Grid
from workbench.explain.sensitivity import sensitivities
from workbench.job.job import load_job
from workbench.llm_table.columns import check_header, read_row
from workbench.llm_table.predict import RowPredictor
from workbench.llm_table.row_model import model_of
from workbench.memory.account import peak_bytes
from workbench.model.expert_load import (
    counted_load_cv,
    load_cv,
    most_load_cv,
    with_expert_load,
    with_load_cv,
)
from workbench.plan.codec import dumps, loads, plan_hash
from workbench.plan.plan import Plan
from workbench.timing.accept import accept

DRAWS = 4000
TOKENS = 2048


def weights(kind: str, shape: tuple[int, int], cv: float, rng: np.random.Generator) -> np.ndarray:
    """Independent positive numbers with this CV: gamma ones make Dirichlet shares."""
    if kind == "dirichlet":
        return rng.gamma(1 / cv**2, size=shape)
    return np.exp(sqrt(log(1 + cv**2)) * rng.normal(size=shape))


@pytest.mark.parametrize(("kind", "tolerance"), [("dirichlet", 0.1), ("lognormal", 0.3)])
@pytest.mark.parametrize("cv", [0.1, 0.3, 0.6, 1.0])
@pytest.mark.parametrize(("num_experts", "num_chosen"), [(8, 2), (64, 6), (256, 8)])
def test_the_busiest_rank_is_that_of_draws_with_unequal_shares(
    num_experts: int, num_chosen: int, cv: float, kind: str, tolerance: float
) -> None:
    """The excess over the mean: within 10 % for Dirichlet shares, within 30 % for lognormal ones."""
    rng = np.random.default_rng(0)
    drawn = weights(kind, (DRAWS, num_experts), cv, rng)
    shares = drawn / drawn.sum(1, keepdims=True)
    stated = shares.std(1) * num_experts
    num_rows = TOKENS * num_chosen
    counts = rng.multinomial(num_rows, shares)
    for num_ranks in (2, 4, 8, num_experts):
        on_ranks = counts.reshape(DRAWS, num_ranks, -1).sum(2)
        excess = on_ranks.max(1).mean() / (num_rows / num_ranks) - 1
        found = [busiest_share(num_rows, num_ranks, num_experts=num_experts, load_cv=c) for c in stated]
        assert np.mean(found) - 1 == pytest.approx(excess, rel=tolerance)


# Rows of 8 experts in 16 layers of a model that trained with a loss that balances them: shawntan/scattermoe,
# issue 10 (11 April 2024), the first 16 lists of "Iter 38350".
COUNTED = (
    (628, 649, 658, 630, 668, 652, 634, 601),
    (654, 627, 632, 676, 586, 646, 647, 652),
    (643, 633, 660, 604, 634, 664, 647, 635),
    (613, 640, 656, 606, 659, 641, 648, 657),
    (609, 624, 627, 658, 587, 705, 624, 686),
    (653, 615, 679, 646, 605, 615, 641, 666),
    (702, 680, 599, 675, 622, 620, 605, 617),
    (711, 658, 672, 623, 590, 688, 609, 569),
    (644, 629, 632, 627, 652, 639, 645, 652),
    (644, 659, 585, 701, 595, 648, 618, 670),
    (781, 548, 647, 600, 636, 566, 713, 629),
    (601, 617, 667, 674, 602, 675, 596, 688),
    (642, 692, 647, 603, 690, 621, 614, 611),
    (684, 613, 667, 696, 580, 632, 634, 614),
    (622, 632, 593, 620, 607, 718, 726, 602),
    (595, 682, 652, 702, 613, 640, 668, 568),
)


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_the_busiest_rank_of_a_trained_router_is_that_of_its_counted_spread(num_ranks: int) -> None:
    """Mean over 16 layers, within 1 %, against `busiest_share` of the CV that is counted there."""
    counts = np.array(COUNTED)
    on_ranks = counts.reshape(len(counts), num_ranks, -1).sum(2)
    most = (on_ranks.max(1) / on_ranks.mean(1)).mean()
    cv = sqrt(np.mean([counted_load_cv(row) ** 2 for row in COUNTED]))
    found = busiest_share(float(counts.sum(1).mean()), num_ranks, num_experts=8, load_cv=cv)
    assert found == pytest.approx(most, rel=0.01)
    assert found > busiest_share(float(counts.sum(1).mean()), num_ranks)


@given(st.floats(1, 1e9), st.integers(2, 64), st.integers(1, 8))
def test_equal_shares_are_random_choices_alone(num_rows: float, num_ranks: int, num_held: int) -> None:
    """To the last bit: plans without a stated load are priced as before."""
    deviations = NormalDist().inv_cdf((num_ranks - 0.375) / (num_ranks + 0.25))
    expected = min(float(num_ranks), 1.0 + deviations * sqrt(num_ranks / num_rows))
    assert busiest_share(num_rows, num_ranks) == expected
    assert busiest_share(num_rows, num_ranks, num_experts=num_ranks * num_held, load_cv=0.0) == expected


@given(st.integers(2, 64), st.integers(1, 16), st.floats(0, 4), st.floats(0, 4))
def test_more_unequal_shares_are_more_rows_up_to_all(
    num_ranks: int, num_held: int, one: float, other: float
) -> None:
    less, more = (
        busiest_share(1e5, num_ranks, num_experts=num_ranks * num_held, load_cv=cv)
        for cv in sorted((one, other))
    )
    assert 1.0 <= less <= more <= num_ranks
    assert busiest_share(1e5, 1, num_experts=8, load_cv=one) == 1.0


@given(st.integers(2, 512), st.floats(0.001, 1.0))
def test_a_largest_load_is_that_of_its_spread(num_experts: int, violation: float) -> None:
    cv = load_cv_of(violation, num_experts)
    expected = min(1.0 + violation, num_experts)
    assert busiest_share(1e15, num_experts, num_experts=num_experts, load_cv=cv) == pytest.approx(expected)


@pytest.mark.parametrize(("violation", "num_experts"), [(0.5, 1), (-0.1, 8), (float("nan"), 8)])
def test_a_largest_load_that_cannot_be_is_refused(violation: float, num_experts: int) -> None:
    with pytest.raises(ValueError, match="want two experts or more and a max_violation from 0"):
        load_cv_of(violation, num_experts)


def test_counted_loads_are_rid_of_what_random_choices_make() -> None:
    """In the mean of the squares, without their cut at 0: rows of shares that are known."""
    rng = np.random.default_rng(0)
    shares = np.array([4, 3, 2, 2, 2, 1, 1, 1]) / 16
    known = float(shares.std() / shares.mean())
    found = [counted_load_cv(row.tolist()) ** 2 for row in rng.multinomial(500, shares, size=2000)]
    assert np.mean(found) == pytest.approx(known**2, rel=0.02)
    assert counted_load_cv([7, 7, 7]) == 0.0
    assert counted_load_cv([0, 0]) == 0.0
    assert counted_load_cv([10**9, 0, 0, 0]) == pytest.approx(most_load_cv(4, 1), abs=1e-3)


def loaded(plan: Plan, cv: float) -> Plan:
    modules = tuple(with_expert_load(module, cv) for module in plan.model.modules)
    return replace(plan, model=replace(plan.model, modules=modules))


def test_a_load_changes_routers_and_hashes_alone() -> None:
    """Files without one have no such key and keep their hash; one that has it says it again."""
    plan = moe_plan(cp=2, ep=2)
    assert "load_cv" not in dumps(plan)
    assert loaded(plan, 0.0) == plan
    assert plan_hash(loaded(plan, 0.0)) == plan_hash(plan)
    other = loaded(plan, 0.5)
    assert loads(dumps(other)) == other != plan
    changed = [
        (ours.name, theirs.load_cv)  # type: ignore[union-attr]
        for mine, layer in zip(plan.model.llm.layers, other.model.llm.layers, strict=True)
        for ours, theirs in zip(mine.operators, layer.operators, strict=True)
        if ours != theirs
    ]
    assert changed == [("mlp.router", 0.5)] * 2


def test_time_and_memory_of_a_plan_grow_with_the_spread_of_loads() -> None:
    cost = CostModel(load_profile("A40"))
    plan = moe_plan(cp=2, ep=2, tokens=256)
    steps, peaks = [], []
    for cv in (0.0, 0.2, 0.5, 0.9):
        lowered, memory = accept(loaded(plan, cv))
        steps.append(predict(lowered, memory, cost).iteration_s)
        peaks.append(max(peak_bytes(lowered, memory).values()))
    assert steps == sorted(set(steps))
    assert peaks == sorted(set(peaks))


def test_where_every_rank_has_all_experts_loads_decide_nothing() -> None:
    cost, plan = CostModel(load_profile("A40")), moe_plan(cp=2, tokens=256)
    found = []
    for cv in (0.0, 0.9):
        lowered, memory = accept(loaded(plan, cv))
        found.append((predict(lowered, memory, cost).iteration_s, peak_bytes(lowered, memory)))
    assert found[0] == found[1]


def test_exchanged_bytes_are_those_of_the_busiest_rank() -> None:
    layer, grid = tiny_models.llm(MIXTRAL).layers[1], Grid(1, 2, 2)

    def exchanged(cv: float) -> list[float]:
        split = on_rank(with_load_cv(layer, cv), WORK, grid)
        found = exchanges_of(split, WORK, grid, 2, divided=False)
        return [each.num_bytes for each in found.forward if each.kind is Collective.ALL_TO_ALL][1:]

    num_rows = 4096 * 2
    share = busiest_share(num_rows, 2, num_experts=4, load_cv=0.5) / busiest_share(num_rows, 2)
    assert exchanged(0.5) == pytest.approx([share * size for size in exchanged(0.0)])


def test_a_layer_measured_with_random_routing_is_one_with_unequal_loads_only_at_ep_1() -> None:
    """At ep 2 its measurement has other rows on the busiest rank; there it is the sum of its operators."""
    layer = tiny_models.llm(MIXTRAL).layers[1]
    unequal = with_load_cv(layer, 0.5)
    alone, apart = measured(layer, 1), measured(layer, 2)
    assert alone.layer_time(unequal, WORK, **MEASURED) == alone.layer_time(layer, WORK, **MEASURED)
    two = apart.with_expert_parallel(2)
    assert two.layer_time(layer, WORK, **MEASURED).forward_s == 2.0
    bare = CostModel(ideal_profile()).with_expert_parallel(2)
    assert two.layer_time(unequal, WORK, **MEASURED) == bare.layer_time(unequal, WORK, **MEASURED)
    scaled = alone.with_expert_parallel(2)
    assert (
        scaled.layer_time(unequal, WORK, **MEASURED).forward_s
        > scaled.layer_time(layer, WORK, **MEASURED).forward_s
    )
    assert [grid.ep for grid, _ in alone.measured_on(unequal, "float32")] == [1]
    assert apart.measured_on(unequal, "float32") == []


def test_explain_varies_a_stated_spread() -> None:
    cost = CostModel(load_profile("A40"))

    def about(plan: Plan) -> dict[str, float]:
        lowered, memory = accept(plan)
        found = sensitivities(lowered, cost, lambda each, model: predict(each, memory, model).iteration_s)
        return {each.about: each.more_s - each.less_s for each in found}

    plan = moe_plan(cp=2, ep=2, tokens=256)
    assert about(loaded(plan, 0.5))["spread of expert loads"] > 0
    assert "spread of expert loads" not in about(plan)


def job_with(tmp_path: Path, value: str, of: str = "llm") -> Path:
    text = EXAMPLE.read_text(encoding="utf-8")
    after = {"llm": "        num_experts_per_tok: 2\n", "vision": "      projector: mlp\n"}
    assert after[of] in text
    path = tmp_path / "job.yaml"
    path.write_text(text.replace(after[of], f"{after[of]}      expert_load_cv: {value}\n"), encoding="utf-8")
    return path


def test_a_job_says_the_loads_of_a_module(tmp_path: Path) -> None:
    llm = load_job(job_with(tmp_path, "0.5")).model.llm
    assert [load_cv(layer) for layer in llm.layers] == [0.0, 0.5, 0.5, 0.0]
    assert load_job(job_with(tmp_path, "0")).model == load_job(EXAMPLE).model


@pytest.mark.parametrize(
    ("value", "of", "message"),
    [
        ("-0.1", "llm", r"model.modules.llm.expert_load_cv: .*greater than or equal to 0, got -0.1"),
        (".nan", "llm", r"model.modules.llm.expert_load_cv: .*got nan"),
        ("1.74", "llm", r"module 'llm': want expert_load_cv up to 1.732, .*got 1.74; nearest: 1.732"),
        ("0.2", "vision", r"module 'vision' has no experts: want expert_load_cv 0, got 0.2"),
    ],
)
def test_bad_loads_of_a_job_are_refused(tmp_path: Path, value: str, of: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        load_job(job_with(tmp_path, value, of))
    assert "\n" not in str(refused.value)


def test_the_nearest_load_is_valid(tmp_path: Path) -> None:
    assert load_cv(load_job(job_with(tmp_path, "1.732")).model.llm.layers[1]) == 1.732


ROW = {
    "hidden": "512",
    "layers": "2",
    "heads": "8",
    "sequence": "1024",
    "global_batch": "8",
    "architecture": "llama",
    "experts": "16",
    "topk": "4",
    "expert_ffn": "256",
    "ep": "4",
    "dp": "4",
    "gpu": "H100",
}


@pytest.mark.parametrize("name", ["expert_load_cv", "load_cv", "cv_load", "moe_load_cv"])
def test_a_row_is_the_model_with_its_loads(name: str) -> None:
    """Under every name of the column; and slower and larger than without."""
    plain, unequal = read_row(ROW), read_row(ROW | {name: "0.5"})
    (module,) = model_of(plain).modules
    assert model_of(unequal).modules == (with_expert_load(module, 0.5),)
    assert read_row(ROW | {name: "0"}) == plain
    predictor = RowPredictor(iteration_s)
    found = [predictor.predict(row) for row in (plain, unequal)]
    assert found[0].iteration_s < found[1].iteration_s
    assert found[0].peak_bytes < found[1].peak_bytes


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ({"expert_load_cv": "-1"}, "expert_load_cv: want a number from 0 .*got -1; nearest: 0"),
        ({"expert_load_cv": "1.8"}, "expert_load_cv: want at most .*= 1.732, .*got 1.8; nearest: 1.732"),
        (
            {"expert_load_cv": "0.2", "capacity": "1"},
            "expert_load_cv: want 0 with a capacity, .*got 0.2; nearest: 0",
        ),
        (
            {"expert_load_cv": "0.2", "moe_copies": "neighbours"},
            "expert_load_cv: want 0 with moe_copies neighbours, .*got 0.2; nearest: 0",
        ),
        (
            {"expert_load_cv": "0.2", "experts": "", "topk": "", "expert_ffn": "", "ep": ""},
            "expert_load_cv: want 0 without experts, got 0.2; nearest: 0",
        ),
    ],
)
def test_bad_loads_of_a_row_are_refused(cells: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_row(ROW | cells)


@pytest.mark.parametrize("heading", ["max_vio", "load_imbalance"])
def test_a_heading_of_another_measure_is_no_synonym(heading: str) -> None:
    with pytest.raises(ValueError, match="want 'expert_load_cv'"):
        check_header([*ROW, heading])
