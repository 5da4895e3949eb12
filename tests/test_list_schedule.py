"""List schedules: any DAG, within limits, never slower than the published, best on tiny chains."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.chains import alone, chain, groups_of, node, one_to_one
from tests.examples import examples
from tests.oracles import passes_read, shortest, timed
from tests.strategies import schedule_problems
from workbench.schedule.action import Pass
from workbench.schedule.choice import Schedule, ScheduleKind, usual
from workbench.schedule.list_schedule import ListScheduler, PassChain, Policy
from workbench.schedule.pass_graph import finish_time, pass_graph, peak_in_flight
from workbench.schedule.programs import programs_of

LIMITED = [kind for kind in ScheduleKind if kind.spec.takes("memory_limit")]


def durations(seed):
    """Times of F, I and W that differ by stage, from 1 to 6."""
    return lambda action: (seed * (3 + action.stage) + 7 * "FIW".index(action.kind) ** 2) % 6 + 1


@examples(100)
@given(schedule_problems(), st.sampled_from([ScheduleKind.ZB_H1, ScheduleKind.ZB_H2]), st.data())
def test_every_dag_runs_with_split_backwards(problem, kind, data):
    nodes, groups = problem
    nodes = [
        replace(n, weights=tuple(data.draw(st.booleans()) for _ in range(n.num_microbatches))) for n in nodes
    ]
    needs = passes_read(nodes, Pass.I)
    needs = {a: n for a, n in needs.items() if a.kind is not Pass.W or a._replace(kind=Pass.I) in needs}
    programs = programs_of(nodes, groups, usual(kind))
    times = timed(programs, needs, durations(1))
    assert sorted(times) == sorted(action for actions in programs.values() for action in actions)
    assert sorted(times) == sorted(needs)


@examples(60)
@given(
    kind=st.sampled_from(LIMITED),
    num_ranks=st.integers(1, 4),
    num_microbatches=st.integers(1, 9),
    seed=st.integers(0, 10_000),
)
def test_never_slower_than_the_published_and_within_its_memory(kind, num_ranks, num_microbatches, seed):
    schedule = usual(kind)
    num_stages = num_ranks * schedule.virtual_stages
    nodes, groups = chain(num_stages, num_microbatches), groups_of(schedule, num_stages)
    order = kind.spec.chain(range(num_stages), num_ranks, num_microbatches)
    published = dict(zip(groups, order, strict=True))
    ours = programs_of(nodes, groups, schedule, [tuple(range(num_stages))], durations(seed))
    needs = passes_read(nodes, Pass.I)

    def length(programs):
        return max(end for _, end in timed(programs, needs, durations(seed)).values())

    assert length(ours) <= length(published)
    assert peak_in_flight(ours, range(num_stages)) <= kind.spec.most_in_flight(num_ranks)


@settings(max_examples=25, deadline=None)
@given(
    size=st.sampled_from([(2, 2), (2, 2), (3, 2)]),
    limit=st.integers(1, 3),
    times=st.lists(st.integers(1, 6), min_size=9, max_size=9),
)
def test_best_of_all_orders_on_tiny_chains(size, limit, times):
    """Not a theorem: a list scheduler is a heuristic. On these it has never been seen to miss."""
    num_stages, num_microbatches = size

    def duration(action):
        return times[3 * action.stage + "FIW".index(action.kind)]

    nodes = chain(num_stages, num_microbatches)
    needs = passes_read(nodes, Pass.I)
    schedule = Schedule(kind=ScheduleKind.ZB_H1, memory_limit=limit)
    ours = programs_of(nodes, alone(nodes), schedule, [tuple(range(num_stages))], duration)
    best = shortest(needs, range(num_stages), duration, limit)
    assert max(end for _, end in timed(ours, needs, duration).values()) == best
    assert peak_in_flight(ours, range(num_stages)) <= limit


def test_frozen_stages_have_no_weight_gradient_and_no_backward_where_nothing_trains():
    """A frozen encoder in front, a trained projector, a frozen LLM: F | F I W | F I."""
    needs = one_to_one(4)
    nodes = [
        node(0, 4, (1, needs), backward=False),
        node(1, 4, (2, needs)),
        replace(node(2, 4, (3, needs)), weights=(False,) * 4),
        replace(node(3, 4), weights=(False,) * 4),
    ]
    programs = programs_of(nodes, alone(nodes), usual(ScheduleKind.ZB_H1), [(0,), (1,), (2, 3)])
    kinds = {group: {action.kind for action in actions} for group, actions in programs.items()}
    assert kinds == {
        (0,): {Pass.F},
        (1,): {Pass.F, Pass.I, Pass.W},
        (2,): {Pass.F, Pass.I},
        (3,): {Pass.F, Pass.I},
    }


def test_a_shorter_memory_limit_is_kept_and_costs_time():
    nodes, stages = chain(4, 8), tuple(range(4))
    graph = pass_graph(nodes, alone(nodes), lambda action: 1.0, backward=Pass.I)
    lengths = []
    for limit in (1, 2, 4, 7):
        schedule = Schedule(kind=ScheduleKind.ZB_H2, memory_limit=limit)
        programs = programs_of(nodes, alone(nodes), schedule, [stages])
        assert peak_in_flight(programs, stages) <= limit
        lengths.append(finish_time(graph, programs))
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] == 8 * (2 * 4 + 1)  # one microbatch at a time, but W beside the next forward
    assert lengths[-1] == 3 * 8 + 4 - 1


def test_a_limit_in_bytes_counts_each_stage_by_its_size():
    """Stage 0 keeps 3 bytes, stage 1 one: 6 bytes are two microbatches there and six here."""
    nodes = chain(2, 8)
    graph = pass_graph(nodes, alone(nodes), lambda action: 1.0, backward=Pass.I)
    chains = [PassChain(stages=(0, 1), limit=6.0, sizes={0: 3.0, 1: 1.0})]
    (found,) = ListScheduler(graph, chains).schedules([Policy()], graph.duration)
    programs = found.programs
    assert peak_in_flight({(0,): programs[0,]}, [0]) == 2
    assert peak_in_flight({(1,): programs[1,]}, [1]) <= 6


def test_a_limit_below_what_a_reader_needs_names_the_nearest():
    """The last stage's only microbatch reads three of the chain before it, which is thus not last itself."""
    schedule = Schedule(kind=ScheduleKind.ZB_H1, memory_limit=1)
    nodes = [node(0, 3, (1, ((0, 1, 2),))), node(1, 1)]
    with pytest.raises(ValueError, match="holds at most 1 microbatches; the nearest needs memory_limit 3"):
        programs_of(nodes, alone(nodes), schedule, [(0, 1)])


