"""The joint search as a command: what it is told, what it shows while it runs, what it found."""

import re
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from workbench.bounded_file import MOST_BYTES, read_bounded
from workbench.cli.console import print_result, warn
from workbench.cli.judging import Strategy
from workbench.cli.searching import Judging, draw
from workbench.cost.model import CostModel
from workbench.job.job import Job
from workbench.job.run_options import asked
from workbench.plan.codec import dumps, loads
from workbench.plan.plan import Plan
from workbench.planner.judged import JudgedBy
from workbench.planner.stage_counts import Progress
from workbench.planner.strategy_spec import Planner
from workbench.report.joint_tables import (
    ablation_record,
    ablation_table,
    joint_record,
    joint_table,
    unit_of,
)
from workbench.report.progress import ticking
from workbench.report.search_tables import search_record
from workbench.search.drive import aimed, search
from workbench.search.joint.ablation import Gain, ablated
from workbench.search.joint.bounds import LowerBound, lower_bound_s
from workbench.search.joint.drive import joint_search, searched_starts
from workbench.search.joint.evaluate import Judge
from workbench.search.joint.log import log_lines, replayed
from workbench.search.joint.objective_bounds import bound_for
from workbench.search.joint.question import Question
from workbench.search.joint.result import SearchResult, State
from workbench.search.joint.terms import Scope, Stop
from workbench.search.joint.worker_pool import RayWorkers, WorkerSpec
from workbench.search.kept_results import Kept, KeptResults, result_key
from workbench.search.objectives.objective import Objective
from workbench.strategies.registry import BY_NAME
from workbench.termination import noting
from workbench.timing.accept import accept
from workbench.units import duration_s
from workbench.whole_file import check_writable, write_text

BUDGET = "60s"
ENDING = "interrupted: finishing the current candidate, then showing the best plan; again: ends at once"
_PERCENT = re.compile(r"(\d+(?:\.\d+)?)%")


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What the command line says of a joint search, as it was typed; None: nothing."""

    joint: bool = field(
        default=False, metadata=asked("search all decisions together, starting from every strategy's plan")
    )
    budget: str | None = field(
        default=None,
        metadata=asked(f"end --joint after this time; default: {BUDGET} if no other end is given"),
    )
    gap: str | None = field(
        default=None, metadata=asked("end --joint this close to the lower bound, such as 2%")
    )
    candidates: int | None = field(default=None, metadata=asked("end --joint after this many candidates"))
    workers: int = field(default=1, metadata=asked("worker processes of --joint"))
    ray: str | None = field(
        default=None,
        metadata=asked("HOST:PORT of a Ray cluster that includes this machine; --workers run there"),
    )
    fix: list[str] | None = field(
        default=None,
        metadata=asked("take a decision from a strategy, such as layout=cornstarch, in --joint; repeatable"),
    )
    log: Path | None = field(default=None, metadata=asked("write every candidate of --joint to this file"))
    replay: Path | None = field(default=None, metadata=asked("build the best plan of a --log file again"))
    ablate: Strategy | None = field(
        default=None,
        metadata=asked("with --joint: gain of each decision alone over this strategy, and of all together"),
    )

    @property
    def worker_spec(self) -> WorkerSpec:
        """Who evaluates."""
        return self.workers if self.ray is None else RayWorkers(address=self.ray, num=self.workers)

    def check_absent(self) -> None:
        """ValueError where something is said that only a joint search takes."""
        for each in fields(self):
            if getattr(self, each.name) not in (each.default, []):
                raise ValueError(f"search: --{each.name} wants --joint")


class Sought(NamedTuple):
    """What a search is of.

    Args:
        job, cost: what is planned, for which machines.
        judging: what is best.
        planners: whose plans it ranks; a joint search starts from them, and has them plan anew.
        judge: whom these were held against.
        seed: of all draws.
    """

    job: Job
    cost: CostModel
    judging: Judging
    planners: Mapping[str, Planner]
    judge: JudgedBy
    seed: int

    @property
    def value_of(self) -> Judge:
        """The judge of candidates."""
        from sim.predict import IterationJudge

        return self.judging.judge or IterationJudge(self.cost)

    @property
    def lower(self) -> LowerBound:
        """Of the judge's values."""
        return lower_bound_s if self.judging.judge is None else bound_for(self.judging.judge)

    @property
    def asked(self) -> Mapping[str, Any]:
        """The objective and what decides it."""
        judge = self.judging.judge
        return {"objective": Objective.ITERATION.value} if judge is None else judge.asked


