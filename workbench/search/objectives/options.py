"""Options of a search's objective, as flags, and the judge that they describe."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

from workbench.bounded_file import read_bounded
from workbench.cost.model import CostModel
from workbench.data.sample import Sample
from workbench.elastic.availability import Availability, Rates, parse_trace, random_trace
from workbench.explain.timeline import Timeline
from workbench.job.job import Job
from workbench.job.run_options import asked
from workbench.plan.lowered import Lowered
from workbench.plan.plan import Plan
from workbench.schedule.choice import Schedule
from workbench.search.objectives.goodput import Goodput
from workbench.search.objectives.money import DollarsPerSample, TrainingDollars, steps_for
from workbench.search.objectives.objective import Objective
from workbench.search.objectives.plan_judge import Measure, PlanJudge, rank_seconds, step_seconds
from workbench.search.objectives.recovery import FailureSim, RecoveryCosts, Saving
from workbench.search.objectives.step_times import Over, OverBatches, OwnBatch, Planning, StepJudge
from workbench.strategies.next_step import next_step
from workbench.units import S_PER_HOUR, duration_s

TRACES = 5  # random traces, for a confidence interval
LOSSES = 100  # expected per trace


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveOptions:
    """How an objective is measured.

    Raises:
        ValueError: numbers out of bounds, or options that no objective combines.
    """

    batches: int | None = field(
        default=None, metadata=asked("evaluate on this many batches drawn from the job's data")
    )
    over: Over = field(default=Over.MEAN, metadata=asked("how step times of --batches are combined"))
    planning: Planning = field(
        default=Planning.HIDDEN,
        metadata=asked("planning time of --batches: hidden behind the step before, or added to every step"),
    )
    steps: int | None = field(
        default=None, metadata=asked("length of the training in steps, for --objective dollars")
    )
    tokens: float | None = field(
        default=None,
        metadata=asked(
            "length of the training in tokens of the LLM's sequence, such as 1e12; replaces --steps"
        ),
    )
    deadline: str | None = field(
        default=None, metadata=asked("time limit of the training, such as 10h, for --objective dollars")
    )
    mtbf: str | None = field(
        default=None,
        metadata=asked(
            "mean time between node failures in the whole cluster, such as 6h, for --objective goodput"
        ),
    )
    leaves_per_node_hour: float | None = field(
        default=None, metadata=asked("rate at which a node leaves; replaces --mtbf")
    )
    repair: str = field(default="1h", metadata=asked("with --mtbf: mean time until a lost node returns"))
    failures: Path | None = field(
        default=None,
        metadata=asked(
            "trace of failures: CSV with the columns t_s, event (add or remove), node; replaces --mtbf"
        ),
    )
    restart: str = field(
        default="60s", metadata=asked("restart time of a job from a checkpoint; loading is added")
    )
    storage_gb_per_s: float = field(default=1.0, metadata=asked("bandwidth of checkpoint storage in GB/s"))
    saving: Saving = field(
        default=Saving.BEHIND,
        metadata=asked(
            "write checkpoints in the background after a copy to the host, or stop training until written"
        ),
    )

    def check(self, objective: Objective) -> None:
        """Raise ValueError for options that the objective does not use, or if it lacks one."""
        self._check_batches()
        training = {"--steps": self.steps, "--tokens": self.tokens, "--deadline": self.deadline}
        _refuse_for_others(training, objective, Objective.TRAINING)
        rates = {
            "--mtbf": self.mtbf,
            "--leaves-per-node-hour": self.leaves_per_node_hour,
            "--failures": self.failures,
        }
        _refuse_for_others(rates | self._changed_recovery, objective, Objective.GOODPUT)
        if objective is Objective.TRAINING and (self.steps is None) == (self.tokens is None):
            raise ValueError(f"--objective {objective}: want one of --steps and --tokens")
        if objective is Objective.GOODPUT and sum(rate is not None for rate in rates.values()) != 1:
            raise ValueError(
                f"--objective {objective}: want one of --mtbf, --leaves-per-node-hour and --failures"
            )
        if self.leaves_per_node_hour is not None and not 0 < self.leaves_per_node_hour < math.inf:
            raise ValueError(
                f"--leaves-per-node-hour: want a rate > 0, got {self.leaves_per_node_hour}; nearest: 0.01"
            )
        if self.failures is not None and "--repair" in self._changed_recovery:
            raise ValueError("--repair is for --mtbf: the trace of --failures says when nodes return")

    @property
    def _changed_recovery(self) -> dict[str, object]:
        """Flags of recovery without their default value."""
        usual = {entry.name: entry.default for entry in fields(self)}
        return {
            f"--{name.replace('_', '-')}": getattr(self, name)
            for name in ("repair", "restart", "storage_gb_per_s", "saving")
            if getattr(self, name) != usual[name]
        }

    def _check_batches(self) -> None:
        if self.batches is not None and self.batches < 1:
            raise ValueError(f"--batches must be >= 1, got {self.batches}")
        if self.batches is None and (self.over, self.planning) != (Over.MEAN, Planning.HIDDEN):
            flag = f"--over {self.over}" if self.over is not Over.MEAN else f"--planning {self.planning}"
            raise ValueError(f"{flag} needs several batches; want --batches")

    @property
    def recovery_costs(self) -> RecoveryCosts:
        """Costs of a loss."""
        return RecoveryCosts(
            restart_s=duration_s(self.restart, "--restart"),
            storage_bytes_per_s=self.storage_gb_per_s * 1e9,
            saving=self.saving,
        )


def _refuse_for_others(options: Mapping[str, object], objective: Objective, wanted: Objective) -> None:
    flag = next((name for name, value in options.items() if value is not None), None)
    if flag is not None and objective is not wanted:
        raise ValueError(f"{flag} is for --objective {wanted}, got {objective}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Executors:
    """Simulators and clock that a judge uses, which this package does not import.

    Args:
        seconds: simulates a step.
        timeline: simulates a plan's step and returns its timeline.
        failures: simulates a job that recovers.
        clock: measures planning, in seconds.
    """

    seconds: Callable[[Lowered], float]
    timeline: Callable[[Plan], Timeline]
    failures: FailureSim
    clock: Callable[[], float]


def judge_for(
    objective: Objective,
    options: ObjectiveOptions,
    job: Job,
    cost: CostModel,
    *,
    batches: Sequence[Sequence[Sample]],
    seed: int,
    executors: Executors,
) -> PlanJudge:
    """The judge of an objective.

    Args:
        batches: drawn for `options.batches`; none: plans are judged on the job's own.
        seed: of the batches and of failures.

    Raises:
        ValueError: what `ObjectiveOptions.check` refuses, or an invalid duration or trace.
    """
    options.check(objective)
    times: StepJudge = OwnBatch(executors.seconds)
    words: dict[str, Any] = {"objective": objective.value}
    if batches:
        times = OverBatches(
            batches=batches,
            replan=partial(_replan, job, cost),
            seconds=executors.seconds,
            over=options.over,
            planning=options.planning,
            clock=executors.clock,
        )
        words |= {"batches": len(batches), "over": options.over.value, "planning": options.planning.value}
        words["seed"] = seed
    measure: Measure
    if objective is Objective.GOODPUT:
        measure = _goodput(options, job, cost, times, seed=seed, simulate=executors.failures)
        words |= {"mtbf_s": measure.mtbf_s, "horizon_s": measure.until_s, "traces": len(measure.traces)}
        words["seed"] = seed
    elif objective is Objective.TRAINING:
        measure = _training(options, job, batches or [job.batch])
        words |= {"steps": measure.num_steps, "deadline_s": measure.deadline_s}
    elif objective is Objective.DOLLARS:
        measure = DollarsPerSample(job)
    else:
        measure = rank_seconds if objective is Objective.THROUGHPUT else step_seconds
    return PlanJudge(times=times, measure=measure, timeline=executors.timeline, asked=words)


def _replan(
    job: Job, cost: CostModel, plan: Plan, batch: Sequence[Sample], schedule: Schedule | None
) -> Plan:
    return next_step(plan, batch, job, cost, schedule)


def _training(options: ObjectiveOptions, job: Job, batches: Sequence[Sequence[Sample]]) -> TrainingDollars:
    if options.steps is not None:
        num_steps = options.steps
    else:
        assert options.tokens is not None, "one of the two is there"
        num_steps = steps_for(options.tokens, batches)
    deadline_s = None if options.deadline is None else duration_s(options.deadline, "--deadline")
    return TrainingDollars(job=job, num_steps=num_steps, deadline_s=deadline_s)


def _goodput(
    options: ObjectiveOptions, job: Job, cost: CostModel, times: StepJudge, *, seed: int, simulate: FailureSim
) -> Goodput:
    if options.failures is not None:
        traces, until_s, mtbf_s = _trace_of(options.failures)
    else:
        count, joins_per_h = len(job.cluster.nodes), S_PER_HOUR / duration_s(options.repair, "--repair")
        if options.mtbf is not None:
            mtbf_s = duration_s(options.mtbf, "--mtbf")
            rates = Rates.of_losses(mtbf_s, count, joins_per_h)
        else:
            assert options.leaves_per_node_hour is not None, "one of the three is there"
            rates = Rates(leaves_per_node_h=options.leaves_per_node_hour, joins_per_missing_h=joins_per_h)
            mtbf_s = rates.mtbf_s(count)
        until_s = LOSSES * mtbf_s
        traces = tuple(random_trace(count, rates, until_s, seed * TRACES + each) for each in range(TRACES))
    return Goodput(
        job=job,
        cost=cost,
        times=times,
        simulate=simulate,
        traces=traces,
        until_s=until_s,
        mtbf_s=mtbf_s,
        costs=options.recovery_costs,
    )


def _trace_of(path: Path) -> tuple[tuple[Availability, ...], float, float]:
    """A file's trace, its duration, and the mean time between its losses."""
    trace = parse_trace(path.name, read_bounded(path))
    if not trace.end_s:
        raise ValueError(f"{path}: no node joins or leaves after the start; want a trace that lasts")
    return (trace,), trace.end_s, trace.mean_between_leaves_s
