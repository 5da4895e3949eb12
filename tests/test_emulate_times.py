"""What counts as an action's own time, and how actions that were timed alone become a timeline."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from runtime.emulation.compose import compose
from runtime.emulation.emulate import clock_of, emulate
from runtime.emulation.thread_mesh import CollectiveSpan, Mailbox, sum_in_place
from runtime.emulation.times import Absences, OwnWork, composed_s, median_work, own_work
from runtime.emulation.turn import Runner, Turns
from runtime.run_settings import Collect
from runtime.world.clock import Clock
from runtime.world.device import CPU
from sim.step.engine import simulate
from tests.layout_jobs import planned, three_phase, vision_language
from tests.test_emulate import PLANS, SETTINGS
from workbench.cost.profile import load_profile
from workbench.plan.lower import lower
from workbench.schedule.action import MEANING, STEP, Activity
from workbench.trace import Executor
from workbench.trace_json import dumps, loads


class QueueingClock(Clock):
    """Of a device that works off what it was given when it is waited for, in a time of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.queued_s = 0.0
        self._worked_s = 0.0

    def stamp(self) -> float:
        self._worked_s += self.queued_s
        self.queued_s = 0.0
        return super().stamp() + self._worked_s


HOUR_S = 3600.0


def test_work_for_others_ends_before_the_next_clock_starts(monkeypatch: pytest.MonkeyPatch):
    """Each copy and each sum takes an hour of the device: no action is that long, and all hours are there."""
    clock, counts = QueueingClock(), {"put": 0, "take": 0, "sum": 0}

    def slow(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def queued(*arguments: Any) -> Any:
            counts[name] += 1
            clock.queued_s += HOUR_S
            return call(*arguments)

        return queued

    monkeypatch.setattr("runtime.emulation.emulate.clock_of", lambda device: clock)
    monkeypatch.setattr(Mailbox, "put", slow("put", Mailbox.put))
    monkeypatch.setattr(Mailbox, "take", slow("take", Mailbox.take))
    monkeypatch.setattr("runtime.emulation.thread_mesh.sum_in_place", slow("sum", sum_in_place))
    began_s = clock.stamp()
    timings = emulate(lower(PLANS["two replicas"]()), replace(SETTINGS, collect=Collect.NOTHING)).timings
    assert all(counts.values())
    assert clock.stamp() - began_s > HOUR_S * sum(counts.values())
    own_s = [work.own_s for by_rank in timings.works.values() for work in by_rank.values()]
    assert max(*own_s, *timings.steps_s.values()) < HOUR_S
    assert min(own_s) > 0


def test_work_queued_before_a_turn_aside_is_ones_own():
    """Three hours of own work, one for others, two of own work again: five are its own."""
    clock = QueueingClock()
    turns = Turns(timeout_s=60.0, now_s=clock.stamp)

    def run(runner: Runner) -> None:
        spans.append(clock.stamp())
        clock.queued_s += 3 * HOUR_S
        with turns.aside(runner):
            clock.queued_s += HOUR_S
        clock.queued_s += 2 * HOUR_S
        turns.hand_back(runner)
        spans.append(clock.stamp())

    spans: list[float] = []
    turns.start(0, run)
    turns.give(0)
    clock.queued_s += 7 * HOUR_S  # of others
    clock.stamp()
    turns.give(0)
    turns.close()
    own_s = Absences(turns.runners[0].away_s).own_s(*spans)
    assert own_s == pytest.approx(5 * HOUR_S, abs=60.0)


def test_a_stamp_of_a_gpu_waits_for_it(monkeypatch: pytest.MonkeyPatch):
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    gpu = torch.device("cuda", 3)
    clock = clock_of(gpu)
    assert clock.stamp() < clock.stamp()
    assert waited == [gpu, gpu]
    clock_of(CPU).stamp()
    assert len(waited) == 2


def test_every_timed_step_is_kept_beside_the_medians():
    lowered = lower(PLANS["everything"]())
    result = emulate(lowered, replace(SETTINGS, collect=Collect.NOTHING, steps=2, repetitions=2))
    assert result.num_timed == len(result.timed) == 4
    for action, by_rank in result.timings.works.items():
        for rank, work in by_rank.items():
            assert work == median_work([step.works[action][rank] for step in result.timed])
    third = result.of_step(2)
    assert (third.num_timed, third.timings) == (1, result.timed[2])


def test_absences_do_not_count():
    absences = Absences([(1.0, 2.0), (3.0, 3.5), (6.0, 9.0)])
    assert absences.own_s(0.0, 10.0) == pytest.approx(10 - 4.5)
    assert absences.own_s(2.5, 4.0) == pytest.approx(1.0)
    assert absences.own_s(4.0, 5.0) == pytest.approx(1.0)
    assert absences.own_s(2.0, 3.0) == pytest.approx(1.0)


def gather(start_s: float, wait_s: float) -> CollectiveSpan:
    return CollectiveSpan(
        kind="all_gather", num_bytes=8, ranks=(0, 1), start_s=start_s, wait_s=(wait_s, wait_s)
    )


def test_own_work_counts_from_the_actions_start():
    absences = Absences([(11.0, 13.0)])
    exchanges = [gather(1.0, 2.0), gather(10.5, 11.0)]
    work = own_work(10.0, 15.0, absences, exchanges, [e.wait_s[0] for e in exchanges])
    assert work == OwnWork(own_s=3.0, exchanges=(gather(0.5, 1.0),))
    slower = OwnWork(own_s=5.0, exchanges=(gather(0.7, 2.0),))
    assert median_work([work, slower]) == OwnWork(own_s=4.0, exchanges=(gather(0.6, 1.5),))


@pytest.mark.parametrize(
    ("exchange_s", "expected_s"),
    [
        pytest.param(0.0, 5.0, id="free: the slower rank comes at 2, then 3 more"),
        pytest.param(1.0, 5.0, id="hidden: the gather runs from 2 to 3, needed at 3"),
        pytest.param(4.0, 8.0, id="exposed: from 2 to 6, then what follows the wait"),
    ],
)
def test_a_collective_starts_when_the_last_rank_comes(exchange_s: float, expected_s: float):
    works = {
        0: OwnWork(own_s=3.0, exchanges=(gather(1.0, 2.0),)),
        1: OwnWork(own_s=5.0, exchanges=(gather(2.0, 3.0),)),
    }
    assert composed_s(works, lambda exchange: exchange_s) == expected_s


def test_collectives_of_a_group_follow_each_other():
    """Two of 4 s, both started in the first second; the second ends at 1 + 8."""
    one = OwnWork(own_s=2.0, exchanges=(gather(0.5, 1.0), gather(0.9, 1.5)))
    assert composed_s({0: one, 1: one}, lambda exchange: 4.0) == pytest.approx(0.5 + 8.0 + 0.5)
    with pytest.raises(ValueError, match="different numbers of collectives"):
        composed_s({0: one, 1: OwnWork(own_s=1.0)}, lambda exchange: 4.0)


def test_collectives_of_different_groups_hold_up_only_their_own():
    """A 2 x 2 grid: rows meet first, then columns. A slow rank delays its row, then all."""
    row = {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}
    column = {0: (0, 2), 1: (1, 3), 2: (0, 2), 3: (1, 3)}

    def work(rank: int, own_s: float) -> OwnWork:
        first = replace(gather(own_s, own_s), ranks=row[rank])
        return OwnWork(own_s=own_s, exchanges=(first, replace(first, ranks=column[rank])))

    works = {0: work(0, 1.0), 1: work(1, 1.0), 2: work(2, 1.0), 3: work(3, 6.0)}
    cost_s = {ranks: 2.0 if ranks in row.values() else 1.0 for ranks in (*row.values(), *column.values())}
    assert composed_s(works, lambda exchange: cost_s[exchange.ranks]) == 6.0 + 2.0 + 1.0
    alone = {rank: replace(one, exchanges=one.exchanges[:1]) for rank, one in works.items()}
    upper = {rank: alone[rank] for rank in (0, 1)}
    assert composed_s(upper, lambda exchange: cost_s[exchange.ranks]) == 3.0
    assert composed_s(alone, lambda exchange: cost_s[exchange.ranks]) == 8.0


def test_copies_to_and_from_the_host_are_timed_beside_passes():
    schedule = replace(three_phase(), offload=True)
    layouts = {"vision": (2, 1, 1), "llm": (1, 2, 1)}
    plan = planned(vision_language(), layouts, microbatch=1, images=(1, 1), schedule=schedule)
    lowered = lower(plan)
    result = emulate(lowered, SETTINGS)
    durations_s = result.timings.durations_s(lambda _: 0.0)
    copies = {action for action in plan.program_actions if MEANING[action.kind].activity is Activity.COPY}
    assert all(durations_s[action] > 0 for action in copies)
    spans = compose(lowered, result, simulate, load_profile("A40")).spans
    assert {span.action for span in spans} == set(plan.program_actions) > copies > set()


@pytest.mark.parametrize("name", ["everything", "context parallel", "divided tokens"])
def test_the_timeline_is_that_of_the_measured_actions(name: str):
    lowered = lower(PLANS[name]())
    result = emulate(lowered, replace(SETTINGS, collect=Collect.NOTHING, repetitions=3))
    assert result.num_timed == 3
    trace = compose(lowered, result, simulate, load_profile("A40"))
    assert trace.executor is Executor.EMULATED
    assert trace.loss == result.losses[-1]
    assert dict(trace.details)["emulated"] == "one action at a time on cpu, median of 3"
    assert loads(dumps(trace)) == trace
    passes_s = {a: s for a, s in result.timings.durations_s(lambda _: 0.0).items() if a != STEP}
    for span in trace.spans:
        if span.action in passes_s:
            least_s = passes_s[span.action]
            assert span.end_s - span.start_s >= least_s * (1 - 1e-9)
    if name == "everything":
        priced = passes_s | {STEP: 0.0}
        again = simulate(lowered, lambda a: priced.get(a, 0.0), step_s=result.timings.steps_s.__getitem__)
        assert again.spans == trace.spans
    assert {rank for span in trace.spans for rank in [span.rank]} == set(lowered.plan.ranks)
    assert all(lowered.plan.ranks_of(span.action) for span in trace.spans)
