"""The demo: calibrate this machine, plan with every strategy, predict, run for real, compare.

Setup:   a vision + audio + language model of 49 M parameters, 8 samples, encoders frozen, with
         the LLM frozen and trained; up to four gloo ranks on this machine's cores.
Ours:    predictions are written, with the plans' hashes, before the first plan runs.
Run:     workbench demo --out out
"""

import json
import statistics
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from experiments.demo_job import MIXES, NUM_RANKS, STRATEGIES, demo_job, local_cluster, write_job_file
from runtime.launch import run_local
from runtime.measure.plans import BenchSettings, measure
from runtime.run_settings import Collect, RunSettings
from runtime.world.pool import Pool
from sim.predict import predict
from workbench.calibrate.fit import fit
from workbench.cost.hardware import Link
from workbench.cost.model import CostModel
from workbench.cost.profile import Profile, ideal_profile, write_profile
from workbench.drift import Run, drift_between, drifted, is_beyond, smoothed, yardstick_s
from workbench.plan.codec import plan_hash, write_plan
from workbench.plan.plan import Plan
from workbench.strategies import cornstarch
from workbench.timing.accept import accept
from workbench.trace import Trace
from workbench.trace_json import write_trace
from workbench.whole_file import write_text

JOB_FILE, JOB_MIX = "job.yaml", "projectors+llm"  # whose neighbours the report's sliders show
ROUNDS = 2  # every plan runs in every round, so that drift of the machine meets all alike
STEPS = 2  # timed steps of a plan in a round
WARMUP = 1
ONE_STAGE_EACH = {"vision": 1, "audio": 1, "llm": 1}

Progress = Callable[[int, int, str], None]  # (done, total, what)
Beside = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A plan of the demo and what was predicted of it."""

    name: str
    mix: str
    plan: Plan
    plan_hash: str
    simulated: Trace

    @property
    def predicted_s(self) -> float:
        return self.simulated.iteration_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """A plan that ran in one round, and what was predicted of it for that round."""

    planned: Planned
    traces: tuple[Trace, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanResult:
    """One row of the demo: predicted, then executed.

    Args:
        predicted_s: before the first round.
        predicted_again_s: before the last round, if the machine was calibrated again; None if it was not.
        executed_s: median over all timed steps.
        drift: of the machine beside the plan's steps, since the calibration that held for each; None where
            nobody read it.
        error: predicted / executed - 1, of the prediction that held in each round.
        error_corrected: the same of predictions times 1 + drift.
        spread: (highest - lowest) / median of the executed steps.
        loss: of the first step.
    """

    plan: str
    mix: str
    num_ranks: int
    plan_hash: str
    predicted_s: float
    predicted_again_s: float | None
    executed_s: float
    lowest_s: float
    highest_s: float
    drift: float | None
    error: float
    error_corrected: float | None
    spread: float
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoResult:
    """Errors over all plans, and of their predictions times what the machine had drifted.

    Args:
        drift: mean over the plans.
        error, error_corrected: medians of signed errors, of which some may make up for others.
        spread: the median of the plans' own spreads.
        recalibrated: how often the machine was calibrated again because it had drifted.
        noise: why the first calibration is not to be trusted; empty: no reason was seen.
    """

    median_abs_error: float
    worst_abs_error: float
    drift: float | None
    error: float
    error_corrected: float | None
    median_abs_error_corrected: float | None
    worst_abs_error_corrected: float | None
    spread: float
    recalibrated: int
    noise: tuple[str, ...]
    machine: str
    plans: tuple[PlanResult, ...]

    @property
    def fastest(self) -> str:
        """The strategy whose plan of the job file's mix was predicted the fastest."""
        mine = [row for row in self.plans if row.mix == JOB_MIX]
        return min(mine, key=lambda row: row.predicted_s).plan.removesuffix(f".{JOB_MIX}")

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def run_demo(
    out: Path,
    progress: Progress = lambda done, total, what: None,
    beside: Beside = nullcontext,
) -> DemoResult:
    """All of it; plans, traces, profile, job file, predictions and `demo.json` are written to `out`.

    `beside`: what happens on this machine while plans are timed, and not while it is calibrated.
    """
    out.mkdir(parents=True, exist_ok=True)
    for stale in (*out.glob("*.plan.json"), *out.glob("*.sim.json"), *out.glob("*.run.json")):
        stale.unlink()
    with Pool(NUM_RANKS) as pool:
        profile = calibrate(pool, out / "profile.json", progress)
        planned = plan_all(profile, progress)
        write_predictions(planned, out / "predictions.json")
        for item in planned:
            write_plan(item.plan, out / f"{item.name}.plan.json")
            write_trace(item.simulated, out / f"{item.name}.sim.json")
        write_job_file(JOB_MIX, out / JOB_FILE, planned[0].plan.cluster, "profile.json")
        ran, recalibrated = execute_all(planned, pool, out, progress, beside)
        watched = watch_all(planned, pool, progress)
    for item, more in zip(planned, watched, strict=True):
        traces = [trace for one in ran if one.planned.name == item.name for trace in one.traces]
        for index, trace in enumerate((*traces, more)):
            write_trace(trace, out / f"{item.name}.{index}.run.json")
    result = summarise(planned, ran, profile, recalibrated)
    write_text(json.dumps(result.as_json(), indent=1) + "\n", out / "demo.json")
    return result


def calibrate(pool: Pool, path: Path, progress: Progress) -> Profile:
    """This machine, for the layers and sizes of the demo; every core works while a layer is timed."""
    unlinked = local_cluster(Link(name="unmeasured", bytes_per_s=1e9, latency_s=0.0), 2**40)
    ideal = CostModel(ideal_profile())
    plans = [cornstarch.plan(demo_job(mix, unlinked, ONE_STAGE_EACH), ideal) for mix in MIXES]
    cores = plans[0].cluster.nodes[0].num_cores or 1
    settings = BenchSettings(concurrency=min(cores, NUM_RANKS))
    measurement = measure(plans, pool, settings=settings, progress=progress)
    profile = fit("this machine", [measurement])
    write_profile(profile, path)
    return profile


