"""Strategies: every one gives a sound plan for any job; stage counts and cuts are the ones they claim."""

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.step.engine import simulate
from tests.examples import examples
from tests.tiny_valm import tiny_batch, tiny_valm
from workbench.cost.hardware import Link, Node, uniform
from workbench.cost.model import CostModel
from workbench.cost.profile import load_profile
from workbench.job.job import Job
from workbench.job.module_layout import ModuleLayout
from workbench.model.frozen import FrozenRule
from workbench.model.trainable import Trainable
from workbench.plan.check import check
from workbench.plan.deadlock import check_deadlock
from workbench.plan.lower import lower
from workbench.planner.assembly import SHARING, draft_plan, layout_of
from workbench.planner.layer_cost import layer_costs
from workbench.schedule.action import Pass
from workbench.strategies import cornstarch, encoders_colocated, encoders_replicated
from workbench.strategies.registry import BY_NAME
from workbench.timing.price import price

STRATEGIES = (
    cornstarch.plan,
    cornstarch.plan_frozen_unaware,
    encoders_colocated.plan,
    encoders_colocated.plan_frozen_aware,
    encoders_replicated.plan,
)
LINK = Link(name="wire", bytes_per_s=20e9, latency_s=5e-6)
CLUSTER = uniform(
    "six nodes", Node(device="A40", num_ranks=4, memory_bytes=2**35), num_nodes=6, intra=LINK, inter=LINK
)


@cache
def cost() -> CostModel:
    return CostModel(load_profile("A40"))


def job(*counts, batch=None, replicas=1, **model):
    """A job on a tiny model; `counts` are the stages of vision, audio and LLM."""
    pp = dict(zip(("vision", "audio", "llm"), counts or (2, 2, 3), strict=True))
    return Job(
        name="tiny",
        model=tiny_valm(**model),
        cluster=CLUSTER,
        batch=batch or tiny_batch(),
        replicas=replicas,
        layouts=tuple(ModuleLayout(module=name, pp=count) for name, count in pp.items()),
    )


counts_of_items = st.lists(st.integers(0, 2), min_size=4, max_size=4)


@examples(60)
@given(
    images=counts_of_items,
    clips=counts_of_items,
    replicas=st.sampled_from([1, 2]),
    encoder_pp=st.integers(1, 3),
    llm_pp=st.integers(1, 4),
    frozen=st.tuples(
        st.sampled_from(Trainable), st.sampled_from(Trainable), st.sampled_from(["all", "none"])
    ),
    tied=st.booleans(),
    strategy=st.sampled_from(STRATEGIES),
)
def test_every_plan_is_sound_and_runs(*, images, clips, replicas, encoder_pp, llm_pp, frozen, tied, strategy):
    vision, audio, llm = frozen
    tiny = job(
        *(encoder_pp, encoder_pp, llm_pp),
        batch=tiny_batch(images, clips),
        replicas=replicas,
        vision=vision,
        audio=audio,
        llm=Trainable(llm),
        tied=tied,
    )
    plan = strategy(tiny, cost())
    check(plan)
    lowered = lower(plan)
    check_deadlock(lowered)
    trace = simulate(lowered, price(lowered, cost()).duration_s)
    for rank in plan.ranks:
        assert len([s for s in trace.spans if s.rank == rank]) == len(plan.program[rank])


@pytest.mark.parametrize(
    ("strategy", "num_ranks"),
    [
        (cornstarch.plan, 2 + 2 + 3),
        (cornstarch.plan_frozen_unaware, 2 + 2 + 3),
        (encoders_colocated.plan, 2 + 3),
        (encoders_replicated.plan, 3),
    ],
)
def test_ranks_used(strategy, num_ranks):
    assert len(strategy(job(), cost()).ranks) == num_ranks
    assert len(strategy(job(replicas=2), cost()).ranks) == 2 * num_ranks


def test_frozen_aware_cuts_balance_forward_plus_backward_best():
    """The bottleneck of T = F + B is never larger than that of cuts made by forward time."""
    tiny = job(3, 2, 3)
    layers = layer_costs(tiny, draft_plan(tiny, "x"), layout_of(tiny, "vision"), cost(), FrozenRule.EXACT)
    aware, unaware = (
        max(sum(layer.total_s for layer in layers[slice(*stage.layers)]) for stage in plan.chain["vision", 0])
        for plan in (cornstarch.plan(tiny, cost()), cornstarch.plan_frozen_unaware(tiny, cost()))
    )
    assert aware <= unaware


