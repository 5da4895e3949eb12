"""The joint search: rounds of candidates derived from the best plans so far, never worse than any strategy's
plan.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from workbench.search.joint.evaluate import UNCHANGED, Judge, Outcome, Request, changed, plan_of
from workbench.search.joint.fewer_ranks import fewer_ranks
from workbench.search.joint.hints import hints_of
from workbench.search.joint.incumbents import HELD, MOST_INCUMBENTS, Incumbent, admitted, shares
from workbench.search.joint.move import Space
from workbench.search.joint.own_spaces import OWN_SPACES
from workbench.search.joint.proposals import Moves, Proposals, steers
from workbench.search.joint.question import Question
from workbench.search.joint.replan import Replan, Replans
from workbench.search.joint.result import Entry, SearchResult, State, path_of, value_of
from workbench.search.joint.seeds import seeds
from workbench.search.joint.starting import planned_starts
from workbench.search.joint.starts import Start
from workbench.search.joint.take import take_moves
from workbench.search.joint.terms import Scope, Stop
from workbench.search.joint.worker_pool import WorkerSpec, worker_pool
from workbench.search.joint.workers import Workers
from workbench.search.objectives.archive import Archive
from workbench.search.objectives.plan_judge import PlanJudge
from workbench.search.objectives.race import race_of
from workbench.search.objectives.step_times import OverBatches
from workbench.strategies.registry import PLANNERS, PRICED

ROUND = 24  # moves per round: results are used when the whole round is done
REPLANNED = 0.4  # initial share of a round's effort for strategies' plans of neighbouring jobs
LEAST_REPLANNED, MOST_REPLANNED = 0.25, 0.6  # limits of that share, which follows gain per effort
SEEDED = 9  # plain and likely layouts added to every round
FIRST_SEEDED = 24  # those added to the first round
ANYWHERE = Scope()


@dataclass(slots=True)
class _Search:
    """The mutable state of a running search."""

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
        """Requests of the next round: seeds, then strategies' plans, then moves from some incumbents."""
        seeded = islice(self.seeded, SEEDED if self.log else FIRST_SEEDED)
        requests: list[tuple[Incumbent, Moves]] = [(self.incumbents[0], moves) for moves in seeded]
        if self.replans is not None:
            requests += [(self.origin, (move,)) for move in self.replans.next(self._replans_effort())]
        for incumbent, count in shares(self.incumbents, ROUND):
            if incumbent.proposals is None:
                incumbent.proposals = self._proposals(incumbent)
            requests += [(incumbent, moves) for moves in incumbent.proposals.next(count, self.seen)]
        return requests

    def _replans_effort(self) -> float:
        """Effort for strategies' plans in the next round: their share by gain per effort."""
        share = self.replanned.rate / (self.replanned.rate + self.moved.rate)
        share = min(MOST_REPLANNED, max(LEAST_REPLANNED, share))
        self.replanned.fade()
        self.moved.fade()
        return ROUND * share / (1 - share)

    def limit(self, moves: Moves) -> float:
        """The value above which a candidate of these moves is seldom useful."""
        limit = self.incumbents[HELD - 1].value if len(self.incumbents) >= HELD else inf
        if self.replans is not None and isinstance(moves[0], Replan):
            return max(limit, self.replans.limit(moves[0]))
        return limit

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

    def learn(self, requests: Sequence[tuple[Incumbent, Moves]], outcomes: Sequence[Outcome]) -> None:
        """Log the outcomes, credit the moves, and make the best candidates incumbents."""
        for (incumbent, moves), outcome in zip(requests, outcomes, strict=False):
            index = len(self.log) + 1
            before = self.incumbents[0].value
            accepted = self._admit(incumbent, moves, outcome, index)
            self.candidates += outcome.value is not None
            if outcome.costs:
                self.front.add(outcome.costs, (index, incumbent.choice, moves))
            if self.replans is not None and isinstance(moves[0], Replan):
                self.replans.learn(moves[0], outcome.value, self.space.job)
            elif incumbent.proposals is not None:
                incumbent.tried += incumbent.effort / self.incumbents[0].effort
                if outcome.value is not None:
                    incumbent.proposals.learn(moves, loss=outcome.value / incumbent.value - 1)
            replan = moves[0] if isinstance(moves[0], Replan) else None
            credit = self.moved if replan is None else self.replanned
            effort = 1.0 if replan is None else OWN_SPACES[replan.strategy].effort
            credit.add(effort, before, self.incumbents[0].value)
            entry = Entry(
                index=index,
                base=incumbent.index,
                moves=moves,
                value=outcome.value,
                refusal=outcome.refusal,
                accepted=accepted,
            )
            self.log.append(entry)

    def _admit(self, base: Incumbent, moves: Moves, outcome: Outcome, index: int) -> bool:
        value = outcome.value
        if value is None or (len(self.incumbents) == MOST_INCUMBENTS and value >= self.incumbents[-1].value):
            return False
        start = moves[0].strategy if isinstance(moves[0], Replan) else base.start
        choice = changed(self.space, base.choice, moves)
        candidate = Incumbent(value, choice, index, start, outcome.batches_s, outcome.effort)
        if start == base.start and base.proposals is not None:
            candidate.first = tuple(move for move in base.proposals.best if move not in moves)
        incumbents = admitted(self.incumbents, candidate)
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
) -> SearchResult:
    """Search all questions together and return the best plan of a job by a judge.

    The search starts from the plans of all strategies, for the job as it is and with its layouts left open,
    and on fewer ranks if the judge counts ranks, so that the result is never worse than any of them. Rounds
    of candidates follow from the best choices: other strategies' answers to single questions, likely
    layouts, moves suggested by the critical path, random regroupings, and combinations of moves. If it
    stops by gap or number of candidates, the result depends on nothing but the arguments and the seed, for
    any number of workers; if it stops by time or on request, it depends on how far the search came, which
    `log` records.

    Args:
        judge: lower is better; with several workers it is pickled, as are job and cost model.
        stop: when to end.
        scope: seed, fixed questions, and strategies to start from.
        workers: number of processes on this machine, >= 1, or workers of a Ray cluster.
        progress: called with the state of the search after each start and after every round.

    Raises:
        ValueError: no strategy has a plan, an answer is fixed to a strategy without one, or the fixed
            answers are incompatible.
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
        varies=_judges_batches(judge),
    )
    with worker_pool(space, judge, workers) as pool:
        bound_of = cache(partial(scope.lower, job, cost))

        def report(best: Start) -> None:
            progress(_planning_state(best, bound_of(None), stop.clock() - began_s))

        starts = scope.starts or planned_starts(space, pool, stop, began_s, report, parts)
        planned_s = stop.clock()
        search = _prepared(starts, space, judge, scope, pool)
        search.seeded = seeds(job, cost, search.questions, [part.job for part in parts if part.is_prefix])
        first = search.incumbents[0]
        bound = min(bound_of(first.choice if Question.LAYOUT in scope.fixed else None), first.value)
        _run(search, pool, stop, began_s, bound, progress)
    ended_s = stop.clock()
    return _result(search, starts, bound, (ended_s - began_s, ended_s - planned_s))


def _planning_state(best: Start, bound: float, seconds: float) -> State:
    """The state of a search that is still planning its starts."""
    value = value_of(best)
    return State(
        best=value, best_from=best.name, lower_bound=min(bound, value), candidates=0, seconds=seconds
    )


def _prepared(starts: Sequence[Start], space: Space, judge: Judge, scope: Scope, pool: Workers) -> _Search:
    """The search before its first round; adds the starts' choices to the space."""
    valued = [(start.name, value_of(start), start.choice) for start in starts if start.choice is not None]
    space.starts.update({name: choice for name, _, choice in valued})
    incumbents = _first_incumbents(space, starts, scope.fixed, pool)
    questions = frozenset(Question) - set(scope.fixed)
    rng = random.Random(scope.seed)
    replans = None
    if not scope.fixed:
        replans = Replans(space.job, space.planners, valued, random.Random(rng.random()))
    return _Search(space, judge, questions, rng, _admitted_in_turn(incumbents), incumbents[0], replans)


