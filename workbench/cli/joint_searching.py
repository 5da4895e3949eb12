"""The joint search of `search --joint`: its flags, progress bar, result, replay and ablation."""

import re
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from workbench.bounded_file import MOST_BYTES, read_bounded
from workbench.cli.budgets import budget_s
from workbench.cli.console import print_result, warn
from workbench.cli.judging import Strategy
from workbench.cli.searching import Criterion, draw
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
from workbench.whole_file import check_writable, write_text

DEFAULT_BUDGET = "60s"
INTERRUPT_NOTE = (
    "interrupted: finishing the current candidate, then showing the best plan; again: ends at once"
)
_PERCENTAGE = re.compile(r"(\d+(?:\.\d+)?)%")


@dataclass(frozen=True, slots=True, kw_only=True)
class JointFlags:
    """Flags of a joint search, unparsed; None: not given."""

    joint: bool = field(
        default=False, metadata=asked("search all decisions together, starting from every strategy's plan")
    )
    budget: str | None = field(
        default=None,
        metadata=asked(
            f"end planning after this time; default: none, with --joint {DEFAULT_BUDGET} if nothing ends it"
        ),
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
    def budget_s(self) -> float:
        """Seconds for planning; infinite where no budget is given, ValueError where it is no time."""
        return budget_s(self.budget, "search")

    @property
    def worker_spec(self) -> WorkerSpec:
        """Processes that evaluate candidates: a number of local ones, or of workers on a Ray cluster."""
        return self.workers if self.ray is None else RayWorkers(address=self.ray, num=self.workers)

    def check_absent(self) -> None:
        """Raise ValueError if any of these flags but `--budget` is given, for a search without --joint."""
        for flag in fields(self):
            if flag.name != "budget" and getattr(self, flag.name) not in (flag.default, []):
                raise ValueError(f"search: --{flag.name} wants --joint")


class SearchRequest(NamedTuple):
    """Inputs of a search.

    Args:
        job, cost: the job to plan, and the cost model of its machines.
        criterion: what plans are ranked by.
        planners: by strategy; a joint search starts from their plans, and calls them again for new ones.
        judge: what chose among the best plans of each strategy.
        seed: random seed of the search.
    """

    job: Job
    cost: CostModel
    criterion: Criterion
    planners: Mapping[str, Planner]
    judge: JudgedBy
    seed: int

    @property
    def candidate_judge(self) -> Judge:
        """The judge of candidates: that of the criterion, or else the seconds of a step."""
        from sim.predict import IterationJudge

        return self.criterion.judge or IterationJudge(self.cost)

    @property
    def lower_bound(self) -> LowerBound:
        """Lower bound on the values of `candidate_judge`."""
        return lower_bound_s if self.criterion.judge is None else bound_for(self.criterion.judge)

    @property
    def description(self) -> Mapping[str, Any]:
        """The objective and its parameters, as JSON data."""
        judge = self.criterion.judge
        return {"objective": Objective.ITERATION.value} if judge is None else judge.asked


def search_jointly(
    request: SearchRequest,
    flags: JointFlags,
    results: KeptResults | None,
    pareto: Path | None,
    *,
    as_json: bool,
) -> tuple[Plan, Callable[[], None]]:
    """Search jointly; return the best plan and a function that prints the result.

    A search without a time limit is deterministic, so its result is cached in `results`.

    Args:
        pareto: file for a plot of the starts, the best plans at the end, and all other candidates close to
            the Pareto front; None: no plot.

    Raises:
        ValueError: contradictory or invalid flags, or a job that the search refuses.
    """
    stop, fixed_questions = stop_of(flags), fixed_of(flags.fix or ())
    _check_exclusive(flags, pareto)
    request = request._replace(job=aimed(request.job, request.criterion.objective))
    if flags.log is not None:
        check_writable(flags.log, flags.replay)
    if flags.replay is not None:
        return _replay(request, flags.replay, as_json=as_json)
    if flags.ablate is not None:
        return _ablate(request, flags, as_json=as_json)
    scope = Scope(
        seed=request.seed,
        fixed=fixed_questions,
        planners=request.planners,
        lower=request.lower_bound,
        keeps_front=pareto is not None,
    )
    key = _result_key(request, stop, scope)
    results = None if stop.seconds is not None or flags.log is not None or pareto is not None else results
    cached = None if results is None else results.get(key)
    if cached is not None:
        warn("cached result of the same job, machines and code; --no-cache searches again")
        return loads(cached.best_plan), _printer(cached.record, as_json=as_json)
    result, is_interrupted = _search(request, stop, scope, flags, quiet=as_json)
    if flags.log is not None:
        write_text("".join(f"{line}\n" for line in log_lines(request.job, scope, result)), flags.log)
    record, notes = _record(request, result), []
    if pareto is not None:
        plans = _plans_record(request, result)
        record |= {"plans": plans["candidates"], "front": plans["front"]}
        notes.append(draw(plans, pareto))
    if results is not None and not is_interrupted:
        results.put(key, Kept(record=record, best_plan=dumps(result.plan)))
    return result.plan, _printer(record, *notes, as_json=as_json)


def _result_key(request: SearchRequest, stop: Stop, scope: Scope) -> str:
    """Cache key of all inputs that determine the result of a search."""
    inputs = ("joint", repr(stop), str(scope.seed), repr(scope.fixed), *request.planners, request.judge)
    return result_key(
        request.job, request.cost, inputs, f"{request.criterion.objective} {request.criterion.cache_key}"
    )


def _search(
    request: SearchRequest, stop: Stop, scope: Scope, flags: JointFlags, *, quiet: bool
) -> tuple[SearchResult, bool]:
    """The result, and whether the user interrupted the search."""
    with (
        _progress_bar("joint search", stop, unit_of(request.description), quiet=quiet) as progress,
        noting(signal.SIGINT, answer=INTERRUPT_NOTE) as interrupts,
    ):
        result = joint_search(
            request.job,
            request.cost,
            request.candidate_judge,
            stop=replace(stop, is_asked=lambda: bool(interrupts)),
            scope=scope,
            workers=flags.worker_spec,
            progress=progress,
        )
        return result, bool(interrupts)


def _record(request: SearchRequest, result: SearchResult) -> dict[str, Any]:
    """The result as JSON data, with the trace of the best plan and the step times of the runners-up."""
    from sim.predict import predict, predict_within

    cost = request.cost
    trace = predict_within(*accept(result.plan), cost)
    runners_up = [(value, predict(*accept(plan), cost).iteration_s) for value, plan in result.runners_up]
    return joint_record(request.job.name, result, trace, runners_up, request.description)


def _check_exclusive(flags: JointFlags, pareto: Path | None) -> None:
    """Raise ValueError for flags that exclude each other: --replay, --ablate, and those of a new search."""
    modes = {"--replay": flags.replay, "--ablate": flags.ablate}
    given_modes = [name for name, value in modes.items() if value is not None]
    if len(given_modes) > 1:
        raise ValueError(f"search: got {' and '.join(given_modes)}; want one of the two")
    other_flags = {"--log": flags.log, "--pareto": pareto, "--fix": flags.fix or None}
    conflict = next((name for name, value in other_flags.items() if value is not None), None)
    if given_modes and conflict is not None:
        raise ValueError(f"search: {given_modes[0]} takes no {conflict}; want one of the two")


def _plans_record(request: SearchRequest, result: SearchResult) -> dict[str, Any]:
    """Record of a search among the starts, the runners-up and the Pareto front, for the plot."""
    from sim.predict import predict_within

    plans = {"joint": result.plan}
    plans |= {f"joint, held {number}": plan for number, (_, plan) in enumerate(result.runners_up, 2)}
    plans |= {f"joint, candidate {index}": plan for index, plan in result.front}
    plans |= {start.name: start.plan for start in result.starts if start.plan is not None}
    candidates = search(
        request.job,
        request.cost,
        {name: partial(_existing_plan, plan) for name, plan in plans.items()},
        lambda plan: predict_within(*accept(plan), request.cost),
        objective=request.criterion.objective,
        judge=request.criterion.judge,
    )
    return search_record(request.job.name, candidates, request.description)


def _existing_plan(plan: Plan, job: Job, cost: CostModel, progress: Progress) -> Plan:
    """A planner that returns the given plan."""
    return plan


def _printer(record: dict[str, Any], *lines: str, as_json: bool) -> Callable[[], None]:
    return lambda: print_result(record, *joint_table(record), *lines, as_json=as_json)


def stop_of(flags: JointFlags) -> Stop:
    """When the search ends; after `DEFAULT_BUDGET` if no limit is given."""
    has_no_limit = flags.budget is None and flags.gap is None and flags.candidates is None
    timed = replace(flags, budget=DEFAULT_BUDGET) if has_no_limit else flags
    return Stop(
        seconds=None if timed.budget is None else timed.budget_s,
        gap=None if flags.gap is None else _parse_percent(flags.gap),
        candidates=flags.candidates,
    )


def _parse_percent(text: str) -> float:
    match = _PERCENTAGE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"search: want --gap as a percentage such as 2%, got {text!r}")
    return float(match[1]) / 100


