"""Search: all strategies, judged by one simulator, best first, refusals with their reasons."""

from dataclasses import replace
from pathlib import Path

import pytest

from sim.predict import predict as predicted
from sim.step.engine import simulate
from tests.test_search_goodput import job as goodput_job
from tests.test_search_goodput import judge as goodput_judge
from tests.test_strategies import CLUSTER, cost, job
from workbench.job.job import load_job
from workbench.job.machines import cost_of
from workbench.model.trainable import Trainable
from workbench.plan.flop import model_flop
from workbench.planner.budget import starting_now
from workbench.planner.stage_counts import OUT_OF_TIME, PlannerStopped, silent
from workbench.report.search_tables import fits_text, layout_record, search_record, search_table
from workbench.report.table_rows import rows_of
from workbench.search.drive import Watch, search
from workbench.search.objectives.objective import Objective
from workbench.strategies import cornstarch, encoders_colocated, encoders_replicated
from workbench.strategies.registry import PLANNERS as STRATEGIES
from workbench.strategies.registry import PRICED
from workbench.timing.accept import accept
from workbench.timing.price import price

PLANNERS = {
    "cornstarch": cornstarch.plan,
    "colocated": encoders_colocated.plan,
    "replicated": encoders_replicated.plan,
}


def predict(plan):
    lowered, _ = accept(plan)
    prices = price(lowered, cost())
    return simulate(lowered, prices.duration_s, step_s=prices.step_s)


def test_best_first_by_either_objective():
    open_job = replace(job(), layouts=(), max_ranks=6)
    by_time = search(open_job, cost(), PLANNERS, predict)
    assert [c.metrics.iteration_s for c in by_time] == sorted(c.metrics.iteration_s for c in by_time)
    by_rank = search(open_job, cost(), PLANNERS, predict, objective=Objective.THROUGHPUT)
    rates = [c.samples_per_s_per_rank for c in by_rank]
    assert rates == sorted(rates, reverse=True)
    assert {c.strategy for c in by_time} == set(PLANNERS)


def test_refused_strategies_stand_last_with_their_reason():
    notes: list[str] = []
    unequal = job(2, 1, 2)  # colocated encoders must have equal stage counts
    found = search(unequal, cost(), PLANNERS, predict, Watch(progress=lambda *done: notes.append(done[-1])))
    assert found[-1].strategy == "colocated"
    assert "same pp, tp and cp" in found[-1].refusal
    assert notes[0] == ""
    assert notes[1].startswith("best so far cornstarch")
    with pytest.raises(ValueError, match="strategy colocated: "):
        _ = found[-1].metrics


def test_strategies_share_a_budget_and_hand_over_their_best_plans_at_its_end():
    """By a clock that every report moves by a second: nine seconds are three each, or what is left."""
    now_s = 0.0
    told: dict[str, int] = {}

    def clock():
        return now_s

    def searching(name, finds_after):
        def planner(job, cost, progress):
            nonlocal now_s
            plan = cornstarch.plan(job, cost, silent)
            for done in range(100):
                told[name] = done
                now_s += 1.0
                try:
                    progress(done, 100, 1.0)
                except PlannerStopped:
                    if done < finds_after:
                        raise
                    return plan
            return plan

        return planner

    planners = {"best": searching("best", 1), "none": searching("none", 50), "quick": cornstarch.plan}
    found = {
        c.strategy: c
        for c in search(job(), cost(), planners, predict, Watch(budget=starting_now(9.0, clock)))
    }
    assert told == {"best": 3, "none": 2}  # the first report later than 3 s, and than half of the rest
    assert [found[name].is_stopped for name in planners] == [True, True, False]
    assert found["best"].plan == found["quick"].plan
    assert (found["none"].plan, found["none"].refusal) == (None, OUT_OF_TIME)
    rows = search_record("job", tuple(found.values()))["candidates"]
    assert {row["strategy"] for row in rows if row.get("stopped")} == {"best", "none"}


