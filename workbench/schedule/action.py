"""An action: one pass of one stage over one microbatch, in torch's letters, or what stands between passes."""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from enum import StrEnum
from typing import NamedTuple


class Pass(StrEnum):
    """torch.distributed.pipelining's letters, zero-bubble's "B" is our `I`; and what is no pass, by name."""

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

    # That of the letter; an Enum's own is a call in Python, and actions are keys everywhere.
    __hash__ = str.__hash__


class Activity(StrEnum):
    """What an action is made of: by this it is priced."""

    COMPUTE = "compute"
    COLLECTIVE = "collective"
    COPY = "copy"  # between the device and its host
    RELEASE = "release"  # of memory, in no time
    UPDATE = "update"


class Operation(StrEnum):
    """What a collective does with what its ranks have, in NCCL's words."""

    ALL_REDUCE = "AllReduce"
    ALL_GATHER = "AllGather"
    REDUCE_SCATTER = "ReduceScatter"


class TaskKind(StrEnum):
    """Who does an action together, and in which lane of theirs it takes its turn.

    PASS: all ranks of the stage.
    FSDP: all ranks that shard the stage's weights, beside their passes.
    ALL_REDUCE: the ranks of each gradient group, one group after another, beside both.
    STEP: each rank for itself, behind all else.
    """

    PASS = "pass"
    FSDP = "fsdp"
    ALL_REDUCE = "all-reduce"
    STEP = "step"


class Number(StrEnum):
    """What the number behind an action's name counts."""

    NOTHING = "nothing"
    MICROBATCH = "microbatch"
    ROUND = "round"


class Meaning(NamedTuple):
    """All that is known of a kind of action: who orders, prices, runs or counts actions reads it here.

    Args:
        about: what it does, in a few words.
        activity: what it is made of.
        task: who does it, in which lane.
        number: what its number counts.
        weights: 1: its stage's weights come to the device; -1: they leave it; 0: neither.
        operation: of a collective.
        measured_as: the kind under which a profile has the executor's share of it; None: its own.
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
    """The kind under which a profile has what the executor adds to such an action."""
    return MEANING[kind].measured_as or kind


def reduction_of(stage: int | None) -> "Action":
    """The sum of a stage's gradients over its replicas."""
    return Action(stage, Pass.REDUCE_GRAD)


COMPUTE = tuple(kind for kind in Pass if MEANING[kind].activity is Activity.COMPUTE)
COLLECTIVES = tuple(kind for kind in Pass if MEANING[kind].activity is Activity.COLLECTIVE)
REDUCTIONS = tuple(kind for kind in Pass if MEANING[kind].task is TaskKind.ALL_REDUCE)
CLOSING = (*REDUCTIONS, Pass.STEP)  # what no schedule orders: it stands behind what one does
FSDP = tuple(kind for kind in Pass if MEANING[kind].task is TaskKind.FSDP)
ROUND = tuple(kind for kind in Pass if MEANING[kind].number is Number.ROUND)  # of sharded weights
MOVES = tuple(kind for kind in Pass if MEANING[kind].weights)
_CONTINUES = {Pass.B: Pass.F, Pass.I: Pass.F, Pass.W: Pass.I}


class Action(NamedTuple):
    """Printed `2F0`, `2REDUCE_GRAD` or `STEP` (which belongs to the rank: stage -1 is not used).

    `microbatch` is the number behind the name: of a stage whose weights are sharded, `2ALL_GATHER0` begins
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
Order = tuple[tuple[Pass, int | None], ...]  # actions of one stage, whose name is left out


def by_stage(actions: Iterable[Action]) -> dict[int | None, Order]:
    """Stage -> kinds and numbers of its actions, in order; stages as they come first."""
    found: defaultdict[int | None, list[tuple[Pass, int | None]]] = defaultdict(list)
    for action in actions:
        found[action[0]].append(action[1:])
    return {stage: tuple(order) for stage, order in found.items()}


_TEXT = re.compile(r"([0-9]*)([A-Z_]+)([0-9]*)")


class Spelling:
    """Names of kinds in one version of plan and trace files; a number may tell apart two that share one."""

    def __init__(self, renamed: Mapping[Pass, str]) -> None:
        self._name = {kind: renamed.get(kind, kind.value) for kind in Pass}
        self._kind = {
            (kind is Pass.STEP, self._name[kind], MEANING[kind].number is not Number.NOTHING): kind
            for kind in Pass
        }

    @property
    def names(self) -> Collection[str]:
        """Of all kinds."""
        return self._name.values()

    def write(self, action: Action) -> str:
        """The action as text, as `str` where nothing was renamed."""
        stage, kind, number = action
        return f"{'' if stage is None else stage}{self._name[kind]}{'' if number is None else number}"

    def read(self, text: str) -> Action:
        """What `write` wrote; ValueError where it is no action."""
        match = _TEXT.fullmatch(text)
        stage, name, number = ("", "", "") if match is None else match.groups()
        kind = self._kind.get((not stage, name, number != ""))
        if kind is None:
            raise ValueError(f"bad action {text!r}: want {self._forms()} or STEP, e.g. '2F0'")
        return Action(int(stage) if stage else None, kind, int(number) if number else None)

    def _forms(self) -> str:
        """`<stage><F|B|I|W><microbatch>` and the like."""
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
    """`'2F0'` as an action; ValueError when it is none."""
    return SPELLINGS[NEWEST].read(text)
