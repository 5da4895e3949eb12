"""The orders of the baseline's sums, and how layouts are held against their range."""

from collections import Counter

from experiments.mimo.figure11 import (
    GROUPINGS,
    ORDERS,
    chosen,
    deviation,
    is_baseline,
    key_of,
    steps_inside,
    verdicts,
)
from experiments.mimo.figure11_runs import Arithmetic, Mix, Played, optimizer, plan_of, train
from experiments.mimo.loss_curves_runs import runs
from runtime.world.pool import Pool
from workbench.plan.plan import Precision
from workbench.timing.accept import accept


def is_grouping(played: Played) -> bool:
    return played.mix is Mix.SAMPLES


def test_every_curve_is_there_once():
    found = Counter((p.arithmetic, is_baseline(p.run), p.order > 0) for p in chosen() if not is_grouping(p))
    assert found == {
        (Arithmetic.BFLOAT16, True, False): 2,
        (Arithmetic.BFLOAT16, True, True): 2 * ORDERS,
        (Arithmetic.BFLOAT16, False, False): 4,
        (Arithmetic.FLOAT32, True, False): 2,
        (Arithmetic.FLOAT32, True, True): 2 * ORDERS,
        (Arithmetic.FLOAT32, False, False): len(runs()) - 2,
    }
    assert sum(map(is_grouping, chosen())) == 2 * GROUPINGS
    keys = Counter(key_of(p, 3) for p in chosen())
    assert len(keys) == len(chosen()) - 2, "Figure 6's layout apart is the first of Figure 13's"


def test_an_order_changes_nothing_but_the_order():
    run = next(run for run in runs() if is_baseline(run))
    plain, other = (plan_of(Played(run=run, arithmetic=Arithmetic.BFLOAT16, order=k)) for k in (0, 3))
    accept(other)
    assert other.settings.precision is Precision.BFLOAT16
    assert other.settings.gradient_bytes == 4
    assert plain.programs == other.programs
    groups = [{m.items for m in plan.microbatches if m.module == "llm"} for plan in (plain, other)]
    assert groups[0] == groups[1]
    assert [m.items for m in plain.microbatches] != [m.items for m in other.microbatches]
    (before,), (after,) = plain.stages[0].ranks, other.stages[0].ranks
    assert sorted(before) == sorted(after)
    assert before != after
    assert {stage.ranks for stage in other.stages} == {(after,)}


def test_a_grouping_has_the_same_samples_in_other_microbatches():
    run = next(run for run in runs() if is_baseline(run))
    plain = plan_of(Played(run=run, arithmetic=Arithmetic.FLOAT32))
    for order, size in ((1, 2), (2, 4)):
        other = plan_of(Played(run=run, arithmetic=Arithmetic.FLOAT32, order=order, mix=Mix.SAMPLES))
        accept(other)
        assert sorted(other.batch, key=lambda sample: sample.id) == list(plain.batch)
        items = {m.items for m in other.microbatches if m.module == "llm"}
        assert {len(group) for group in items} == {size}
        assert not items & {m.items for m in plain.microbatches}


def test_the_schedule_ends_at_the_printed_rate():
    played = next(p for p in chosen() if p.run.trains_llm)
    schedule = optimizer(played, 50).schedule
    assert schedule is not None
    assert (schedule.factor(0), schedule.factor(2), schedule.factor(50)) == (1 / 3, 1.0, 0.1)


def test_a_layout_that_leaves_the_range_is_counted_and_one_that_leaves_the_bound_is_off():
    orders = [[2.0, 1.0, 0.5], [2.0002, 1.0, 0.5]]
    assert steps_inside([2.0001, 1.0, 0.6], orders) == 2
    assert abs(deviation([2.0001, 1.0, 0.6], orders) - 0.2) < 1e-9
    same = [p for p in chosen() if p.arithmetic is Arithmetic.BFLOAT16 and not p.run.trains_llm]
    curves = {p: list(orders[p.order % 2]) for p in same}
    found = verdicts(same, curves, 3)["groups"][0]
    assert found["orders_inside_the_others"] == {"least": 3, "median": 3}
    assert not found["off"]
    far = next(p for p in same if not is_baseline(p.run))
    off = verdicts(same, curves | {far: [2.0, 1.0, 0.6]}, 3)
    assert off["groups"][0]["off"] == [far.run.name]
    assert not off["holds"]


def test_two_orders_in_bfloat16_learn_alike(pool: Pool) -> None:
    first, other = (p for p in chosen()[: ORDERS + 1] if p.order in (0, 2))
    ours, theirs = train(first, 3, pool), train(other, 3, pool)
    assert ours[2] < ours[0]
    assert deviation(ours, [theirs]) < 1e-3
