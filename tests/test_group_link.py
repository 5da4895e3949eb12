"""Which link a collective runs over, and what travels behind an attention."""

from dataclasses import replace

import pytest

from workbench.cost.collectives import Collective, Collectives
from workbench.cost.execution import Execution, KeyTravel
from workbench.cost.group_link import group_link, ring_link, slowest_ring
from workbench.cost.hardware import Cluster, Link, Node, uniform
from workbench.cost.model import CostModel, RowWork, Work
from workbench.cost.profile import load_profile
from workbench.model.zoo import from_shape

NVLINK = Link(name="nvlink", bytes_per_s=300.0, latency_s=1.0)
CARD = Link(name="card", bytes_per_s=50.0, latency_s=2.0)
CLUSTER: Cluster = uniform(
    "c", Node(device="gpu", num_ranks=8, memory_bytes=1, num_cards=8), num_nodes=4, intra=NVLINK, inter=CARD
)


@pytest.mark.parametrize(
    ("num_ranks", "stride", "bytes_per_s"),
    [
        pytest.param(8, 1, 300.0, id="one-node"),
        pytest.param(4, 2, 300.0, id="every-second-rank-of-a-node"),
        pytest.param(4, 8, 50.0, id="one-rank-a-node"),
        pytest.param(8, 4, 100.0, id="two-ranks-a-node"),
        pytest.param(32, 1, 300.0, id="eight-cards-outrun-the-node"),
        pytest.param(1, 64, 300.0, id="alone"),
    ],
)
def test_a_group_uses_the_cards_of_all_its_members(num_ranks, stride, bytes_per_s):
    assert group_link(CLUSTER, num_ranks=num_ranks, stride=stride).bytes_per_s == bytes_per_s


@pytest.mark.parametrize(
    ("num_cards", "bytes_per_s"), [(1, 6.25), (4, 25.0), (8, 50.0), (16, 100.0), (64, 300.0)]
)
def test_groups_of_a_node_share_its_cards(num_cards, bytes_per_s):
    node = replace(CLUSTER.nodes[0], num_cards=num_cards)
    cluster = replace(CLUSTER, nodes=(node,) * 4)
    assert group_link(cluster, num_ranks=4, stride=8).bytes_per_s == bytes_per_s


@pytest.mark.parametrize(("num_ranks", "stride"), [(4, 8), (8, 4), (16, 2), (32, 1)])
def test_no_group_is_faster_than_its_node(num_ranks, stride):
    slow = replace(CLUSTER, intra=replace(NVLINK, bytes_per_s=20.0))
    ring = ring_link(slow, range(0, num_ranks * stride, stride))
    assert ring.bytes_per_s <= 20.0
    assert group_link(slow, num_ranks=num_ranks, stride=stride).bytes_per_s <= 20.0


def test_processes_of_one_machine_share_no_cards():
    node = Node(device="cpu", num_ranks=2, memory_bytes=1, num_cores=2)
    cluster = uniform("c", node, num_nodes=2, intra=CARD, inter=CARD)
    assert group_link(cluster, num_ranks=4, stride=1) == CARD
    assert ring_link(cluster, range(4)) == CARD


def test_a_domain_larger_than_a_server_is_one_node():
    domain = Node(device="gpu", num_ranks=72, memory_bytes=1, num_cards=72)
    cluster = uniform("nvl72", domain, num_nodes=2, intra=NVLINK, inter=CARD)
    assert group_link(cluster, num_ranks=64, stride=1) == NVLINK
    assert ring_link(cluster, range(64)) == NVLINK
    assert ring_link(cluster, range(60, 84)).num_nodes == 2


@pytest.mark.parametrize(
    ("num_ranks", "stride"),
    [(8, 1), (4, 2), (4, 8), (8, 4), (16, 1), (32, 1), (1, 5), (10, 1), (9, 1), (5, 2), (6, 3), (3, 12)],
)
def test_a_ring_of_given_ranks_is_the_same(num_ranks, stride):
    ranks = range(0, num_ranks * stride, stride)
    ring, group = ring_link(CLUSTER, ranks), group_link(CLUSTER, num_ranks=num_ranks, stride=stride)
    assert (ring.bytes_per_s, ring.latency_s) == (group.bytes_per_s, group.latency_s)


