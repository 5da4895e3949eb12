"""Building: microbatches hold the same samples everywhere, programs fit them, shared ranks agree."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import examples
from tests.plans import chain_module, disjoint_plan, finish, sample, two_encoders
from workbench.model.model_graph import connect
from workbench.plan.build import with_programs
from workbench.plan.check import check
from workbench.plan.lower import lower
from workbench.plan.microbatches import batched_microbatches
from workbench.plan.stage import Stage
from workbench.schedule.action import Action, Pass
from workbench.timing.critical_path import critical_path_s

CUTS = {"vision": [2, 1], "audio": [2], "llm": [2, 2]}


def kinds(samples):
    return [sample(i, images=images, sounds=sounds) for i, (images, sounds) in enumerate(samples)]


@examples(60)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1)), min_size=2, max_size=8).filter(
        lambda samples: len(samples) % 2 == 0
    ),
    st.sampled_from([1, 2]),
    st.lists(st.booleans(), min_size=9, max_size=9),
)
def test_any_mix_of_missing_modalities_and_frozen_layers_builds_and_checks(samples, replicas, flags):
    model = two_encoders(flags[:3], flags[3:5], flags[5:])
    plan = disjoint_plan(model, kinds(samples), CUTS, replicas=replicas)
    check(plan)  # again, from outside
    lowered = lower(plan)
    assert critical_path_s(lowered, lambda _: 1.0) > 0  # every action can run


def test_module_without_items_in_a_replica_has_no_microbatch_there():
    plan = disjoint_plan(two_encoders(), kinds([(1, 1), (0, 1)]), CUTS, replicas=2)
    assert ("vision", 0) in plan.microbatches_of
    assert ("vision", 1) not in plan.microbatches_of


def test_rank_without_items_still_reduces():
    plan = disjoint_plan(two_encoders(), kinds([(1, 1), (0, 1)]), CUTS, replicas=2)
    idle = next(
        stage
        for stage in plan.stages
        if stage.module == "vision" and stage.replica == 1 and stage.layers[1] == 3
    )
    assert [str(a) for a in plan.program[idle.flat_ranks[0]]] == [f"{idle.id}REDUCE_GRAD", "STEP"]


@pytest.mark.parametrize(("size", "replicas"), [(3, 1), (2, 3), (0, 1)])
def test_batch_that_does_not_divide_is_refused(size, replicas):
    plan = disjoint_plan(two_encoders(), kinds([(1, 1)] * 4), CUTS)
    with pytest.raises(ValueError, match=rf"batch of 4 samples.*got {size} x {replicas}"):
        batched_microbatches(plan, samples_per_microbatch=size, replicas=range(replicas))


def test_colocated_encoders_run_in_lockstep():
    stages = [
        Stage(id=0, module="vision", replica=0, layers=(0, 3), ranks=((0,),)),
        Stage(id=1, module="audio", replica=0, layers=(0, 2), ranks=((0,),)),
        Stage(id=2, module="llm", replica=0, layers=(0, 4), ranks=((1,),)),
    ]
    plan = finish(two_encoders(), kinds([(1, 1)] * 3), stages)
    passes = " ".join(str(a) for a in plan.program[0] if a.kind in (Pass.F, Pass.B))
    assert passes == "0F0 1F0 0F1 1F1 1B0 0B0 0F2 1F2 1B1 0B1 1B2 0B2"


def test_stages_that_overlap_without_being_equal_are_refused():
    llm = chain_module("llm", "text", [True, True])
    stages = [
        Stage(id=0, module="llm", replica=0, layers=(0, 1), ranks=((0, 1),)),
        Stage(id=1, module="llm", replica=0, layers=(1, 2), ranks=((1, 2),)),
    ]
    with pytest.raises(ValueError, match="stages 0 and 1 share rank 1 but not all ranks"):
        finish(connect("llm", (llm,)), kinds([(0, 0)]), stages)


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(1, 1), (2, 4), (4, 8), (4, 2)])
def test_critical_path_of_equal_stages_is_the_closed_form(num_stages, num_microbatches):
    """1F1B, Narayanan et al. 2019: (m + p - 1)(f + b); links cost 2(p - 1) latencies and transmissions."""
    llm = chain_module("llm", "text", [True] * num_stages)
    batch = kinds([(0, 0)] * num_microbatches)
    plan = disjoint_plan(connect("llm", (llm,)), batch, {"llm": [1] * num_stages})
    instant = replace(plan.cluster.intra, bytes_per_s=1e30, latency_s=0.0)
    plan = replace(plan, cluster=replace(plan.cluster, intra=instant))

    def duration_s(action: Action) -> float:
        return {Pass.F: 1.0, Pass.B: 2.0}.get(action.kind, 0.0)

    assert critical_path_s(lower(plan), duration_s) == pytest.approx(
        (num_microbatches + num_stages - 1) * 3.0
    )


def test_critical_path_of_a_plan_that_waits_for_itself_is_refused():
    plan = disjoint_plan(
        connect("llm", (chain_module("llm", "text", [True] * 2),)), kinds([(0, 0)] * 2), {"llm": [1, 1]}
    )
    swapped = {"1F0": "1F1", "1F1": "1F0", "1B0": "1B1", "1B1": "1B0", "0F1": "0B0", "0B0": "0F1"}
    by_text = {str(action): action for action in plan.program_actions}
    programs = tuple(
        replace(p, actions=tuple(by_text[swapped.get(str(a), str(a))] for a in p.actions))
        for p in plan.programs
    )
    with pytest.raises(ValueError, match="can never run"):
        critical_path_s(lower(replace(plan, programs=programs)), lambda _: 1.0)


def test_with_programs_is_deterministic():
    plans = [disjoint_plan(two_encoders(), kinds([(1, 1)] * 4), CUTS) for _ in range(2)]
    assert plans[0] == plans[1] == with_programs(replace(plans[0], programs=()))
