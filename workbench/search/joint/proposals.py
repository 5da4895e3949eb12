"""Moves to try from a choice: what the critical path points at, then others, then several at once."""

import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import islice, zip_longest

from workbench.explain.neighbours import ChangeKind, neighbours
from workbench.job.job import Job, ModuleLayout
from workbench.plan.plan import KeyExchange, Plan
from workbench.planner.groupings import Grouping, differ, groups_of, llm_of
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
from workbench.search.joint.setting_moves import Distribute, ExchangeKeys, Keep, shardings
from workbench.search.joint.take import Take

Moves = tuple[Move, ...]
MOST_AT_ONCE = 3
REGROUPED = 0.3  # of moves among others: random regroupings
PROVEN = 0.7  # of the others: moves that cost next to nothing alone
LITTLE = 0.01  # of the value
EXCHANGED, REORDERED, DEFERRED = 0.5, 0.25, 0.4  # of regroupings; the last of samples that move
LEADS = (1, 2, 4)
PIECES = (1, 2, 4, 8)
WINDOWS = (1, 2, 4, 8)
QUICK = (Exchange, MoveSample, Reorder, Resize, ShiftLayer, Distribute, ExchangeKeys, Keep)  # to apply
REPEATED = 200  # candidates one after the other that were tried before: there may be no other