@pytest.mark.parametrize(
    ("kind", "most"),
    [
        (ScheduleKind.ZB_H1, 2 * (4 + 1)),  # what graph-aware 1F1B holds: the LLM's depth and one, times two
        (ScheduleKind.ZB_H2, 2 * 2 * (4 + 1) - 1),
        (ScheduleKind.ZB_V, 2 * (8 + 1)),
        (ScheduleKind.INTERLEAVED, 2 * (4 + 4 + 1)),  # two rounds of four are ahead on the first stage
    ],
)
def test_encoders_in_front_run_what_the_next_forward_needs(kind, most):
    """Two encoder microbatches per LLM microbatch, 4 LLM ranks: the encoder holds no more than asked for."""
    schedule = usual(kind)
    num_stages, num_microbatches = 4 * schedule.virtual_stages, 24
    pairs = tuple((2 * j, 2 * j + 1) for j in range(num_microbatches))
    nodes = [*chain(num_stages, num_microbatches), node(99, 2 * num_microbatches, (0, pairs))]
    groups = [(99,), *groups_of(schedule, num_stages)]
    programs = programs_of(nodes, groups, schedule, [tuple(range(num_stages)), (99,)])
    assert peak_in_flight({(99,): programs[99,]}, [99]) <= most
    alone_in_time = programs_of(nodes[:-1], groups[1:], schedule, [tuple(range(num_stages))])
    if kind is ScheduleKind.INTERLEAVED:
        assert {group: programs[group] for group in groups[1:]} == alone_in_time


def test_equal_replicas_get_equal_programs_and_unequal_ones_their_own():
    """Three replicas of a chain; the third has stages of other times."""
    nodes, chains = [], []
    for first in (0, 10, 20):
        chains.append(tuple(range(first, first + 3)))
        nodes += [
            node(stage, 6, *([(stage + 1, one_to_one(6))] if stage < first + 2 else []))
            for stage in chains[-1]
        ]

    def duration(action):
        return 5.0 if action.stage == 21 and action.kind is Pass.W else 1.0

    schedule = usual(ScheduleKind.ZB_H1)
    programs = programs_of(nodes, alone(nodes), schedule, chains, duration)
    for stage in range(3):
        first, second = programs[stage,], programs[stage + 10,]
        assert [a._replace(stage=a.stage + 10) for a in first] == list(second)
    slow = {group: actions for group, actions in programs.items() if group[0] >= 20}
    by_itself = [n for n in nodes if n.stage >= 20]
    assert slow == programs_of(by_itself, alone(by_itself), schedule, chains[2:], duration)
    assert list(programs) == alone(nodes)
