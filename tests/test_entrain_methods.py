"""Entrain's methods beside DIP's."""

from collections import Counter
from dataclasses import replace
from itertools import chain, pairwise

import numpy as np
import pytest

from experiments.cornstarch.modelled import a40_cost
from experiments.entrain.bubble_filling import filled_s
from experiments.entrain.methods import METHODS, assigned, dip_windows, replicas_of
from experiments.entrain.regrouping import iteration_s
from experiments.entrain.replica import Deferring, PipelineMemory, Replica, chain_of, stage_memory
from experiments.entrain.series import one_sample_stages
from experiments.entrain.stage_work import Judge, Which, fit_error
from experiments.entrain.workload import CORPUS_OF, batch_of, job_of
from runtime.world.pool import Pool
from tests.test_data_strategies import CLIPS, COST, IMAGES, skewed_job
from tests.test_parity import assert_same
from workbench.balance.microbatches.assignment import MicrobatchAssignment
from workbench.job.job import Job
from workbench.job.module_layout import ModuleLayout
from workbench.memory.account import memory_table, peak_bytes
from workbench.plan.lower import lower
from workbench.plan.plan import ModuleSettings, Recompute
from workbench.schedule.action import Pass
from workbench.schedule.choice import Schedule, ScheduleKind
from workbench.strategies import cornstarch, dip

LLM = "Llama3-3b"


def replica(dataset: str = "SynthChartNet", num: int = 32) -> Replica:
    return Replica(llm=LLM, samples=batch_of(dataset, num, 1), stages=(4, 4))


def test_encoder_microbatches_are_cut_by_consumer():
    assignment = MicrobatchAssignment(
        encoder=((0, 1, 2), (3,), (4, 5)), deferred=((1,), (), (4, 5)), llm=((0, 2), (1, 3), (4, 5))
    )
    found = chain_of(assignment)
    assert found.encoder == ((0, 2), (1,), (3,), (4, 5))
    assert found.followers == {1: 0}


@pytest.mark.parametrize("method", METHODS)
def test_every_method_needs_at_least_the_work_of_the_ranks_it_has(method: str):
    given = replica()
    taken = METHODS[method](given)
    works = (given.encoder_work(1), given.llm_work(1))
    assert taken.iteration_s > sum(float((work.forward_s + work.backward_s).sum()) for work in works) / 8
    assert len(taken.encoder_forward_s) >= 1
    assert len(taken.llm_forward_s) >= 1


def test_agrees_with_the_simulator_on_a_batch():
    """Missing are messages, the embedding's own sizes, and what a quadratic misses between its points."""
    given = Replica(llm=LLM, samples=batch_of("SynthChartNet", 128, 1), stages=(4, 4))
    pairs = (("1f1b", "as drawn"), ("disttrain", "disttrain"), ("entrain-in-turn", "entrain in turn"))
    missed = max(fit_error(LLM, "llm"), fit_error(LLM, "vision"))
    assert missed < 0.05
    for method, system in pairs:
        simulated_s = iteration_s("SynthChartNet", system, 1)
        assert METHODS[method](given).iteration_s == pytest.approx(simulated_s, rel=missed)


@pytest.mark.parametrize(("planner", "recompute"), [(cornstarch.plan, "none"), (dip.plan, "full")])
def test_memory_is_that_of_the_planners_account(planner, recompute: str):
    """Of every rank; a gradient counts from the start, not from the first backward on."""
    samples = batch_of("SynthChartNet", 32, 1)
    stages = (4, 4) if planner is cornstarch.plan else None
    given = job_of("SynthChartNet", LLM, samples, pp=stages)
    own = ModuleSettings(module="vision", recompute=Recompute(recompute))
    lowered = lower(planner(replace(given, settings=replace(given.settings, modules=(own,))), a40_cost()))
    plan, wanted = lowered.plan, peak_bytes(lowered, memory_table(lowered))
    parts = [
        (
            stage_memory(LLM, module, tuple(s.layers for s in plan.chain[module, 0]), samples, of),
            [sorted({item.sample for item in m.items}) for m in plan.microbatches_of[module, 0]],
        )
        for module, of in (("vision", own.recompute), ("llm", Recompute.NONE))
    ]
    held = PipelineMemory(parts, 1e99)
    number = {s.id: n for n, s in enumerate((*plan.chain["vision", 0], *plan.chain["llm", 0]))}
    for rank in plan.ranks:
        passes = [a._replace(stage=number[a.stage]) for a in plan.program[rank] if a.kind in (Pass.F, Pass.B)]
        assert 0.98 < held.peak_bytes(passes) / wanted[rank] < 1.05


