"""The joint search: rounds of candidates from the best plans so far, never worse than any strategy's plan."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import islice
from math import inf

from workbench.collector import collector_paused
from workbench.cost.model import CostModel
from workbench.job.job import Job
from workbench.plan.plan import Plan
from workbench.planner.strategy_spec import Planner
from workbench.search.joint.arrangement import arrangement_of
from workbench.search.joint.choice import Choice, draft_of
from workbench.search.joint.credit import Credit
from workbench.search.joint.evaluate import UNCHANGED, Asked, Judge, Outcome, changed, plan_of
from workbench.search.joint.fewer_ranks import fewer_ranks
from workbench.search.joint.found import Entry, Found, State, path_of, value_of
from workbench.search.joint.hints import hints_of
from workbench.search.joint.incumbents import HELD, MOST_INCUMBENTS, Incumbent, admitted, shares
from workbench.search.joint.move import Space
from workbench.search.joint.own_spaces import OWN_SPACES
from workbench.search.joint.proposals import Moves, Proposals, steers
from workbench.search.joint.question import Question
from workbench.search.joint.replan import Replan, Replans
from workbench.search.joint.seeds import seeds
from workbench.search.joint.starting import planned_starts
from workbench.search.joint.starts import Start
from workbench.search.joint.take import taken
from workbench.search.joint.terms import Scope, Stop
from workbench.search.joint.worker_pool import WorkerSpec, worker_pool
from workbench.search.joint.workers import Workers
from workbench.search.objectives.archive import Archive
from workbench.search.objectives.plan_judge import PlanJudge
from workbench.search.objectives.race import race_of
from workbench.search.objectives.step_times import OverBatches
from workbench.strategies.registry import PLANNERS, PRICED

ROUND = 24  # candidates between two looks at what they gave
REPLANNED = 0.4  # of a round's effort besides, at first, plans of strategies for neighbouring jobs
LEAST_REPLANNED, MOST_REPLANNED = 0.25, 0.6  # later, by what has gained how much for its effort
SEEDED = 9  # of a round besides, plain and likely layouts
FIRST_SEEDED = 24  # of the first round
ANYWHERE = Scope()


@dataclass(slots=True)
class _Search:
    """What changes while a search runs."""

    space: Space
    judge: Judge
    questions: frozenset[Question]
    rng: random.Random
    incumbents: list[Incumbent]
    origin: Incumbent
    replans: Replans | None
    log: list[Entry] = field(default_factory=list)
    candidates: int = 0
    seen: set[Choice] = field(default_factory=set)
    replanned: Credit = field(default_factory=lambda: Credit(REPLANNED))
    moved: Credit = field(default_factory=lambda: Credit(1 - REPLANNED))
    seeded: Iterator[Moves] = field(default_factory=lambda: iter(()))
    front: Archive[tuple[int, Choice, Moves]] = field(default_factory=Archive)

    def round(self) -> list[tuple[Incumbent, Moves]]:
        """The next candidates: seeds first, then plans of strategies, then of some incumbents their share."""
        seeded = islice(self.seeded, SEEDED if self.log else FIRST_SEEDED)
        asked: list[tuple[Incumbent, Moves]] = [(self.incumbents[0], moves) for moves in seeded]
        if self.replans is not None:
            asked += [(self.origin, (move,)) for move in self.replans.next(self._replans_effort())]
        for incumbent, count in shares(self.incumbents, ROUND):
            if incumbent.proposals is None:
                incumbent.proposals = self._proposals(incumbent)
            asked += [(incumbent, moves) for moves in incumbent.proposals.next(count, self.seen)]
        return asked

    def _replans_effort(self) -> float:
        """Of a round, for plans of strategies: their share by what they have gained for their effort."""
        share = self.replanned.rate / (self.replanned.rate + self.moved.rate)
        share = min(MOST_REPLANNED, max(LEAST_REPLANNED, share))
        self.replanned.fade()
        self.moved.fade()
        return ROUND * share / (1 - share)

    def limit(self, moves: Moves) -> float:
        """A candidate of these moves with a value above it is seldom of use."""
        held = self.incumbents[HELD - 1].value if len(self.incumbents) >= HELD else inf
        if self.replans is not None and isinstance(moves[0], Replan):
            return max(held, self.replans.limit(moves[0]))
        return held

    def _proposals(self, incumbent: Incumbent) -> Proposals:
        space, choice = self.space, incumbent.choice
        draft = draft_of(space.job, choice)
        arrangement = arrangement_of(space.job, choice.stages, choice.schedule, draft, space.cost)
        return Proposals(
            space,
            choice,
            arrangement=arrangement,
            hints=hints_of(plan_of(space, choice), self.judge) if steers(draft) else None,
            questions=self.questions,
            rng=random.Random(self.rng.random()),
            first=incumbent.first,
        )

    def took(self, asked: Sequence[tuple[Incumbent, Moves]], outcomes: Sequence[Outcome]) -> None:
        """Log what candidates gave; the best become incumbents."""
        for (incumbent, moves), outcome in zip(asked, outcomes, strict=False):
            index = len(self.log) + 1
            before = self.incumbents[0].value
            accepted = self._admitted(incumbent, moves, outcome, index)
            self.candidates += outcome.value is not None
            if outcome.costs:
                self.front.add(outcome.costs, (index, incumbent.choice, moves))
            if self.replans is not None and isinstance(moves[0], Replan):
                self.replans.learn(moves[0], outcome.value, self.space.job)
            elif incumbent.proposals is not None:
                incumbent.tried += 1
                if outcome.value is not None:
                    incumbent.proposals.learn(moves, loss=outcome.value / incumbent.value - 1)
            replan = moves[0] if isinstance(moves[0], Replan) else None
            of_kind = self.moved if replan is None else self.replanned
            effort = 1.0 if replan is None else OWN_SPACES[replan.strategy].effort
            of_kind.add(effort, before, self.incumbents[0].value)
            entry = Entry(
                index=index,
                base=incumbent.index,
                moves=moves,
                value=outcome.value,
                refusal=outcome.refusal,
                accepted=accepted,
            )
            self.log.append(entry)

    def _admitted(self, base: Incumbent, moves: Moves, outcome: Outcome, index: int) -> bool:
        value = outcome.value
        if value is None or (len(self.incumbents) == MOST_INCUMBENTS and value >= self.incumbents[-1].value):
            return False
        start = moves[0].strategy if isinstance(moves[0], Replan) else base.start
        choice = changed(self.space, base.choice, moves)
        taken = Incumbent(value, choice, index, start, outcome.batches_s)
        if start == base.start and base.proposals is not None:
            taken.first = tuple(move for move in base.proposals.best if move not in moves)
        incumbents = admitted(self.incumbents, taken)
        self.incumbents = self.incumbents if incumbents is None else incumbents
        return incumbents is not None


def joint_search(
    job: Job,
    cost: CostModel,
    judge: Judge,
    *,
    stop: Stop,
    scope: Scope = ANYWHERE,
    workers: WorkerSpec = 1,
    progress: Callable[[State], None] = lambda state: None,
) -> Found:
    """The best plan of a job over all questions together, by a judge.

    Starts are the plans of all strategies, on the job as it is and with its layouts left open, and on fewer
    ranks where the judge counts them; so the answer is never worse than any of them. From the best choices
    come rounds of candidates: answers of other strategies to single questions, likely layouts, moves that the
    critical path points at, random regroupings, and several moves at once. Stopped by gap or candidates, the
    answer depends on nothing but the arguments and the seed, whatever the workers; stopped by time or asked
    to end, on how far it came: `log` says it.

    Args:
        judge: lower is better; several workers pickle it, with job and cost model.
        stop: when it ends.
        scope: its seed, what is fixed, whose plans it starts from.
        workers: processes of this machine, >= 1, or workers of a Ray cluster.
        progress: told how far the search is, after each start and after every round.

    Raises:
        ValueError: no strategy has a plan, a fixed answer of a strategy without one, or fixed answers that
            do not go together.
    """
    began_s = stop.clock()
    parts = fewer_ranks(job, cost, judge)
    space = Space(
        job,
        cost,
        {},
        _planners(job, scope),
        counts_ranks=bool(parts),
        keeps_front=scope.keeps_front,
        varies=_varies(judge),
    )
    with worker_pool(space, judge, workers) as pool:
        least = cache(partial(scope.lower, job, cost))

        def told(best: Start) -> None:
            progress(_planning(best, least(None), stop.clock() - began_s))

        starts = scope.starts or planned_starts(space, pool, stop, began_s, told, parts)
        started_s = stop.clock()
        held = _begun_at(starts, space, judge, scope, pool)
        held.seeded = seeds(job, cost, held.questions, [part.job for part in parts if part.is_front])
        first = held.incumbents[0]
        bound = min(least(first.choice if Question.LAYOUT in scope.fixed else None), first.value)
        _run(held, pool, stop, began_s, bound, progress)
    ended_s = stop.clock()
    return _found(held, starts, bound, (ended_s - began_s, ended_s - started_s))


def _planning(best: Start, bound: float, seconds: float) -> State:
    """How far a search is that still plans what it starts from."""
    value = value_of(best)
    return State(
        best=value, best_from=best.name, lower_bound=min(bound, value), candidates=0, seconds=seconds
    )


def _begun_at(starts: Sequence[Start], space: Space, judge: Judge, scope: Scope, pool: Workers) -> _Search:
    """A search before its first round, whose space knows what it starts from."""
    valued = [(each.name, value_of(each), each.choice) for each in starts if each.choice is not None]
    space.starts.update({name: choice for name, _, choice in valued})
    incumbents = _first_incumbents(space, starts, scope.fixed, pool)
    questions = frozenset(Question) - set(scope.fixed)
    rng = random.Random(scope.seed)
    replans = None
    if not scope.fixed:
        replans = Replans(space.job, space.planners, valued, random.Random(rng.random()))
    return _Search(space, judge, questions, rng, _unlike(incumbents), incumbents[0], replans)


def searched_starts(
    job: Job, cost: CostModel, judge: Judge, *, stop: Stop, scope: Scope = ANYWHERE, workers: WorkerSpec = 1
) -> tuple[Start, ...]:
    """What `joint_search` starts from, for several searches of one job; arguments and errors as there."""
    space = Space(job, cost, {}, _planners(job, scope))
    with worker_pool(space, judge, workers) as pool:
        parts = fewer_ranks(job, cost, judge)
        return planned_starts(space, pool, stop, stop.clock(), parts=parts)


def _varies(judge: Judge) -> bool:
    times = judge.times if isinstance(judge, PlanJudge) else None
    return isinstance(times, OverBatches) and len(times.batches) > 1


def _planners(job: Job, scope: Scope) -> Mapping[str, Planner]:
    if scope.planners is not None:
        return scope.planners
    return PLANNERS | (PRICED if job.has_prices else {})


def _first_incumbents(
    space: Space, starts: Sequence[Start], fixed: Mapping[Question, str], pool: Workers
) -> list[Incumbent]:
    """The starts, best first; with fixed questions, each with those answers."""
    valued = [start for start in starts if start.value is not None and start.choice is not None]
    incumbents = [
        Incumbent(value_of(start), start.choice, start.name, start.name, start.batches_s)
        for start in valued
        if start.choice
    ]
    if fixed:
        incumbents = _with_fixed(space, incumbents, fixed, pool)
    distinct: dict[float, Incumbent] = {}
    for incumbent in sorted(incumbents, key=lambda incumbent: incumbent.value):
        distinct.setdefault(incumbent.value, incumbent)
    return list(distinct.values())


def _unlike(incumbents: Sequence[Incumbent]) -> list[Incumbent]:
    """The best of them in all places."""
    found: list[Incumbent] = []
    for incumbent in incumbents:
        found = admitted(found, incumbent) or found
    return found


def _with_fixed(
    space: Space,
    incumbents: Sequence[Incumbent],
    fixed: Mapping[Question, str],
    pool: Workers,
) -> list[Incumbent]:
    moves = taken(space, fixed)
    found, refusal = [], ""
    outcomes = pool.outcomes(space, [Asked(incumbent.choice, moves) for incumbent in incumbents])
    for incumbent, outcome in zip(incumbents, outcomes, strict=True):
        if outcome.value is not None:
            choice = changed(space, incumbent.choice, moves)
            found.append(
                Incumbent(outcome.value, choice, incumbent.index, incumbent.start, outcome.batches_s)
            )
        elif outcome.refusal == UNCHANGED:
            found.append(incumbent)
        refusal = refusal or outcome.refusal
    if not found:
        told = ", ".join(f"{question} of {name}" for question, name in fixed.items())
        raise ValueError(f"joint search: no plan has {told}: {refusal}")
    return found


def _run(
    held: _Search,
    pool: Workers,
    stop: Stop,
    began_s: float,
    bound: float,
    progress: Callable[[State], None],
) -> None:
    while True:
        best = held.incumbents[0]
        state = State(
            best=best.value,
            best_from=best.start,
            lower_bound=bound,
            candidates=held.candidates,
            seconds=stop.clock() - began_s,
        )
        progress(state)
        if _is_over(state, stop):
            return
        if not _has_looked(held, pool, stop, began_s):
            return


@collector_paused()
def _has_looked(held: _Search, pool: Workers, stop: Stop, began_s: float) -> bool:
    """One round: what the next candidates give. Whether there were any."""
    asked = held.round()
    if not asked:
        return False
    outcomes: list[Outcome] = []
    race = race_of([incumbent.batches_s for incumbent in held.incumbents])
    candidates = [Asked(incumbent.choice, moves, held.limit(moves), race) for incumbent, moves in asked]
    for outcome in pool.outcomes(held.space, candidates):
        outcomes.append(outcome)
        if stop.seconds is not None and stop.clock() - began_s > stop.seconds:
            break
        if stop.candidates is not None and held.candidates + _valued(outcomes) >= stop.candidates:
            break
        if stop.is_asked():
            break
    held.took(asked, outcomes)
    return True


def _valued(outcomes: Sequence[Outcome]) -> int:
    return sum(outcome.value is not None for outcome in outcomes)


def _is_over(state: State, stop: Stop) -> bool:
    late = stop.seconds is not None and state.seconds > stop.seconds
    near = stop.gap is not None and state.gap <= stop.gap
    enough = stop.candidates is not None and state.candidates >= stop.candidates
    return late or near or enough or stop.is_asked()


def _found(held: _Search, starts: Sequence[Start], bound: float, times_s: tuple[float, float]) -> Found:
    best, *others = held.incumbents
    plan = next((s.plan for s in starts if s.name == best.index and s.plan is not None), None)
    if plan is None or held.space.starts.get(best.start) != best.choice:
        plan = plan_of(held.space, best.choice)
    return Found(
        plan=plan,
        value=best.value,
        best_from=best.start,
        path=path_of(held.log, best.index),
        lower_bound=bound,
        candidates=held.candidates,
        seconds=times_s[0],
        search_s=times_s[1],
        starts=tuple(starts),
        log=tuple(held.log),
        runners_up=tuple((incumbent.value, plan_of(held.space, incumbent.choice)) for incumbent in others),
        front=tuple(_front(held)),
    )


def _front(held: _Search) -> Iterator[tuple[int, Plan]]:
    """Made again; those that are held are among the others."""
    incumbents = {incumbent.index for incumbent in held.incumbents}
    for index, base, moves in held.front:
        if index not in incumbents:
            yield index, plan_of(held.space, changed(held.space, base, moves))
