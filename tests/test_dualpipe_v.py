"""DualPipeV: torch's order, the published bubble and memory, never a deadlock, the step of one process."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules

from experiments.fidelity.memory import measure, summarise, tiny_job
from tests.chains import chain, chain_plan
from tests.oracles import can_run, passes_read
from tests.test_parity import assert_same, mixed
from tests.test_schedule_chains import SIZES, one_tick, published, simulated, times_of
from tests.test_schedule_golden import planned
from workbench.cost.model import CostModel
from workbench.cost.profile import ideal_profile
from workbench.job.module_layout import ModuleLayout
from workbench.plan.deadlock import check_deadlock
from workbench.plan.lower import lower
from workbench.schedule.action import Pass, parse_action
from workbench.schedule.choice import ScheduleKind, usual
from workbench.schedule.dualpipe_v import dualpipe_v
from workbench.schedule.pass_graph import peak_in_flight
from workbench.strategies import cornstarch

KIND = ScheduleKind.DUALPIPE_V


def torch_order(num_ranks, num_microbatches, rank):
    """One rank's actions by torch's own generator, which needs no processes: single ones and pairs."""
    schedule = object.__new__(torch_schedules.ScheduleDualPipeV)
    schedule.pp_group_size, schedule._n_microbatches = num_ranks, num_microbatches
    made = schedule._calculate_single_rank_operations(rank)
    return [[parse_action(str(each)) for each in action.sub_actions or (action,)] for action in made]


@given(num_ranks=st.integers(1, 8), more=st.integers(0, 24))
def test_it_is_torchs_where_torch_takes_it(num_ranks, more):
    num_microbatches = 2 * num_ranks + more
    for rank, actions in enumerate(dualpipe_v(range(2 * num_ranks), num_microbatches)):
        theirs = torch_order(num_ranks, num_microbatches, rank)
        assert list(actions) == [action for together in theirs for action in together]


@given(num_ranks=st.integers(1, 6), num_microbatches=st.integers(1, 16))
def test_any_number_of_microbatches_runs_and_holds_what_the_paper_says(num_ranks, num_microbatches):
    programs, times = times_of(KIND, num_ranks, num_microbatches)
    assert sum(len(actions) for actions in programs.values()) == len(times)
    most = min(2 * num_ranks + 1, 2 * num_microbatches)  # of a microbatch on one of two stages
    held = [2 * peak_in_flight({group: actions}, group) for group, actions in programs.items()]
    assert max(held) <= most
    if num_microbatches >= 2 * num_ranks:
        assert held == [most] * num_ranks


@pytest.mark.parametrize("num_ranks", range(1, 6))
def test_it_never_deadlocks(num_ranks):
    for num_microbatches in (1, 2, 2 * num_ranks - 1, 2 * num_ranks, 2 * num_ranks + 3):
        lowered = lower(chain_plan(usual(KIND), num_ranks, num_microbatches))
        check_deadlock(lowered)  # under both models of communication
        assert can_run(lowered)


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_the_bubble_is_half_the_published_one_as_halves_of_a_pair_pass_on_their_results(p, m):
    """With F = I = W = 1 and B = 2: published are (p - 1)(F&B + B - 3W) = 2 (p - 1)."""
    assert simulated(KIND, p, m) == (6 * m + (p - 1), p - 1)
    assert length_of_closed_pairs(p, m) == 6 * m + (p - 1) * (3 + 2 - 3)


def length_of_closed_pairs(num_ranks, num_microbatches):
    """How long it takes when a pair begins once both inputs are there, and gives both results at its end."""
    programs = published(KIND, num_ranks, num_microbatches)
    whole = {action for actions in programs.values() for action in actions if action.kind is Pass.B}
    inputs = passes_read(chain(2 * num_ranks, num_microbatches), Pass.I, whole)
    left = [torch_order(num_ranks, num_microbatches, rank) for rank in range(num_ranks)]
    free, ends = [0] * num_ranks, {}
    while any(left):
        before = len(ends)
        for rank, units in enumerate(left):
            needed = [read for action in units[0] for read in inputs[action]] if units else [None]
            if all(read in ends for read in needed):
                unit = units.pop(0)
                free[rank] = max([free[rank], *map(ends.get, needed)]) + sum(map(one_tick, unit))
                ends |= dict.fromkeys(unit, free[rank])
        assert len(ends) > before, f"stuck with {left}"
    return max(ends.values())


@pytest.mark.parametrize("images", [(1, 2, 0, 1, 1, 0, 2), (1, 2)], ids=["seven", "fewer-than-stages"])
def test_it_trains_a_multimodal_model_as_one_process(images, pool):
    plan = planned(mixed("everything"), usual(KIND), (2, 3), images=images, clips=images[::-1])
    assert_same(plan, pool)


def test_measured_peaks_are_at_most_the_predicted_ones_and_near_them(pool):
    job = replace(tiny_job("all"), schedule=usual(KIND))
    layouts = [ModuleLayout(module=module.name, pp=1) for module in job.model.modules[:-1]]
    job = replace(job, layouts=(*layouts, ModuleLayout(module="llm", pp=2)))
    plan = cornstarch.plan(job, CostModel(ideal_profile()))
    assert {Pass.B, Pass.I, Pass.W} <= {action.kind for action in plan.program_actions}
    summary = summarise(measure("all, dualpipe-v", plan, pool))
    assert summary.num_exceeded == 0
    assert summary.worst_abs_error <= 0.06


def test_bad_chains_are_refused():
    with pytest.raises(
        ValueError, match=r"dualpipe-v: want two stages on each rank, all different, got \[0, 1, 2\]"
    ):
        dualpipe_v(range(3), 4)
    with pytest.raises(ValueError, match="dualpipe-v: want at least one microbatch, got 0"):
        dualpipe_v(range(4), 0)
