"""Graph-aware 1F1B: ordinary 1F1B on chains, the stated depths on DAGs, never a deadlock."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.chains import alone, chain, each_reads, node, one_to_one
from tests.examples import examples
from tests.oracles import passes_read, timed
from tests.strategies import schedule_problems
from workbench.schedule.action import Action, Pass
from workbench.schedule.graph_aware import ScheduleNode, graph_aware_1f1b
from workbench.schedule.one_f_one_b import gpipe, one_f_one_b


def text(actions):
    return " ".join(str(action) for action in actions)


def warmup(actions, stage):
    """Forwards of a stage before its first backward."""
    mine = [action for action in actions if action.stage == stage]
    return next(i for i, action in enumerate(mine) if action.kind is Pass.B)


@given(st.integers(1, 8), st.integers(1, 12))
def test_chain_is_ordinary_1f1b(num_stages, num_microbatches):
    nodes = chain(num_stages, num_microbatches)
    programs = graph_aware_1f1b(nodes, alone(nodes))
    assert tuple(programs.values()) == one_f_one_b(range(num_stages), num_microbatches)


@given(st.integers(1, 6), st.integers(1, 9), st.integers(1, 3), st.integers(1, 3))
def test_1f1b_takes_the_closed_form_time(num_stages, num_microbatches, forward, backward):
    """(m + p - 1)(f + b) on equal stages; GPipe takes the same without its memory bound."""
    nodes = chain(num_stages, num_microbatches)
    for schedule in (one_f_one_b, gpipe):
        programs = dict(zip(alone(nodes), schedule(range(num_stages), num_microbatches), strict=True))
        times = timed(
            programs, passes_read(nodes), lambda action: forward if action.kind is Pass.F else backward
        )
        assert max(end for _, end in times.values()) == (num_microbatches + num_stages - 1) * (
            forward + backward
        )


@examples(150)
@given(schedule_problems(), st.integers(0, 3))
def test_every_dag_runs_whatever_the_counts_needs_and_groups(problem, seed):
    nodes, groups = problem
    programs = graph_aware_1f1b(nodes, groups)
    times = timed(
        programs, passes_read(nodes), lambda action: (7 * action.stage + 5 * action.microbatch + seed) % 3 + 1
    )
    assert len(times) == sum(n.num_microbatches + sum(n.backward) for n in nodes)


@examples(60)
@given(schedule_problems())
def test_forwards_are_in_index_order_on_every_stage(problem):
    nodes, groups = problem
    for actions in graph_aware_1f1b(nodes, groups).values():
        for stage in {action.stage for action in actions}:
            forwards = [a.microbatch for a in actions if a.stage == stage and a.kind is Pass.F]
            assert forwards == sorted(forwards)


@examples(60)
@given(schedule_problems())
def test_order_of_listing_nodes_does_not_matter(problem):
    nodes, groups = problem
    assert graph_aware_1f1b(nodes, groups) == graph_aware_1f1b(nodes[::-1], groups)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(2, 9))
def test_warmup_is_the_longest_distance_to_the_sink(vision, audio, llm, num_microbatches):
    """Two encoders of unequal depth in front of an LLM, equal microbatches."""
    needs, nodes, first_llm = one_to_one(num_microbatches), [], vision + audio
    for first, depth in ((0, vision), (vision, audio)):
        for index in range(depth):
            reader = first + index + 1 if index + 1 < depth else first_llm
            nodes.append(node(first + index, num_microbatches, (reader, needs)))
    for index in range(llm):
        readers = [(first_llm + index + 1, needs)] if index + 1 < llm else []
        nodes.append(node(first_llm + index, num_microbatches, *readers))
    programs = graph_aware_1f1b(nodes, alone(nodes))
    for first, depth in ((0, vision), (vision, audio)):
        for index in range(depth):
            distance = depth - index + llm
            assert warmup(programs[(first + index,)], first + index) == min(distance, num_microbatches)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(1, 5))
def test_warmup_counts_what_the_consumers_first_forwards_read(per_llm, llm, depth, num_llm):
    """An encoder with several microbatches per LLM microbatch: n = what the first n + 1 forwards read."""
    own = per_llm * num_llm
    nodes = [node(index, own, (index + 1, one_to_one(own))) for index in range(depth - 1)]
    nodes.append(node(depth - 1, own, (depth, each_reads(own, num_llm))))
    for index in range(llm):
        readers = [(depth + index + 1, one_to_one(num_llm))] if index + 1 < llm else []
        nodes.append(node(depth + index, num_llm, *readers))
    programs = graph_aware_1f1b(nodes, alone(nodes))
    expected = min(llm, num_llm)
    for stage in range(depth - 1, -1, -1):
        expected = per_llm * min(expected + 1, num_llm) if stage == depth - 1 else min(expected + 1, own)
        assert warmup(programs[(stage,)], stage) == expected


THREE, FOUR = one_to_one(3), one_to_one(4)
ORDERS = {  # nodes, shared ranks, and the programs of some of them
    "one consumer forward's worth alternates with its backwards": (
        [node(0, 8, (1, each_reads(8, 4))), node(1, 4)],
        [(0,), (1,)],
        "0F0 0F1 0F2 0F3 0B0 0F4 0B1 0F5 0B2 0F6 0B3 0F7 0B4 0B5 0B6 0B7",
        "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3",
    ),
    "backwards follow their readers, not their index": (
        [node(0, 3, (1, ((0,), (1,), (0, 2)))), node(1, 3)],
        [(0,), (1,)],
        "0F0 0F1 0F2 0B1 0B0 0B2",
    ),
    "text-only microbatches hold nothing back": (
        [node(0, 2, (1, ((), (0,), (), (1,)))), node(1, 4)],
        [(0,), (1,)],
        "0F0 0B0 0F1 0B1",
        "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3",
    ),
    "a stage without backward runs forwards only": (
        [node(0, 3, (1, THREE), backward=False), node(1, 3, (2, THREE)), node(2, 3)],
        [(0,), (1,), (2,)],
        "0F0 0F1 0F2",
        "1F0 1F1 1B0 1F2 1B1 1B2",
    ),
    "one encoder feeds two replicas of the LLM": (
        [node(0, 4, (1, ((0,), (2,))), (2, ((1,), (3,)))), node(1, 2), node(2, 2)],
        [(0,), (1,), (2,)],
        "0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3",
        "1F0 1B0 1F1 1B1",
    ),
    "colocated encoders merge in lockstep": (
        [node(0, 3, (2, THREE)), node(1, 3, (2, THREE)), node(2, 3)],
        [(0, 1), (2,)],
        "0F0 1F0 0F1 1F1 1B0 0B0 0F2 1F2 1B1 0B1 1B2 0B2",
    ),
    # Stage 0 is two hops from the LLM, its mate stage 2 one: both start with three forwards.
    "a group of unequal depths warms up to the deepest": (
        [node(0, 4, (1, FOUR)), node(1, 4, (3, FOUR)), node(2, 4, (3, FOUR)), node(3, 4)],
        [(0, 2), (1,), (3,)],
        "0F0 2F0 0F1 2F1 0F2 2F2 2B0 0B0 0F3 2F3 2B1 0B1 2B2 0B2 2B3 0B3",
    ),
    "an encoder on its reader's ranks runs just before it": (
        [node(0, 3, (1, THREE)), node(1, 3, (2, THREE)), node(2, 3)],
        [(0, 1), (2,)],
        "0F0 1F0 0F1 1F1 1B0 0B0 0F2 1F2 1B1 0B1 1B2 0B2",
    ),
    **{
        f"{copies} unread copies run beside the stage on their ranks": (
            [node(0, 4, (2, FOUR)), node(1, copies, backward=False), node(2, 4, (3, FOUR)), node(3, 4)],
            [(1, 3), (0, 2)],
            expected,
        )
        for copies, expected in (
            (4, "1F0 3F0 3B0 1F1 3F1 3B1 1F2 3F2 3B2 1F3 3F3 3B3"),
            (2, "3F0 3B0 1F0 3F1 3B1 3F2 3B2 1F1 3F3 3B3"),
        )
    },
}


@pytest.mark.parametrize("name", ORDERS)
def test_programs_are_those_written_down(name):
    nodes, groups, *expected = ORDERS[name]
    programs = graph_aware_1f1b(nodes, sorted(groups))
    assert [text(programs[group]) for group, _ in zip(groups, expected, strict=False)] == expected


def test_microbatch_of_several_readers_goes_back_after_the_last():
    nodes = [node(0, 2, (1, ((0,), (0,), (0, 1), (1,)))), node(1, 4)]
    programs = graph_aware_1f1b(nodes, alone(nodes))
    assert text(programs[(0,)]) == "0F0 0F1 0B0 0B1"
    times = timed(programs, passes_read(nodes), lambda _: 1)
    assert times[Action(0, Pass.B, 0)][0] >= times[Action(1, Pass.B, 2)][1]


@pytest.mark.parametrize(
    ("nodes", "groups", "message"),
    [
        pytest.param([node(0, 1)], [(0,), (0,)], r"stages \[0\], in groups \[0, 0\]", id="twice-grouped"),
        pytest.param([node(0, 1), node(1, 1)], [(0,)], r"stages \[0, 1\], in groups \[0\]", id="ungrouped"),
        pytest.param([node(0, 1, (7, ((0,),)))], [(0,)], "consumer, stage 7, is not there", id="consumer"),
        pytest.param(
            [node(0, 2, (1, ((0,), (2,)))), node(1, 2)],
            [(0,), (1,)],
            r"stage 0 has microbatches 0..1, but microbatch 1 of stage 1 reads 2",
            id="needs",
        ),
        pytest.param(
            [node(0, 2, (1, ((0,),))), node(1, 2)], [(0,), (1,)], "which has 2, got 1", id="needs-count"
        ),
        pytest.param(
            [node(0, 1, (1, ((0,),))), node(1, 1, (0, ((0,),)))],
            [(0,), (1,)],
            r"cycle, got one among stages \[0, 1\]",
            id="cycle",
        ),
    ],
)
def test_bad_problems_are_refused(nodes, groups, message):
    with pytest.raises(ValueError, match=message):
        graph_aware_1f1b(nodes, groups)


def test_backward_flags_count_the_microbatches():
    with pytest.raises(ValueError, match=r"stage 3: .* got 1 for 2 microbatches"):
        ScheduleNode(3, 2, (True,))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: one_f_one_b([0, 0], 2), r"must be there and differ, got \[0, 0\]"),
        (lambda: gpipe([], 2), "must be there"),
        (lambda: one_f_one_b([0], 0), "num_microbatches must be >= 1, got 0"),
    ],
)
def test_bad_chains_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
