"""What a joint search changed is told in the field's words, for every kind of move."""

from workbench.job.module_layout import ModuleLayout
from workbench.plan.plan import ModuleSettings, Recompute, Sharding
from workbench.planner.groupings import Grouping
from workbench.planner.layout_choice import Degrees
from workbench.report.joint_tables import described_moves
from workbench.schedule.choice import Schedule, ScheduleKind
from workbench.search.joint.arrangement import Arrangement, Placement
from workbench.search.joint.choice import TokenRule
from workbench.search.joint.grouping_moves import Exchange, MoveSample, Regroup, Reorder, Resize
from workbench.search.joint.layout_moves import Arrange, CutStages, Reschedule, ShiftLayer
from workbench.search.joint.move import Move
from workbench.search.joint.move_json import move_to_json
from workbench.search.joint.question import Question
from workbench.search.joint.replan import Replan
from workbench.search.joint.setting_moves import Distribute, Keep
from workbench.search.joint.take import Take


def told(*moves: Move) -> list[tuple[str, str]]:
    return list(described_moves([{"question": move.question.value, **move_to_json(move)} for move in moves]))


def keep(module: str | None, recompute: Recompute = Recompute.NONE) -> Keep:
    return Keep(module, recompute, Sharding.OPTIMIZER, 1, False)


def test_modules_that_change_alike_share_a_line():
    assert told(keep("vision"), keep("llm"), keep("audio", Recompute.FULL)) == [
        ("memory", "vision, llm: recompute none, sharding optimizer"),
        ("memory", "audio: recompute full, sharding optimizer"),
    ]
    assert told(keep(None)) == [("memory", "all modules: recompute none, sharding optimizer")]


def test_degrees_of_one_are_left_out():
    degrees = (Degrees(module="vision", dp=4), Degrees(module="llm", tp=2, dp=2), Degrees(module="head"))
    move = Arrange(Arrangement(placement=Placement.ISLANDS, degrees=degrees), samples=1)
    assert told(move) == [
        ("layout", "islands: vision dp 4, llm dp 2 tp 2, head one rank; 1 sample a microbatch")
    ]


def test_a_strategy_that_plans_anew_says_what_it_was_given():
    move = Replan(
        strategy="disttrain",
        layouts=(ModuleLayout(module="llm", pp=2, tp=4),),
        replicas=2,
        microbatch_samples=4,
        schedule=Schedule(kind=ScheduleKind.ONE_F_ONE_B),
        modules=(ModuleSettings(module="llm", recompute=Recompute.FULL),),
    )
    assert told(move) == [
        (
            "layout",
            "disttrain's plan, 4 samples a microbatch, 1f1b; llm dp 2 pp 2 tp 4; "
            "llm recompute full, sharding none",
        )
    ]


def test_other_moves():
    assert told(
        Reschedule(Schedule(kind=ScheduleKind.INTERLEAVED, virtual_stages=2)),
        CutStages(8),
        Resize(2),
        Regroup(Grouping.EVEN),
        Distribute(TokenRule.STRIPE),
        Take(Question.TOKENS, "cornstarch"),
        Exchange(3, 5),
        MoveSample(3, 0, 2),
        MoveSample(3, 0, 2, deferred=True),
        Reorder(0, 1, 3),
        ShiftLayer("llm", 0, -1),
    ) == [
        ("order", "interleaved, virtual_stages 2"),
        ("order", "stages that train in pieces, 8 each"),
        ("grouping", "2 samples a microbatch"),
        ("grouping", "even microbatches"),
        ("tokens", "tokens stripe"),
        ("tokens", "as in cornstarch"),
        ("grouping", "samples 3 and 5 change places"),
        ("grouping", "sample 3 to microbatch 2 of replica 0"),
        ("grouping", "sample 3 of the LLM alone to microbatch 2 of replica 0"),
        ("grouping", "microbatch 1 of replica 0 at 3"),
        ("order", "llm: a layer from its stage 0 to its stage 1"),
    ]
