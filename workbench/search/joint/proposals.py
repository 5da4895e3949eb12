"""Moves to try from a choice: those the critical path suggests, then others, then combinations."""

import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import islice, zip_longest

from workbench.explain.neighbours import memory_neighbours
from workbench.float_sum import float_sum
from workbench.job.job import Job
from workbench.job.module_layout import ModuleLayout
from workbench.plan.plan import KeyExchange, Plan, Recompute, Sharding
from workbench.planner.groupings import Grouping, differ, groups_of
from workbench.schedule.choice import Schedule, ScheduleKind, usual
from workbench.search.joint.arrangement import Arrangement
from workbench.search.joint.choice import Choice, TokenRule, draft_of
from workbench.search.joint.evaluate import changed
from workbench.search.joint.grouping_moves import Exchange, MoveSample, Regroup, Reorder, Resize
from workbench.search.joint.hints import Hints
from workbench.search.joint.layout_moves import (
    Arrange,
    CutStages,
    Reschedule,
    RunEncodersAhead,
    ShiftLayer,
)
from workbench.search.joint.layout_neighbours import arrangements_near, with_fewer_replicas
from workbench.search.joint.move import Move, Space
from workbench.search.joint.question import Question
from workbench.search.joint.setting_moves import Distribute, ExchangeKeys, Keep, Reshard, keep_of, shardings
from workbench.search.joint.take import Take

Moves = tuple[Move, ...]
MOST_AT_ONCE = 3
REGROUPED = 0.3  # share of random regroupings in combinations
PROVEN = 0.7  # share of the others: moves that cost next to nothing alone
LITTLE = 0.01  # relative to the value
EXCHANGED, REORDERED, DEFERRED = 0.5, 0.25, 0.4  # shares of regroupings; the last, of moved samples
LEADS = (1, 2, 4)
PIECES = (1, 2, 4, 8)
WINDOWS = (1, 2, 4, 8)
REGROUPING = (Exchange, MoveSample, Reorder, Resize)
QUICK = (*REGROUPING, ShiftLayer, Distribute, ExchangeKeys, Keep, Reshard)  # to apply
REPEATED = 200  # consecutive known candidates after which no new one is expected


class Proposals:
    """Moves to try from a choice; endless if an open question has any.

    Single moves come first, each once, one kind after another, those on the critical path ahead of their
    kind, interleaved with random regroupings; then two or three combined, preferably moves that cost little
    alone.

    Args:
        arrangement: of the choice; None: no placement describes it, so that only other plans' layouts are
            tried.
        hints: of the choice's plan; None: unknown.
        questions: open questions.
        rng: source of all draws.
        first: single moves that improved another incumbent.
    """

    def __init__(
        self,
        space: Space,
        choice: Choice,
        *,
        arrangement: Arrangement | None,
        hints: Hints | None,
        questions: Collection[Question],
        rng: random.Random,
        first: Sequence[Move] = (),
    ) -> None:
        draft = draft_of(space.job, choice)
        singles = [
            move for move in single_moves(space, choice, draft, arrangement) if move.question in questions
        ]
        weighted = [(_weight(move, draft, hints) * rng.random(), move) for move in singles]
        self._singles = in_turn([move for _, move in sorted(weighted, key=lambda pair: -pair[0])])
        regroups = Question.GROUPING in questions
        self._regroupings = _regroupings(space, draft, hints, rng) if regroups else iter(())
        self._rng, self._space, self._choice = rng, space, choice
        self._good: list[tuple[float, Move]] = []
        self._proposed: set[Moves] = set()
        self._moves = self._all([move for move in first if move.question in questions])

    def next(self, count: int, seen: set[Choice]) -> list[Moves]:
        """The next `count` moves, or as many as there are.

        Args:
            seen: choices tried so far, from this one or others; moves that yield one of them are skipped if
                that is quick to tell, and new choices are added.
        """
        proposals: list[Moves] = []
        repeated = 0
        for moves in self._moves:
            repeated = 0 if self._is_new(moves, seen) else repeated + 1
            proposals += [moves] * (repeated == 0)
            if len(proposals) == count or repeated == REPEATED:
                break
        return proposals

    def _is_new(self, moves: Moves, seen: set[Choice]) -> bool:
        if moves in self._proposed:
            return False
        self._proposed.add(moves)
        if not all(isinstance(move, QUICK) for move in moves):
            return True
        try:
            choice = changed(self._space, self._choice, moves)
        except ValueError:  # the samples cannot be moved there
            return False
        if choice == self._choice or choice in seen:
            return False
        seen.add(choice)
        return True

    def learn(self, moves: Moves, *, loss: float) -> None:
        """Record an outcome: single moves that cost next to nothing are worth combining."""
        if len(moves) == 1 and loss < LITTLE:
            self._good.append((loss, moves[0]))

    @property
    def best(self) -> list[Move]:
        """Single moves that improved the choice, largest gain first."""
        gained = sorted((pair for pair in self._good if pair[0] < 0), key=lambda pair: pair[0])
        return [move for _, move in gained]

    def _all(self, first: Sequence[Move]) -> Iterator[Moves]:
        for move in dict.fromkeys((*first, *self._singles)):
            yield (move,)
            yield from ((other,) for other in islice(self._regroupings, 1))
        while True:
            count = self._rng.randint(2, MOST_AT_ONCE)
            moves = tuple(move for _ in range(count) for move in self._drawn())
            if not moves:
                return
            yield moves

    def _drawn(self) -> list[Move]:
        if self._rng.random() < REGROUPED or not self._singles:
            return list(islice(self._regroupings, 1))
        if self._good and self._rng.random() < PROVEN:
            return [self._rng.choice(self._good)[1]]
        return [self._rng.choice(self._singles)]


