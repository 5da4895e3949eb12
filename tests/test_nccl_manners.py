"""NCCL: its cases and its manners."""

import re
import signal
from collections.abc import Iterable
from math import log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.nccl.cases import Case, cases, divisions, pipeline, schedules
from experiments.nccl.manners import Manner
from experiments.nccl.ranks import LACKS, Conduct, Doom, Variant
from experiments.nccl.run import HUNG, SAME, SHORT_S, UNNOTICED_S, dead_rank, hangs_of_before, outcome
from runtime.world.pool import Pool
from workbench.cost import nccl
from workbench.cost.collectives import Collective, Collectives
from workbench.cost.group_link import group_link
from workbench.cost.hardware import Link, Node, uniform
from workbench.cost.profile import ideal_profile, load_profile
from workbench.plan.codec import plan_hash
from workbench.plan.plan import Plan
from workbench.schedule.choice import ScheduleKind
from workbench.strategies.registry import PLANNERS, PRICED

TOLD_S = 30.0
NAMES = [*PLANNERS, *PRICED]
KINDS = list(ScheduleKind)
PARTS = ("schedules", "strategies", "divided layers")


@pytest.fixture(scope="module")
def every() -> list[Case]:
    return list(cases())


@pytest.fixture(scope="module")
def two_ranks() -> Plan:
    return pipeline(ScheduleKind.ONE_F_ONE_B, 2)


def assert_twice(found: Iterable[Case], names: Iterable[str]) -> None:
    """Each of the names at two numbers of ranks."""
    there = {case.name for case in found}
    for each in names:
        assert len([name for name in there if re.fullmatch(rf"{each}, \d+ ranks", name)]) == 2, each


def test_every_schedule_is_there_at_two_numbers_of_ranks() -> None:
    assert_twice(schedules(), ScheduleKind)


def test_every_strategy_is_there_at_two_numbers_of_ranks(every: list[Case]) -> None:
    assert_twice(every, NAMES)
    stages = [stage for case in every for stage in case.plan.stages]
    assert {stage.cp for stage in stages} > {1}
    assert {stage.tp for stage in stages} > {1}
    assert {stage.ep for stage in stages} > {1}


@pytest.fixture
def different(part: str, request: pytest.FixtureRequest) -> list[Case]:
    """Of a part; of equal plans the first, and a strategy at its first number of ranks."""
    parts: dict[str, list[Case]] = {part: [] for part in PARTS}
    seen: set[str] = set()
    named: set[str] = set()
    for case in schedules() if part == "schedules" else request.getfixturevalue("every"):
        name = case.name.split(", ")[0]
        part = "schedules" if name in KINDS else "strategies" if name in NAMES else "divided layers"
        if not (part == "strategies" and name in named) and plan_hash(case.plan) not in seen:
            parts[part].append(case)
            seen.add(plan_hash(case.plan))
        named.add(name)
    return parts[part]


@pytest.mark.parametrize("part", PARTS)
def test_all_train_as_one_process(different: list[Case], pool: Pool) -> None:
    """Every schedule twice, every strategy once, and every way to divide a layer; equal plans run once.

    `experiments.bench.nccl_manners` runs all of them.
    """
    assert different
    outcomes = {case.name: outcome(case.plan, pool, Conduct()).what for case in different}
    assert outcomes == dict.fromkeys(outcomes, SAME)


def test_receives_posted_first_and_a_wait_for_the_device_hang(every: list[Case], pool: Pool) -> None:
    found = {case.name: before.what for case, before in hangs_of_before(every, pool)}
    assert found == {"1f1b, 2 ranks": HUNG, "gpipe, 2 ranks": HUNG}


@pytest.mark.parametrize("manner", [Manner.DEVICE_WAIT, Manner.FIRST_USE, Manner.EARLY_FUTURES])
def test_each_manner_alone_is_caught(manner: Manner, two_ranks: Plan, pool: Pool) -> None:
    lacking = Conduct(manners=frozenset({manner}), variant=LACKS[manner])
    assert outcome(two_ranks, pool, lacking, timeout_s=SHORT_S).what != SAME
    built = Conduct(manners=frozenset({manner}))
    assert outcome(two_ranks, pool, built).what == SAME


