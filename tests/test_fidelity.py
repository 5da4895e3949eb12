"""The fidelity suite: its arithmetic on made-up numbers, its plans, and a small run from end to end."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest, kendalltau

from experiments.fidelity import run as suite
from experiments.fidelity.cases import CROWD, Case, LeftOut, Part, cases, quick
from experiments.fidelity.causes import OTHER, SHARED, causes, executed_medians
from experiments.fidelity.draw import drawing
from experiments.fidelity.emulated import execute_emulated, predict, rehearsed
from experiments.fidelity.many_ranks import MANY, emulate_on
from experiments.fidelity.rehearsals import rehearsals
from experiments.fidelity.report import lines
from experiments.fidelity.score import Timed, accuracy, job_regrets, ranking, sign_test
from experiments.fidelity.work import (
    LLM,
    UNMEASURED,
    Work,
    decoder,
    plan_of,
    text_only,
    text_samples,
    this_machine,
)
from experiments.harness.drawing import save
from runtime.launch import run_local
from runtime.run_settings import RunSettings
from runtime.world.device import CPU
from runtime.world.pool import Pool
from sim.step.engine import simulate
from tests.bench_sizes import CELLS
from workbench.cost.profile import ideal_profile, load_profile
from workbench.plan.codec import plan_hash
from workbench.plan.lower import lower
from workbench.plan.lowered import Lowered
from workbench.plan.plan import Plan
from workbench.schedule.action import Action, Pass
from workbench.timing.price import Price
from workbench.trace import Executor, Trace
from workbench.trace_json import read_trace

MESSAGE_BYTES = tuple(2**i for i in (10, 14, 18))
HEADLINE = {
    "mean_abs_error",
    "worst_abs_error",
    "spread",
    "kendall_tau",
    "regret",
    "memory_mean_abs_error",
    "num_plans",
}


def timed(predicted_s: float, *executed_s: float, job: str = "one") -> Timed:
    return Timed(job=job, predicted_s=predicted_s, executed_s=executed_s)


# ---- arithmetic ----


def test_error_and_spread_are_of_the_median() -> None:
    plan = timed(1.1, 0.9, 1.0, 1.3)
    assert plan.error == pytest.approx(0.1)
    assert plan.spread == pytest.approx(0.4)


def test_accuracy_counts_plans_beyond_limit_and_spread() -> None:
    calm, wild, good = timed(1.2, 1.0, 1.01), timed(1.2, 0.8, 1.0, 1.2), timed(0.99, 1.0, 1.0)
    found = accuracy((calm, wild, good), limit=0.08)
    assert found.num_beyond == 1  # the wild one runs between 0.8 and 1.2 itself
    assert found.num_too_slow == 2
    assert found.worst_abs_error == pytest.approx(0.2)
    assert found.mean_error == pytest.approx((1.2 / 1.005 - 1 + 0.2 - 0.01) / 3)


def test_accuracy_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one plan"):
        accuracy((), limit=0.1)


@given(st.integers(0, 60), st.integers(0, 60))
def test_sign_test_is_the_binomial_test(positive: int, negative: int) -> None:
    count = positive + negative
    expected = binomtest(positive, count).pvalue if count else 1.0
    assert sign_test(positive, negative) == pytest.approx(expected)


NUMBERS = st.lists(st.tuples(st.integers(1, 10**6), st.integers(1, 10**6)), min_size=2, max_size=12)


@given(NUMBERS)
def test_tau_within_a_job_is_kendalls(pairs: list[tuple[int, int]]) -> None:
    predicted, executed = ([*dict.fromkeys(column)] for column in zip(*pairs, strict=True))
    length = min(len(predicted), len(executed))
    found = ranking([timed(p, e) for p, e in zip(predicted[:length], executed[:length], strict=True)])
    if length < 2:
        assert found.kendall_tau is None
    else:
        expected = kendalltau(predicted[:length], executed[:length]).statistic
        assert found.kendall_tau == pytest.approx(expected)


def test_jobs_are_not_ranked_against_each_other() -> None:
    plans = [timed(1, 10, job="a"), timed(2, 20, job="a"), timed(9, 1, job="b"), timed(8, 2, job="b")]
    found = ranking(plans)
    assert (found.num_pairs, found.kendall_tau) == (2, 0.0)
    assert job_regrets(plans) == {"a": 0.0, "b": 1.0}
    assert (found.regret, found.mean_regret) == (1.0, 0.5)


def test_pairs_that_runs_cannot_tell_apart_are_counted_apart() -> None:
    near, same, far = timed(2, 1.0, 1.2), timed(1, 1.1, 1.3), timed(3, 2.0, 2.1)
    found = ranking((near, same, far))
    assert found.num_pairs == 3
    assert found.kendall_tau == pytest.approx(1 / 3)
    assert (found.num_clear, found.clear_tau) == (2, 1.0)


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), min_size=2, max_size=6))
def test_regret_against_brute_force(pairs: list[tuple[int, int]]) -> None:
    plans = [timed(p, e) for p, e in pairs]
    least = min(p for p, _ in pairs)
    chosen = next(e for p, e in pairs if p == least)
    assert job_regrets(plans)["one"] == pytest.approx(chosen / min(e for _, e in pairs) - 1)


# ---- causes ----


def tiny_plan(num_ranks: int, *, num_cores: int | None = None, samples: Sequence[int] = (1, 1)) -> Plan:
    work = Work(
        name="tiny",
        model=text_only(decoder("llama", width=128, blocks=max(num_ranks - 2, 1))),
        batch=text_samples([16] * sum(samples)),
    )
    layers = len(work.model.module(LLM).layers)
    cuts = [(1, (rank,)) for rank in range(num_ranks - 1)] + [(layers - num_ranks + 1, (num_ranks - 1,))]
    cluster = this_machine(UNMEASURED, num_ranks, num_cores=num_cores or num_ranks)
    return plan_of(work, cluster, {LLM: cuts}, samples=samples)


def made_up(lowered: Lowered, seconds: dict[Pass, float]) -> tuple[Price, Trace]:
    """Prices by kind of action, and the trace they simulate to."""
    actions = lowered.plan.program_actions
    durations_s = {action: seconds[action.kind] for action in actions}
    prices = Price(durations_s, dict.fromkeys(lowered.plan.ranks, seconds[Pass.STEP]), ())
    return prices, simulate(lowered, prices.duration_s, step_s=prices.step_s)


SECONDS = {Pass.F: 1.0, Pass.B: 2.0, Pass.REDUCE_GRAD: 0.1, Pass.STEP: 0.5}


@pytest.mark.parametrize("kind", [Pass.F, Pass.B, Pass.STEP])
def test_an_error_of_one_kind_has_that_cause_alone(kind: Pass) -> None:
    lowered = lower(tiny_plan(2, samples=(1, 1, 1)))
    prices, predicted = made_up(lowered, SECONDS)
    _, executed = made_up(lowered, SECONDS | {kind: SECONDS[kind] * 1.25})
    found = causes(lowered, prices, (executed,))
    error = predicted.iteration_s / executed.iteration_s - 1
    assert error < 0
    assert found[str(kind)] == pytest.approx(error)
    assert sum(found.values()) == pytest.approx(error)
    assert [name for name, part in found.items() if abs(part) > 1e-12] == [str(kind)]


@given(st.tuples(*[st.floats(0.1, 5.0)] * 4))
def test_causes_add_up_to_the_error(seconds: tuple[float, ...]) -> None:
    prices, predicted = made_up(LOWERED, SECONDS)
    _, executed = made_up(LOWERED, dict(zip(SECONDS, seconds, strict=True)))
    found = causes(LOWERED, prices, (executed,))
    assert sum(found.values()) == pytest.approx(predicted.iteration_s / executed.iteration_s - 1, abs=1e-9)
    assert found[OTHER] == pytest.approx(0.0, abs=1e-9)  # made-up durations leave nothing between actions


LOWERED = lower(tiny_plan(2, samples=(1, 2, 1)))


def test_shared_cores_are_not_shared_twice() -> None:
    lowered = lower(tiny_plan(4, num_cores=2))
    prices, executed = made_up(lowered, SECONDS)
    found = causes(lowered, prices, (executed,))
    assert set(found) == {SHARED, OTHER}
    assert sum(found.values()) == pytest.approx(0.0, abs=1e-9)


def test_medians_are_of_the_slowest_rank() -> None:
    lowered = lower(tiny_plan(2))
    traces = [made_up(lowered, SECONDS | {Pass.F: f})[1] for f in (1.0, 3.0, 2.0)]
    found = executed_medians(traces)
    assert found.durations_s[Action(0, Pass.F, 0)] == pytest.approx(2.0)
    assert found.steps_s == pytest.approx({0: 0.5, 1: 0.5})


# ---- plans ----


def test_the_suite_has_its_plans() -> None:
    left_out: list[LeftOut] = []
    every = cases(UNMEASURED, left_out.append)
    assert not left_out
    assert len(every) >= 40
    assert {case.part for case in every} == set(Part) - {Part.REHEARSAL}
    assert {case.part for case in rehearsals(UNMEASURED)} == {Part.REHEARSAL}
    assert {plan_hash(case.plan) for case in rehearsals(UNMEASURED)}.isdisjoint(
        plan_hash(case.plan) for case in every
    )
    assert len({case.name for case in every}) == len({plan_hash(case.plan) for case in every}) == len(every)
    for case in every:
        pinned = len(case.plan.ranks) <= (case.plan.cluster.nodes[0].num_cores or 0)
        assert pinned == (case.part is not Part.CROWDED)
        assert len(case.plan.ranks) <= (MANY if case.part is Part.EMULATED else CROWD)


def test_quick_takes_plans_evenly() -> None:
    plan = tiny_plan(2)
    every = tuple(Case(name=str(index), job="j", part=Part.CLEAN, plan=plan) for index in range(45))
    assert quick(every, len(every) + 1) == every
    assert [case.name for case in quick(every, 6)] == ["0", "7", "15", "22", "30", "37"]
    assert quick(every, 1) == every[:1]
    with pytest.raises(ValueError, match="at least one"):
        quick(every, 0)


def test_microbatches_must_make_up_the_batch() -> None:
    work = Work(name="t", model=text_only(decoder("llama", width=128, blocks=1)), batch=text_samples([8] * 3))
    with pytest.raises(ValueError, match="do not make up a batch of 3"):
        plan_of(work, this_machine(UNMEASURED, 1), {LLM: [(3, (0,))]}, samples=(1, 1))


# ---- from end to end ----


def test_predict_run_resume_and_draw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def few(*_: object) -> tuple[Case, ...]:
        return tuple(
            Case(name=f"tiny {samples}", job="tiny", part=part, plan=tiny_plan(2, samples=samples))
            for part, samples in ((Part.CLEAN, (1, 1)), (Part.CONTEXT, (2,)))
        )

    def rehearsed(*_: object) -> tuple[Case, ...]:
        plan = tiny_plan(2, samples=(2, 1))
        return (Case(name="tiny rehearsal", job="tiny", part=Part.REHEARSAL, plan=plan),)

    monkeypatch.setattr("runtime.measure.microbench.cell_sizes", lambda device: CELLS)
    monkeypatch.setattr("runtime.measure.wires.BYTES", MESSAGE_BYTES)
    monkeypatch.setattr(suite, "cases", few)
    monkeypatch.setattr(suite, "rehearsals", rehearsed)
    extent = suite.Extent(rounds=2, steps=1, budget_s=0.01)
    result = suite.run(tmp_path, extent, is_quiet=True)
    assert set(result) >= HEADLINE
    assert result["num_plans"] == 2
    assert result["left_out"] == []
    kinds = [set(row["kinds"]) for row in result["plans"]]
    assert kinds == [{"F", "B", "STEP"}] * 2
    for row in result["plans"]:
        assert sum(row["causes"].values()) == pytest.approx(row["predicted_s"] / row["executed_s"] - 1)
        assert row["drift"] > -1
        assert row["error_corrected"] > -1
        assert row["steps"] == 2
    predictions = {row["plan_hash"] for row in json.loads((tmp_path / "predictions.json").read_text())}
    assert predictions == {row["plan_hash"] for row in result["plans"]}
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").iterdir()}
    assert len(written) == 2 * (2 + 1)  # two rounds and the watched step
    assert len((tmp_path / "runs.jsonl").read_text().splitlines()) == 4

    missing = next(path for path in written if ".1.0." in path.name)
    missing.unlink()
    again = suite.run(tmp_path, extent, is_quiet=True)
    assert again["num_plans"] == 2
    assert [path for path, time_ns in written.items() if path.stat().st_mtime_ns != time_ns] == [missing]
    assert any(line.startswith("goal: ") for line in lines(again))
    assert all(path.stat().st_size > 0 for path in save(drawing(again), tmp_path, "fidelity"))
    assert load_profile(tmp_path / "profile.json").pipeline_factor("F") != 1

    monkeypatch.setattr(suite, "rehearsals", few)
    with pytest.raises(ValueError, match=r"'tiny \(1, 1\)' is judged: it cannot be run to calibrate"):
        suite.run(tmp_path, extent, is_quiet=True)


def test_one_device_plays_all_ranks_of_the_whole_suite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: one process calibrates, rehearses, predicts and emulates, and starts no other."""

    def case(part: Part, samples: tuple[int, ...]) -> tuple[Case, ...]:
        plan = tiny_plan(2, samples=samples)
        return (Case(name=f"tiny {samples}", job="tiny", part=part, plan=plan),)

    monkeypatch.setattr(suite, "cases", lambda *_: case(Part.EMULATED, (1, 1, 1)))
    monkeypatch.setattr(suite, "rehearsals", lambda *_: case(Part.REHEARSAL, (2, 1)))
    monkeypatch.setattr(suite, "Pool", None)
    monkeypatch.setattr("runtime.measure.plans.operator_tasks", lambda clock, dtype: [])
    extent = suite.Extent(rounds=1, steps=3, budget_s=0.01)
    result = suite.run(tmp_path, extent, is_quiet=True, alone=CPU)
    assert result["left_out"] == []
    (row,) = result["plans"]
    assert (row["part"], row["steps"]) == ("emulated", 3)
    assert row["lowest_s"] < row["executed_s"] < row["highest_s"]
    traces = [read_trace(path) for path in sorted((tmp_path / "runs").iterdir())]
    assert [trace.executor for trace in traces] == [Executor.EMULATED] * 3
    assert {profile_overhead > 0 for profile_overhead in overheads(tmp_path)} == {True}
    assert result["drift"] is not None