def steers(draft: Plan) -> bool:
    """Whether hints can rank moves: stages that may trade layers, or samples that differ."""
    return differ(draft.batch) or any(len(chain) > 1 for chain in draft.chain.values())


def in_turn(moves: Sequence[Move]) -> list[Move]:
    """Interleave moves by kind, so that kinds with few moves are not behind those with many."""
    kinds: dict[type[Move], list[Move]] = {}
    for move in moves:
        kinds.setdefault(type(move), []).append(move)
    turns = zip_longest(*kinds.values())
    return [move for turn in turns for move in turn if move is not None]


def _weight(move: Move, draft: Plan, hints: Hints | None) -> float:
    """Preference for boundary moves whose giving stage has more of the critical path, and for small plans."""
    if isinstance(move, Keep):
        return 1 / _growth(move, draft)
    if hints is None or not isinstance(move, ShiftLayer):
        return 1.0
    giver_s = taker_s = 0.0
    for replica in draft.replicas(move.module):
        front, behind = draft.chain[move.module, replica][move.place : move.place + 2]
        giver, taker = (behind, front) if move.by > 0 else (front, behind)
        giver_s += hints.stages.get(giver.id, 0.0)
        taker_s += hints.stages.get(taker.id, 0.0)
    return 2.0 if giver_s > taker_s else 0.5


def _growth(move: Keep, draft: Plan) -> float:
    """How many times as many stages the move makes: a layer with sharded weights is a stage of its own."""
    if move.sharding is not Sharding.PARAMETERS:
        return 1.0
    split = [
        stage.layers[1] - stage.layers[0]
        for stage in draft.stages
        if move.module in (None, stage.module) and not draft.settings.of(stage.module).shards_parameters
    ]
    return 1 + (sum(split) - len(split)) / len(draft.stages)


def single_moves(
    space: Space, choice: Choice, draft: Plan, arrangement: Arrangement | None
) -> Iterator[Move]:
    """All moves from a choice, each once, but for regroupings of single samples.

    Args:
        draft: the choice's `draft_of`.
        arrangement: as of `Proposals`.
    """
    yield from _takes(space)
    if arrangement is not None:
        yield from map(Arrange, arrangements_near(space.job, choice, arrangement))
        if space.counts_ranks:
            yield from map(Arrange, with_fewer_replicas(arrangement))
    yield from map(Reschedule, _schedules(space.job, choice.schedule, draft))
    yield from _boundaries(draft)
    yield from map(RunEncodersAhead, LEADS)
    yield from map(CutStages, PIECES)
    yield from map(Regroup, Grouping)
    yield from _sizes(space.job, choice)
    yield from _memory(space.job, choice, draft)
    yield from _tokens(choice, draft)


def _takes(space: Space) -> Iterator[Move]:
    for question in Question:
        for name in space.starts:
            yield Take(question, name)


def _schedules(job: Job, current: Schedule, draft: Plan) -> Iterator[Schedule]:
    """Every kind with its usual settings, and with other virtual stages, limits, windows, run-ahead and
    offload.
    """
    blocks = len(
        {stage.flat_ranks for stage in draft.chain[job.model.llm.name, draft.replicas(job.model.llm.name)[0]]}
    )
    schedules: dict[Schedule, None] = {}
    for kind in dict.fromkeys((*ScheduleKind, job.schedule.kind)):  # the job's may be one of its own
        base = usual(kind)
        schedules[base] = None
        spec = base.spec
        if spec.takes_more_stages:
            schedules |= {replace(base, virtual_stages=base.virtual_stages + more): None for more in (1, 2)}
        if spec.most_in_flight is not None:  # the kind's own limit would be the same schedule
            limits = {blocks, 2 * blocks} - {spec.most_in_flight(blocks)}
            schedules |= {replace(base, memory_limit=limit): None for limit in sorted(limits)}
        if spec.takes("window"):
            schedules |= {replace(base, window=window): None for window in WINDOWS}
            schedules |= {replace(base, window=window, run_ahead=1): None for window in WINDOWS}
        elif spec.takes("run_ahead"):
            schedules |= {replace(base, run_ahead=ahead): None for ahead in LEADS}
        if spec.takes("offload"):
            schedules[replace(base, offload=True)] = None
    for schedule in schedules:
        if schedule != current:
            yield schedule


