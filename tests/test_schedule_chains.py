"""Interleaved and zero-bubble schedules of chains: the published orders, times and memories.

`UPDATE_GOLDEN=1 python -m pytest tests/test_schedule_chains.py` writes the golden grids anew.
"""

import os
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules

from sim.step.engine import simulate
from tests.chains import chain, chain_plan, groups_of
from tests.oracles import passes_read, timed
from workbench.plan.build import with_programs
from workbench.plan.lower import lower
from workbench.schedule.action import COMPUTE, Action, Pass
from workbench.schedule.choice import Schedule, ScheduleKind, usual
from workbench.schedule.interleaved import interleaved_1f1b
from workbench.schedule.one_f_one_b import one_f_one_b
from workbench.schedule.pass_graph import peak_in_flight
from workbench.schedule.text import Slot, format_timeline
from workbench.schedule.zero_bubble import zb_h1_interleaved, zb_v
from workbench.trace import Lane

GOLDEN = Path(__file__).parent / "golden"
TIMELINES = [
    (kind, 4, 8, kind.usual_virtual_stages)
    for kind in ScheduleKind
    if kind not in (ScheduleKind.ONE_F_ONE_B, ScheduleKind.GPIPE, ScheduleKind.THREE_PHASE)
]  # 1F1B and GPipe are held against their closed forms, three-phase has a grid with encoders of its own


def published(kind, num_ranks, num_microbatches, virtual_stages=None):
    """Programs by group of stages."""
    schedule = Schedule(kind=kind, virtual_stages=virtual_stages or kind.usual_virtual_stages)
    num_stages = num_ranks * schedule.virtual_stages
    programs = kind.spec.chain(range(num_stages), num_ranks, num_microbatches)
    return dict(zip(groups_of(schedule, num_stages), programs, strict=True))


def one_tick(action):
    return 2 if action.kind is Pass.B else 1


def times_of(kind, num_ranks, num_microbatches, virtual_stages=None):
    programs = published(kind, num_ranks, num_microbatches, virtual_stages)
    backward = Pass.I if kind.splits_backward else Pass.B
    whole = {action for actions in programs.values() for action in actions if action.kind is Pass.B}
    nodes = chain(sum(len(group) for group in programs), num_microbatches)
    return programs, timed(programs, passes_read(nodes, backward, whole), one_tick)


@pytest.mark.parametrize(
    ("kind", "num_ranks", "num_microbatches", "virtual_stages"),
    [*TIMELINES, (ScheduleKind.INTERLEAVED, 3, 7, 2), (ScheduleKind.ZB_H1, 4, 8, 2)],
)
def test_timeline_is_the_reviewed_one(kind, num_ranks, num_microbatches, virtual_stages):
    programs, times = times_of(kind, num_ranks, num_microbatches, virtual_stages)
    rows = {
        (rank,): [Slot(action, *times[action]) for action in actions]
        for rank, actions in enumerate(programs.values())
    }
    name = f"{kind}_p{num_ranks}_m{num_microbatches}_v{virtual_stages}.txt".replace("-", "_")
    text = f"# {kind}: F, I and W take a tick, B two.\n" + format_timeline(rows)
    if os.environ.get("UPDATE_GOLDEN"):
        (GOLDEN / name).write_text(text)
    assert (GOLDEN / name).exists(), f"tests/golden/{name} is missing; UPDATE_GOLDEN=1 writes it"
    assert text == (GOLDEN / name).read_text(), f"{name} differs; UPDATE_GOLDEN=1 writes it anew"