def overheads(folder: Path) -> list[float]:
    """What the executor adds to forward, backward and STEP, by the profile there."""
    profile = load_profile(folder / "profile.json")
    return [profile.overhead_s(kind) for kind in ("F", "B", "STEP")]


def test_an_emulation_is_composed_of_medians_and_shows_its_steps() -> None:
    plan = tiny_plan(2, samples=(2, 1))
    profile = replace(ideal_profile("mine"), device="cpu")
    predicted = predict(plan, profile)
    executed = execute_emulated(plan, CPU, steps=3, profile=profile)
    assert predicted.plan_hash == executed.trace.plan_hash == plan_hash(plan)
    assert predicted.seconds == predicted.simulated.iteration_s
    assert set(predicted.durations_s) == set(plan.program_actions)
    assert len(executed.steps) == 3
    assert executed.seconds == pytest.approx(median(executed.steps_s), rel=0.5)
    again = rehearsed(profile, [(predicted, executed)])
    assert {kind for kind, _ in again.in_pipeline} >= {"B", "F"}
    errors = [abs(predict(plan, one).seconds / executed.seconds - 1) for one in (profile, again)]
    assert errors[1] < errors[0]
    with pytest.raises(ValueError, match="'ideal' is of device 'ideal', this runs on 'cpu'"):
        execute_emulated(plan, CPU, profile=ideal_profile())