def fixed_of(texts: Sequence[str]) -> dict[Question, str]:
    """Parse `question=strategy` texts; ValueError for other texts, or two strategies for one question."""
    answers: dict[Question, str] = {}
    for text in texts:
        question, _, strategy = text.partition("=")
        if question not in set(Question) or strategy not in BY_NAME:
            raise ValueError(
                f"search: want --fix QUESTION=STRATEGY with one of {', '.join(Question)} and a strategy's "
                f"name, got {text!r}"
            )
        if answers.setdefault(Question(question), strategy) != strategy:
            raise ValueError(
                f"search: --fix {question} names both {answers[Question(question)]} and {strategy}; want one"
            )
    if set(answers) == set(Question):
        raise ValueError("search: --fix names every question, so there is nothing to search; want fewer")
    return answers


@contextmanager
def _progress_bar(title: str, stop: Stop, unit: str, *, quiet: bool) -> Iterator[Callable[[State], None]]:
    """Progress bar by candidates or seconds that also shows the best value, the lower bound and the rate."""
    total = stop.candidates or (None if stop.seconds is None else round(stop.seconds))
    suffix = " s" if unit == "s" else ""
    label = title if stop.candidates or total is None else f"{title}, seconds"
    with ticking(label, total, quiet=quiet) as ticker:

        def progress(state: State) -> None:
            elapsed_s = round(state.seconds)
            done = (
                state.candidates if stop.candidates else elapsed_s if total is None else min(elapsed_s, total)
            )
            rate = state.candidates / state.seconds if state.seconds else 0.0
            note = (
                f"best {state.best:.4g}{suffix} from {state.best_from}, "
                f"bound {state.lower_bound:.4g}{suffix}, gap {state.gap:.1%}, {state.candidates} candidates, "
                f"{rate:.3g} candidates/s"
            )
            ticker.at(done, total, note)

        yield progress