def test_methods_live_within_memory():
    """Windows where not all microbatches fit; forwards as far ahead as do, which is more in more memory."""
    given = replace(replica(num=128), stages=(3, 5))
    found = Deferring(given.apart, assigned(given), Schedule())
    most = found.most_ahead()
    assert 0 < most < given.num_microbatches - 1
    assert found.seconds(most) < found.seconds(0)
    assert dip_windows(given) > 1 == dip_windows(replica(num=32))


def test_a_judge_may_see_what_the_balancer_does_not():
    given = replica()
    for judge in (Judge.NOISE, Judge.ATTENTION):
        other = replace(given, judge=judge)
        assert assigned(other) == assigned(given)
        for method in ("1f1b", "dip", "entrain"):
            seconds = [METHODS[method](each).iteration_s for each in (given, other, other)]
            assert seconds[0] != seconds[1] == seconds[2]
    even, off = (METHODS["entrain"](replace(given, judge=j)) for j in (Judge.EXACT, Judge.NOISE))
    errors = off.encoder_forward_s / even.encoder_forward_s - 1
    assert 0.001 < float(np.abs(errors).max()) < 0.15


def test_recomputation_adds_a_forward_and_keeps_less():
    given = replica()
    again = replace(given, recompute=Recompute.FULL)
    assert (again.encoder_work().backward_s > given.encoder_work().backward_s).all()
    assert again.llm_work().backward_s.tolist() == given.llm_work().backward_s.tolist()
    kept = [each.apart.encoder_memory.kept_bytes.sum() for each in (again, given)]
    assert kept[0] < kept[1] / 4


def test_assumed_sizes_are_scaled():
    plain, longer, finer = (
        batch_of(name, 4, 1)
        for name in ("SynthChartNet", "SynthChartNet, twice the text", "SynthChartNet at 200 dpi")
    )
    texts = [[s.segments[-1].tokens_out for s in batch] for batch in (plain, longer)]
    assert [2 * tokens for tokens in texts[0]] == texts[1]
    assert all(a.segments[0].tokens_in < b.segments[0].tokens_in for a, b in zip(plain, finer, strict=True))


def test_entrain_evens_out_the_encoder_and_disttrain_does_not():
    given = replica()
    plain, sorted_first, even = (METHODS[name](given) for name in ("1f1b", "disttrain", "entrain"))
    assert even.encoder_forward_s.std() < plain.encoder_forward_s.std() / 3
    assert sorted_first.encoder_forward_s.std() > plain.encoder_forward_s.std()
    (assignment,) = [assigned(given)]
    assert Counter(chain(*assignment.llm)) == Counter(range(32))


@pytest.mark.parametrize("method", METHODS)
def test_replicas_share_a_batch_out_evenly(method: str):
    batch = replica(num=64)
    found = replicas_of(method, batch, 4)
    assert [len(each.samples) for each in found] == [16] * 4
    ids = [sample.id for each in found for sample in each.samples]
    assert sorted(ids) == [sample.id for sample in batch.samples]


def test_small_calls_take_what_their_launches_take():
    """The host bounds a call from below; with many samples only the device counts."""
    for work in (replica().encoder_work(), replica().llm_work()):
        host_s = work.host_s[Which.FORWARD]
        device_s = work.forward_s + work.calls_s[Which.FORWARD]
        alone = work.microbatches_s(Which.FORWARD, [(index,) for index in range(32)])
        assert (host_s > 0).all()
        assert (alone == np.maximum(device_s, host_s)).all()
        (whole,) = work.microbatches_s(Which.FORWARD, [tuple(range(32))])
        assert (whole > host_s).all()
        assert whole == pytest.approx(work.forward_s.sum(axis=0) + work.calls_s[Which.FORWARD])


@pytest.mark.parametrize("dataset", CORPUS_OF)
def test_one_sample_gives_each_module_the_whole_number_nearest_to_its_share(dataset: str):
    batch = batch_of(dataset, 20, 3)
    one_by_one = Replica(llm=LLM, samples=batch, stages=(1, 1))
    pairs = zip(one_by_one.encoder_work().samples_s(), one_by_one.llm_work().samples_s(), strict=True)
    shares = [8 * encoder_s / (encoder_s + llm_s) for encoder_s, llm_s in pairs]
    assert max(shares) > min(shares)  # single samples disagree, and in stages if a half lies between
    assert [one_sample_stages(LLM, sample) for sample in batch] == [
        (round(share), 8 - round(share)) for share in shares
    ]


