"""Actions: a pass of a stage over a microbatch, in torch's letters, or a collective, copy or update."""

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from enum import StrEnum
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple, cast


class Pass(StrEnum):
    """Kinds of actions: passes in torch's pipelining letters (zero-bubble's "B" is `I`), others by name."""

    F = "F"
    B = "B"
    I = "I"  # noqa: E741  (torch's letter for the input gradient)
    W = "W"
    ALL_GATHER = "ALL_GATHER"
    FREE = "FREE"
    REDUCE_SCATTER = "REDUCE_SCATTER"
    OFFLOAD = "OFFLOAD"
    ONLOAD = "ONLOAD"
    REDUCE_GRAD = "REDUCE_GRAD"
    STEP = "STEP"

    # The string's hash: Enum's is a Python call, and actions are keys everywhere.
    __hash__ = str.__hash__


class Activity(StrEnum):
    """What kind of work an action is, which decides its price."""

    COMPUTE = "compute"
    COLLECTIVE = "collective"
    COPY = "copy"  # between the device and its host
    RELEASE = "release"  # of memory, in no time
    UPDATE = "update"


class Operation(StrEnum):
    """What a collective does, in NCCL's words."""

    ALL_REDUCE = "AllReduce"
    ALL_GATHER = "AllGather"
    REDUCE_SCATTER = "ReduceScatter"


class TaskKind(StrEnum):
    """Which ranks do an action together, and in which of their lanes.

    PASS: all ranks of the stage.
    FSDP: all ranks that shard the stage's weights, beside their passes.
    ALL_REDUCE: the ranks of each gradient group, one group after another, beside both.
    STEP: each rank for itself, after everything else.
    """

    PASS = "pass"
    FSDP = "fsdp"
    ALL_REDUCE = "all-reduce"
    STEP = "step"


class Number(StrEnum):
    """What the number after an action's name counts."""

    NOTHING = "nothing"
    MICROBATCH = "microbatch"
    ROUND = "round"


class Meaning(NamedTuple):
    """All facts about a kind of action, for code that orders, prices, runs or counts actions.

    Args:
        about: what it does, in a few words.
        activity: kind of work.
        task: which ranks do it, in which lane.
        number: what its number counts.
        weights: 1: brings its stage's weights to the device; -1: removes them; 0: neither.
        operation: of a collective.
        measured_as: the kind under which a profile has the executor's overhead; None: its own.
    """

    about: str
    activity: Activity
    task: TaskKind
    number: Number = Number.NOTHING
    weights: int = 0
    operation: Operation | None = None
    measured_as: Pass | None = None


def _pass(about: str) -> Meaning:
    return Meaning(about, Activity.COMPUTE, TaskKind.PASS, Number.MICROBATCH)


MEANING: Mapping[Pass, Meaning] = {
    Pass.F: _pass("forward"),
    Pass.B: _pass("backward"),
    Pass.I: _pass("input gradient of a split backward"),
    Pass.W: _pass("weight gradient of a split backward"),
    Pass.ALL_GATHER: Meaning(
        "gathers the sharded weights of a stage",
        Activity.COLLECTIVE,
        TaskKind.FSDP,
        Number.ROUND,
        weights=1,
        operation=Operation.ALL_GATHER,
    ),
    Pass.FREE: Meaning(
        "frees the gathered weights", Activity.RELEASE, TaskKind.PASS, Number.ROUND, weights=-1
    ),
    Pass.REDUCE_SCATTER: Meaning(
        "sums gradients of sharded weights; each rank keeps its shard",
        Activity.COLLECTIVE,
        TaskKind.FSDP,
        Number.ROUND,
        operation=Operation.REDUCE_SCATTER,
        measured_as=Pass.REDUCE_GRAD,
    ),
    Pass.OFFLOAD: Meaning(
        "copies weights and optimizer state of a stage to the host",
        Activity.COPY,
        TaskKind.PASS,
        weights=-1,
    ),
    Pass.ONLOAD: Meaning("copies them back to the device", Activity.COPY, TaskKind.PASS, weights=1),
    Pass.REDUCE_GRAD: Meaning(
        "sums the gradients of a stage over its replicas",
        Activity.COLLECTIVE,
        TaskKind.ALL_REDUCE,
        operation=Operation.ALL_REDUCE,
    ),
    Pass.STEP: Meaning("updates the weights of a rank", Activity.UPDATE, TaskKind.STEP),
}


def measured_as(kind: Pass) -> Pass:
    """Return the kind under which a profile has the executor's overhead of such an action."""
    return MEANING[kind].measured_as or kind


def reduction_of(stage: int | None) -> "Action":
    """Return the reduction of a stage's gradients over its replicas."""
    return Action(stage, Pass.REDUCE_GRAD)


COMPUTE = tuple(kind for kind in Pass if MEANING[kind].activity is Activity.COMPUTE)
COLLECTIVES = tuple(kind for kind in Pass if MEANING[kind].activity is Activity.COLLECTIVE)
REDUCTIONS = tuple(kind for kind in Pass if MEANING[kind].task is TaskKind.ALL_REDUCE)
CLOSING = (*REDUCTIONS, Pass.STEP)  # not ordered by schedules: they follow everything that is
FSDP = tuple(kind for kind in Pass if MEANING[kind].task is TaskKind.FSDP)
ROUND = tuple(kind for kind in Pass if MEANING[kind].number is Number.ROUND)  # of sharded weights
MOVES = tuple(kind for kind in Pass if MEANING[kind].weights)
_CONTINUES = {Pass.B: Pass.F, Pass.I: Pass.F, Pass.W: Pass.I}