def _replay(request: SearchRequest, log: Path, *, as_json: bool) -> tuple[Plan, Callable[[], None]]:
    """Build the best plan of a log again.

    With --batches, a value contains measured planning time, so it can differ from the logged one.
    """
    is_timed, unit = "planning" in request.description, unit_of(request.description)
    plan, value = replayed(
        request.job,
        request.cost,
        request.candidate_judge,
        request.planners,
        read_bounded(log, MOST_BYTES).splitlines(),
        is_timed=is_timed,
    )
    record: Mapping[str, Any] = {
        "job": request.job.name,
        "replayed": str(log),
        "iteration_s" if unit == "s" else unit: value,
    }
    value_text = f"{value:.6g} s" if unit == "s" else f"{value:.6g} by {request.description['objective']}"
    suffix = "" if is_timed else ", as logged"
    return plan, lambda: print_result(record, f"{log}: {value_text}{suffix}", as_json=as_json)


def _ablate(request: SearchRequest, flags: JointFlags, *, as_json: bool) -> tuple[Plan, Callable[[], None]]:
    job, cost, judge = request.job, request.cost, request.candidate_judge
    strategy, stop, workers = str(flags.ablate), stop_of(flags), flags.worker_spec
    scope = Scope(seed=request.seed, planners=request.planners, lower=request.lower_bound)
    rows: list[Gain] = []
    with ticking("ablation", len(Question) + 1, quiet=as_json) as ticker:
        starts = searched_starts(job, cost, judge, stop=stop, scope=scope, workers=workers)
        scope = replace(scope, starts=starts)
        for row in ablated(job, cost, judge, strategy, scope=scope, stop=stop, workers=workers):
            rows.append(row)
            ticker.step(f"{', '.join(row.open)}: {row.factor:.3f} times better")
    record = ablation_record(job.name, strategy, rows, request.description)
    best: SearchResult = rows[-1].found
    return best.plan, lambda: print_result(record, ablation_table(record), as_json=as_json)