def test_a_judgement_that_may_take_long_is_announced():
    notes: list[str] = []

    class Slow:
        def judged(self, plan, schedule, report):
            notes.append(f"judged {plan.strategy}")
            raise ValueError("no")

    found = search(
        job(),
        cost(),
        {"cornstarch": cornstarch.plan},
        predict,
        Watch(progress=lambda *done: notes.append(done[-1])),
        judge=Slow(),
    )
    assert notes[-2:] == ["cornstarch: its plan is judged", "judged cornstarch"]
    assert [candidate.refusal for candidate in found] == ["no"]


def test_a_search_for_goodput_tells_what_is_simulated_and_the_best_in_its_own_figure():
    notes: list[str] = []
    found = search(
        goodput_job(),
        cost(),
        {name: STRATEGIES[name] for name in ("cornstarch", "megatron-homogeneous")},
        predict,
        Watch(progress=lambda *done: notes.append(done[-1])),
        Objective.GOODPUT,
        goodput_judge(mtbf="1h"),
    )
    first = next(candidate for candidate in found if candidate.strategy == "cornstarch")
    rate = first.judged.figures["useful_samples_per_s"]
    judging = "cornstarch: its plan is judged, "
    assert f"{judging}its step on 2 nodes" in notes
    assert any(note.startswith(f"{judging}failures of trace 5 of 5, checkpoint every ") for note in notes)
    assert f"best so far cornstarch, {rate:.4g} useful samples/s" in notes


def test_model_flop_does_not_depend_on_how_the_model_is_parallelised():
    flops = {
        planner(job(), cost()).strategy: model_flop(planner(job(), cost())) for planner in PLANNERS.values()
    }
    assert len(set(flops.values())) == 1


def test_model_flop_of_a_trained_text_model_is_three_forwards():
    """Chowdhery et al. 2022: 6 N per token without attention."""
    plan = cornstarch.plan(replace(job(1, 1, 1, llm=Trainable.ALL), cluster=CLUSTER), cost())
    text_only = replace(
        plan,
        stages=plan.chain["llm", 0],
        microbatches=plan.microbatches_of["llm", 0],
    )
    layers = plan.model.module("llm").layers
    matmul = sum(
        o.in_features * o.out_features
        for layer in layers
        for o in layer.operators
        if hasattr(o, "in_features")
    )
    tokens = sum(sample.num_tokens for sample in plan.batch)
    assert model_flop(text_only) > 6 * matmul * tokens
    assert model_flop(text_only) < 6 * matmul * tokens * 1.5


def test_the_example_with_pools_is_searched_for_dollars():
    """What its header says, on a quarter of its batch and with three of the strategies."""
    example = load_job(Path(__file__).parents[1] / "examples" / "pools.yaml")
    example = replace(example, batch=example.batch[:8])
    machine = cost_of(example, None, None)
    names = ("cornstarch", "disttrain", "disttrain-cheapest", "megatron-colocated")
    notes: list[tuple[int, int, str]] = []
    found = search(
        example,
        machine,
        {name: (PRICED | STRATEGIES)[name] for name in names},
        lambda plan: predicted(*accept(plan), machine),
        Watch(progress=lambda *note: notes.append(note)),
        Objective.DOLLARS,
    )
    assert found[0].strategy == "disttrain-cheapest"
    dollars = [candidate.dollars_per_sample for candidate in found[:-1]]
    assert dollars == sorted(dollars)
    assert "module 'llm' lies on pool 'slower', which takes vision alone" in found[-1].refusal
    assert any(note.startswith("cornstarch: ") and " of " in note for _, _, note in notes)
    assert any(note.endswith("dollars a sample") for _, _, note in notes)
    for candidate in found[:-1]:
        stages = [stage for stage in candidate.plan.stages if stage.module == "llm"]
        assert min(rank for stage in stages for rank in stage.flat_ranks) >= 16


