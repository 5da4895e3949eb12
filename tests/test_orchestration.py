"""GPUs and degrees of every unit: the exact search against all integers, the relaxation below it."""

import random
from dataclasses import replace
from itertools import product
from math import inf

import cvxpy
import pytest

from experiments.bench.rivals.orchestration_relaxed import StageBounds, orchestrate_relaxed, relaxed_stages
from workbench.balance.orchestration.cheapest import dollars_per_sample, orchestrate_cheapest
from workbench.balance.orchestration.depth import orchestrate_in_flight, stages_behind
from workbench.balance.orchestration.exact import evaluate, orchestrate, paces
from workbench.balance.orchestration.task import Cut, Degrees, Pool, Task, Unit


def random_task(seed: int, *, num_gpus: int | None = None) -> Task:
    """Small enough for all degrees to be tried."""
    rng = random.Random(seed)
    units = tuple(
        Unit(
            name=name,
            sample_s=tuple((tp, rng.uniform(0.5, 4.0) / tp**0.8) for tp in (1, 2)),
            num_layers=rng.randint(1, 5),
            weight_bytes=rng.uniform(0, 60),
            optimizer_bytes=rng.uniform(0, 120),
            activation_bytes=rng.uniform(0, 6),
            max_gpus=rng.choice([None, 2, 6]),
            reduction_bytes=rng.choice([0.0, 3.0]),
        )
        for name in ("encoder", "llm", "generator")[: rng.randint(1, 3)]
    )
    return Task(
        units=units,
        pacing=rng.choice(units).name,
        batch_samples=rng.choice([4, 6, 8]),
        microbatch_samples=rng.choice([1, 2]),
        num_gpus=num_gpus or rng.randint(3, 12),
        gpu_bytes=rng.choice([40.0, 80.0, inf]),
        virtual_stages=rng.choice([1, 2]),
        gpu_bytes_per_s=rng.choice([0.5, 5.0]),
    )


def pooled_task(seed: int) -> Task:
    """The same on two kinds of GPUs."""
    task, rng = random_task(seed), random.Random(-seed - 1)
    pools = tuple(
        Pool(
            name=name,
            num_gpus=rng.randint(1, 7),
            gpu_bytes=rng.choice([40.0, 80.0, inf]),
            gpu_bytes_per_s=rng.choice([0.5, 5.0]),
            dollars_per_hour=rng.choice([0.5, 1.0, 4.0]),
        )
        for name in ("cheap", "fast")
    )
    units = tuple(replace(unit, pool=rng.choice(pools).name) for unit in task.units)
    return replace(task, units=units, pools=pools, num_gpus=sum(pool.num_gpus for pool in pools))


def suffice(task: Task, degrees) -> bool:
    taken = dict.fromkeys([unit.pool for unit in task.units], 0)
    for unit, of_unit in zip(task.units, degrees, strict=True):
        taken[unit.pool] += of_unit.num_gpus
    most = {pool.name: pool.num_gpus for pool in task.pools} or {"": task.num_gpus}
    return all(taken[name] <= most[name] for name in taken)


def all_orchestrations(task: Task):
    """Every assignment of degrees that the rules admit."""
    choices = [
        [
            Degrees(tp=tp, dp=dp, pp=pp)
            for (tp, _), dp, pp in product(
                unit.sample_s, range(1, task.batch_samples + 1), range(1, unit.num_layers + 1)
            )
            if tp * dp * pp <= task.num_gpus
        ]
        for unit in task.units
    ]
    pace_at = [unit.name for unit in task.units].index(task.pacing)
    for degrees in product(*choices):
        if degrees[pace_at].dp not in paces(task) or not suffice(task, degrees):
            continue
        try:
            yield evaluate(task, degrees)
        except ValueError:
            continue