def _boundaries(draft: Plan) -> Iterator[Move]:
    for module in draft.model.modules:
        chain = draft.chain[module.name, draft.replicas(module.name)[0]]
        for index in range(len(chain) - 1):
            if chain[index].ranks == chain[index + 1].ranks:  # moving a layer changes no rank's work
                continue
            yield ShiftLayer(module.name, index, 1)
            yield ShiftLayer(module.name, index, -1)


def _sizes(job: Job, choice: Choice) -> Iterator[Move]:
    """Sizes that divide the batch, with a sample for each joint replica."""
    current = max(1, len(job.batch) // len(groups_of(job, choice.microbatches)))
    least = max(stage.joint_replicas for stage in choice.stages if stage.module == job.model.llm.name)
    for size in range(least, len(job.batch) + 1):
        if len(job.batch) % size == 0 and size != current:
            yield Resize(size)


def _memory(job: Job, choice: Choice, draft: Plan) -> Iterator[Move]:
    """Memory settings of each module and, if there are several, the same for all."""
    single_moves: list[Keep | Reshard] = list(dict.fromkeys(_memory_of_one(job, choice, draft)))
    yield from dict.fromkeys((*single_moves, *shardings(choice, draft)))
    if len(job.model.modules) > 1:
        yield from dict.fromkeys(map(_of_all_modules, single_moves))


def _of_all_modules(move: Keep | Reshard) -> Keep | Reshard:
    """The move for all modules, of which each recomputes all of its layers, if any."""
    if isinstance(move, Keep):
        return replace(move, module=None, recompute_layers=None)
    return replace(move, module=None)


def _memory_of_one(job: Job, choice: Choice, draft: Plan) -> Iterator[Keep | Reshard]:
    layouts = _plain_layouts(draft)
    one_replica = replace(job, layouts=layouts, settings=choice.settings, replicas=1, joint_replicas=1)
    for change in memory_neighbours(one_replica):
        try:
            settings = change.edit(one_replica).settings
        except ValueError:  # these degrees do not support the setting
            continue
        for module in job.model.modules:
            current, other = choice.settings.of(module.name), settings.of(module.name)
            if current.recompute is Recompute.NONE and other.recompute is Recompute.BLOCKS:
                continue  # slower, and tried from recomputing all where that makes room for something else
            if current.reshard_after is not other.reshard_after:
                yield Reshard(module.name, other.reshard_after)
            elif current != other and current.key_exchange is other.key_exchange:
                yield keep_of(other)


def _plain_layouts(draft: Plan) -> tuple[ModuleLayout, ...]:
    layouts = []
    for module in draft.model.modules:
        first = draft.chain[module.name, draft.replicas(module.name)[0]][0]
        layouts.append(ModuleLayout(module=module.name, tp=first.tp, cp=first.cp, pp=1))
    return tuple(layouts)


def _tokens(choice: Choice, draft: Plan) -> Iterator[Move]:
    modules = dict.fromkeys(stage.module for stage in draft.stages if stage.cp > 1)
    if modules:
        yield from (Distribute(rule) for rule in TokenRule if rule is not choice.tokens)
    for module in modules:
        for exchange in KeyExchange:
            if exchange is not choice.settings.of(module).key_exchange:
                yield ExchangeKeys(module, exchange)


def _regroupings(space: Space, draft: Plan, hints: Hints | None, rng: random.Random) -> Iterator[Move]:
    """Random exchanges, moves, deferrals and reorderings, preferring samples on the critical path.

    None if all samples are alike, or if other batches are judged too: positions in one batch say nothing
    about the others.
    """
    kinds = {sample.id: (sample.segments, sample.mask) for sample in draft.batch}
    if not differ(draft.batch) or space.varies:
        return
    llm = space.job.model.llm.name
    llm_microbatches = [microbatch for microbatch in draft.microbatches if microbatch.module == llm]
    microbatch_of = {item.sample: each for each in llm_microbatches for item in each.items}
    seconds = hints.sample_weights(draft) if hints is not None else {}
    least = float_sum(seconds.values()) / len(kinds) or 1.0
    ids = list(kinds)
    weights = [least + seconds.get(sample, 0.0) for sample in ids]
    while True:
        (first,) = rng.choices(ids, weights)
        source = microbatch_of[first]
        target = rng.choice(llm_microbatches)
        others = [s for s in ids if kinds[s] != kinds[first] and microbatch_of[s] is not source]
        draw = rng.random()
        if draw < EXCHANGED and others:
            yield Exchange(first, rng.choice(others))
        elif draw < EXCHANGED + REORDERED and target.replica == source.replica and target is not source:
            yield Reorder(source.replica, source.index, target.index)
        elif len(source.rows) > 1 and target is not source:
            yield MoveSample(first, target.replica, target.index, deferred=rng.random() < DEFERRED)
        elif others:
            yield Exchange(first, rng.choice(others))
        elif len(llm_microbatches) > 1:
            yield Reorder(source.replica, source.index, rng.randrange(len(llm_microbatches)))
        else:
            return