def searched_starts(
    job: Job, cost: CostModel, judge: Judge, *, stop: Stop, scope: Scope = ANYWHERE, workers: WorkerSpec = 1
) -> tuple[Start, ...]:
    """Plan the starts of `joint_search` once for several searches of a job; arguments and errors as there."""
    space = Space(job, cost, {}, _planners(job, scope))
    with worker_pool(space, judge, workers) as pool:
        parts = fewer_ranks(job, cost, judge)
        return planned_starts(space, pool, stop, stop.clock(), parts=parts)


def _judges_batches(judge: Judge) -> bool:
    """Whether the judge evaluates plans on more than one batch."""
    times = judge.times if isinstance(judge, PlanJudge) else None
    return isinstance(times, OverBatches) and len(times.batches) > 1


def _planners(job: Job, scope: Scope) -> Mapping[str, Planner]:
    if scope.planners is not None:
        return scope.planners
    return PLANNERS | (PRICED if job.has_prices else {})


def _first_incumbents(
    space: Space, starts: Sequence[Start], fixed: Mapping[Question, str], pool: Workers
) -> list[Incumbent]:
    """The starts, best first, without equal values; with fixed questions, each with those answers applied."""
    valued = [start for start in starts if start.value is not None and start.choice is not None]
    incumbents = [
        Incumbent(value_of(start), start.choice, start.name, start.name, start.batches_s, start.effort)
        for start in valued
        if start.choice
    ]
    if fixed:
        incumbents = _with_fixed(space, incumbents, fixed, pool)
    distinct: dict[float, Incumbent] = {}
    for incumbent in sorted(incumbents, key=lambda incumbent: incumbent.value):
        distinct.setdefault(incumbent.value, incumbent)
    return list(distinct.values())


