"""The joint search as a command: what it is told, what it shows while it runs, what it found."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from workbench.bounded_file import MOST_BYTES, read_bounded
from workbench.cli.console import print_result, warn
from workbench.cli.judging import Strategy
from workbench.cost.model import CostModel
from workbench.job.job import Job
from workbench.job.run_options import asked
from workbench.plan.codec import dumps, loads
from workbench.plan.plan import Plan
from workbench.report.joint_tables import ablation_record, ablation_table, joint_record, joint_table
from workbench.report.progress import ticking
from workbench.search.joint.ablation import Gain, ablated
from workbench.search.joint.crew import Crew, RayWorkers
from workbench.search.joint.drive import joint_search, searched_starts
from workbench.search.joint.evaluate import Judge
from workbench.search.joint.found import Found, State
from workbench.search.joint.log import log_lines, replayed
from workbench.search.joint.objective_bounds import bound_for
from workbench.search.joint.question import Question
from workbench.search.joint.terms import Scope, Stop
from workbench.search.kept_results import Kept, KeptResults, result_key
from workbench.search.objectives.objective import Objective
from workbench.search.objectives.plan_judge import PlanJudge
from workbench.strategies.registry import BY_NAME
from workbench.timing.accept import accept
from workbench.units import duration_s
from workbench.whole_file import check_writable, write_text

BUDGET = "60s"
_PERCENT = re.compile(r"(\d+(?:\.\d+)?)%")


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What the command line says of a joint search, as it was typed; None: nothing."""

    joint: bool = field(
        default=False, metadata=asked("search all questions together, from every strategy's plan")
    )
    budget: str | None = field(
        default=None, metadata=asked(f"time for --joint; default: {BUDGET} where no other end is given")
    )
    gap: str | None = field(
        default=None, metadata=asked("end of --joint: so near the lower bound, such as 2%")
    )
    candidates: int | None = field(default=None, metadata=asked("end of --joint: so many candidates"))
    workers: int = field(default=1, metadata=asked("processes for --joint"))
    ray: str | None = field(
        default=None,
        metadata=asked("HOST:PORT of a Ray cluster, of which this machine is part: --workers are its"),
    )
    fix: list[str] | None = field(
        default=None,
        metadata=asked("question that --joint leaves to a strategy, such as layout=cornstarch; repeatable"),
    )
    log: Path | None = field(default=None, metadata=asked("file for every candidate of --joint"))
    replay: Path | None = field(default=None, metadata=asked("log of --joint whose answer is made again"))
    ablate: Strategy | None = field(
        default=None,
        metadata=asked("with --joint: what each question alone gains over this strategy, and all together"),
    )

    @property
    def crew(self) -> Crew:
        """Who evaluates."""
        return self.workers if self.ray is None else RayWorkers(address=self.ray, num=self.workers)

    def check_absent(self) -> None:
        """ValueError where something is said that only a joint search takes."""
        for each in fields(self):
            if getattr(self, each.name) not in (each.default, []):
                raise ValueError(f"search: --{each.name} wants --joint")

    def check_unbounded(self, said: Mapping[str, Any]) -> None:
        """ValueError where something is said that wants a lower bound, or the step's seconds."""
        for name, value in (("--gap", self.gap), ("--replay", self.replay), ("--ablate", self.ablate)):
            if value is not None:
                what = f"over {said['batches']} batches" if "batches" in said else said["objective"]
                raise ValueError(
                    f"search: {name} is about one step's seconds, got --objective {what}; "
                    "want --budget or --candidates"
                )