@pytest.mark.parametrize("start", range(0, 220, 20))
def test_exact_search_equals_all_degrees(start: int):
    for seed in range(start, start + 20):
        task = random_task(seed)
        best = min(
            all_orchestrations(task), key=lambda o: (round(o.iteration_s, 9), o.num_gpus), default=None
        )
        if best is None:
            with pytest.raises(ValueError, match=r"does not fit on|at least"):
                orchestrate(task)
            continue
        found = orchestrate(task)
        assert found.iteration_s == pytest.approx(best.iteration_s, rel=1e-9)
        assert found.num_gpus == best.num_gpus
        assert evaluate(task, found.degrees) == found
        relaxed = orchestrate_relaxed(task)
        assert evaluate(task, relaxed.degrees) == relaxed
        assert relaxed.num_gpus <= task.num_gpus
        assert relaxed.iteration_s >= found.iteration_s * (1 - 1e-9)


def test_updates_are_counted_exactly_too():
    """Once a step: a GPU's part of the module is shared by stages, and by replicas that share state."""
    for seed in range(60):
        task, rng = random_task(seed), random.Random(seed)
        units = (
            replace(unit, update_s=((1, rng.uniform(0, 9)), (2, rng.uniform(0, 9)))) for unit in task.units
        )
        with_updates = replace(task, units=tuple(units))
        every = list(all_orchestrations(with_updates))
        if not every:
            continue
        least_s = min(found.iteration_s for found in every)
        assert orchestrate(with_updates).iteration_s == pytest.approx(least_s, rel=1e-9)
        for found in every:
            more_s = sum(
                dict(unit.update_s)[d.tp] / (d.pp * (d.dp if unit.optimizer_bytes else 1))
                for unit, d in zip(with_updates.units, found.degrees, strict=True)
            )
            without_s = evaluate(task, found.degrees).iteration_s
            assert found.iteration_s == pytest.approx(without_s + more_s, rel=1e-9)


@pytest.mark.parametrize("start", range(0, 120, 20))
def test_pools_and_prices_equal_all_degrees(start: int):
    """The fastest and the cheapest, on GPUs of two kinds."""
    for seed in range(start, start + 20):
        task = pooled_task(seed)
        every = list(all_orchestrations(task))
        if not every:
            for search in (orchestrate, orchestrate_cheapest):
                with pytest.raises(ValueError, match=r"does not fit on|at least|feasible together"):
                    search(task)
            continue
        fastest_s = min(found.iteration_s for found in every)
        assert orchestrate(task).iteration_s == pytest.approx(fastest_s, rel=1e-9)
        cheapest = orchestrate_cheapest(task)
        assert suffice(task, cheapest.degrees)
        assert evaluate(task, cheapest.degrees) == cheapest
        least = min(dollars_per_sample(task, found) for found in every)
        assert dollars_per_sample(task, cheapest) == pytest.approx(least, rel=1e-9)


def test_one_pool_is_the_whole_cluster():
    for seed in range(20):
        task = replace(random_task(seed, num_gpus=12), gpu_bytes=1e9)
        pool = Pool(name="", num_gpus=12, gpu_bytes=task.gpu_bytes, gpu_bytes_per_s=task.gpu_bytes_per_s)
        assert orchestrate(replace(task, pools=(pool,))) == orchestrate(task)


def test_dollars_by_hand():
    """2 GPUs of 3 dollars and 1 of 6 for 1,800 s and 4 samples."""
    task = Task(
        units=(
            Unit(name="encoder", sample_s=((2, 1.0),), num_layers=1, pool="cheap"),
            Unit(name="llm", sample_s=((1, 449.0),), num_layers=1, pool="fast"),
        ),
        pacing="llm",
        batch_samples=4,
        microbatch_samples=1,
        num_gpus=3,
        pools=(
            Pool(name="cheap", num_gpus=2, dollars_per_hour=3.0),
            Pool(name="fast", num_gpus=1, dollars_per_hour=6.0),
        ),
    )
    found = orchestrate_cheapest(task)
    assert found.iteration_s == 1 + 449 + 3 * 449
    assert dollars_per_sample(task, found) == pytest.approx(12 * (1797 / 3600) / 4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"pools": (Pool(name="slow", num_gpus=4),)}, "unit 'llm': no pool ''; there are slow"),
        ({"pools": (Pool(name="", num_gpus=3),)}, "4 GPUs together, got 3"),
        ({"pools": (Pool(name="", num_gpus=2),) * 2}, "pools must differ"),
    ],
)
def test_bad_pools_are_named(change: dict[str, object], words: str):
    unit = Unit(name="llm", sample_s=((1, 1.0),), num_layers=2)
    given = {"units": (unit,), "pacing": "llm", "batch_samples": 4, "microbatch_samples": 2, "num_gpus": 4}
    with pytest.raises(ValueError, match=words):
        Task(**(given | change))


