"""A plan on fewer of its pipelines: microbatches are dealt one by one, those of all modules together."""

from collections import Counter
from dataclasses import replace

import pytest

from tests.test_search_goodput import job
from tests.test_strategies import cost
from workbench.elastic.batch_distribution import distribute
from workbench.plan.plan import Microbatch, Plan
from workbench.schedule.choice import Schedule
from workbench.search.objectives.fewer_nodes import num_pipelines, with_pipelines
from workbench.strategies import fsdp
from workbench.strategies.registry import PLANNERS
from workbench.timing.accept import accept


def made(name: str, replicas: int) -> Plan:
    """On eight nodes of two ranks, of eight microbatches.

    fsdp is held to all ranks: by itself it takes fewer, which is faster with layers so small.
    """
    on = job(replicas)
    cluster = replace(on.cluster, nodes=on.cluster.nodes[:1] * 8)
    batch = (*on.batch, *(replace(sample, id=len(on.batch) + sample.id) for sample in on.batch))
    on = replace(on, cluster=cluster, batch=batch)
    if name == "fsdp":
        return fsdp.fastest_of_size(on, cost())[1]
    return PLANNERS[name](on, cost(), lambda *_: None)


def counts(plan: Plan) -> list[int]:
    """Of the LLM's microbatches, by pipeline."""
    held = Counter(each.replica for each in plan.microbatches if each.module == plan.model.llm.name)
    return [held[replica] for replica in range(num_pipelines(plan))]


@pytest.mark.parametrize("name", ["cornstarch", "entrain", "megatron-homogeneous", "fsdp"])
def test_each_pipeline_left_has_as_many_as_elastic_training_gives_it(name: str) -> None:
    """What equal pipelines get there; and no sample goes from one to another that did not before."""
    plan = made(name, 4)
    whole = num_pipelines(plan)
    assert whole >= 4
    for kept in range(2, whole):
        fewer = with_pipelines(plan, kept, Schedule(), cost())
        accept(fewer)
        found = counts(fewer)
        assert sorted(found) == sorted(distribute([1.0] * kept, sum(counts(plan))))
        where: dict[int, set[int]] = {}
        for each in fewer.microbatches:
            for item in each.items:
                where.setdefault(item.sample, set()).add(each.replica)
        assert {len(replicas) for replicas in where.values()} == {1}


@pytest.mark.parametrize("name", ["cornstarch", "megatron-heterogeneous"])
def test_a_half_of_the_pipelines_has_what_the_strategy_gives_so_many(name: str) -> None:
    """Which deals samples in turn."""
    expected = made(name, 2)
    assert num_pipelines(expected) == 2
    assert with_pipelines(made(name, 4), 2, Schedule(), cost()).microbatches == expected.microbatches


def wider(plan: Plan) -> Plan:
    """Each pipeline has one microbatch of vision, which feeds all of its LLM's."""
    held = plan.microbatches_of
    joined = [
        Microbatch(module="vision", replica=r, index=0, rows=sum((m.rows for m in held["vision", r]), ()))
        for r in range(num_pipelines(plan))
    ]
    others = (each for each in plan.microbatches if each.module != "vision")
    return replace(plan, microbatches=(*joined, *others), programs=())


def crossed(plan: Plan) -> Plan:
    """Pipelines encode the images of their neighbours."""
    whole = num_pipelines(plan)
    turned = [
        replace(each, replica=(each.replica + 1) % whole) if each.module == "vision" else each
        for each in plan.microbatches
    ]
    return replace(plan, microbatches=tuple(turned), programs=())


@pytest.mark.parametrize("changed", [wider, crossed])
def test_what_samples_hold_together_stays_together(changed) -> None:
    """Both microbatches of the LLM that one of vision feeds; whole pipelines where these feed each other."""
    draft = changed(made("cornstarch", 4))
    fewer = with_pipelines(draft, 3, Schedule(), cost())
    accept(fewer)
    llm = draft.model.llm.name
    before = {each.items: each.replica for each in draft.microbatches if each.module == llm}
    after = [(before[each.items], each.replica) for each in fewer.microbatches if each.module == llm]
    assert Counter(after) == {(0, 0): 2, (1, 1): 2, (2, 2): 2, (3, 0): 2}