class Action(NamedTuple):
    """One action, printed `2F0`, `2REDUCE_GRAD` or `STEP` (which belongs to the rank, not to a stage).

    `microbatch` is the number after the name: for a stage whose weights are sharded, `2ALL_GATHER0` begins
    round 0.
    """

    stage: int | None
    kind: Pass
    microbatch: int | None = None

    def __str__(self) -> str:
        stage = "" if self.stage is None else str(self.stage)
        microbatch = "" if self.microbatch is None else str(self.microbatch)
        return f"{stage}{self.kind}{microbatch}"

    @property
    def continues(self) -> "Action | None":
        """The pass of the same stage and microbatch that this one needs; None for a forward."""
        before = _CONTINUES.get(self.kind)
        return None if before is None else Action(self.stage, before, self.microbatch)


STEP = Action(None, Pass.STEP)
# Slower: `Action(*parts)`, a call in Python. A plan has 10^3 to 10^5 actions.
_of_parts = cast(
    Callable[[tuple[int | None, Pass, int | None]], Action], partial(cast(Any, tuple.__new__), Action)
)


def with_stages(
    actions: Iterable[Action], stage_of: Callable[[int | None], int | None]
) -> tuple[Action, ...]:
    """Return the actions under other stage ids."""
    columns = tuple(zip(*actions, strict=True))
    if not columns:
        return ()
    stages, kinds, numbers = columns
    return tuple(map(_of_parts, zip(map(stage_of, stages), kinds, numbers, strict=True)))


def passes_of(stage: int, kind: Pass, microbatches: Iterable[int]) -> list[Action]:
    """Return the passes of one kind of a stage over microbatches."""
    return list(map(_of_parts, zip(repeat(stage), repeat(kind), microbatches)))


Order = tuple[tuple[Pass, int | None], ...]  # kinds and numbers of one stage's actions


def by_stage(actions: Iterable[Action]) -> dict[int | None, Order]:
    """Map each stage, by first appearance, to kinds and numbers of its actions in order."""
    orders: defaultdict[int | None, list[tuple[Pass, int | None]]] = defaultdict(list)
    for stage, kind, number in actions:
        orders[stage].append((kind, number))
    return {stage: tuple(order) for stage, order in orders.items()}


_TEXT = re.compile(r"([0-9]*)([A-Z_]+)([0-9]*)")


class Spelling:
    """Names of kinds in one version of plan and trace files; two kinds may differ only in having a number."""

    def __init__(self, renamed: Mapping[Pass, str]) -> None:
        self._name = {kind: renamed.get(kind, kind.value) for kind in Pass}
        self._kind = {
            (kind is Pass.STEP, self._name[kind], MEANING[kind].number is not Number.NOTHING): kind
            for kind in Pass
        }

    @property
    def names(self) -> Collection[str]:
        """Names of all kinds."""
        return self._name.values()

    def write(self, action: Action) -> str:
        """Return the action as text; equal to `str` where nothing is renamed."""
        stage, kind, number = action
        return f"{'' if stage is None else stage}{self._name[kind]}{'' if number is None else number}"

    def read(self, text: str) -> Action:
        """Return the action that `write` wrote; ValueError where it is none."""
        match = _TEXT.fullmatch(text)
        stage, name, number = ("", "", "") if match is None else match.groups()
        kind = self._kind.get((not stage, name, number != ""))
        if kind is None:
            raise ValueError(f"bad action {text!r}: want {self._forms()} or STEP, e.g. '2F0'")
        return Action(int(stage) if stage else None, kind, int(number) if number else None)

    def _forms(self) -> str:
        """Return the forms of actions, such as `<stage><F|B|I|W><microbatch>`."""
        names: dict[Number, list[str]] = {}
        for kind in Pass:
            if kind is not Pass.STEP:
                names.setdefault(MEANING[kind].number, []).append(self._name[kind])
        return ", ".join(
            f"<stage><{'|'.join(alike)}>" + (f"<{number}>" if number is not Number.NOTHING else "")
            for number, alike in names.items()
        )


SPELLINGS: Mapping[int, Spelling] = {
    1: Spelling(
        {
            Pass.ALL_GATHER: "UNSHARD",
            Pass.FREE: "RESHARD",
            Pass.REDUCE_SCATTER: "REDUCE_GRAD",
            Pass.OFFLOAD: "RESHARD",
            Pass.ONLOAD: "UNSHARD",
        }
    ),
    2: Spelling({}),
    3: Spelling({}),
}  # by version of plan and trace files; 3 names plans by another hash, see `plan.codec`
NEWEST = max(SPELLINGS)


def parse_action(text: str) -> Action:
    """Parse an action such as `'2F0'`; ValueError when it is none."""
    return SPELLINGS[NEWEST].read(text)