def torch_order(name, num_ranks, virtual_stages, num_microbatches, rank):
    """One rank's passes by torch's own generator, which needs no processes."""
    schedule = object.__new__(getattr(torch_schedules, name))
    schedule.pp_group_size, schedule.rank, schedule._n_microbatches = num_ranks, rank, num_microbatches
    schedule.n_local_stages, schedule.num_stages = virtual_stages, num_ranks * virtual_stages
    schedule.number_of_rounds = max(1, num_microbatches // num_ranks)
    schedule.microbatches_per_round = num_microbatches // schedule.number_of_rounds
    made = schedule._calculate_single_rank_operations(rank)
    return [str(action) for action in made if action is not None]


@given(num_ranks=st.integers(1, 6), virtual_stages=st.integers(2, 4), num_microbatches=st.integers(1, 24))
def test_interleaved_is_torchs_where_torch_takes_it(num_ranks, virtual_stages, num_microbatches):
    if num_microbatches % max(1, num_microbatches // num_ranks):
        num_microbatches -= num_microbatches % num_ranks  # rounds of equal size are all that torch takes
    ours = interleaved_1f1b(range(num_ranks * virtual_stages), num_ranks, num_microbatches)
    for rank, actions in enumerate(ours):
        theirs = torch_order("ScheduleInterleaved1F1B", num_ranks, virtual_stages, num_microbatches, rank)
        assert [str(action) for action in actions] == theirs


def weights_waiting(actions):
    """A rank's 1F1B where weight gradients wait until as many later microbatches as its stage had their I."""
    program = []
    for action in actions:
        program.append(action._replace(kind=Pass.I) if action.kind is Pass.B else action)
        if action.kind is Pass.B and action.microbatch >= action.stage:
            program.append(Action(action.stage, Pass.W, action.microbatch - action.stage))
    done = sum(action.kind is Pass.W for action in program)
    waiting = range(done, sum(action.kind is Pass.F for action in actions))
    return (*program, *(Action(actions[0].stage, Pass.W, microbatch) for microbatch in waiting))


@given(num_ranks=st.integers(1, 6), virtual_stages=st.integers(1, 4), num_microbatches=st.integers(1, 24))
def test_interleaved_zb_h1_is_torchs_and_that_of_the_paper_with_one_stage(
    num_ranks, virtual_stages, num_microbatches
):
    ours = zb_h1_interleaved(range(num_ranks * virtual_stages), num_ranks, num_microbatches)
    if virtual_stages == 1:
        assert ours == tuple(map(weights_waiting, one_f_one_b(range(num_ranks), num_microbatches)))
    if num_microbatches % max(1, num_microbatches // num_ranks):
        return  # rounds of equal size are all that torch takes
    for rank, actions in enumerate(ours):
        theirs = torch_order(
            "ScheduleInterleavedZeroBubble", num_ranks, virtual_stages, num_microbatches, rank
        )
        assert [str(action) for action in actions] == theirs


@given(num_ranks=st.integers(1, 6), virtual_stages=st.integers(2, 4), num_microbatches=st.integers(1, 24))
def test_interleaved_zb_h1_runs_and_holds_no_more_than_p_microbatches(
    num_ranks, virtual_stages, num_microbatches
):
    programs, times = times_of(ScheduleKind.ZB_H1, num_ranks, num_microbatches, virtual_stages)
    assert sum(len(actions) for actions in programs.values()) == len(times)
    for group, actions in programs.items():
        assert peak_in_flight({group: actions}, group) <= num_ranks * virtual_stages


@given(num_ranks=st.integers(1, 6), num_microbatches=st.integers(1, 24))
def test_zb_v_is_torchs(num_ranks, num_microbatches):
    for rank, actions in enumerate(zb_v(range(2 * num_ranks), num_microbatches)):
        theirs = torch_order("ScheduleZBVZeroBubble", num_ranks, 2, num_microbatches, rank)
        assert [str(action) for action in actions] == theirs


@given(num_ranks=st.integers(1, 6), virtual_stages=st.integers(2, 4), num_microbatches=st.integers(1, 30))
def test_interleaved_runs_with_any_number_of_microbatches(num_ranks, virtual_stages, num_microbatches):
    programs, times = times_of(ScheduleKind.INTERLEAVED, num_ranks, num_microbatches, virtual_stages)
    assert sum(len(actions) for actions in programs.values()) == len(times)


@pytest.mark.parametrize("num_ranks", range(2, 9))
def test_interleaved_with_a_single_round_has_the_moments_that_prove_it(num_ranks):
    """The moments of its docstring grow along every program and from input to pass: no circle of waits."""
    for virtual_stages in range(2, 5):
        for num_microbatches in range(1, 2 * num_ranks):
            stages = num_ranks * virtual_stages
            programs = interleaved_1f1b(range(stages), num_ranks, num_microbatches)
            moment = partial(_moment, num_ranks, virtual_stages, num_microbatches)
            for actions in programs:
                moments = [moment(action) for action in actions]
                assert moments == sorted(set(moments))
            for action, inputs in passes_read(chain(stages, num_microbatches), Pass.B).items():
                assert all(moment(read) < moment(action) for read in inputs)


def _moment(num_ranks, virtual_stages, num_microbatches, action):
    chunk, rank = divmod(action.stage, num_ranks)
    beat, d, last = num_microbatches + num_ranks, num_ranks - 1 - rank, virtual_stages - 1
    if action.kind is Pass.F:
        if chunk < last:
            return chunk * beat + action.microbatch + rank
        return virtual_stages * beat + action.microbatch - d
    if chunk == last:
        return virtual_stages * beat + action.microbatch + d + 0.5
    return (2 * virtual_stages + 1 - chunk) * beat + action.microbatch + d


def test_interleaved_without_microbatches_is_refused():
    with pytest.raises(ValueError, match="at least one microbatch, got 0"):
        interleaved_1f1b(range(8), 4, 0)


def simulated(kind, num_ranks, num_microbatches, virtual_stages=None):
    """(iteration, busiest span of a rank, idle inside it) in units of F on one stage."""
    schedule = Schedule(kind=kind, virtual_stages=virtual_stages or kind.usual_virtual_stages)
    lowered = lower(chain_plan(schedule, num_ranks, num_microbatches))

    def unit_s(action):
        return float(one_tick(action)) if action.kind in COMPUTE else 0.0

    trace = simulate(lowered, unit_s)
    spans = [span for span in trace.spans if span.lane is Lane.COMPUTE and span.action.kind in COMPUTE]
    idle = 0.0
    for rank in range(num_ranks):
        mine = [span for span in spans if span.rank == rank]
        window = max(s.end_s for s in mine) - min(s.start_s for s in mine)
        idle = max(idle, window - sum(s.end_s - s.start_s for s in mine))
    return trace.iteration_s, idle


SIZES = [(2, 4), (3, 6), (4, 8), (4, 12), (6, 18)]


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_bubbles_are_the_closed_forms(p, m):
    """With F = I = W = 1: what an iteration takes beyond the work of a rank, 3 per microbatch."""
    assert simulated(ScheduleKind.ONE_F_ONE_B, p, m)[0] == 3 * m + 3 * (p - 1)
    assert simulated(ScheduleKind.GPIPE, p, m)[0] == 3 * m + 3 * (p - 1)
    assert simulated(ScheduleKind.ZB_H1, p, m)[0] == 3 * m + (p - 1) * (1 + 1 - 1)


@pytest.mark.parametrize("virtual_stages", [2, 3])
@pytest.mark.parametrize(("p", "m"), SIZES)
def test_interleaved_divides_the_bubble(p, m, virtual_stages):
    """(p - 1)(f + b) / v, in units of one of v stages."""
    iteration, _ = simulated(ScheduleKind.INTERLEAVED, p, m, virtual_stages)
    assert iteration == 3 * m * virtual_stages + 3 * (p - 1)


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_zb_h2_and_zb_v_have_no_bubble(p, m):
    """No rank idles between its first and last pass; the ends are p - 1 forwards apart."""
    assert simulated(ScheduleKind.ZB_H2, p, m) == (3 * m + p - 1, 0)
    assert simulated(ScheduleKind.ZB_V, p, m) == (6 * m + p - 1, 0)


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_memory_in_flight_is_what_the_papers_say(p, m):
    def peak(kind):
        programs = published(kind, p, m)
        return peak_in_flight(programs, [stage for group in programs for stage in group])

    assert peak(ScheduleKind.ZB_H1) == p
    assert peak(ScheduleKind.ZB_H2) == min(m, 2 * p - 1)
    assert peak(ScheduleKind.ZB_V) == p
    # Megatron: p (1 + (p - 1) / (p v)) microbatches
    assert peak(ScheduleKind.INTERLEAVED) == p * (1 + (p - 1) / (p * 2))


def test_bad_chains_are_refused():
    with pytest.raises(ValueError, match="two stages, got 3 stages"):
        zb_v(range(3), 4)
    with pytest.raises(ValueError, match="7 stages must differ and be a multiple of 2 ranks"):
        interleaved_1f1b(range(7), 2, 4)
    with pytest.raises(ValueError, match="num_microbatches must be >= 1"):
        zb_h1_interleaved(range(3), 3, 0)


def test_a_plan_that_is_not_laid_out_is_refused():
    plan = chain_plan(usual(ScheduleKind.ONE_F_ONE_B), 4, 8)

    with pytest.raises(ValueError, match="zb-v: want a module whose stages go down the ranks and up again"):
        with_programs(plan, usual(ScheduleKind.ZB_V))