@pytest.mark.parametrize(
    ("num_ranks", "stride", "num_groups"), [(5, 1, 2), (3, 2, 3), (10, 1, 2), (4, 1, 8), (6, 1, 5), (2, 3, 4)]
)
def test_of_groups_one_behind_the_other_the_slowest_counts(num_ranks, stride, num_groups):
    """Ranks 0-4 are on one node of eight, ranks 5-9 on two, of which one has two of them."""
    size = num_ranks * stride
    groups = [range(first, first + size, stride) for first in range(0, num_groups * size, size)]
    found = group_link(CLUSTER, num_ranks=num_ranks, stride=stride, num_groups=num_groups)
    assert found.bytes_per_s == slowest_ring(CLUSTER, groups).bytes_per_s


def test_the_node_with_the_fewest_ranks_sets_the_pace():
    assert ring_link(CLUSTER, (0, 1, 2, 8)).bytes_per_s == 50.0
    assert ring_link(CLUSTER, (6, 7, 8, 9)).bytes_per_s == 100.0
    slow = replace(CLUSTER, nodes=(replace(CLUSTER.nodes[0], card=replace(CARD, bytes_per_s=10.0)),) * 4)
    assert ring_link(slow, (6, 7, 8, 9)).bytes_per_s == 20.0


@pytest.mark.parametrize(
    ("ranks", "bytes_per_s"),
    [
        pytest.param((0, 4), 25.0, id="one-each"),
        pytest.param((0, 1, 4), 50.0, id="two-shares-of-one-card-are-as-fast-as-a-card"),
        pytest.param((0, 1, 2, 3, 4), 50.0, id="the-whole-fast-card-waits-for-a-slow-one"),
        pytest.param((0, 4, 5), 25.0, id="two-slow-cards-wait-for-a-share"),
        pytest.param((0, 1, 2, 3, 4, 5), 100.0, id="all-of-one-node"),
    ],
)
def test_of_unlike_nodes_the_one_with_the_slowest_shares_sets_the_pace(ranks, bytes_per_s):
    """Four ranks share a card of 100 (25 each); eight have a card of 50 each."""
    few = Node(device="gpu", num_ranks=4, memory_bytes=1, card=replace(CARD, bytes_per_s=100.0))
    many = Node(device="gpu", num_ranks=8, memory_bytes=1, num_cards=8)
    cluster = Cluster(name="c", nodes=(few, many), intra=NVLINK, inter=CARD)
    found = ring_link(cluster, ranks)
    assert (found.bytes_per_s, found.cards_bytes_per_s) == (bytes_per_s, bytes_per_s)
    assert found.rank_bytes_per_s == 25.0
    assert found.neighbour_bytes_per_s == min(50.0, bytes_per_s)  # over one card


def test_a_group_of_nothing_is_refused():
    with pytest.raises(ValueError, match="num_ranks and stride >= 1"):
        group_link(CLUSTER, num_ranks=0, stride=1)