def test_searches_that_pools_do_not_suit_say_so():
    unit = Unit(name="llm", sample_s=((1, 1.0),), num_layers=2, pool="one")
    task = Task(
        units=(unit,),
        pacing="llm",
        batch_samples=4,
        microbatch_samples=2,
        num_gpus=4,
        pools=(Pool(name="one", num_gpus=4),),
    )
    with pytest.raises(ValueError, match="dollars_per_hour > 0"):
        orchestrate_cheapest(task)
    with pytest.raises(ValueError, match="GPUs of one kind"):
        orchestrate_relaxed(task)
    with pytest.raises(ValueError, match="want >= 1 GPU and >= 0 dollars"):
        Pool(name="one", num_gpus=4, dollars_per_hour=-1.0)


def test_formula_of_the_paper():
    """Equations 1 and 2 by hand: 2 LLM stages, one encoder of half the data-parallel degree."""
    task = Task(
        units=(
            Unit(name="encoder", sample_s=((1, 3.0),), num_layers=4),
            Unit(name="llm", sample_s=((2, 8.0),), num_layers=4),
        ),
        pacing="llm",
        batch_samples=12,
        microbatch_samples=1,
        num_gpus=16,
    )
    found = evaluate(task, (Degrees(tp=1, dp=1, pp=2), Degrees(tp=2, dp=2, pp=2)))
    assert found.warmup_s == 8.0 + 2 * 3.0
    assert found.steady_s == max(8.0 / 2, 2 * 3.0 / 2) * (12 / 2 - 1)
    assert found.num_gpus == 2 + 8


def test_more_gpus_than_bring_anything_are_left_alone():
    unit = Unit(name="llm", sample_s=((1, 1.0),), num_layers=2)
    task = Task(units=(unit,), pacing="llm", batch_samples=2, microbatch_samples=1, num_gpus=100)
    found = orchestrate(task)
    assert found.num_gpus == 2
    assert found.iteration_s == 1.0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_gpus": 2}, "need 3 GPUs at least, got 2"),
        ({"gpu_bytes": 1.0}, "unit 'encoder' does not fit on"),
    ],
)
def test_what_cannot_fit_is_named(change: dict[str, float], words: str):
    units = tuple(
        Unit(name=name, sample_s=((1, 1.0),), num_layers=2, weight_bytes=8.0)
        for name in ("encoder", "llm", "generator")
    )
    given = {"num_gpus": 12, "batch_samples": 4, "microbatch_samples": 1} | change
    with pytest.raises(ValueError, match=words):
        orchestrate(Task(units=units, pacing="llm", **given))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"pacing": "lm"}, "'lm'"),
        ({"batch_samples": 5}, "multiple of the microbatch of 2"),
        ({"num_gpus": 0}, ">= 1 GPU"),
        ({"units": ()}, "got"),
    ],
)
def test_bad_tasks_are_named(change: dict[str, object], words: str):
    unit = Unit(name="llm", sample_s=((1, 1.0),), num_layers=2)
    given = {"units": (unit,), "pacing": "llm", "batch_samples": 4, "microbatch_samples": 2, "num_gpus": 4}
    with pytest.raises(ValueError, match=words):
        Task(**(given | change))


@pytest.mark.parametrize("sample_s", [(), ((0, 1.0),), ((1, -1.0),)])
def test_bad_units_are_named(sample_s: tuple[tuple[int, float], ...]):
    with pytest.raises(ValueError, match="unit 'x'"):
        Unit(name="x", sample_s=sample_s, num_layers=1)