def search_jointly(
    sought: Sought, told: Told, results: KeptResults | None, pareto: Path | None, *, as_json: bool
) -> tuple[Plan, Callable[[], None]]:
    """The best plan, and what prints the search; ValueError for what the search refuses.

    A search without a budget of time finds the same again, so its result is kept in `results`.

    Args:
        pareto: picture of the plans that it began with, of those that it held at its end, and of all others
            that none beats by more than a little; None: none is drawn.
    """
    stop, fixed = stop_of(told), fixed_of(told.fix or ())
    _check_together(told, pareto)
    sought = sought._replace(job=aimed(sought.job, sought.judging.objective))
    if told.log is not None:
        check_writable(told.log)
    if told.replay is not None:
        return _replay(sought, told.replay, as_json=as_json)
    if told.ablate is not None:
        return _ablate(sought, told, as_json=as_json)
    scope = Scope(
        seed=sought.seed,
        fixed=fixed,
        planners=sought.planners,
        lower=sought.lower,
        keeps_front=pareto is not None,
    )
    key = _result_key(sought, stop, scope)
    results = None if stop.seconds is not None or told.log is not None or pareto is not None else results
    known = None if results is None else results.get(key)
    if known is not None:
        warn("cached result of the same job, machines and code; --no-cache searches again")
        return loads(known.best_plan), _printed(known.record, as_json=as_json)
    found, is_cut_short = _search(sought, stop, scope, told, quiet=as_json)
    if told.log is not None:
        write_text("".join(f"{line}\n" for line in log_lines(sought.job, scope, found)), told.log)
    record, drawn = _record(sought, found), []
    if pareto is not None:
        plans = _plans_record(sought, found)
        record |= {"plans": plans["candidates"], "front": plans["front"]}
        drawn.append(draw(plans, pareto))
    if results is not None and not is_cut_short:
        results.put(key, Kept(record=record, best_plan=dumps(found.plan)))
    return found.plan, _printed(record, *drawn, as_json=as_json)


def _result_key(sought: Sought, stop: Stop, scope: Scope) -> str:
    """Of everything that decides what a search finds."""
    decided = ("joint", repr(stop), str(scope.seed), repr(scope.fixed), *sought.planners, sought.judge)
    return result_key(
        sought.job, sought.cost, decided, f"{sought.judging.objective} {sought.judging.decided}"
    )


def _search(
    sought: Sought, stop: Stop, scope: Scope, told: Told, *, quiet: bool
) -> tuple[SearchResult, bool]:
    """What is found, and whether the user ended the search before."""
    with (
        _told_on("joint search", stop, unit_of(sought.asked), quiet=quiet) as progress,
        noting(signal.SIGINT, answer=ENDING) as interrupts,
    ):
        found = joint_search(
            sought.job,
            sought.cost,
            sought.value_of,
            stop=replace(stop, is_asked=lambda: bool(interrupts)),
            scope=scope,
            workers=told.worker_spec,
            progress=progress,
        )
        return found, bool(interrupts)


def _record(sought: Sought, found: SearchResult) -> dict[str, Any]:
    """As JSON, with the trace of the best plan and the times of the others."""
    from sim.predict import predict, predict_within

    cost = sought.cost
    trace = predict_within(*accept(found.plan), cost)
    replays = [(value, predict(*accept(plan), cost).iteration_s) for value, plan in found.runners_up]
    return joint_record(sought.job.name, found, trace, replays, sought.asked)


def _check_together(told: Told, pareto: Path | None) -> None:
    """ValueError for flags that are of another kind of search than the one that is asked for."""
    both = {"--replay": told.replay, "--ablate": told.ablate}
    said = [name for name, value in both.items() if value is not None]
    if len(said) > 1:
        raise ValueError(f"search: got {' and '.join(said)}; want one of the two")
    unused = {"--log": told.log, "--pareto": pareto, "--fix": told.fix or None}
    lost = next((name for name, value in unused.items() if value is not None), None)
    if said and lost is not None:
        raise ValueError(f"search: {said[0]} takes no {lost}; want one of the two")


def _plans_record(sought: Sought, found: SearchResult) -> dict[str, Any]:
    """The record of a search whose strategies' plans are the plans that this one began with and kept."""
    from sim.predict import predict_within

    plans = {"joint": found.plan}
    plans |= {f"joint, held {number}": plan for number, (_, plan) in enumerate(found.runners_up, 2)}
    plans |= {f"joint, candidate {index}": plan for index, plan in found.front}
    plans |= {start.name: start.plan for start in found.starts if start.plan is not None}
    candidates = search(
        sought.job,
        sought.cost,
        {name: partial(_made, plan) for name, plan in plans.items()},
        lambda plan: predict_within(*accept(plan), sought.cost),
        objective=sought.judging.objective,
        judge=sought.judging.judge,
    )
    return search_record(sought.job.name, candidates, sought.asked)


