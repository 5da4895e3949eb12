"""Every schedule: its published grid, its plans, and its runs."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from runtime.world.pool import Pool
from sim.step.engine import simulate
from tests import figures
from tests.examples import examples
from tests.figures import FIGURES
from tests.job_files import write
from tests.plans import finish
from tests.schedule_grids import parse_timeline
from tests.strategies import plans
from tests.test_parity import assert_same, mixed
from tests.tiny_valm import tiny_batch
from workbench.balance.stages.partition import partition
from workbench.cost.model import CostModel
from workbench.cost.profile import load_profile
from workbench.job.job import load_job
from workbench.job.module_layout import ModuleLayout
from workbench.model.model_graph import ModelGraph
from workbench.plan.build import with_programs
from workbench.plan.check import check
from workbench.plan.deadlock import check_deadlock
from workbench.plan.lower import lower
from workbench.plan.lowered import Route
from workbench.plan.plan import Plan
from workbench.plan.stage import Stage
from workbench.schedule.action import Action, Pass
from workbench.schedule.choice import Schedule, ScheduleKind, rank_block, usual
from workbench.search.drive import search, with_schedules
from workbench.strategies.registry import PLANNERS
from workbench.timing.accept import accept

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("name", FIGURES)
def test_timeline_is_the_reviewed_one(name):
    path, ours = GOLDEN / f"{name}.txt", FIGURES[name]().text()
    if os.environ.get("UPDATE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(ours)
    assert ours == path.read_text(), f"{path.name} differs; UPDATE_GOLDEN=1 writes it anew"


@pytest.mark.parametrize("name", FIGURES)
def test_golden_files_hold_every_pass_for_its_ticks(name):
    figure = FIGURES[name]()
    slots = [slot for row in parse_timeline((GOLDEN / f"{name}.txt").read_text()).values() for slot in row]
    assert {slot.action: slot.end_tick - slot.start_tick for slot in slots} == {
        action: figure.ticks(action) for action in figure.times()
    }
    assert max(slot.end_tick for slot in slots) == figure.length


def test_v1_figure2a_eight_microbatches_take_eleven_sevenths_of_four():
    four, eight = figures.v1_figure2a(4).length, figures.v1_figure2a(8).length
    assert eight * 7 == four * 11
    assert round(eight / four, 2) == 1.57
    assert four == (4 + 4 - 1) * (1 + 2)


def test_v1_figure2_order_of_the_three():
    """Same work and ranks: replicated is the slowest, the ideal the fastest."""
    ideal, colocated = figures.v1_figure2c().length, figures.v1_figure2b().length
    replicated = figures.v1_figure2a(8).length * (2 + 2 + 1)  # vision and audio whole, a quarter of the LLM
    assert ideal < colocated < replicated
    assert ideal == (8 + 3 - 1) * (2 + 4)  # a chain of three: encoders in parallel count once


def test_v1_figure2a_copies_as_stages_are_not_eleven_sevenths():
    """What a plan with early copies gives instead: only the first rank's encoders go back."""
    four, eight = figures.v1_figure2a_copies(4).length, figures.v1_figure2a_copies(8).length
    assert (four, eight) == (36, 72)


def test_v1_figure6b_llm_waits_for_both_encoders_and_they_for_it():
    times = figures.v1_figure6b().times()
    for index in range(6):
        starts = {(s, k): times[Action(s, k, index)][0] for s in range(3) for k in (Pass.F, Pass.B)}
        ends = {(s, k): times[Action(s, k, index)][1] for s in range(3) for k in (Pass.F, Pass.B)}
        assert starts[2, Pass.F] >= max(ends[0, Pass.F], ends[1, Pass.F])
        assert min(starts[0, Pass.B], starts[1, Pass.B]) >= ends[2, Pass.B]
        assert starts[0, Pass.F] == starts[1, Pass.F]
        assert starts[0, Pass.B] == starts[1, Pass.B]


def test_v1_figure6c_has_the_time_of_its_longest_chain():
    assert figures.v1_figure6c().length == (6 + 5 - 1) * (1 + 2)


def test_v1_figure7_partitions_come_from_the_costs():
    """24 layers of one forward tick; frozen: the encoder's 12 have no backward, the LLM's 12 one forward."""
    by_forward = partition([1.0] * 24, 6)
    assert by_forward == tuple((4 * k, 4 * k + 4) for k in range(6))
    by_both = partition([1.0] * 12 + [2.0] * 12, 6)
    assert by_both == ((0, 6), (6, 12), (12, 15), (15, 18), (18, 21), (21, 24))
    for figure, cuts in ((figures.v1_figure7("b"), by_forward), (figures.v1_figure7("c"), by_both)):
        assert [box.forward for box in figure.boxes] == [end - first for first, end in cuts]


