"""What rows of a table say between GPUs: closed forms of boundaries, of cards, and of sharded optimizers."""

from dataclasses import replace

import pytest

from sim.predict import iteration_s
from sim.step.wire import wires
from workbench.cost import overlapped_collectives
from workbench.cost.collectives import Collective
from workbench.cost.execution import Execution
from workbench.cost.group_link import ring_link
from workbench.cost.model import CostModel
from workbench.cost.profile import load_profile
from workbench.cost.weight_update import InstanceSums, UpdatedWeights
from workbench.llm_table.columns import read_row
from workbench.llm_table.llm_row import LlmRow
from workbench.llm_table.predict import RowPredictor
from workbench.llm_table.replicas import with_replicas
from workbench.llm_table.row_plan import plan_of
from workbench.llm_table.row_prices import prices_of
from workbench.model.layer import Shard
from workbench.plan.lower import lower
from workbench.plan.lowered import Lowered, Route
from workbench.plan.optimizer_shards import optimizer_shards
from workbench.schedule.action import Pass
from workbench.timing.price import price
from workbench.timing.weights import WeightPrices

CELLS = {
    "hidden": "2048",
    "layers": "8",
    "heads": "16",
    "sequence": "1024",
    "global_batch": "64",
    "vocab": "4096",
    "gpu": "A100-80GB",
}
GB = 1e9


def row(**cells: object) -> LlmRow:
    return read_row(CELLS | {name: str(value) for name, value in cells.items()})


def lowered_of(llm: LlmRow) -> tuple[Lowered, Lowered, CostModel]:
    cost = RowPredictor(iteration_s).cost(llm)
    alone = lower(plan_of(llm, cost.profile))
    return alone, with_replicas(alone, llm), cost


def sent_bytes(lowered: Lowered) -> int:
    return sum(
        r.num_bytes * len(r.destination_ranks) for r in lowered.transfers if r.route is not Route.LOCAL
    )


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_tensor_parallel_ranks_send_one_tensor_between_them(tp: int):
    alone, whole, _ = lowered_of(row(tp=tp, pp=2, dp=2))
    assert sent_bytes(whole) * tp == sent_bytes(alone)
    one, _, _ = lowered_of(row(tp=1, pp=2, dp=2))
    assert sent_bytes(whole) == sent_bytes(one)


def test_each_rank_sends_over_its_own_card():
    llm = row(tp=8, pp=2, dp=1, global_batch=4, micro_batch=4, inter_gbytes_per_s=200)
    _, whole, _ = lowered_of(llm)
    found = wires(whole)
    assert len(set(found.port.tolist())) == 16  # eight forward, eight back
    share = 4 * 1024 * 2048 * 2 / 8
    assert found.transmit_s == pytest.approx(share / (25 * GB))


def test_scattered_messages_are_gathered_in_front_of_the_pass_that_reads_them():
    llm = row(tp=4, pp=2, dp=2)
    _, whole, cost = lowered_of(llm)
    before, after = price(whole, cost), prices_of(whole, llm, cost)
    ranks = whole.plan.stages[1].ranks[0]
    link = ring_link(whole.plan.cluster, ranks)
    gather_s = cost.between_ranks_s(Collective.ALL_GATHER, 1024 * 2048 * 2, 4, link)
    added = {str(a): after.durations_s[a] - before.durations_s[a] for a in before.durations_s}
    assert added["1F0"] == pytest.approx(gather_s)
    assert added["0B0"] == pytest.approx(gather_s)
    assert added["0F0"] == added["1B0"] == 0


def test_ranks_that_share_tokens_add_up_gradients_of_norms():
    """Of weights that all of them hold whole: two norms a block, and the head's; float32 gradients."""
    prices, whole = weight_prices(row(tp=4, pp=2, dp=2, sequence_parallel="yes", grad_precision="fp32"))
    alone, _ = weight_prices(row(tp=4, pp=2, dp=2, grad_precision="fp32"))
    last = whole.groups[0]
    layers = [whole.plan.model.modules[0].layers[weights.layer] for weights in last.weights]
    num_norms = sum(
        p.num_elements for layer in layers for p in layer.parameters() if p.shard is Shard.REPLICATED
    )
    action = next(each for each, groups in whole.reductions.items() if 0 in groups)
    added_s = prices.reduce_s(action) - alone.reduce_s(action)
    ranks = next(row for stage in whole.plan.stages for row in stage.ranks if last.ranks[0] in row)
    assert added_s == pytest.approx(prices.collective_s(Collective.ALL_REDUCE, 4 * num_norms, ranks))


