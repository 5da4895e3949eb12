"""The three-phase schedule: its phases, its windows, and that nothing in it can deadlock."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.chains import each_reads, node, one_to_one
from tests.examples import examples
from tests.oracles import passes_read, timed
from tests.strategies import schedule_problems
from workbench.schedule.action import Pass, parse_action
from workbench.schedule.choice import Schedule, ScheduleKind
from workbench.schedule.graph_aware import graph_aware_1f1b
from workbench.schedule.offload import with_offload
from workbench.schedule.programs import programs_of
from workbench.schedule.text import format_programs
from workbench.schedule.three_phase import three_phase

GOLDEN = Path(__file__).parent / "golden" / "three_phase_w2_m4.txt"


def encoders_and_llm(num_encoders, depth, num_microbatches, *, windows=1, backward=True):
    """Encoder replicas 0..e-1, each with a microbatch per window, before LLM stages e..e+d-1.

    Every LLM stage lies on ranks of `num_encoders / depth` encoder replicas.
    """
    first = num_encoders
    share = num_microbatches // windows
    needs = tuple((index // share,) for index in range(num_microbatches))
    nodes = [node(stage, windows, (first, needs), backward=backward) for stage in range(num_encoders)]
    one = one_to_one(num_microbatches)
    for position in range(depth):
        readers = [(first + position + 1, one)] if position + 1 < depth else []
        nodes.append(node(first + position, num_microbatches, *readers))
    groups = [(stage, first + stage * depth // num_encoders) for stage in range(num_encoders)]
    return nodes, groups, range(first, first + depth)


def test_golden_of_four_encoder_replicas_on_the_ranks_of_two_llm_stages():
    nodes, groups, inner = encoders_and_llm(4, 2, 4, windows=2)
    ours = format_programs(three_phase(nodes, groups, inner, window=2)) + "\n"
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.write_text(ours)
    assert ours == GOLDEN.read_text()


@st.composite
def shared_problems(draw):
    """A random DAG of stages; its inner ones are closed under reading, and any ranks are shared."""
    nodes, _ = draw(schedule_problems())
    by_stage = {n.stage: n for n in nodes}
    inner = draw(st.sets(st.sampled_from(sorted(by_stage))))
    for stage in sorted(by_stage):  # readers have higher numbers
        if stage in inner:
            inner |= {consumer.stage for consumer in by_stage[stage].consumers}
    parts: dict[int, list[int]] = {}
    for stage in sorted(inner):
        parts.setdefault(draw(st.integers(0, 2)), []).append(stage)
    groups = [tuple(part) for part in parts.values()]
    for stage in sorted(set(by_stage) - inner):
        at = draw(st.lists(st.integers(0, len(groups)), min_size=1, max_size=2, unique=True))
        groups = [
            (stage, *group) if index in at else group
            for index, group in enumerate([*groups, ()])
            if group or index in at
        ]
        if draw(st.booleans()):
            groups.append((stage, *groups[draw(st.integers(0, len(groups) - 1))]))
            groups = [tuple(dict.fromkeys(group)) for group in groups]
    return nodes, list(dict.fromkeys(groups)), inner


@examples(150)
@given(shared_problems(), st.integers(0, 3))
def test_every_dag_runs_whatever_ranks_are_shared(problem, seed):
    nodes, groups, inner = problem
    programs = three_phase(nodes, groups, inner)
    times = timed(programs, passes_read(nodes), lambda a: (7 * a.stage + 5 * a.microbatch + seed) % 3 + 1)
    assert len(times) == sum(n.num_microbatches + sum(n.backward) for n in nodes)
    for group, actions in programs.items():
        phases = [(a.stage in inner) + 2 * (a.stage not in inner and a.kind is Pass.B) for a in actions]
        assert phases == sorted(phases), f"{group}: outer F, then inner, then outer B"
        assert len(set(actions)) == len(actions)


@examples(60)
@given(
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(0, 3),
    st.booleans(),
)
def test_windows_run_with_every_run_ahead(copies, depth, num_windows, size, run_ahead, backward):
    nodes, groups, inner = encoders_and_llm(
        copies * depth, depth, num_windows * size, windows=num_windows, backward=backward
    )
    programs = three_phase(nodes, groups, inner, window=size, run_ahead=run_ahead)
    times = timed(programs, passes_read(nodes), lambda a: 1)
    assert len(times) == sum(n.num_microbatches + sum(n.backward) for n in nodes)
    for actions in programs.values():
        for number in range(num_windows):
            done = [a for a in actions if a.stage not in inner and a.kind is Pass.F][: number + 1]
            reads = next(
                i for i, a in enumerate(actions) if a.stage in inner and a.microbatch == number * size
            )
            assert actions.index(done[number]) < reads


@given(st.integers(1, 4), st.integers(1, 6))
def test_inner_stages_keep_their_own_pipeline(depth, num_microbatches):
    nodes, groups, inner = encoders_and_llm(depth, depth, num_microbatches)
    programs = three_phase(nodes, groups, inner)
    alone = [n for n in nodes if n.stage in inner]
    expected = graph_aware_1f1b(alone, [(n.stage,) for n in alone])
    for group, actions in programs.items():
        assert tuple(a for a in actions if a.stage in inner) == expected[group[1:]]


@pytest.mark.parametrize("depth", [2, 3, 4])
def test_run_ahead_hides_a_frozen_encoder_in_the_bubbles(depth):
    """Stage s waits s ticks before its first forward and depth - 1 - s before its first backward."""
    encode, num_windows, size = depth // 2, 4, 6
    nodes, groups, inner = encoders_and_llm(
        depth, depth, num_windows * size, windows=num_windows, backward=False
    )
    needs = passes_read(nodes)

    def duration(action):
        return encode if action.stage not in inner else 1

    def length(run_ahead):
        programs = three_phase(nodes, groups, inner, window=size, run_ahead=run_ahead, duration=duration)
        return max(end for _, end in timed(programs, needs, duration).values())

    assert length(0) == num_windows * encode + num_windows * 2 * size + 2 * (depth - 1) * num_windows
    assert length(1) == length(0) - (num_windows - 1) * encode


def test_an_outer_microbatch_of_two_windows_runs_first_and_last():
    nodes = [node(0, 1, (1, ((0,), (0,), (0,)))), node(1, 3)]
    (actions,) = three_phase(nodes, [(0, 1)], {1}, window=1).values()
    assert " ".join(map(str, actions)) == "0F0 1F0 1B0 1F1 1B1 1F2 1B2 0B0"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window": 0}, "a window has >= 1 microbatch, got 0"),
        ({"run_ahead": -1}, "run_ahead must be >= 0 windows, got -1"),
        ({"inner": [0]}, "inner stage 0 feeds an outer one, stage 1"),
        ({"inner": [7]}, "inner stage 7 is not there"),
        ({"groups": [(0,), (1,)]}, "stage 2 stands in no group"),
        ({"groups": [(0,), (1, 2), (2,)]}, r"inner stages \(1, 2\) and \(2,\) share ranks in part"),
        (
            {"window": 3},
            "microbatch 2 of stage 1 is in window 0, but microbatch 1 of stage 2, which reads it",
        ),
    ],
)
def test_refuses(change, message):
    nodes = [node(0, 4, (1, one_to_one(4))), node(1, 4, (2, each_reads(4, 2))), node(2, 2)]
    given_ = {"groups": [(0, 1), (0, 2)], "inner": [1, 2]} | change
    with pytest.raises(ValueError, match=message):
        three_phase(nodes, given_.pop("groups"), given_.pop("inner"), **given_)


def test_microbatches_whose_indices_have_gaps_are_named():
    """A plan's microbatch 2 of two: the schedule counts 0 and 1."""
    nodes = [node(0, 2, (1, ((0,), (2,)))), node(1, 2)]
    with pytest.raises(
        ValueError, match=r"stage 0 has microbatches 0\.\.1, but microbatch 1 of stage 1 reads 2"
    ):
        three_phase(nodes, [(0,), (1,)], [1])