def search_jointly(
    job: Job,
    cost: CostModel,
    told: Told,
    objective: PlanJudge | None,
    *,
    seed: int,
    results: KeptResults | None,
    as_json: bool,
) -> tuple[Plan, Callable[[], None]]:
    """The best plan, and what prints the search; ValueError for what the search refuses.

    A search of the step on the job's own batch without a budget of time finds the same again, so its result
    is kept in `results`.

    Args:
        objective: None: the step on the job's own batch.
        seed: of all draws.
    """
    from sim.predict import IterationJudge, predict_within

    stop, scope = stop_of(told), Scope(seed=seed, fixed=fixed_of(told.fix or ()))
    judge: Judge = objective or IterationJudge(cost)
    if objective is not None:
        told.check_unbounded(objective.asked)
        scope = replace(scope, lower=bound_for(objective))
    if told.log is not None:
        check_writable(told.log)
    if told.replay is not None:
        return _replay(job, cost, judge, told.replay, as_json=as_json)
    if told.ablate is not None:
        return _ablate(job, cost, judge, told, as_json=as_json)
    decided = ("joint", repr(stop), str(seed), repr(scope.fixed))
    key = result_key(job, cost, decided, Objective.ITERATION)
    is_kept = results is not None and objective is None and stop.seconds is None and told.log is None
    known = results.get(key) if results is not None and is_kept else None
    if known is not None:
        warn("found before, for the same job, machines and code; --no-cache searches again")
        return loads(known.best_plan), _printed(known.record, as_json=as_json)
    with _told_on("joint search", stop, quiet=as_json) as progress:
        found = joint_search(job, cost, judge, stop=stop, scope=scope, workers=told.crew, progress=progress)
    if told.log is not None:
        write_text("".join(f"{line}\n" for line in log_lines(job, scope, found)), told.log)
    trace = predict_within(*accept(found.plan), cost)
    replays = [(value, judge.replay(plan).iteration_s) for value, plan in found.runners_up]
    said = {"objective": Objective.ITERATION.value} if objective is None else objective.asked
    record = joint_record(job.name, found, trace, replays, said)
    if results is not None and is_kept:
        results.put(key, Kept(record=record, best_plan=dumps(found.plan)))
    return found.plan, _printed(record, as_json=as_json)


def _printed(record: dict[str, Any], *, as_json: bool) -> Callable[[], None]:
    return lambda: print_result(record, *joint_table(record), as_json=as_json)


def stop_of(told: Told) -> Stop:
    """When the search ends: a minute where nothing is said."""
    nothing = told.budget is None and told.gap is None and told.candidates is None
    budget = BUDGET if nothing else told.budget
    return Stop(
        seconds=None if budget is None else duration_s(budget),
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
                f"search: --fix {question} is said of {found[Question(question)]} and of {strategy}; want one"
            )
    if set(found) == set(Question):
        raise ValueError("search: --fix names every question, which leaves none to search")
    return found


@contextmanager
def _told_on(title: str, stop: Stop, *, quiet: bool) -> Iterator[Callable[[State], None]]:
    """A bar by candidates or seconds, with the best, the bound and the pace beside it."""
    total = stop.candidates or (None if stop.seconds is None else round(stop.seconds))
    counted = title if stop.candidates or total is None else f"{title}, seconds"
    with ticking(counted, total, quiet=quiet) as ticker:

        def progress(state: State) -> None:
            spent = round(state.seconds)
            done = state.candidates if stop.candidates else spent if total is None else min(spent, total)
            pace = state.candidates / state.seconds if state.seconds else 0.0
            note = (
                f"best {state.best:.4g} s from {state.best_from}, bound {state.lower_bound:.4g} s, gap "
                f"{state.gap:.1%}, {state.candidates} candidates, {pace:.3g} a second"
            )
            ticker.at(done, total or done, note)

        yield progress


def _replay(
    job: Job, cost: CostModel, judge: Judge, log: Path, *, as_json: bool
) -> tuple[Plan, Callable[[], None]]:
    planners = {name: spec.planner for name, spec in BY_NAME.items()}
    plan, value = replayed(job, cost, judge, planners, read_bounded(log, MOST_BYTES).splitlines())
    record: Mapping[str, Any] = {"job": job.name, "replayed": str(log), "iteration_s": value}
    return plan, lambda: print_result(record, f"{log}: {value:.6g} s, as logged", as_json=as_json)


def _ablate(
    job: Job, cost: CostModel, judge: Judge, told: Told, *, as_json: bool
) -> tuple[Plan, Callable[[], None]]:
    strategy = str(told.ablate)
    stop = stop_of(told)
    rows: list[Gain] = []
    with ticking("ablation", len(Question) + 1, quiet=as_json) as ticker:
        starts = searched_starts(job, cost, judge, stop=stop, workers=told.crew)
        for row in ablated(job, cost, judge, strategy, starts=starts, stop=stop, workers=told.crew):
            rows.append(row)
            ticker.step(f"{', '.join(row.open)}: {row.factor:.3f} times as fast")
    record = ablation_record(job.name, strategy, rows)
    best: Found = rows[-1].found
    return best.plan, lambda: print_result(record, ablation_table(record), as_json=as_json)