def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert suite.main(["--plans", "0"]) == 2
    assert capsys.readouterr().err == "error: --plans: want at least one plan, got 0\n"
    monkeypatch.setattr(suite, "device_of", lambda name: torch.device("cuda", 0))
    assert suite.main(["--device", "cuda", "--part", "clean"]) == 2
    words = (
        "error: --part clean: its ranks are processes of this machine's cores, and one GPU plays all ranks"
    )
    assert capsys.readouterr().err == f"{words} itself; want --part emulated\n"


def test_emulated_plans_run_on_every_core_at_once(pool: Pool) -> None:
    plan = tiny_plan(4, samples=(1, 2))
    traces = emulate_on(pool, plan, RunSettings(steps=2, warmup=1), num_processes=2)
    assert [trace.executor for trace in traces] == [Executor.EMULATED] * 2
    assert all({span.rank for span in trace.spans} == {0, 1, 2, 3} for trace in traces)
    assert traces[0].loss == traces[1].loss
    assert traces[0].iteration_s != traces[1].iteration_s


def test_a_reduction_of_several_groups_is_one_span_that_takes_time(pool: Pool) -> None:
    """Two replicas of a model of three layers: three groups in one REDUCE_GRAD."""
    work = Work(
        name="t", model=text_only(decoder("llama", width=128, blocks=1)), batch=text_samples([16] * 2)
    )
    whole = [{LLM: [(3, (rank,))]} for rank in range(2)]
    plan = plan_of(work, this_machine(UNMEASURED, 2), whole, samples=(1, 1))
    assert len(lower(plan).groups) == 3
    for trace in run_local(plan, RunSettings(steps=2), pool=pool).traces:
        spans = [span for span in trace.spans if span.action.kind is Pass.REDUCE_GRAD]
        assert [span.rank for span in spans] == [0, 1]
        assert all(span.end_s > span.start_s for span in spans)


def test_emulated_replicas_add_up_gradients_at_the_profiles_prices(pool: Pool) -> None:
    work = Work(
        name="t", model=text_only(decoder("llama", width=128, blocks=1)), batch=text_samples([16] * 2)
    )
    whole = [{LLM: [(3, (rank,))]} for rank in range(2)]
    plan = plan_of(work, this_machine(UNMEASURED, 2), whole, samples=(1, 1))
    settings = RunSettings(steps=1, warmup=1)
    with pytest.raises(ValueError, match="no shipped profile is of device 'cpu'"):
        emulate_on(pool, plan, settings, num_processes=2)
    profile = load_profile(Path(__file__).parents[1] / "examples" / "elastic-cpu.json")
    for trace in emulate_on(pool, plan, settings, num_processes=2, profile=profile):
        spans = [span for span in trace.spans if span.action.kind is Pass.REDUCE_GRAD]
        assert [span.rank for span in spans] == [0, 1]
        assert all(span.end_s > span.start_s for span in spans)