def test_equal_plans_share_a_row_with_their_names():
    """The same plan under two names, and one that differs; the record keeps all of them."""
    planners = {"one": cornstarch.plan, "replicated": encoders_replicated.plan, "two": cornstarch.plan}
    record = search_record("job", search(job(), cost(), planners, predict))
    same = {found["strategy"]: found.get("same_as") for found in record["candidates"]}
    assert same == {"one": None, "replicated": None, "two": "one"}
    rows = {row["strategy"]: row for row in rows_of([search_table(record)])}
    assert set(rows) == {"one, two", "replicated"}


def test_a_plain_cluster_has_a_price_that_changes_no_plan():
    """Dollars are ranks x price x time; ranked by them, fewer ranks may come first."""
    open_job = replace(job(), layouts=(), max_ranks=6)
    priced = replace(open_job, dollars_per_rank_hour=3.6)
    free, found = (search(each, cost(), PLANNERS, predict) for each in (open_job, priced))
    assert [each.plan for each in free] == [each.plan for each in found]
    for candidate in found:
        step_dollars = len(candidate.plan.ranks) * 0.001 * candidate.metrics.iteration_s
        assert candidate.dollars_per_sample == pytest.approx(step_dollars / len(open_job.batch))
    by_dollars = search(priced, cost(), PLANNERS, predict, objective=Objective.DOLLARS)
    prices = [candidate.dollars_per_sample for candidate in by_dollars]
    assert prices == sorted(prices)
    with pytest.raises(ValueError, match=r"wants cluster.dollars_per_gpu_hour, or cluster.pools"):
        search(open_job, cost(), PLANNERS, predict, objective=Objective.DOLLARS)


def test_the_best_and_the_front_follow_the_objective_not_the_step():
    priced = replace(job(), layouts=(), max_ranks=6, dollars_per_rank_hour=3.6)
    by_dollars = search(priced, cost(), PLANNERS, predict, objective=Objective.DOLLARS)
    best = by_dollars[0]
    assert best.metrics.iteration_s > min(each.metrics.iteration_s for each in by_dollars)
    record = search_record("job", by_dollars, {"objective": Objective.DOLLARS.value})
    price = f"${1000 * best.dollars_per_sample:.4g} for 1,000 samples"
    assert f"; best by dollars-per-sample: {best.strategy}, {price}, " in fits_text(record)
    fastest = min(by_dollars, key=lambda each: each.metrics.iteration_s).strategy
    caption = str(search_table({**record, "front": [fastest, best.strategy]}).caption)
    assert f"GPUs and dollars, best first: {best.strategy}, {fastest}" in caption


def test_a_row_says_how_the_plan_is_laid_out():
    record = search_record("job", search(job(2, 1, 3), cost(), {"cornstarch": cornstarch.plan}, predict))
    [found] = record["candidates"]
    plan = cornstarch.plan(job(2, 1, 3), cost())
    assert found["layout"] == layout_record(plan)
    [row] = rows_of([search_table(record)])
    assert (row["pp"], row["tp"], row["ranks"]) == ("2 + 1 + 3", 1, 6)
    assert (row["iteration_s"], row["memory"]) == (found["iteration_s"], found["peak_bytes"])
    assert row["80_percent_within"] is None
    assert fits_text(record).startswith("fits: 1 of 1 strategies have a plan; best cornstarch, ")


@pytest.mark.parametrize(("mfu", "is_low"), [(None, False), (0.046, True), (0.1, False)])
def test_a_low_mfu_of_the_best_plan_names_the_command_that_explains_it(mfu: float | None, is_low: bool):
    record = search_record("job", search(job(2, 1, 3), cost(), {"cornstarch": cornstarch.plan}, predict))
    record["candidates"][0]["mfu"] = mfu
    caption = str(search_table(record).caption)
    assert ("the best plan's MFU is low, 4.6%: `workbench explain" in caption) is is_low