def test_offloaded_stages_are_on_the_host_between_their_phases():
    def parsed(text):
        return tuple(parse_action(word) for word in text.split())

    program = parsed("0F0 1F0 0F1 2F0 2B0 1B0 0B0 0B1")
    assert with_offload(program, {0, 1}) == parsed(
        "0F0 1F0 1OFFLOAD 0F1 0OFFLOAD 2F0 2B0 1ONLOAD 1B0 0ONLOAD 0B0 0B1"
    )
    frozen = parsed("0F0 2F0 2B0")
    assert with_offload(frozen, {0}) == parsed("0F0 0OFFLOAD 2F0 2B0 0ONLOAD"), "back for the next step"
    with pytest.raises(ValueError, match=r"stage 0 cannot be offloaded: 0F1 comes after 0B0; want all"):
        with_offload(parsed("0F0 0B0 0F1 0B1"), {0})


def test_schedule_refuses_what_a_kind_does_not_have():
    with pytest.raises(ValueError, match="schedule 1f1b has no window, got 2; three-phase has one"):
        Schedule(window=2)
    with pytest.raises(ValueError, match="window must be >= 1, got 0"):
        Schedule(kind=ScheduleKind.THREE_PHASE, window=0)
    with pytest.raises(ValueError, match="offload wants three-phase without a window, got window 2"):
        Schedule(kind=ScheduleKind.THREE_PHASE, window=2, offload=True)
    with pytest.raises(ValueError, match="run_ahead 1 wants a window"):
        Schedule(kind=ScheduleKind.THREE_PHASE, run_ahead=1)
    with pytest.raises(ValueError, match="wants to know which stages are inner"):
        programs_of([node(0, 1)], [(0,)], Schedule(kind=ScheduleKind.THREE_PHASE))
