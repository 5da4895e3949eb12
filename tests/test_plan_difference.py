"""`diff` of two plans: rows add up to the difference of their steps, and what differs is named."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.vlm_job import H100, planned, side, vlm_job
from workbench.explain.difference import difference, differing
from workbench.job.job import Job
from workbench.job.module_layout import ModuleLayout
from workbench.model.model_graph import Module
from workbench.plan.build import with_programs
from workbench.strategies import fsdp

STRATEGIES = st.sampled_from(["cornstarch", "encoders-colocated", "dip", "entrain", "megatron-homogeneous"])


@pytest.fixture(scope="module")
def job() -> Job:
    return vlm_job()


@settings(max_examples=12)
@given(STRATEGIES, STRATEGIES)
def test_changes_of_both_tables_add_up_to_the_difference(job: Job, first: str, second: str) -> None:
    sides = side(planned(job, first)), side(planned(job, second))
    found = difference(*sides)
    change_s = sides[1].trace.iteration_s - sides[0].trace.iteration_s
    for rows in (found.along_path, found.of_ranks):
        assert sum(row.change_s for row in rows) == pytest.approx(change_s, abs=1e-12)
        assert sum(row.first_s for row in rows) == pytest.approx(sides[0].trace.iteration_s, rel=1e-12)
    if first == second:
        assert found.differs == ()
        assert change_s == 0


def test_what_differs_is_named_part_by_part(job: Job) -> None:
    one = planned(job)
    other = planned(
        replace(
            job,
            layouts=(ModuleLayout(module="vision", pp=1), ModuleLayout(module="llm", pp=1, tp=2)),
            microbatch_samples=2,
        )
    )
    found = {(each.part, each.about): each[2:] for each in difference(side(one), side(other)).differs}
    assert found["stages", "llm"] == ("dp 2 x 2 stages of cp 1 x tp 1", "dp 2 x 1 stages of cp 1 x tp 2")
    assert found["microbatches", "llm"] == ("16 of 1 items", "8 of 2 items")
    assert ("samples", "") not in found
    assert ("stages", "vision") not in found


def test_models_differ_in_weights_that_are_trained_or_in_layers_and_not_in_names(job: Job) -> None:
    one = planned(job)
    llm = one.model.module("llm")
    frozen = replace(llm, layers=tuple(replace(layer, trainable=False) for layer in llm.layers))
    wider = replace(llm, layers=(*llm.layers[:-1], replace(llm.layers[-1], name="other")))

    def told(changed: Module) -> list[tuple[str, ...]]:
        modules = tuple(changed if module.name == "llm" else module for module in one.model.modules)
        model = replace(one.model, name="renamed", modules=modules)
        return [tuple(each) for each in differing(one, replace(one, model=model))]

    assert told(llm) == []
    size = f"{len(llm.layers)} layers, {llm.num_parameters:,} weights, {{}} trained"
    assert told(frozen) == [("model", "llm", size.format(f"{llm.num_trained:,}"), size.format("0"))]
    assert told(wider) == [("model", "llm", f"{len(llm.layers)} layers", "1 of them differ")]


def test_machines_differ_in_devices_links_and_cards_and_not_in_names(job: Job) -> None:
    one = planned(job)
    (node,) = one.cluster.nodes
    other = replace(node, device="A40", link=replace(one.cluster.intra, bytes_per_s=5e9, latency_s=2e-6))
    nodes = replace(one.cluster, name="renamed", nodes=(node, other))
    told = {each.about: each[2:] for each in differing(one, replace(one, cluster=nodes))}
    own = f"{one.cluster.intra.bytes_per_s / 1e9:.4g} GB/s"
    assert told["nodes"] == (
        f"1 of {node.num_ranks} H100",
        f"1 of {node.num_ranks} H100 + 1 of {node.num_ranks} A40",
    )
    assert told["links inside nodes"][0].startswith(own)
    assert told["links inside nodes"][1].endswith("+ 5 GB/s, 2 us")
    assert told["links between nodes"][0] == "none"
    assert set(told) == {"nodes", "links inside nodes", "links between nodes"}
    assert not list(differing(one, replace(one, cluster=replace(one.cluster, name="renamed"))))


def test_sharded_plans_differ_in_shards_and_passes_not_in_stages_and_microbatches(job: Job) -> None:
    open_job = replace(job, layouts=())
    one, hybrid = planned(open_job, "fsdp"), planned(open_job, "hsdp")
    units, ranks, instances = len(one.chain["llm", 0]), len(one.ranks), hybrid.settings.of("llm").instances
    cp = f", cp {one.chain['llm', 0][0].cp}"
    told = {(each.part, each.about): each[2:] for each in differing(one, hybrid)}
    assert {part for part, _ in told}.isdisjoint({"stages", "microbatches"})
    assert told["sharding", "llm"] == (
        f"{units} units sharded over {ranks} ranks{cp}",
        f"{units} units sharded over {len(hybrid.ranks)} ranks in {instances} instances{cp}",
    )
    four, eight = (
        fsdp.fastest_of_size(replace(open_job, microbatch_samples=samples), H100, num_ranks=2)[1]
        for samples in (4, 8)
    )
    told = {(each.part, each.about): each[2:] for each in differing(four, eight)}
    assert told["accumulation", "llm"] == (
        "2 passes of 4 items on each of 2 replicas",
        "1 pass of 8 items on each of 2 replicas",
    )
    mixed = {(each.part, each.about): each[2:] for each in differing(planned(job), one)}
    assert mixed["stages", "llm"] == (
        "dp 2 x 2 stages of cp 1 x tp 1",
        f"{units} units sharded over {ranks} ranks{cp}",
    )
    assert ("stages", "llm, layers of its first replica") not in mixed


def test_what_only_the_second_replica_has_is_named(job: Job) -> None:
    """Its cuts, the ranks of its stages, and whose microbatches they are."""
    plan = planned(job)
    llm = [stage for stage in plan.stages if stage.module == "llm" and stage.replica == 1]
    middle, end = llm[0].layers[1], llm[1].layers[1]
    cut = {llm[0].id: (0, middle - 1), llm[1].id: (middle - 1, end)}
    place = {llm[0].id: llm[1].ranks, llm[1].id: llm[0].ranks}
    cuts = tuple(replace(stage, layers=cut.get(stage.id, stage.layers)) for stage in plan.stages)
    places = tuple(replace(stage, ranks=place.get(stage.id, stage.ranks)) for stage in plan.stages)
    told = {row[1]: row[2:] for row in differing(plan, replace(plan, stages=cuts))}
    assert told["llm, layers of replica 1"] == (
        f"{middle} {end - middle}",
        f"{middle - 1} {end - middle + 1}",
    )
    moved = with_programs(replace(plan, stages=places, programs=()))
    first, second = (stage.flat_ranks[0] for stage in llm)
    told = {row[1]: row[2:] for row in differing(plan, moved)}
    assert told["llm, ranks of replica 1"] == (f"{first} {second}", f"{second} {first}")
    swapped = tuple(replace(each, replica=1 - each.replica) for each in plan.microbatches)
    told = {row[1]: row[2:] for row in differing(plan, replace(plan, microbatches=swapped))}
    assert told["llm, samples"] == ("16", "0 of them the same")
