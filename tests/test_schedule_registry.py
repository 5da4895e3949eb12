"""What is told of schedules is told of all of them, and each is what its spec says."""

import re

import pytest

from tests.chains import chain, groups_of
from tests.command_line import workbench
from tests.oracles import passes_read, timed
from workbench.schedule.action import Pass
from workbench.schedule.choice import Schedule, ScheduleKind, rank_block, usual
from workbench.schedule.programs import programs_of
from workbench.schedule.spec import StagePlacement

PARAMETERS = {"memory_limit": 3, "window": 2, "run_ahead": 1, "offload": True}


def test_names_and_summaries_are_theirs_alone():
    specs = [kind.spec for kind in ScheduleKind]
    assert [kind.value for kind in ScheduleKind] == [spec.name for spec in specs]
    assert len({spec.summary for spec in specs}) == len(specs)
    assert all(spec.summary and "\n" not in spec.summary for spec in specs)


def test_the_command_offers_them_all():
    told = workbench("plan", "job.yaml", "--schedule", "zb", "-o", "plan.json")
    assert told.exit_code == 2
    offered = told.output.partition("not one of")[2].partition("Did you mean")[0]
    assert re.findall(r"'([a-z0-9-]+)'", offered) == list(ScheduleKind)


@pytest.mark.parametrize("kind", ScheduleKind)
@pytest.mark.parametrize("name", PARAMETERS)
def test_a_parameter_is_taken_or_refused_with_who_takes_it(kind, name):
    given = {"kind": kind, "virtual_stages": kind.usual_virtual_stages, name: PARAMETERS[name]}
    if name == "run_ahead" and kind.spec.takes("window"):
        given["window"] = 2
    if kind.spec.takes(name):
        assert getattr(Schedule(**given), name) == PARAMETERS[name]
        return
    takers = ", ".join(other for other in ScheduleKind if other.spec.takes(name))
    with pytest.raises(ValueError, match=f"schedule {kind} has no {name}, got .*; {takers} ha(s|ve) one"):
        Schedule(**given)


@pytest.mark.parametrize("kind", ScheduleKind)
def test_virtual_stages_are_bounded(kind):
    usual_, more = kind.usual_virtual_stages, kind.spec.takes_more_stages
    with pytest.raises(ValueError, match=f"want virtual_stages (>= )?{usual_}, got {usual_ - 1}"):
        Schedule(kind=kind, virtual_stages=usual_ - 1)
    if more:
        assert Schedule(kind=kind, virtual_stages=usual_ + 1).virtual_stages == usual_ + 1
        return
    with pytest.raises(ValueError, match=f"want virtual_stages {usual_}, got {usual_ + 1}"):
        Schedule(kind=kind, virtual_stages=usual_ + 1)


@pytest.mark.parametrize("kind", ScheduleKind)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_stages_lie_round_the_ranks_or_in_a_v(kind, num_ranks):
    schedule = usual(kind)
    num_stages = num_ranks * schedule.virtual_stages
    blocks = [rank_block(schedule, index, num_stages) for index in range(num_stages)]
    there = list(range(num_ranks))
    vee = kind.spec.layout is StagePlacement.VEE
    assert blocks == (there + there[::-1] if vee else there * schedule.virtual_stages)


@pytest.mark.parametrize("kind", ScheduleKind)
@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(1, 1), (2, 3), (3, 8), (4, 2)])
def test_a_chain_gets_the_kinds_own_order_or_a_faster_one(kind, num_ranks, num_microbatches):
    schedule = usual(kind)
    num_stages = num_ranks * schedule.virtual_stages
    stages, groups = tuple(range(num_stages)), groups_of(schedule, num_stages)
    nodes = chain(num_stages, num_microbatches)
    own = dict(zip(groups, kind.spec.chain(stages, num_ranks, num_microbatches), strict=True))
    made = programs_of(nodes, groups, schedule, [stages], inner=stages)
    passes = [action for actions in own.values() for action in actions]
    assert kind.splits_backward or Pass.W not in {action.kind for action in passes}
    if not kind.spec.takes("memory_limit"):
        assert made == own
    backward = Pass.I if kind.splits_backward else Pass.B
    needs = passes_read(nodes, backward, {action for action in passes if action.kind is Pass.B})

    def length(programs):
        times = timed(programs, needs, lambda action: 2 if action.kind is Pass.B else 1)
        assert sorted(times) == sorted(needs)
        return max(end for _, end in times.values())

    assert length(made) <= length(own)
