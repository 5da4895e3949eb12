"""Training on nodes that come and go, against closed forms; traces and their mistakes."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.failures.run import Spent
from sim.failures.simulate import simulate_failures
from sim.failures.training_system import Checkpoints, Joins, Restart, System
from tests.examples import examples
from workbench.elastic.availability import (
    Availability,
    Change,
    NodeEvent,
    Rates,
    by_nodes,
    from_counts,
    parse_trace,
    random_trace,
    rescaled,
    warned,
)


def in_memory(**changes) -> System:
    """10 s iterations of 10 n samples on n nodes, none below 2 nodes, 3 s to recover."""
    given_values = {
        "name": "memory",
        "samples_per_s": (0.0, 0.0, 2.0, 3.0, 4.0),
        "samples_per_step": 60.0,
        "recover_s": 3.0,
        "creation_s": 5.0,
    }
    return System(**{**given_values, **changes})


def trace(*counts, notice_s=0.0) -> Availability:
    return warned(from_counts("test", counts), notice_s)


def spent(run):
    return {kind: pytest.approx(seconds) for kind, seconds in run.spent_s if seconds}


def test_a_failure_costs_the_cut_off_iteration_and_the_recovery():
    """3 nodes: 20 s an iteration. At 50 s 10 s are lost, 3 s recovery, then 2 nodes: 30 s each."""
    run = simulate_failures(in_memory(), trace((0.0, 3), (50.0, 2)), until_s=113.0)
    assert spent(run) == {Spent.EFFECTIVE: 100.0, Spent.LOST: 10.0, Spent.RECOVERY: 3.0}
    assert run.samples == pytest.approx(4 * 60)
    assert run.num_recoveries == 1


def test_failure_at_the_end_of_an_iteration_comes_first():
    run = simulate_failures(in_memory(), trace((0.0, 3), (40.0, 2)), until_s=43.0)
    assert spent(run) == {Spent.EFFECTIVE: 20.0, Spent.LOST: 20.0, Spent.RECOVERY: 3.0}


def test_the_running_iteration_counts_by_its_part():
    run = simulate_failures(in_memory(), trace((0.0, 3)), until_s=30.0)
    assert run.samples == pytest.approx(90.0)


def test_checkpoints_bound_what_is_lost():
    """Two iterations and 4 s to save: 44 s a round. At 70 s one iteration and 6 s are undone."""
    system = in_memory(checkpoints=Checkpoints(every=2, save_s=4.0))
    run = simulate_failures(system, trace((0.0, 3), (70.0, 2)), until_s=73.0)
    assert spent(run) == {
        Spent.EFFECTIVE: 40.0,
        Spent.CHECKPOINT: 4.0,
        Spent.LOST: 26.0,
        Spent.RECOVERY: 3.0,
    }
    assert [iteration.samples for iteration in run.iterations] == [60.0, 60.0, 0.0, 0.0]


def test_failure_while_saving_loses_everything_since_the_last_checkpoint():
    system = in_memory(checkpoints=Checkpoints(every=2, save_s=4.0))
    run = simulate_failures(system, trace((0.0, 3), (42.0, 2)), until_s=45.0)
    assert spent(run) == {Spent.CHECKPOINT: 2.0, Spent.LOST: 40.0, Spent.RECOVERY: 3.0}


@pytest.mark.parametrize(
    ("failure_s", "effective_s", "lost_s"),
    [pytest.param(44.0, 0.0, 43.0, id="while-it-copies"), pytest.param(50.0, 40.0, 9.0, id="after-it")],
)
def test_an_asynchronous_checkpoint_counts_once_it_is_copied(failure_s, effective_s, lost_s):
    """Saved from 40 to 41 s, copied until 46 s while training goes on."""
    system = in_memory(checkpoints=Checkpoints(every=2, save_s=1.0, copy_s=5.0))
    run = simulate_failures(system, trace((0.0, 3), (failure_s, 2)), until_s=failure_s + 3)
    want = {Spent.EFFECTIVE: effective_s, Spent.CHECKPOINT: 1.0, Spent.LOST: lost_s, Spent.RECOVERY: 3.0}
    assert spent(run) == {kind: seconds for kind, seconds in want.items() if seconds}


def test_nodes_are_taken_in_when_the_copy_is_written():
    """A node comes at 10 s, so 20 s of work are saved by 21 s and copied by 26 s: from there it recovers."""
    system = in_memory(checkpoints=Checkpoints(every=2, save_s=1.0, copy_s=5.0), creation_s=0.0)
    run = simulate_failures(system, trace((0.0, 3), (10.0, 4)), until_s=44.0)
    assert spent(run) == {Spent.EFFECTIVE: 35.0, Spent.CHECKPOINT: 1.0, Spent.RECOVERY: 8.0}


def test_the_next_save_waits_for_the_copy_before_it():
    """Copied from 41 to 91 s; two more iterations end at 81 s."""
    system = in_memory(checkpoints=Checkpoints(every=2, save_s=1.0, copy_s=50.0))
    run = simulate_failures(system, trace((0.0, 3)), until_s=92.0)
    assert spent(run) == {Spent.EFFECTIVE: 80.0, Spent.CHECKPOINT: 12.0}


def test_failure_during_recovery_starts_it_anew():
    run = simulate_failures(in_memory(), trace((0.0, 4), (10.0, 3), (12.0, 2)), until_s=45.0)
    assert spent(run) == {Spent.LOST: 10.0, Spent.RECOVERY: 5.0, Spent.EFFECTIVE: 30.0}
    assert run.num_recoveries == 1


def test_too_few_nodes_wait_until_others_are_created():
    run = simulate_failures(in_memory(), trace((0.0, 2), (10.0, 1), (20.0, 2)), until_s=58.0)
    assert spent(run) == {
        Spent.LOST: 10.0,
        Spent.WAITING: 15.0,
        Spent.RECOVERY: 3.0,
        Spent.EFFECTIVE: 30.0,
    }
    assert run.node_s == pytest.approx(2 * 10 + 10 + 2 * 38)
    assert run.dollars_per_sample(3600.0) == pytest.approx(run.node_s / 60)


@pytest.mark.parametrize(
    ("joins", "expected"),
    [
        (Joins.AT_ONCE, {Spent.EFFECTIVE: 45.0, Spent.RECOVERY: 3.0}),
        (Joins.AT_RECOVERY, {Spent.EFFECTIVE: 48.0}),
    ],
)
def test_new_nodes_are_taken_in(joins, expected):
    run = simulate_failures(in_memory(joins=joins), trace((0.0, 2), (10.0, 3)), until_s=48.0)
    assert spent(run) == expected


def test_a_warning_saves_the_iteration():
    """Known 15 s ahead: the iteration ends at 40 s, the node is left out, and nothing is lost at 50 s."""
    run = simulate_failures(in_memory(), trace((0.0, 3), (50.0, 2), notice_s=15.0), until_s=73.0)
    assert spent(run) == {Spent.EFFECTIVE: 70.0, Spent.RECOVERY: 3.0}


def test_a_warning_too_short_to_save_a_checkpoint_does_not_help():
    system = in_memory(checkpoints=Checkpoints(every=10, save_s=30.0))
    run = simulate_failures(system, trace((0.0, 3), (50.0, 2), notice_s=15.0), until_s=53.0)
    assert spent(run) == {Spent.CHECKPOINT: 10.0, Spent.LOST: 40.0, Spent.RECOVERY: 3.0}


def events(*rows) -> Availability:
    """Three nodes from the start, and what happens then: (time, change, node, warning)."""
    first = [NodeEvent(time_s=0.0, change=Change.JOIN, node=f"node{k}") for k in range(3)]
    then = [NodeEvent(time_s=t, change=change, node=node, warned_s=w) for t, change, node, w in rows]
    return Availability(name="events", events=(*first, *then))


def test_a_node_that_comes_and_goes_at_one_instant_leaves_nothing():
    found = events((10.0, Change.JOIN, "x", 0.0), (10.0, Change.LEAVE, "x", 0.0))
    run = simulate_failures(in_memory(), found, until_s=60.0)
    assert spent(run) == {Spent.EFFECTIVE: 60.0}
    assert run.node_s == 180.0


def test_stays_last_and_are_known_of_no_sooner_than_they_begin():
    found = events(
        (10.0, Change.JOIN, "x", 0.0),
        (10.0, Change.LEAVE, "x", 0.0),
        (20.0, Change.LEAVE, "node1", 5.0),
        (30.0, Change.JOIN, "node1", 0.0),
        (40.0, Change.LEAVE, "node1", 120.0),
    )
    spans = [(stay.node, stay.join_s, stay.warned_s, stay.leave_s) for stay in found.stays()]
    assert spans == [
        ("node1", 0.0, 15.0, 20.0),
        ("node0", 0.0, inf, inf),
        ("node2", 0.0, inf, inf),
        ("node1", 30.0, 30.0, 40.0),
    ]


def test_creation_starts_anew_for_a_node_that_comes_back():
    """Created from 10 s on, gone at 12, back at 14: usable at 19, not at 15; taken in at 20."""
    found = events(
        (10.0, Change.JOIN, "x", 0.0), (12.0, Change.LEAVE, "x", 0.0), (14.0, Change.JOIN, "x", 0.0)
    )
    run = simulate_failures(in_memory(samples_per_step=12.0, creation_s=5.0), found, until_s=26.0)
    assert spent(run) == {Spent.EFFECTIVE: 23.0, Spent.RECOVERY: 3.0}
    assert [each.start_s for each in run.iterations] == [0.0, 4.0, 8.0, 12.0, 16.0, 23.0]


def test_a_node_warned_of_before_it_is_usable_is_not_taken_in():
    found = events((10.0, Change.JOIN, "x", 0.0), (30.0, Change.LEAVE, "x", 15.0))
    run = simulate_failures(in_memory(), found, until_s=60.0)
    assert spent(run) == {Spent.EFFECTIVE: 60.0}


def test_a_month_of_iterations_is_a_handful_of_stretches():
    run = simulate_failures(
        in_memory(checkpoints=Checkpoints(every=10, save_s=4.0)),
        trace((0.0, 3), (15 * 86400.0, 2)),
        until_s=30 * 86400.0,
    )
    assert sum(stretch.num_iterations for stretch in run.stretches) > 90_000
    assert len(run.stretches) < 12
    assert sum(seconds for _, seconds in run.spent_s) == pytest.approx(30 * 86400.0)


def test_redundancy_and_idle_nodes_are_split_off():
    system = in_memory(redundant_share=0.25, idle_nodes=(0, 0, 0, 1, 0))
    run = simulate_failures(system, trace((0.0, 3)), until_s=60.0)
    assert spent(run) == {Spent.IDLE_NODES: 20.0, Spent.REDUNDANT: 10.0, Spent.EFFECTIVE: 30.0}
    assert run.samples == pytest.approx(180.0)


@given(st.integers(0, 10**6), st.booleans(), st.floats(0, 400))
@examples(60)
def test_the_books_close_on_random_traces(seed, saves, notice_s):
    checkpoints = Checkpoints(every=3, save_s=7.0) if saves else None
    found = warned(
        random_trace(4, Rates(leaves_per_node_h=6.0, joins_per_missing_h=20.0), 7200.0, seed), notice_s
    )
    run = simulate_failures(in_memory(checkpoints=checkpoints), found, until_s=7200.0)
    assert sum(seconds for _, seconds in run.spent_s) == pytest.approx(7200.0)
    assert run.samples <= 4.0 * 7200 + 1e-6
    ends = [iteration.end_s for iteration in run.iterations]
    assert ends == sorted(ends)
    assert run == simulate_failures(in_memory(checkpoints=checkpoints), found, until_s=7200.0)


def test_hours_in_seconds_of_simulation_are_exact_without_failures():
    run = simulate_failures(in_memory(), trace((0.0, 4)), until_s=12 * 3600.0)
    assert run.samples == pytest.approx(4.0 * 12 * 3600)


def test_trace_file_and_its_counts():
    found = parse_trace("t", "t_s,event,node\n0,add,a\n0,add,b\n60,remove,a\n90,add,a\n120,remove,b\n")
    assert found.num_nodes() == ((0.0, 2), (60.0, 1), (90.0, 2), (120.0, 1))
    assert found.mean_between_leaves_s == 60.0
    assert rescaled(found, 15, 30, "r").num_nodes() == ((0.0, 30), (60.0, 15), (90.0, 30), (120.0, 15))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        pytest.param(
            lambda: parse_trace("t", "t_s,event,node\n5,add,a\n3,add,b\n"),
            "goes back from 5.0 s to 3.0",
            id="back",
        ),
        pytest.param(
            lambda: parse_trace("t", "t_s,event,node\n0,add,a\n1,remove,a\n2,remove,a\n"),
            "event 3: node 'a' is removed at 2.0 s but is not there",
            id="removed-twice",
        ),
        pytest.param(
            lambda: parse_trace("t", "t_s,event,node\n0,add,a\n1,add,a\n"), "there already", id="added"
        ),
        pytest.param(lambda: parse_trace("t", "t_s,event,node\n0,vanish,a\n"), "line 2", id="word"),
        pytest.param(lambda: parse_trace("t", "t_s,node\n0,a\n"), "want the columns", id="columns"),
        pytest.param(lambda: from_counts("t", [(0.0, -1)]), ">= 0", id="count"),
        pytest.param(lambda: rescaled(from_counts("t", [(0.0, 3)]), 1, 2, "r"), "cannot scale", id="flat"),
        pytest.param(lambda: Rates(leaves_per_node_h=-1.0), ">= 0", id="rate"),
        pytest.param(lambda: by_nodes({1: 1.0, 3: 2.0}, 4), "consecutive", id="gap"),
        pytest.param(
            lambda: simulate_failures(in_memory(), from_counts("t", [(0.0, 3)])), "until_s", id="window"
        ),
        pytest.param(lambda: in_memory(redundant_share=1.0), "redundant_share", id="share"),
        pytest.param(lambda: in_memory(samples_per_s=()), "throughput", id="throughput"),
        pytest.param(lambda: Checkpoints(every=0, save_s=1.0), "every 1", id="checkpoint"),
    ],
)
def test_bad_input_is_named(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_training_that_goes_on_while_restarting_loses_only_what_is_undone():
    """10 s are undone at 50 s; the old speed goes on until 53 s, where its iteration is cut off."""
    system = in_memory(restart=Restart.GOES_ON)
    run = simulate_failures(system, trace((0.0, 3), (50.0, 2)), until_s=83.0)
    assert spent(run) == {Spent.EFFECTIVE: 70.0, Spent.LOST: 13.0}
    assert run.samples == pytest.approx(180.0)


def test_first_checkpoint_after_a_failure_may_come_sooner():
    system = in_memory(checkpoints=Checkpoints(every=9, save_s=4.0, first=1))
    run = simulate_failures(system, trace((0.0, 3), (30.0, 2)), until_s=67.0)
    assert spent(run) == {
        Spent.LOST: 30.0,
        Spent.RECOVERY: 3.0,
        Spent.EFFECTIVE: 30.0,
        Spent.CHECKPOINT: 4.0,
    }