def test_v1_figure7_awareness_pays():
    unaware, aware = figures.v1_figure7("b"), figures.v1_figure7("c")
    assert {box.forward + box.backward for box in aware.boxes} == {6}
    assert {box.forward + box.backward for box in unaware.boxes} == {4, 8}
    work = [sum(box.forward + box.backward for box in figure.boxes) for figure in (unaware, aware)]
    assert work[0] == work[1]
    assert aware.length < unaware.length < figures.v1_figure7("a").length


def test_icml_figure1c_freezing_breaks_the_balance():
    """All trained, the stages differ by 4 %; frozen, three of them wait for nobody and the first idles."""
    trained, frozen = (figures.icml_figure1c_iteration_ms(status) for status in ("trainable", "frozen"))
    ideal = {status: 64 * sum(map(sum, figures.FIGURE1B_MS[status])) / 4 for status in figures.FIGURE1B_MS}
    assert trained / ideal["trainable"] == pytest.approx(1.057, abs=0.001)
    assert frozen / ideal["frozen"] == pytest.approx(1.249, abs=0.001)


def laid_out(plan, schedule):
    """The LLM's stages on fewer ranks, as the schedule wants them; None where their number does not fit."""
    moved = {}
    for (module, _), chain in plan.chain.items():
        if module != "llm":
            continue
        if len(chain) % schedule.virtual_stages:
            return None
        for index, stage in enumerate(chain):
            home = chain[rank_block(schedule, index, len(chain))]
            moved[stage.id] = replace(stage, ranks=home.ranks)
    return replace(plan, programs=(), stages=tuple(moved.get(s.id, s) for s in plan.stages))


@examples(80)
@given(plan=plans(), kind=st.sampled_from(ScheduleKind))
def test_any_plan_with_any_schedule_is_accepted_and_runs(plan, kind):
    schedule = usual(kind)
    draft = laid_out(plan, schedule)
    assume(draft is not None)
    made = with_programs(draft, schedule)
    check(made)
    lowered = lower(made)
    check_deadlock(lowered)
    simulate(lowered, lambda action: 1.0)
    if kind.spec.takes("memory_limit"):
        assert Pass.B not in {action.kind for action in made.program_actions}


@pytest.fixture(scope="module")
def cost():
    return CostModel(load_profile("A40"))


def job_with(tmp_path, kind, **batch):
    def change(data):
        data["cluster"] = {"device": "A40", "nodes": 2, "ranks_per_node": 4, "memory_gib": 40}
        data["cluster"] |= {scope: {"gb_per_s": 20.0, "latency_us": 5} for scope in ("intra", "inter")}
        data["profile"] = "A40"
        data["batch"]["samples"] = 8
        data["batch"] |= batch
        data["model"]["modules"]["llm"]["trainable"] = "all"
        data["model"]["modules"]["llm"]["config"]["num_hidden_layers"] = 6
        data["layouts"] = {"vision": {"pp": 1}, "llm": {"pp": 2}}
        data["schedule"] = {"kind": kind.value}

    return load_job(write(tmp_path, change))


def test_open_stage_counts_leave_out_what_a_schedule_cannot_do(tmp_path, cost):
    job = job_with(tmp_path, ScheduleKind.ZB_V)
    layers = len(job.model.module("llm").layers)
    job = replace(job, layouts=())
    plan = PLANNERS["cornstarch"](job, cost, lambda *_: None)
    assert len(plan.chain["llm", 0]) % 2 == 0
    assert len(plan.chain["llm", 0]) <= layers


def test_search_tries_each_strategy_with_each_schedule(tmp_path, cost):
    kinds = (ScheduleKind.ONE_F_ONE_B, ScheduleKind.ZB_H1)
    planners = with_schedules({"cornstarch": PLANNERS["cornstarch"]}, [usual(kind) for kind in kinds])
    assert list(planners) == ["cornstarch 1f1b", "cornstarch zb-h1"]

    def predict(plan):
        lowered, _ = accept(plan)
        return simulate(lowered, lambda action: float(action.kind is not Pass.STEP) + (action.kind is Pass.B))

    found = search(job_with(tmp_path, ScheduleKind.GPIPE), cost, planners, predict)
    assert [candidate.refusal for candidate in found] == ["", ""]
    assert found[0].strategy == "cornstarch zb-h1"
    assert found[0].trace.iteration_s < found[1].trace.iteration_s


