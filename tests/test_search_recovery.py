"""Ways to go on after a loss: from copies that pipelines or instances are, or else from checkpoints."""

from dataclasses import replace

import pytest

from sim.predict import step_s
from tests.test_search_goodput import job, judge, made, useful
from tests.test_strategies import cost
from workbench.cost.hardware import Link
from workbench.elastic.availability import Availability, Change, NodeEvent
from workbench.job.module_layout import ModuleLayout
from workbench.memory.checkpoint_bytes import checkpoint_bytes
from workbench.memory.stage import GRADIENTS, state_of
from workbench.schedule.choice import Schedule
from workbench.search.objectives.fewer_nodes import num_pipelines, pipelines_of_copy, with_pipelines
from workbench.search.objectives.recovery import Recovering, Saving
from workbench.search.objectives.step_times import OwnBatch
from workbench.strategies.fsdp import sharded_plan
from workbench.strategies.registry import PLANNERS
from workbench.timing.accept import accept


def test_instances_of_sharded_weights_stay_whole() -> None:
    """Of four pipelines, two copies of all state, two go on alone, and three do not."""
    apart = job(4)
    layouts = tuple(ModuleLayout(module=m.name, pp=1, rank_offset=0) for m in apart.model.modules)
    plan = sharded_plan(replace(apart, layouts=layouts), cost(), instances=2)
    assert (num_pipelines(plan), pipelines_of_copy(plan), pipelines_of_copy(made("cornstarch"))) == (4, 2, 1)
    assert pipelines_of_copy(made("fsdp")) == num_pipelines(made("fsdp"))
    fewer = with_pipelines(plan, 2, Schedule(), cost())
    accept(fewer)
    assert {fewer.settings.of(module.name).instances for module in plan.model.modules} == {1}
    with pytest.raises(ValueError, match="2 in each of its 2 instances, want a multiple of 2, got 3"):
        with_pipelines(plan, 3, Schedule(), cost())


def test_checkpoints_are_for_what_memory_does_not_go_on_from() -> None:
    """Two of three nodes have an instance each, the third is spare: whatever is saved only takes time."""
    plan = made("hsdp")
    events = [NodeEvent(time_s=0.0, change=Change.JOIN, node=name) for name in ("a", "b", "c")]
    for number in range(1, 41):
        kind = Change.LEAVE if number % 2 else Change.JOIN
        events.append(NodeEvent(time_s=600.0 * number, change=kind, node="a"))
    measure = replace(
        judge(mtbf="2h").measure,
        traces=(Availability(name="one at a time", events=tuple(events)),),
    )
    times = OwnBatch(lambda lowered: step_s(lowered, cost()))(plan)
    ways = list(measure.ways(plan, measure.on_nodes(plan, times, None)))
    assert {way.kind for way in ways} == {Recovering.REPLICAS}
    for way in ways:
        for every in (1, 10, 1000):
            saving = replace(way, kind=Recovering.CHECKPOINT, checkpoint_every=every, save_s=1e-3)
            assert useful(measure, way) > useful(measure, saving)
    assert measure(plan, times, None).figures["recovery"] == "replicas"


@pytest.mark.parametrize(("num_cards", "own_bytes_per_s"), [(1, None), (2, None), (2, 1e5)])
def test_a_lost_nodes_state_comes_over_all_its_cards(num_cards: int, own_bytes_per_s: float | None) -> None:
    """By brute force: of all groups of ranks that share a card, the one that waits longest."""
    on = job()
    card = (
        on.cluster.inter
        if own_bytes_per_s is None
        else Link(name="own", bytes_per_s=own_bytes_per_s, latency_s=2.0)
    )
    node = replace(on.cluster.nodes[0], num_cards=num_cards, card=card if own_bytes_per_s else None)
    on = replace(on, cluster=replace(on.cluster, nodes=(node,) * 3))
    plan = PLANNERS["cornstarch"](on, cost(), lambda *_: None)
    held = {
        rank: sum(size for _, kind, size in state_of(plan, rank) if kind.part != GRADIENTS)
        for rank in plan.ranks
    }
    cards = [held.get(rank, 0) for rank in range(6)]
    if num_cards == 1:
        cards = [first + second for first, second in zip(cards[::2], cards[1::2], strict=True)]
    measure = judge(on=on, mtbf="2h").measure
    times = OwnBatch(lambda lowered: step_s(lowered, cost()))(plan)
    ways = list(measure.ways(plan, measure.on_nodes(plan, times, None)))
    expected_s = measure.costs.notice_s + card.latency_s + max(cards) / card.bytes_per_s
    in_memory = [way.recover_s for way in ways if way.kind is Recovering.REPLICAS]
    assert in_memory == pytest.approx([expected_s] * 2)


def test_how_checkpoints_are_written() -> None:
    """Behind training they stop it for a copy to the host alone, and count later; so that more is useful."""
    plan = made("fsdp")
    found = {}
    for each in Saving:
        measure = judge(mtbf="10m", storage_gb_per_s=1e-5, saving=each).measure
        times = OwnBatch(lambda lowered: step_s(lowered, cost()))(plan)
        (way, *_) = measure.ways(plan, measure.on_nodes(plan, times, None))
        found[each] = measure(plan, times, None).figures["useful_samples_per_s"]
        saved_s = checkpoint_bytes(plan.model, plan.settings) / 1e4
        if each is Saving.STOPPING:
            assert (way.save_s, way.write_s) == (saved_s, 0.0)
        else:
            assert (way.save_s < 1e-3 * saved_s, way.write_s) == (True, saved_s)
            assert way.checkpoint_every * way.step_s >= saved_s
    assert found[Saving.BEHIND] > found[Saving.STOPPING]