def test_sums_behind_reduce_scatters_wait_for_them(pool: Pool) -> None:
    """In a side stream, since no pass waits: one that does not wait sums what has not come."""
    plan = next(case.plan for case in divisions() if case.name == "resharded after a step, 2 instances")
    assert outcome(plan, pool, Conduct()).what == SAME
    early = frozenset({Manner.EARLY_FUTURES})
    lacking = Conduct(manners=early, variant=Variant.SUMS_TOO_EARLY)
    assert outcome(plan, pool, lacking).what.startswith("different gradient")


def test_a_stopped_rank_is_named_where_waits_never_end(two_ranks: Plan, pool: Pool) -> None:
    found = dead_rank(two_ranks, pool, signal.SIGSTOP)
    assert "to rank 1: nothing came within 2 s" in found.what or "from rank 1: nothing came" in found.what
    assert found.seconds < TOLD_S
    endless = Conduct(
        manners=frozenset({Manner.ENDLESS_WAITS}),
        variant=Variant.WAITS_FOR_EVER,
        doom=Doom(1, 1, signal.SIGSTOP),
    )
    assert outcome(two_ranks, pool, endless, timeout_s=SHORT_S, job_s=UNNOTICED_S).what == HUNG


def test_a_killed_rank_ends_the_job(two_ranks: Plan, pool: Pool) -> None:
    found = dead_rank(two_ranks, pool, signal.SIGKILL)
    assert found.what.startswith("process 1: killed by SIGKILL")
    assert found.seconds < TOLD_S


GB = 1e9
NEAR = Link(name="nvlink", bytes_per_s=300 * GB, latency_s=2e-6)
CARD = Link(name="card", bytes_per_s=25 * GB, latency_s=5e-6)
LARGE = 1e15


def cluster(num_nodes, *, num_cards=8, near=NEAR, card=CARD, num_ranks=8):
    node = Node(device="ideal", num_ranks=num_ranks, memory_bytes=1, num_cards=num_cards)
    return uniform("c", node, num_nodes=num_nodes, intra=near, inter=card)


def seconds(kind, num_bytes, num_nodes, *, stride=1, **machine):
    machines = cluster(num_nodes, **machine)
    num_ranks = machines.num_ranks // stride
    link = group_link(machines, num_ranks=num_ranks, stride=stride)
    return Collectives(ideal_profile()).seconds(kind, num_bytes, num_ranks, link)


def network(num_nodes):
    return 8 * 25 * GB * nccl.network_share(num_nodes)


@pytest.mark.parametrize("kind", [Collective.ALL_GATHER, Collective.REDUCE_SCATTER])
def test_large_gathers_run_at_the_cards_of_a_node(kind):
    assert seconds(kind, LARGE, 4) == pytest.approx(LARGE * 31 / 32 / network(4), rel=1e-6)


def test_large_sums_run_twice_that_way():
    assert seconds(Collective.ALL_REDUCE, LARGE, 4) == pytest.approx(
        2 * LARGE * 31 / 32 / network(4), rel=1e-6
    )


def test_between_two_nodes_a_tree_sends_every_byte_once_each_way():
    moved_s = 2 * LARGE / min(NEAR.bytes_per_s, 2 * network(2)) / nccl.TREE[-1].share
    assert seconds(Collective.ALL_REDUCE, LARGE, 2) == pytest.approx(moved_s, rel=1e-6)


def test_a_gather_of_nothing_much_takes_its_hops():
    fastest_s = min(each.base_s + 56 * each.near_s + 7 * max(each.far_s, 5e-6) for each in nccl.RING)
    assert seconds(Collective.ALL_GATHER, 1e-9, 8) == pytest.approx(fastest_s, rel=1e-6)


def test_a_small_sum_goes_by_tree_and_a_tree_grows_by_its_depth():
    small_s = {nodes: seconds(Collective.ALL_REDUCE, 1e-9, nodes) for nodes in (16, 64)}
    low_latency = nccl.TREE[0]
    assert small_s[64] - small_s[16] == pytest.approx(2 * log2(64 / 16) * low_latency.far_s, rel=1e-3)


