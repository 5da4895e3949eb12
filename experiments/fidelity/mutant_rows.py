"""Single edits of a lowered plan: of a transfer row, its position, or a gradient group."""

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import wraps

from workbench.plan.lowered import Lowered, Route, Transfer
from workbench.schedule.action import Action

RowOperator = Callable[[Lowered, random.Random], Lowered | None]
ROW_OPERATORS: list[RowOperator] = []  # in the order in which they stand here


def operator(edit: RowOperator) -> RowOperator:
    """Register an edit that mutants are made by."""
    ROW_OPERATORS.append(edit)
    return edit


def of_row(edit: Callable[[Lowered, Transfer, random.Random], Lowered]) -> RowOperator:
    """Make an operator of an edit of one row."""

    @operator
    @wraps(edit)
    def edited(lowered: Lowered, rng: random.Random) -> Lowered | None:
        return edit(lowered, rng.choice(lowered.transfers), rng) if lowered.transfers else None

    return edited


def _with_row(lowered: Lowered, row: Transfer) -> Lowered:
    rows = tuple(row if other.row == row.row else other for other in lowered.transfers)
    return replace(lowered, transfers=rows)


@of_row
def drop_row(lowered: Lowered, row: Transfer, rng: random.Random) -> Lowered:
    """Drop a row from its producer's sends, its consumer's inputs, or both."""
    sides = rng.choice(((True, False), (False, True), (True, True)))
    inputs, outputs = dict(lowered.inputs), dict(lowered.outputs)
    if sides[0]:
        outputs[row.producer] = tuple(n for n in outputs[row.producer] if n != row.row)
    if sides[1]:
        inputs[row.consumer] = tuple(n for n in inputs[row.consumer] if n != row.row)
    return replace(lowered, inputs=inputs, outputs=outputs)


@of_row
def duplicate_row(lowered: Lowered, row: Transfer, _: random.Random) -> Lowered:
    """Duplicate a row under a new number."""
    copy = row._replace(row=len(lowered.transfers))
    inputs = dict(lowered.inputs) | {row.consumer: (*lowered.inputs[row.consumer], copy.row)}
    outputs = dict(lowered.outputs) | {row.producer: (*lowered.outputs[row.producer], copy.row)}
    return replace(lowered, transfers=(*lowered.transfers, copy), inputs=inputs, outputs=outputs)


@operator
def swap_rows(lowered: Lowered, rng: random.Random) -> Lowered | None:
    """Swap the numbers of two rows, and so their order in their communicator."""
    if len(lowered.transfers) < 2:
        return None
    one, other = rng.sample(range(len(lowered.transfers)), 2)
    pair = {one: other, other: one}

    def moved(number: int) -> int:
        return pair.get(number, number)

    def renamed(table: Mapping[Action, tuple[int, ...]]) -> dict[Action, tuple[int, ...]]:
        return {action: tuple(map(moved, rows)) for action, rows in table.items()}

    rows = [
        row._replace(row=moved(row.row), after=None if row.after is None else moved(row.after))
        for row in lowered.transfers
    ]
    return replace(
        lowered,
        transfers=tuple(sorted(rows, key=lambda row: row.row)),
        inputs=renamed(lowered.inputs),
        outputs=renamed(lowered.outputs),
    )


@of_row
def re_peer_row(lowered: Lowered, row: Transfer, rng: random.Random) -> Lowered:
    """Change the source or destination rank, keeping the route or taking the one that fits."""
    rank = rng.choice(lowered.plan.ranks)
    changed = rng.choice((row._replace(source_rank=rank), row._replace(destination_ranks=(rank,))))
    if rng.random() < 0.5 and changed.route is not Route.BROADCAST:
        is_own = changed.source_rank == changed.destination_rank
        changed = changed._replace(route=Route.LOCAL if is_own else Route.P2P)
    return _with_row(lowered, changed)


@of_row
def re_end_row(lowered: Lowered, row: Transfer, rng: random.Random) -> Lowered:
    """Change the producer or consumer, with or without the tables."""
    action = rng.choice(list(lowered.plan.program_actions))
    inputs, outputs = dict(lowered.inputs), dict(lowered.outputs)
    if rng.random() < 0.5:
        changed = row._replace(producer=action)
        outputs[row.producer] = tuple(n for n in outputs[row.producer] if n != row.row)
        outputs[action] = (*outputs.get(action, ()), row.row)
    else:
        changed = row._replace(consumer=action)
        inputs[row.consumer] = tuple(n for n in inputs[row.consumer] if n != row.row)
        inputs[action] = (*inputs.get(action, ()), row.row)
    if rng.random() < 0.3:
        inputs, outputs = dict(lowered.inputs), dict(lowered.outputs)
    return replace(_with_row(lowered, changed), inputs=inputs, outputs=outputs)


@of_row
def re_shape_row(lowered: Lowered, row: Transfer, rng: random.Random) -> Lowered:
    """Move a boundary of a slice, or remove the slice."""
    at = rng.randrange(len(row.slices))
    piece, by = row.slices[at], rng.choice((-1, 1))
    changed = rng.choice(
        (
            (piece._replace(source_start=piece.source_start + by),),
            (piece._replace(destination_start=piece.destination_start + by),),
            (piece._replace(num_tokens=piece.num_tokens + by),),
            (),
        )
    )
    slices = (*row.slices[:at], *changed, *row.slices[at + 1 :])
    num_tokens = sum(piece.num_tokens for piece in slices)
    return _with_row(lowered, row._replace(slices=slices, num_tokens=num_tokens))


@operator
def shrink_group(lowered: Lowered, rng: random.Random) -> Lowered | None:
    """Remove a rank from a gradient group, or the group from a rank's REDUCE_GRAD."""
    wide = [group for group in lowered.groups if len(group.ranks) > 1]
    if not wide:
        return None
    group = rng.choice(wide)
    if rng.random() < 0.5:
        ranks = tuple(rank for rank in group.ranks if rank != rng.choice(group.ranks))
        groups = [replace(g, ranks=ranks) if g is group else g for g in lowered.groups]
        return replace(lowered, groups=tuple(groups))
    action = rng.choice([a for a, indices in lowered.reductions.items() if group.index in indices])
    remaining = tuple(index for index in lowered.reductions[action] if index != group.index)
    return replace(lowered, reductions=lowered.reductions | {action: remaining})


@operator
def reorder_reductions(lowered: Lowered, rng: random.Random) -> Lowered | None:
    """Reorder the groups of a REDUCE_GRAD."""
    several = [action for action, indices in lowered.reductions.items() if len(indices) > 1]
    if not several:
        return None
    action = rng.choice(several)
    mixed = rng.sample(lowered.reductions[action], len(lowered.reductions[action]))
    return replace(lowered, reductions=lowered.reductions | {action: tuple(mixed)})
