"""What a rank holds while one action runs, by part and module: the entries of its account, not summed."""

from collections import Counter
from typing import NamedTuple

from workbench.memory.accounts import Accounts
from workbench.memory.entries import rank_holdings
from workbench.memory.holdings import Part
from workbench.memory.moves import PART_OF, Moves
from workbench.memory.stage import GRADIENTS
from workbench.plan.lowered import Lowered
from workbench.schedule.action import Action, Pass


class PartBytes(NamedTuple):
    """Bytes of one part on a rank.

    Args:
        part: what they are for.
        module: that they belong to; "" for those of messages and of the optimizer step.
        num_bytes: more than 0.
    """

    part: Part
    module: str
    num_bytes: int

    @property
    def name(self) -> str:
        """`optimizer of llm`."""
        return f"{self.part} of {self.module}" if self.module else str(self.part)


def held_at(lowered: Lowered, rank: int, position: int | None) -> tuple[PartBytes, ...]:
    """Return what a rank holds while the action at a position of its program runs; None: before the first.

    A pass that makes its stage's first gradients holds most at one moment inside it: parts are those of that
    moment, so of its activations some are freed, and of its gradients some are made.

    Returns:
        Parts, largest first, that add up to the bytes of `memory_table` there.

    Complexity: O(actions x layers of a stage + rows).
    """
    accounts, plan = Accounts(lowered, (rank,)), lowered.plan
    held: Counter[tuple[Part, int]] = Counter()
    for stage, kind, num_bytes in accounts.state(rank):
        if kind.part != GRADIENTS:
            held[PART_OF[kind.part], stage.id] += num_bytes
    if position is not None:
        _add_held(accounts, rank, position, held)
    by_module: Counter[tuple[Part, str]] = Counter()
    for (part, number), num_bytes in held.items():
        by_module[part, plan.stage[number].module if number in plan.stage else ""] += num_bytes
    parts = (PartBytes(*key, num_bytes) for key, num_bytes in by_module.items() if num_bytes)
    return tuple(sorted(parts, key=lambda part: (-part.num_bytes, part.name)))


def _add_held(accounts: Accounts, rank: int, position: int, held: Counter[tuple[Part, int]]) -> None:
    holdings, makes_first = rank_holdings(accounts, rank)
    for holding in holdings:
        is_held = (holding.first <= position) & (position <= holding.last)
        for stage, num_bytes in zip(
            holding.stage[is_held].tolist(), holding.num_bytes[is_held].tolist(), strict=True
        ):
            held[holding.part, stage] += num_bytes
    for moved_at, is_acquired, stage, moved in Moves(accounts).of(rank):
        if moved_at < position + is_acquired:  # what goes at the end of the action itself is there
            for part, num_bytes in moved.parts.items():
                held[part, stage] += num_bytes if is_acquired else -num_bytes
    action = accounts.plan.program[rank][position]
    if action.stage is not None and action.kind in (Pass.B, Pass.I, Pass.W):
        _divide_working(accounts, action, held, makes_first=bool(makes_first[position]))


def _divide_working(
    accounts: Accounts, action: Action, held: Counter[tuple[Part, int]], *, makes_first: bool
) -> None:
    """Divide what a backward adds: gradients, and tensors in work, less activations that it has freed."""
    plan, number = accounts.plan, action.stage
    assert number is not None
    assert action.microbatch is not None
    if makes_first:
        stage = plan.stage[number]
        microbatch = plan.microbatches_of[stage.module, stage.replica][action.microbatch]
        moment = accounts.sizes.first_moment(stage, microbatch, is_split=action.kind is Pass.W)
        held[Part.ACTIVATIONS, number] += moment.kept
        held[Part.GRADIENTS, number] += moment.gradients + min(0, moment.working)
        held[Part.WORKING, number] -= moment.kept + moment.gradients + min(0, moment.working)
    freed = min(0, held[Part.WORKING, number])  # activations of layers that the backward is done with
    held[Part.ACTIVATIONS, number] += freed
    held[Part.WORKING, number] -= freed