def plan_all(profile: Profile, progress: Progress) -> tuple[Planned, ...]:
    """Every strategy on every mix, checked, priced and simulated."""
    cost = CostModel(profile)
    cluster = local_cluster(profile.machine_link("intra").link, profile.memory_bytes)
    plans: list[Planned] = []
    for mix in MIXES:
        for strategy in STRATEGIES:
            plan = strategy(demo_job(mix, cluster), cost)
            name = f"{plan.strategy}.{mix}"
            progress(len(plans), len(MIXES) * len(STRATEGIES), f"planning {name}")
            plans.append(predicted(name, mix, plan, cost))
    return tuple(plans)


def predicted(name: str, mix: str, plan: Plan, cost: CostModel) -> Planned:
    """The plan with its simulated trace; ValueError when it is refused."""
    simulated = predict(*accept(plan), cost)
    return Planned(name=name, mix=mix, plan=plan, plan_hash=plan_hash(plan), simulated=simulated)


def write_predictions(planned: tuple[Planned, ...], path: Path) -> None:
    """What was predicted, before anything runs that it is compared with."""
    rows = [
        {"plan": item.name, "plan_hash": item.plan_hash, "predicted_s": item.predicted_s} for item in planned
    ]
    write_text(json.dumps(rows, indent=1) + "\n", path)


def execute_all(
    planned: tuple[Planned, ...], pool: Pool, out: Path, progress: Progress, beside: Beside
) -> tuple[list[Ran], int]:
    """Round by round, all plans in each, and how often the machine was calibrated again.

    Where it drifted in a round, it is before the next one, for which the same plans are predicted anew.
    """
    runs: list[Ran] = []
    recalibrated = 0
    for turn in range(ROUNDS):
        if turn > 0 and is_beyond(_drift_of(runs[-len(planned) :])):
            recalibrated += 1
            profile = calibrate(pool, out / f"profile.{recalibrated}.json", progress)
            cost = CostModel(profile)
            planned = tuple(predicted(item.name, item.mix, item.plan, cost) for item in planned)
            write_predictions(planned, out / f"predictions.{recalibrated}.json")
        with beside():
            for item in planned:
                progress(len(runs), ROUNDS * len(planned), f"running {item.name}")
                ran = run_local(item.plan, RunSettings(steps=STEPS, warmup=WARMUP), pool=pool)
                runs.append(Ran(planned=item, traces=ran.traces))
    return runs, recalibrated


def _drift_of(ran: Sequence[Ran]) -> float | None:
    """Of the machine in one round, whose predictions are all of one profile."""
    return drift_between(ran[0].planned.simulated, [trace for one in ran for trace in one.traces])


def watch_all(planned: tuple[Planned, ...], pool: Pool, progress: Progress) -> tuple[Trace, ...]:
    """One more step of every plan with its memory watched, which makes it slower: it is not timed."""
    traces = []
    for done, item in enumerate(planned):
        progress(done, len(planned), f"watching the memory of {item.name}")
        traces.append(
            run_local(item.plan, RunSettings(warmup=WARMUP, collect=Collect.MEMORY), pool=pool).trace
        )
    return tuple(traces)


def summarise(
    planned: tuple[Planned, ...], ran: Sequence[Ran], profile: Profile, recalibrated: int
) -> DemoResult:
    """The figures of all plans."""
    rows = tuple(_row(item, ran) for item in planned)
    errors = [abs(row.error) for row in rows]
    corrected = [row.error_corrected for row in rows if row.error_corrected is not None]
    drifts = [row.drift for row in rows if row.drift is not None]
    return DemoResult(
        median_abs_error=statistics.median(errors),
        worst_abs_error=max(errors),
        drift=statistics.fmean(drifts) if drifts else None,
        error=statistics.median(row.error for row in rows),
        error_corrected=statistics.median(corrected) if corrected else None,
        median_abs_error_corrected=statistics.median(map(abs, corrected)) if corrected else None,
        worst_abs_error_corrected=max(map(abs, corrected), default=None),
        recalibrated=recalibrated,
        noise=profile.noise,
        spread=statistics.median(row.spread for row in rows),
        machine=profile.provenance.sources[0],
        plans=rows,
    )


def _row(item: Planned, ran: Sequence[Ran]) -> PlanResult:
    drifts = smoothed(
        [yardstick_s(one.planned.simulated) for one in ran],
        [[yardstick_s(trace) for trace in one.traces] for one in ran],
    )
    mine = [(one, drift) for one, drift in zip(ran, drifts, strict=True) if one.planned.name == item.name]
    runs = [Run(o.planned.predicted_s, tuple(t.iteration_s for t in o.traces), drift) for o, drift in mine]
    traces = [trace for one, _ in mine for trace in one.traces]
    times_s = [trace.iteration_s for trace in traces]
    median_s, last_s = statistics.median(times_s), runs[-1].predicted_s
    return PlanResult(
        plan=item.name,
        mix=item.mix,
        num_ranks=len(item.plan.ranks),
        plan_hash=item.plan_hash,
        predicted_s=item.predicted_s,
        predicted_again_s=None if last_s == item.predicted_s else last_s,
        executed_s=median_s,
        lowest_s=min(times_s),
        highest_s=max(times_s),
        **asdict(drifted(runs)),
        spread=(max(times_s) - min(times_s)) / median_s,
        loss=traces[0].loss or 0.0,
    )