def test_shared_tokens_need_no_gather():
    llm = row(tp=4, pp=2, dp=2, sequence_parallel="yes")
    _, whole, cost = lowered_of(llm)
    assert prices_of(whole, llm, cost).durations_s == price(whole, cost).durations_s


@pytest.mark.parametrize(("gpu", "server"), [("A100-80GB", 200.0), ("A40", 25.0)])
def test_a_server_sends_what_its_cards_do(gpu: str, server: float):
    cluster = plan_of(row(gpu=gpu, dp=16), load_profile(gpu)).cluster
    node = cluster.nodes[0]
    assert cluster.inter.bytes_per_s * node.num_cards == pytest.approx(server * GB)
    told = plan_of(row(gpu=gpu, dp=16, inter_gbytes_per_s=50), load_profile(gpu)).cluster
    assert told.inter.bytes_per_s * told.nodes[0].num_cards == pytest.approx(50 * GB)


def test_a_domain_of_nine_servers_has_the_cards_of_all():
    llm = row(dp=144, global_batch=144, gpus_per_node=8, gpus_per_nvlink_domain=72, inter_gbytes_per_s=400)
    cluster = plan_of(llm, load_profile("A100-80GB")).cluster
    assert [node.num_ranks for node in cluster.nodes] == [72, 72]
    assert cluster.inter.bytes_per_s * cluster.nodes[0].num_cards == pytest.approx(9 * 400 * GB)


def weight_prices(llm: LlmRow, **changes: object) -> tuple[WeightPrices, Lowered]:
    _, whole, cost = lowered_of(llm)
    run = replace(cost.execution, **changes)
    return WeightPrices(whole, lambda ranks: cost.executed(run)), whole


def test_sums_over_copies_move_from_the_step_into_the_lane():
    llm = row(dp=32, zero_stage=1, shard_group=8)
    found = {when: weight_prices(llm, instance_sums=when) for when in InstanceSums}
    (at_step, whole), (behind, _) = found[InstanceSums.AT_STEP], found[InstanceSums.BEHIND_EACH]
    moved_s = 0.0
    for group in whole.groups:
        part_bytes = group.num_elements * whole.plan.settings.gradient_bytes / 8
        peers = optimizer_shards(whole.plan, group).peers(0)
        sums_s = at_step.collective_s(Collective.ALL_REDUCE, part_bytes, peers)
        assert sums_s > 0
        assert at_step.step_s(group) - behind.step_s(group) == pytest.approx(sums_s)
        moved_s += sums_s
    (action,) = whole.reductions
    assert behind.reduce_s(action) - at_step.reduce_s(action) == pytest.approx(moved_s)


def test_owners_send_their_tensors_one_after_another():
    llm = row(dp=64, zero_stage=1)
    sent, whole = weight_prices(llm, updated_weights=UpdatedWeights.SENT)
    group = whole.groups[0]
    layers = whole.plan.model.modules[0].layers
    num_tensors = sum(1 if w.layer is None else len(layers[w.layer].parameters()) for w in group.weights)
    owners = min(64, num_tensors)
    num_bytes = group.num_elements * 2
    one_s = sent.collective_s(Collective.BROADCAST, num_bytes / owners, group.ranks)
    assert sent.step_s(group) == pytest.approx(owners * one_s)


@pytest.mark.parametrize("updated", list(UpdatedWeights))
def test_more_replicas_never_shorten_an_iteration(updated: UpdatedWeights):
    taken = [
        RowPredictor(iteration_s, execution=Execution())
        .predict(row(dp=dp, global_batch=4 * dp, zero_stage=1, updated_weights=updated))
        .iteration_s
        for dp in (8, 16, 64, 256)
    ]
    assert taken == sorted(taken)


def test_passes_between_sharded_weights_lose_what_gathers_beside_them_take(monkeypatch: pytest.MonkeyPatch):
    llm = row(dp=32, zero_stage=3, inter_gbytes_per_s=50)
    _, whole, cost = lowered_of(llm)
    slowed = price(whole, cost).durations_s
    monkeypatch.setattr(overlapped_collectives, "SLOWED", 0.0)
    alone = price(whole, cost).durations_s
    gathers = {a.stage: s for a, s in alone.items() if a.kind is Pass.ALL_GATHER}
    scatters = {a.stage: s for a, s in alone.items() if a.kind is Pass.REDUCE_SCATTER}
    for action, pass_s in alone.items():
        if action.kind in (Pass.F, Pass.B):
            travels_s = gathers[action.stage] + (scatters[action.stage] if action.kind is Pass.B else 0.0)
            busy_s = travels_s * 50 * GB / load_profile("A100-80GB").machine_link("intra").bytes_per_s
            assert slowed[action] - pass_s == pytest.approx(0.189 * min(busy_s, pass_s))