def test_bubbles_take_encoder_work_for_nothing():
    """One forward per rank is hidden in the warm-up, and with no encoder 1F1B has its closed form."""
    ones = np.ones((6, 4))
    nothing = np.zeros(6)
    assert filled_s((ones, 2 * ones), (nothing, nothing)) == pytest.approx((6 + 3) * 3)
    little = filled_s((ones, 2 * ones), (np.full(6, 0.4), np.full(6, 0.4)))
    assert 27 < little < 27 + 6 * 0.8
    alone = filled_s((np.full((1, 1), 1.0), np.full((1, 1), 2.0)), (np.array([4.0]), np.array([8.0])))
    assert alone == pytest.approx(15.0)


def colocated_job(mix: str = "projectors-and-llm", *, replicas: int = 1) -> Job:
    """Two stages of every module on the same ranks."""
    layouts = tuple(ModuleLayout(module=module, pp=2) for module in ("vision", "audio", "llm"))
    return replace(skewed_job(mix, replicas=replicas), layouts=layouts)


def test_encoders_run_before_the_llm_forward_and_after_it_backward():
    plan = dip.plan(colocated_job("everything"), COST)
    llm = {stage.id for stage in plan.chain["llm", 0]}
    for program in plan.programs:
        passes = [a for a in program.actions if a.kind in (Pass.F, Pass.B)]
        assert {a.stage in llm for a in passes} == {True, False}
        inside = [index for index, action in enumerate(passes) if action.stage in llm]
        assert inside == list(range(inside[0], inside[-1] + 1))
        assert {a.kind for a in passes[: inside[0]]} == {Pass.F}
        assert {a.kind for a in passes[inside[-1] + 1 :]} == {Pass.B}


def test_sub_microbatches_stay_inside_their_microbatch_and_share_its_items():
    job = colocated_job()
    plan = dip.plan(job, COST)
    whole = [{item.sample for item in m.items} for m in plan.microbatches_of["llm", 0]]
    for module, counts in (("vision", IMAGES), ("audio", CLIPS)):
        parts = plan.microbatches_of[module, 0]
        assert all(any({item.sample for item in m.items} <= of for of in whole) for m in parts)
        items = [item for m in parts for item in m.items]
        assert len(items) == len(set(items)) == sum(counts)


@pytest.mark.parametrize("replicas", [1, 2])
def test_training_is_the_same_under_dip(replicas: int, pool: Pool):
    assert_same(dip.plan(colocated_job("everything", replicas=replicas), COST), pool)


def test_a_module_without_pp_takes_all_ranks():
    layouts = tuple(ModuleLayout(module=module, tp=tp) for module, tp in (("vision", 1), ("audio", 1)))
    job = replace(skewed_job(), layouts=(*layouts, ModuleLayout(module="llm", tp=1)), max_ranks=2)
    plan = dip.plan(job, COST)
    assert {len(chain) for chain in plan.chain.values()} == {2}
    assert plan.ranks == (0, 1)


def test_what_cannot_be_shared_is_refused():
    layouts = tuple(ModuleLayout(module=module) for module in ("vision", "audio", "llm"))
    open_job = replace(skewed_job(replicas=2), layouts=layouts, max_ranks=3)
    with pytest.raises(ValueError, match=r"3 ranks must divide by the 2 .* nearest: max_ranks 2"):
        dip.plan(open_job, COST)
    with pytest.raises(ValueError, match="want 1 replicas of 'vision', got dp 2"):
        dip.plan(replace(skewed_job(), layouts=(ModuleLayout(module="vision", dp=2),)), COST)


def test_a_schedule_of_three_phases_is_kept():
    job = colocated_job()
    windowed = replace(job.schedule, kind=ScheduleKind.THREE_PHASE, window=2)
    plan = dip.plan(replace(job, schedule=windowed), COST)
    llm = plan.chain["llm", 0][0].id
    (program, *_) = [p for p in plan.programs if any(a.stage == llm for a in p.actions)]
    changes = [a.stage == llm for a in program.actions if a.kind in (Pass.F, Pass.B)]
    assert sum(before != after for before, after in pairwise(changes)) > 2
