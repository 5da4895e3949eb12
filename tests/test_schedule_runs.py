"""Schedules beyond 1F1B, executed: the loss, gradients and weights of one process, in planned order."""

from collections.abc import Sequence

import pytest

from runtime.world.pool import Pool
from tests.plans import finish
from tests.test_parity import assert_same, mixed
from tests.tiny_valm import tiny_batch
from workbench.model.model_graph import ModelGraph
from workbench.plan.lower import lower
from workbench.plan.lowered import Route
from workbench.plan.plan import Plan
from workbench.plan.stage import Stage
from workbench.schedule.action import Pass
from workbench.schedule.choice import Schedule, ScheduleKind, rank_block, usual

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