def test_bisection_solves_the_convex_program_as_a_solver_does():
    """Slowest stage of 40 random programs, by bisection and by cvxpy."""
    rng = random.Random(0)
    for _ in range(40):
        units = []
        for _ in range(rng.randint(1, 4)):
            least = rng.randint(1, 4)
            most = least + rng.randint(0, 30)
            units.append(StageBounds(rng.uniform(0.1, 50.0), rng.choice([1, 2, 4, 8, 16]), least, most))
        num_gpus = sum(unit.gpus_per_stage * unit.least for unit in units) + rng.randint(0, 200)
        stages = cvxpy.Variable(len(units))
        per_stage = [unit.gpus_per_stage for unit in units]
        slowest = cvxpy.max(cvxpy.multiply([u.work_s for u in units], cvxpy.inv_pos(stages)))
        rules = [
            stages >= [unit.least for unit in units],
            stages <= [unit.most for unit in units],
            cvxpy.sum(cvxpy.multiply(per_stage, stages)) <= num_gpus,
        ]
        cvxpy.Problem(cvxpy.Minimize(slowest), rules).solve(solver=cvxpy.CLARABEL)
        found = relaxed_stages(units, num_gpus)
        assert sum(pp * gpus for pp, gpus in zip(found, per_stage, strict=True)) <= num_gpus * (1 + 1e-9)
        ours_s = max(unit.work_s / pp for unit, pp in zip(units, found, strict=True))
        assert ours_s == pytest.approx(float(slowest.value), rel=1e-5)


@pytest.mark.parametrize("seed", range(60))
def test_whole_layers_equal_all_degrees(seed: int):
    task = replace(random_task(seed), cut=Cut.LAYERS, gpu_bytes=1e9)
    least_s = min((found.iteration_s for found in all_orchestrations(task)), default=None)
    if least_s is not None:
        assert orchestrate(task).iteration_s == pytest.approx(least_s, rel=1e-9)


def test_stages_of_whole_layers_by_hand():
    """5 layers on 3 stages: the slowest has 2 of them."""
    unit = Unit(name="llm", sample_s=((1, 10.0),), num_layers=5)
    task = Task(units=(unit,), pacing="llm", batch_samples=4, microbatch_samples=1, num_gpus=3)
    three = (Degrees(tp=1, dp=1, pp=3),)
    assert evaluate(task, three).steady_s == pytest.approx(3 * 10 / 3)
    assert evaluate(replace(task, cut=Cut.LAYERS), three).steady_s == pytest.approx(3 * 4.0)


def in_flight_bytes(task: Task, found) -> list[float]:
    """Bytes of the first stage of each unit: its state, and a microbatch for every stage from it on."""
    pace = next(d.dp for unit, d in zip(task.units, found.degrees, strict=True) if unit.name == task.pacing)
    total = []
    for index, (unit, d) in enumerate(zip(task.units, found.degrees, strict=True)):
        held = sum(later.pp for later in found.degrees[index:])
        samples = pace * task.microbatch_samples / d.dp
        state = (unit.weight_bytes + unit.optimizer_bytes / d.dp) / (d.tp * d.pp)
        total.append(state + unit.activation_bytes * samples / (d.tp * d.pp) * held)
    return total


@pytest.mark.parametrize("start", range(0, 80, 20))
def test_what_is_in_flight_fits(start: int):
    """The printed constraint counts the microbatches of a unit's own stages; the pipeline holds more."""
    kept = overfull = 0
    for seed in range(start, start + 20):
        task = replace(random_task(seed), gpu_bytes=80.0)
        try:
            found = orchestrate_in_flight(task, orchestrate)
        except ValueError:
            continue
        assert max(in_flight_bytes(task, found)) <= 80.0 * (1 + 1e-9)
        assert found.iteration_s >= orchestrate(task).iteration_s * (1 - 1e-12)
        kept += 1
        overfull += max(in_flight_bytes(task, orchestrate(task))) > 80.0
    assert kept >= 5
    if start == 0:
        assert overfull >= 1


def test_stages_behind_are_those_of_later_units():
    task = Task(
        units=tuple(Unit(name=name, sample_s=((1, 1.0),), num_layers=9) for name in "abc"),
        pacing="b",
        batch_samples=2,
        microbatch_samples=1,
        num_gpus=20,
    )
    found = evaluate(task, [Degrees(tp=1, dp=1, pp=pp) for pp in (2, 5, 3)])
    assert stages_behind(found) == (8, 3, 0)