def _made(plan: Plan, job: Job, cost: CostModel, progress: Progress) -> Plan:
    """A planner of a plan that is there."""
    return plan


def _printed(record: dict[str, Any], *lines: str, as_json: bool) -> Callable[[], None]:
    return lambda: print_result(record, *joint_table(record), *lines, as_json=as_json)


def stop_of(told: Told) -> Stop:
    """When the search ends: a minute where nothing is said."""
    nothing = told.budget is None and told.gap is None and told.candidates is None
    budget = BUDGET if nothing else told.budget
    return Stop(
        seconds=None if budget is None else duration_s(budget, "--budget"),
        gap=None if told.gap is None else _share(told.gap),
        candidates=told.candidates,
    )


def _share(text: str) -> float:
    found = _PERCENT.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"search: want --gap as a percentage such as 2%, got {text!r}")
    return float(found[1]) / 100


def fixed_of(said: Sequence[str]) -> dict[Question, str]:
    """`question=strategy` read; ValueError for anything else, or two strategies for one question."""
    found: dict[Question, str] = {}
    for text in said:
        question, _, strategy = text.partition("=")
        if question not in set(Question) or strategy not in BY_NAME:
            raise ValueError(
                f"search: want --fix QUESTION=STRATEGY with one of {', '.join(Question)} and a strategy's "
                f"name, got {text!r}"
            )
        if found.setdefault(Question(question), strategy) != strategy:
            raise ValueError(
                f"search: --fix {question} names both {found[Question(question)]} and {strategy}; want one"
            )
    if set(found) == set(Question):
        raise ValueError("search: --fix names every question, so there is nothing to search; want fewer")
    return found


@contextmanager
def _told_on(title: str, stop: Stop, unit: str, *, quiet: bool) -> Iterator[Callable[[State], None]]:
    """A bar by candidates or seconds, with the best, the bound and the pace beside it."""
    total = stop.candidates or (None if stop.seconds is None else round(stop.seconds))
    behind = " s" if unit == "s" else ""
    counted = title if stop.candidates or total is None else f"{title}, seconds"
    with ticking(counted, total, quiet=quiet) as ticker:

        def progress(state: State) -> None:
            spent = round(state.seconds)
            done = state.candidates if stop.candidates else spent if total is None else min(spent, total)
            pace = state.candidates / state.seconds if state.seconds else 0.0
            note = (
                f"best {state.best:.4g}{behind} from {state.best_from}, "
                f"bound {state.lower_bound:.4g}{behind}, gap {state.gap:.1%}, {state.candidates} candidates, "
                f"{pace:.3g} candidates/s"
            )
            ticker.at(done, total, note)

        yield progress


def _replay(sought: Sought, log: Path, *, as_json: bool) -> tuple[Plan, Callable[[], None]]:
    """Over several batches a value has the time to plan them, which is measured."""
    is_timed, unit = "planning" in sought.asked, unit_of(sought.asked)
    plan, value = replayed(
        sought.job,
        sought.cost,
        sought.value_of,
        sought.planners,
        read_bounded(log, MOST_BYTES).splitlines(),
        is_timed=is_timed,
    )
    record: Mapping[str, Any] = {
        "job": sought.job.name,
        "replayed": str(log),
        "iteration_s" if unit == "s" else unit: value,
    }
    shown = f"{value:.6g} s" if unit == "s" else f"{value:.6g} by {sought.asked['objective']}"
    behind = "" if is_timed else ", as logged"
    return plan, lambda: print_result(record, f"{log}: {shown}{behind}", as_json=as_json)


def _ablate(sought: Sought, told: Told, *, as_json: bool) -> tuple[Plan, Callable[[], None]]:
    job, cost, judge = sought.job, sought.cost, sought.value_of
    strategy, stop, workers = str(told.ablate), stop_of(told), told.worker_spec
    scope = Scope(seed=sought.seed, planners=sought.planners, lower=sought.lower)
    rows: list[Gain] = []
    with ticking("ablation", len(Question) + 1, quiet=as_json) as ticker:
        starts = searched_starts(job, cost, judge, stop=stop, scope=scope, workers=workers)
        scope = replace(scope, starts=starts)
        for row in ablated(job, cost, judge, strategy, scope=scope, stop=stop, workers=workers):
            rows.append(row)
            ticker.step(f"{', '.join(row.open)}: {row.factor:.3f} times better")
    record = ablation_record(job.name, strategy, rows, sought.asked)
    best: SearchResult = rows[-1].found
    return best.plan, lambda: print_result(record, ablation_table(record), as_json=as_json)