def block_time(execution, precision="bfloat16", **links):
    cost = CostModel(load_profile("H100"), execution)
    layer = from_shape("llama-3.1-8b", module="llm").layers[1]
    work = Work((RowWork(32768, 32768, 32768 * 32769 // 2),))
    return cost.layer_time(layer, work, tp=2, cp=8, precision=precision, **links)


def test_each_axis_has_its_own_link():
    slow = replace(CARD, bytes_per_s=1e9, latency_s=1e-5)
    fast = replace(CARD, bytes_per_s=3e11, latency_s=1e-6)
    both = [
        block_time(Execution(), link=a, context_link=b).forward_s for a in (fast, slow) for b in (fast, slow)
    ]
    assert both[0] < both[1] < both[3]
    assert both[0] < both[2] < both[3]
    assert both[3] - both[2] == pytest.approx(both[1] - both[0])  # the axes do not touch each other
    assert block_time(Execution(), link=slow).forward_s == both[3]  # one link holds for both


@pytest.mark.parametrize(("precision", "key_bytes", "sum_bytes"), [("bfloat16", 2, 4), ("float32", 4, 4)])
def test_a_backward_gathers_keys_again_and_adds_their_gradients_up_in_float32(
    precision, key_bytes, sum_bytes
):
    """As `runtime.parallel.context.gathered` does: what was gathered is not kept."""
    slow, free = (replace(CARD, bytes_per_s=rate, latency_s=0.0) for rate in (1e9, 1e30))
    exposed, alone = (block_time(Execution(), precision, link=free, context_link=a) for a in (slow, free))
    elements = 2 * 32768 * 8 * 128 / 2  # keys and values, of half the heads
    seconds = Collectives(load_profile("H100")).seconds
    gather_s = seconds(Collective.ALL_GATHER, elements * key_bytes, 8, slow)
    scatter_s = seconds(Collective.REDUCE_SCATTER, elements * sum_bytes, 8, slow)
    assert exposed.forward_s - alone.forward_s == pytest.approx(gather_s)
    backward_s = [time.input_grad_s + time.weight_grad_s for time in (exposed, alone)]
    assert backward_s[0] - backward_s[1] == pytest.approx(gather_s + scatter_s)


def test_keys_passed_on_leave_a_node_over_one_card():
    """Of four ranks on a node one sends to the next node: the other cards do not help."""
    node = Node(device="H100", num_ranks=8, memory_bytes=1, num_cards=8)
    near = replace(CARD, name="near", bytes_per_s=3e11, latency_s=1e-6)
    rate, times = 0.5, []
    for bytes_per_s in (1e8, 5e7):
        card = replace(CARD, bytes_per_s=bytes_per_s)
        cluster = uniform("nodes", node, num_nodes=2, intra=near, inter=card)
        group = group_link(cluster, num_ranks=8, stride=2)
        assert (group.members, group.neighbour_bytes_per_s) == (4, bytes_per_s)
        behind = Execution(keys=KeyTravel.BEHIND, collective_rate=rate)
        times.append(block_time(behind, link=near, context_link=group))
    block_bytes = 2 * (32768 / 8) * (8 / 2) * 128 * 2  # keys and values of a rank's tokens in bfloat16
    longer_s = 7 * block_bytes * (1 / 5e7 - 1 / 1e8) / rate
    fast, slow = times
    assert slow.forward_s - fast.forward_s == pytest.approx(longer_s)
    assert slow.input_grad_s - fast.input_grad_s == pytest.approx(2 * longer_s)


@pytest.mark.parametrize(("num_cards", "bytes_per_s"), [(1, 12.5), (2, 25.0), (4, 50.0), (8, 50.0)])
def test_columns_of_a_grid_share_the_cards_when_they_pass_on(num_cards, bytes_per_s):
    """Two ranks of each of four columns on a node: a quarter of its cards, and at most one."""
    node = Node(device="gpu", num_ranks=8, memory_bytes=1, num_cards=num_cards)
    cluster = uniform("c", node, num_nodes=4, intra=NVLINK, inter=CARD)
    assert group_link(cluster, num_ranks=8, stride=4).neighbour_bytes_per_s == bytes_per_s


def test_keys_behind_an_attention_cost_what_it_does_not_hide():
    links = {"link": replace(CARD, bytes_per_s=3e11, latency_s=1e-6)}
    ahead = block_time(Execution(), **links, context_link=replace(CARD, bytes_per_s=2e11, latency_s=5e-6))
    hidden = block_time(
        Execution(keys=KeyTravel.BEHIND),
        **links,
        context_link=replace(CARD, bytes_per_s=2e11, latency_s=5e-6),
    )
    free = block_time(Execution(), **links, context_link=replace(CARD, bytes_per_s=1e18, latency_s=0.0))
    slow = replace(CARD, bytes_per_s=1e8, latency_s=5e-6)
    exposed = block_time(Execution(keys=KeyTravel.BEHIND), **links, context_link=slow)
    assert hidden.forward_s == pytest.approx(free.forward_s)
    assert hidden.input_grad_s == pytest.approx(free.input_grad_s)
    assert ahead.forward_s > free.forward_s
    assert free.forward_s < exposed.forward_s < block_time(Execution(), **links, context_link=slow).forward_s