def test_a_schedule_that_does_not_fit_the_layers_is_one_line(tmp_path, cost):
    job = job_with(tmp_path, ScheduleKind.ZB_V)
    layers = len(job.model.module("llm").layers)
    too_many = layers // 2 + 1
    wide = replace(job, layouts=(ModuleLayout(module="llm", pp=too_many),))
    with pytest.raises(ValueError, match="module 'llm'") as raised:
        PLANNERS["cornstarch"](wide, cost, lambda *_: None)
    assert "\n" not in str(raised.value)


LAYERS = {2: (3, 3), 4: (1, 2, 2, 1)}  # of the LLM's stages
ELSEWHERE = (ScheduleKind.ONE_F_ONE_B, ScheduleKind.THREE_PHASE)  # test_parity and test_layouts_parity
KINDS = [kind for kind in ScheduleKind if kind not in ELSEWHERE]


def planned(
    model: ModelGraph,
    schedule: Schedule,
    encoder_ranks: Sequence[int],
    *,
    replicas: int = 1,
    images: Sequence[int] = (1, 2, 0, 1),
    clips: Sequence[int] = (1, 0, 0, 2),
) -> Plan:
    """The LLM on two ranks of each replica, laid out for the schedule; one stage per encoder."""
    num_stages = 2 * schedule.virtual_stages
    ranks = tuple(rank_block(schedule, index, num_stages) for index in range(num_stages))
    per_replica = 1 + max(*ranks, *encoder_ranks)
    stages: list[Stage] = []
    for replica in range(replicas):
        for module in model.modules:
            is_llm = module.name == "llm"
            counts = LAYERS[len(ranks)] if is_llm else (len(module.layers),)
            places = ranks if is_llm else (encoder_ranks[len(stages) % len(encoder_ranks)],)
            first = 0
            for count, rank in zip(counts, places, strict=True):
                stages.append(
                    Stage(
                        id=len(stages),
                        module=module.name,
                        replica=replica,
                        layers=(first, first + count),
                        ranks=((rank + replica * per_replica,),),
                    )
                )
                first += count
    batch = tiny_batch(tuple(images) * replicas, tuple(clips) * replicas)
    return finish(model, batch, stages, replicas=replicas, schedule=schedule)


@pytest.mark.parametrize("mix", ["projectors-and-llm", "encoders"])
@pytest.mark.parametrize("kind", KINDS)
def test_encoders_on_ranks_of_their_own(kind: ScheduleKind, mix: str, pool: Pool) -> None:
    assert_same(planned(mixed(mix), usual(kind), (2, 3)), pool)


def test_interleaved_zero_bubble(pool: Pool) -> None:
    """Two stages of the LLM on each rank, their backwards split."""
    schedule = Schedule(kind=ScheduleKind.ZB_H1, virtual_stages=2)
    plan = planned(mixed("everything", tied=True), schedule, (2, 3))
    assert plan.program[0][0].stage != plan.program[0][2].stage
    assert_same(plan, pool)


@pytest.mark.parametrize("kind", KINDS)
def test_tied_and_replicated(kind: ScheduleKind, pool: Pool) -> None:
    assert_same(planned(mixed("everything", tied=True), usual(kind), (2,), replicas=2), pool)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.splits_backward])
def test_split_backwards_stand_in_the_program(kind: ScheduleKind) -> None:
    kinds = {action.kind for action in planned(mixed("everything"), usual(kind), (2, 3)).program_actions}
    whole = {Pass.B} & {action.kind for program in kind.spec.chain(range(4), 2, 4) for action in program}
    assert kinds & {Pass.B, Pass.I, Pass.W} == {Pass.I, Pass.W} | whole
    frozen = planned(mixed("encoders"), usual(kind), (2, 3))
    of_llm = [a for a in frozen.program_actions if a.stage in {s.id for s in frozen.chain["llm", 0]}]
    assert {Pass.F, Pass.I} | whole == {action.kind for action in of_llm}


def test_interleaved_with_fewer_microbatches_than_ranks(pool: Pool) -> None:
    plan = planned(mixed("everything"), usual(ScheduleKind.INTERLEAVED), (2, 3), images=(1,), clips=(2,))
    assert_same(plan, pool)


def test_a_v_ties_embedding_and_head_without_a_message(pool: Pool) -> None:
    plan = planned(mixed("everything", tied=True), usual(ScheduleKind.ZB_V), (2, 3))
    lowered = lower(plan)
    tied = [group for group in lowered.groups if group.weights[0].shared is not None]
    assert [group.ranks for group in tied] == [(0,)]
    assert not lowered.reductions
    inside = [row for row in lowered.transfers if row.edge == "llm" and row.source_rank == 1]
    assert Route.LOCAL in {row.route for row in inside}
    assert_same(plan, pool)