class Proposals:
    """Moves to try from a choice, without end where a question is open that has any.

    Single moves come first, each once, a kind in turn, those with weight on the critical path ahead of their
    kind, with random regroupings between them; then two or three together, more often of those that cost
    little alone.

    Args:
        arrangement: of the choice; None: no placement says it, and only the whole arrangements of others
            are tried.
        hints: of the choice's plan; None: not known.
        questions: that are open.
        rng: of all draws.
        first: single moves that gained something elsewhere.
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
        singles = [move for move in _singles(space, choice, draft, arrangement) if move.question in questions]
        weighted = [(_weight(move, draft, hints) * rng.random(), move) for move in singles]
        self._singles = _in_turn([move for _, move in sorted(weighted, key=lambda pair: -pair[0])])
        regroups = Question.GROUPING in questions
        self._regroupings = _regroupings(space, draft, hints, rng) if regroups else iter(())
        self._rng, self._space, self._choice = rng, space, choice
        self._good: list[tuple[float, Move]] = []
        self._asked: set[Moves] = set()
        self._moves = self._all([move for move in first if move.question in questions])

    def next(self, count: int, seen: set[Choice]) -> list[Moves]:
        """So many more, or as many as there are.

        Args:
            seen: choices that were tried, from this one or others: what gives one of them is left out, as
                far as it is quick to say; those that are new are added.
        """
        found: list[Moves] = []
        repeated = 0
        for moves in self._moves:
            repeated = 0 if self._is_new(moves, seen) else repeated + 1
            found += [moves] * (repeated == 0)
            if len(found) == count or repeated == REPEATED:
                break
        return found

    def _is_new(self, moves: Moves, seen: set[Choice]) -> bool:
        if moves in self._asked:
            return False
        self._asked.add(moves)
        if not all(isinstance(move, QUICK) for move in moves):
            return True
        try:
            choice = changed(self._space, self._choice, moves)
        except ValueError:  # samples that do not go there
            return False
        if choice == self._choice or choice in seen:
            return False
        seen.add(choice)
        return True

    def learn(self, moves: Moves, *, loss: float) -> None:
        """What a candidate gave: a single move that costs next to nothing is worth a try among others."""
        if len(moves) == 1 and loss < LITTLE:
            self._good.append((loss, moves[0]))

    @property
    def best(self) -> list[Move]:
        """Single moves that gained something, those that gained most first."""
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
    """Whether hints say anything: of stages that may give layers to one another, or samples that differ."""
    return differ(draft.batch) or any(len(chain) > 1 for chain in draft.chain.values())


def _in_turn(moves: Sequence[Move]) -> list[Move]:
    """One of every kind in turn, so that kinds with few moves are not behind those with many."""
    kinds: dict[type[Move], list[Move]] = {}
    for move in moves:
        kinds.setdefault(type(move), []).append(move)
    turns = zip_longest(*kinds.values())
    return [move for turn in turns for move in turn if move is not None]


def _weight(move: Move, draft: Plan, hints: Hints | None) -> float:
    """Of a boundary: how much more of the critical path the stage that gives a layer has."""
    if hints is None or not isinstance(move, ShiftLayer):
        return 1.0
    given = kept = 0.0
    for replica in draft.replicas(move.module):
        front, behind = draft.chain[move.module, replica][move.place : move.place + 2]
        giver, taker = (behind, front) if move.by > 0 else (front, behind)
        given += hints.stages.get(giver.id, 0.0)
        kept += hints.stages.get(taker.id, 0.0)
    return 2.0 if given > kept else 0.5


def _singles(space: Space, choice: Choice, draft: Plan, arrangement: Arrangement | None) -> Iterator[Move]:
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


def _schedules(job: Job, now: Schedule, draft: Plan) -> Iterator[Schedule]:
    """Every kind as usual, with more virtual stages, limits, windows, forwards ahead and offload."""
    blocks = len({stage.flat_ranks for stage in draft.chain[llm_of(job), draft.replicas(llm_of(job))[0]]})
    found: dict[Schedule, None] = {}
    for kind in ScheduleKind:
        base = usual(kind)
        found[base] = None
        spec = kind.spec
        if spec.takes_more_stages:
            found |= {replace(base, virtual_stages=base.virtual_stages + more): None for more in (1, 2)}
        if spec.most_in_flight is not None:  # a limit that is the kind's own is no other schedule
            limits = {blocks, 2 * blocks} - {spec.most_in_flight(blocks)}
            found |= {replace(base, memory_limit=limit): None for limit in sorted(limits)}
        if spec.takes("window"):
            found |= {replace(base, window=window): None for window in WINDOWS}
            found |= {replace(base, window=window, run_ahead=1): None for window in WINDOWS}
        elif spec.takes("run_ahead"):
            found |= {replace(base, run_ahead=ahead): None for ahead in LEADS}
        if spec.takes("offload"):
            found[replace(base, offload=True)] = None
    for schedule in found:
        if schedule != now:
            yield schedule


def _boundaries(draft: Plan) -> Iterator[Move]:
    for module in draft.model.modules:
        chain = draft.chain[module.name, draft.replicas(module.name)[0]]
        for place in range(len(chain) - 1):
            if chain[place].ranks == chain[place + 1].ranks:  # the same ranks do both
                continue
            yield ShiftLayer(module.name, place, 1)
            yield ShiftLayer(module.name, place, -1)


def _sizes(job: Job, choice: Choice) -> Iterator[Move]:
    now = max(1, len(job.batch) // len(groups_of(job, choice.microbatches)))
    for size in range(1, len(job.batch) + 1):
        if len(job.batch) % size == 0 and size != now:
            yield Resize(size)


def _memory(job: Job, choice: Choice, draft: Plan) -> Iterator[Move]:
    """Of one module and, where there are several, the same of all."""
    own = list(dict.fromkeys(_memory_of_one(job, choice, draft)))
    yield from dict.fromkeys((*own, *shardings(choice, draft)))
    if len(job.model.modules) > 1:
        yield from dict.fromkeys(replace(move, module=None) for move in own)


def _memory_of_one(job: Job, choice: Choice, draft: Plan) -> Iterator[Keep]:
    held = replace(job, layouts=_plain_layouts(draft), settings=choice.settings, replicas=1)
    for change in neighbours(held):
        if change.kind not in (ChangeKind.ACTIVATIONS, ChangeKind.SHARDING):
            continue
        try:
            settings = change.edit(held).settings
        except ValueError:  # a setting that these degrees do not take
            continue
        for module in job.model.modules:
            own, other = choice.settings.of(module.name), settings.of(module.name)
            if own != other and own.key_exchange is other.key_exchange:
                yield Keep(
                    module.name, other.recompute, other.sharding, other.instances, other.sequence_parallel
                )


def _plain_layouts(draft: Plan) -> tuple[ModuleLayout, ...]:
    found = []
    for module in draft.model.modules:
        first = draft.chain[module.name, draft.replicas(module.name)[0]][0]
        found.append(ModuleLayout(module=module.name, tp=first.tp, cp=first.cp, pp=1))
    return tuple(found)


def _tokens(choice: Choice, draft: Plan) -> Iterator[Move]:
    shared = dict.fromkeys(stage.module for stage in draft.stages if stage.cp > 1)
    if shared:
        yield from (Distribute(rule) for rule in TokenRule if rule is not choice.tokens)
    for module in shared:
        for way in KeyExchange:
            if way is not choice.settings.of(module).key_exchange:
                yield ExchangeKeys(module, way)


def _regroupings(space: Space, draft: Plan, hints: Hints | None, rng: random.Random) -> Iterator[Move]:
    """Random exchanges, moves, deferrals and reorderings, of samples on the critical path more often.

    None where all samples are alike, or where other batches are judged too: what stands where in one of
    them says nothing about the others.
    """
    kinds = {sample.id: (sample.segments, sample.mask) for sample in draft.batch}
    if not differ(draft.batch) or space.varies:
        return
    llm = llm_of(space.job)
    held = [microbatch for microbatch in draft.microbatches if microbatch.module == llm]
    where = {item.sample: each for each in held for item in each.items}
    seconds = hints.sample_weights(draft) if hints is not None else {}
    least = sum(seconds.values()) / len(kinds) or 1.0
    ids = list(kinds)
    weights = [least + seconds.get(sample, 0.0) for sample in ids]
    while True:
        (first,) = rng.choices(ids, weights)
        own = where[first]
        target = rng.choice(held)
        others = [s for s in ids if kinds[s] != kinds[first] and where[s] is not own]
        draw = rng.random()
        if draw < EXCHANGED and others:
            yield Exchange(first, rng.choice(others))
        elif draw < EXCHANGED + REORDERED and target.replica == own.replica and target is not own:
            yield Reorder(own.replica, own.index, target.index)
        elif len(own.rows) > 1 and target is not own:
            yield MoveSample(first, target.replica, target.index, deferred=rng.random() < DEFERRED)
        elif others:
            yield Exchange(first, rng.choice(others))
        elif len(held) > 1:
            yield Reorder(own.replica, own.index, rng.randrange(len(held)))
        else:
            return