def test_colocated_encoders_share_ranks_stage_by_stage():
    plan = encoders_colocated.plan(job(), cost())
    vision, audio = plan.chain["vision", 0], plan.chain["audio", 0]
    assert [s.ranks for s in vision] == [s.ranks for s in audio] == [((0,),), ((1,),)]


def test_replicated_encoders_stand_whole_on_every_llm_stage():
    plan = encoders_replicated.plan(job(), cost())
    for stage in plan.chain["llm", 0]:
        held = {s.module for s in plan.stages if s.ranks == stage.ranks}
        assert held == {"vision", "audio", "llm"}
    vision = {stage.id for stage in plan.stages if stage.module == "vision"}
    assert {a.stage for a in plan.program_actions if a.kind is Pass.F} >= vision
    assert len(vision & {a.stage for a in plan.program_actions if a.kind is Pass.B}) == 1


def test_context_parallel_tokens_are_balanced_by_cornstarch_and_zigzag_elsewhere():
    wide = replace(
        job(),
        layouts=(
            ModuleLayout(module="vision", pp=1),
            ModuleLayout(module="audio", pp=1),
            ModuleLayout(module="llm", pp=2, cp=2),
        ),
    )
    plan = cornstarch.plan(wide, cost())
    assert {(s.module, s.microbatch) for s in plan.token_shards} == {("llm", index) for index in range(4)}
    check_deadlock(lower(plan))
    assert encoders_colocated.plan(wide, cost()).token_shards == ()


def test_searched_counts_beat_or_equal_every_other_choice():
    open_job = replace(job(batch=tiny_batch((1,) * 4, (1,) * 4)), layouts=(), max_ranks=5)
    seen: list[float] = []
    found = cornstarch.plan(open_job, cost(), lambda done, total, best_s: seen.append(best_s))
    assert len(found.ranks) <= 5
    assert seen == sorted(seen, reverse=True)
    best_s = simulate(lower(found), price(lower(found), cost()).duration_s).iteration_s
    for counts in ((1, 1, 1), (1, 1, 2), (1, 1, 3), (2, 1, 2), (1, 2, 2)):
        other = lower(cornstarch.plan(job(*counts, batch=open_job.batch), cost()))
        other_s = simulate(other, price(other, cost()).duration_s).iteration_s
        assert best_s <= other_s * (1 + 1e-9)


@pytest.mark.parametrize(("ranks", "named"), [(4, True), (3, True), (1, False)])
def test_modules_that_would_fit_on_shared_ranks_are_told_of_strategies_that_share_them(
    ranks: int, named: bool
) -> None:
    """Of seven ranks the largest module takes three."""
    with pytest.raises(ValueError, match="the layout needs 7 ranks") as refused:
        cornstarch.plan(replace(job(), max_ranks=ranks), cost())
    assert str(refused.value).endswith(SHARING) == named
    assert all(name in BY_NAME for name in SHARING.rpartition(": ")[2].split(", "))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"max_ranks": 3}, "the layout needs 7 ranks, job 'tiny' may use 3", id="ranks"),
        pytest.param({"microbatch_samples": 3}, "batch of 4 samples", id="batch"),
    ],
)
def test_impossible_jobs_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        cornstarch.plan(replace(job(), **change), cost())


def test_colocated_encoders_with_unequal_layouts_are_refused():
    with pytest.raises(ValueError, match=r"same pp, tp and cp, got vision: pp 2.*audio: pp 1"):
        encoders_colocated.plan(job(2, 1, 2), cost())


def test_nothing_fits_names_the_reason():
    tight = uniform(
        "tight", Node(device="A40", num_ranks=4, memory_bytes=1000), num_nodes=1, intra=LINK, inter=LINK
    )
    with pytest.raises(ValueError, match="job 'tiny': "):
        cornstarch.plan(replace(job(), cluster=tight, layouts=(), max_ranks=None), cost())