def test_all_to_all_sends_what_leaves_over_a_ranks_own_cards():
    far_rate = 25 * GB * nccl.network_share(2)
    assert seconds(Collective.ALL_TO_ALL, LARGE, 2) == pytest.approx(LARGE * 8 / 16 / far_rate, rel=1e-6)


def test_a_group_alone_on_its_rail_has_one_card():
    alone_s = seconds(Collective.ALL_GATHER, LARGE, 4, stride=8)
    assert alone_s == pytest.approx(LARGE * 3 / 4 / (network(4) / 8), rel=1e-6)


def test_a_link_slower_to_arrive_than_the_librarys_hops_sets_them():
    far = Link(name="ethernet", bytes_per_s=25 * GB, latency_s=140e-6)
    assert seconds(Collective.ALL_GATHER, 1.0, 4, card=far) > 3 * 140e-6


SIZES = st.floats(1.0, 1e11)
NODES = st.integers(2, 128)


@given(st.sampled_from(Collective), SIZES, SIZES, NODES)
def test_more_bytes_are_never_faster(kind, one, other, num_nodes):
    less, more = sorted((one, other))
    assert seconds(kind, less, num_nodes) <= seconds(kind, more, num_nodes)


@given(st.sampled_from(Collective), SIZES, st.integers(1, 6))
def test_more_nodes_are_never_faster(kind, num_bytes, doublings):
    fewer, more = 2**doublings, 2 ** (doublings + 1)
    assert seconds(kind, num_bytes, fewer) <= seconds(kind, num_bytes, more) * (1 + 1e-12)


@given(
    st.sampled_from(Collective), SIZES, NODES, st.floats(1.0, 10.0), st.floats(1.0, 10.0), st.integers(1, 16)
)
def test_a_better_link_is_never_slower(kind, num_bytes, num_nodes, faster, nearer, num_cards):
    better = Link(name="b", bytes_per_s=CARD.bytes_per_s * faster, latency_s=CARD.latency_s / nearer)
    inside = Link(name="n", bytes_per_s=NEAR.bytes_per_s * faster, latency_s=NEAR.latency_s / nearer)
    plain_s = seconds(kind, num_bytes, num_nodes, num_cards=num_cards)
    assert seconds(kind, num_bytes, num_nodes, num_cards=num_cards, card=better) <= plain_s
    assert seconds(kind, num_bytes, num_nodes, num_cards=num_cards, near=inside) <= plain_s
    assert seconds(kind, num_bytes, num_nodes, num_cards=num_cards + 1) <= plain_s


@given(SIZES, NODES)
def test_halves_of_a_sum_take_no_less_than_the_sum(num_bytes, num_nodes):
    halves_s = 2 * seconds(Collective.ALL_GATHER, num_bytes, num_nodes)
    assert seconds(Collective.ALL_REDUCE, num_bytes, num_nodes) <= halves_s * nccl.PLATEAU


@pytest.mark.parametrize("name", ["A100-80GB", "H100"])
def test_the_rate_of_a_step_falls_with_the_nodes_of_a_real_machine(name):
    profile = load_profile(name)
    links = {scope: profile.machine_link(scope).link for scope in ("intra", "inter")}
    rates = []
    for num_nodes in (1, 8, 64):
        node = Node(device=name, num_ranks=8, memory_bytes=1, num_cards=8)
        machines = uniform("c", node, num_nodes=num_nodes, intra=links["intra"], inter=links["inter"])
        link = group_link(machines, num_ranks=8 * num_nodes, stride=1)
        taken_s = Collectives(profile).seconds(Collective.ALL_GATHER, 64 * 2**20, 8 * num_nodes, link)
        rates.append(64 * 2**20 / taken_s)
    assert rates[0] > 1.3 * rates[1] > 3 * rates[2]


def test_more_ranks_on_a_measured_switch_keep_their_rate():
    profile = load_profile("H100")
    link, times = profile.machine_link("intra").link, Collectives(profile)
    eight_s, many_s = (times.seconds(Collective.ALL_GATHER, 2**29, n, link) for n in (8, 64))
    more_hops_s = 56 * link.latency_s
    assert many_s == pytest.approx(eight_s * (63 / 64) / (7 / 8) + more_hops_s)