def _admitted_in_turn(incumbents: Sequence[Incumbent]) -> list[Incumbent]:
    """The incumbents that remain when all are admitted one by one."""
    kept: list[Incumbent] = []
    for incumbent in incumbents:
        kept = admitted(kept, incumbent) or kept
    return kept


def _with_fixed(
    space: Space,
    incumbents: Sequence[Incumbent],
    fixed: Mapping[Question, str],
    pool: Workers,
) -> list[Incumbent]:
    """Each incumbent with the fixed answers applied; ValueError if none allows them."""
    moves = take_moves(space, fixed)
    fixed_incumbents, refusal = [], ""
    outcomes = pool.outcomes(space, [Request(incumbent.choice, moves) for incumbent in incumbents])
    for incumbent, outcome in zip(incumbents, outcomes, strict=True):
        if outcome.value is not None:
            choice = changed(space, incumbent.choice, moves)
            fixed_incumbents.append(
                replace(
                    incumbent,
                    value=outcome.value,
                    choice=choice,
                    batches_s=outcome.batches_s,
                    effort=outcome.effort,
                )
            )
        elif outcome.refusal == UNCHANGED:
            fixed_incumbents.append(incumbent)
        refusal = refusal or outcome.refusal
    if not fixed_incumbents:
        answers = ", ".join(f"{question} of {name}" for question, name in fixed.items())
        raise ValueError(f"joint search: no plan has {answers}: {refusal}")
    return fixed_incumbents


def _run(
    search: _Search,
    pool: Workers,
    stop: Stop,
    began_s: float,
    bound: float,
    progress: Callable[[State], None],
) -> None:
    while True:
        best = search.incumbents[0]
        state = State(
            best=best.value,
            best_from=best.start,
            lower_bound=bound,
            candidates=search.candidates,
            seconds=stop.clock() - began_s,
        )
        progress(state)
        if _is_over(state, stop):
            return
        if not _run_round(search, pool, stop, began_s):
            return


@collector_paused()
def _run_round(search: _Search, pool: Workers, stop: Stop, began_s: float) -> bool:
    """Evaluate one round of candidates; False if there are none left."""
    requests = search.round()
    if not requests:
        return False
    outcomes: list[Outcome] = []
    race = race_of([incumbent.batches_s for incumbent in search.incumbents])
    limited = [Request(incumbent.choice, moves, search.limit(moves), race) for incumbent, moves in requests]
    for outcome in pool.outcomes(search.space, limited):
        outcomes.append(outcome)
        if stop.seconds is not None and stop.clock() - began_s > stop.seconds:
            break
        if stop.candidates is not None and search.candidates + _valued(outcomes) >= stop.candidates:
            break
        if stop.is_asked():
            break
    search.learn(requests, outcomes)
    return True


def _valued(outcomes: Sequence[Outcome]) -> int:
    return sum(outcome.value is not None for outcome in outcomes)


def _is_over(state: State, stop: Stop) -> bool:
    is_late = stop.seconds is not None and state.seconds > stop.seconds
    is_close = stop.gap is not None and state.gap <= stop.gap
    has_enough = stop.candidates is not None and state.candidates >= stop.candidates
    return is_late or is_close or has_enough or stop.is_asked()


def _result(
    search: _Search, starts: Sequence[Start], bound: float, times_s: tuple[float, float]
) -> SearchResult:
    best, *others = search.incumbents
    plan = next((s.plan for s in starts if s.name == best.index and s.plan is not None), None)
    if plan is None or search.space.starts.get(best.start) != best.choice:
        plan = plan_of(search.space, best.choice)
    return SearchResult(
        plan=plan,
        value=best.value,
        best_from=best.start,
        path=path_of(search.log, best.index),
        lower_bound=bound,
        candidates=search.candidates,
        seconds=times_s[0],
        search_s=times_s[1],
        starts=tuple(starts),
        log=tuple(search.log),
        runners_up=tuple((incumbent.value, plan_of(search.space, incumbent.choice)) for incumbent in others),
        front=tuple(_front(search)),
    )


def _front(search: _Search) -> Iterator[tuple[int, Plan]]:
    """Rebuild the plans of the front, without the incumbents."""
    incumbents = {incumbent.index for incumbent in search.incumbents}
    for index, base, moves in search.front:
        if index not in incumbents:
            yield index, plan_of(search.space, changed(search.space, base, moves))
