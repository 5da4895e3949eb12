"""Predicts plans before they run, then runs them round by round; every step is kept as a file.

Files of a folder: `measurement.json` and `profile.json` (this machine), `rehearsals/` (plans run to
calibrate), `predictions.json` (written before the first judged plan runs; `predictions.<number>.json`
where rehearsals ran again), `<hash>.plan.json`, `<hash>.sim.json`, `runs/<hash>.<round>.<step>.run.json`,
`runs/<hash>.watched.run.json`, and `runs.jsonl` (a line for every run as it ends).
What is there already is not done again.
"""

import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch

from experiments.fidelity import emulated
from experiments.fidelity.cases import PAIR, Case, LeftOut, Part
from experiments.fidelity.emulated import WAIT_S, WARMUP, Prediction, execute_emulated
from experiments.fidelity.many_ranks import emulate_on
from runtime.launch import run_local
from runtime.measure.plans import BenchSettings, measure
from runtime.run_settings import Collect, RunSettings
from runtime.world.device import CPU
from runtime.world.failure import RankError, WorldFailed
from runtime.world.pool import Pool
from workbench.calibrate.fit import fit
from workbench.calibrate.in_pipeline import Rehearsal, with_pipeline_factors
from workbench.cost.profile import Profile
from workbench.drift import Run, drift_of, smoothed, yardstick_s
from workbench.plan.codec import plan_hash, write_plan
from workbench.trace import Trace
from workbench.trace_json import read_trace, write_trace
from workbench.whole_file import write_text

PREDICTIONS = "predictions.json"

Progress = Callable[[int, int, str], None]  # (done, total, what)


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted(Prediction):
    """A plan of the suite with everything that was predicted of it."""

    case: Case


def calibrate(
    every: Sequence[Case],
    pool: Pool | None,
    folder: Path,
    progress: Progress,
    *,
    budget_s: float,
    visits: int = 1,
    device: torch.device = CPU,
) -> Profile:
    """One profile for all plans; as many processes work while a layer is timed as there are cores.

    Args:
        every: plans; the executor's overhead is that of the first.
        pool: None: this process measures alone, on the device.
        budget_s: of each kind of pass of each group of layers, at each visit.
        visits: of each group of layers, all others between.
    """
    plans = [case.plan for case in every]
    cores = plans[0].cluster.nodes[0].num_cores or 1
    concurrency = 1 if pool is None else min(cores, pool.num_workers)
    measured = measure(
        plans,
        pool,
        settings=BenchSettings(concurrency=concurrency, budget_s=budget_s, visits=visits, device=device),
        path=folder / "measurement.json",
        progress=progress,
    )
    return fit("this machine", [measured])


def rehearse(
    profile: Profile, every: Sequence[Case], judged: Sequence[Case], runs: "Runs", progress: Progress
) -> Profile:
    """The profile with what running plans show: how much longer passes take in a pipeline.

    What an earlier rehearsal showed is forgotten.

    Raises:
        ValueError: a plan that is judged too, or one that did not run.
    """
    told = {plan_hash(case.plan) for case in judged}
    profile = replace(profile, in_pipeline=(), without_messages=())
    predicted = [predict(case, profile) for case in every]
    both = next((one for one in predicted if one.plan_hash in told), None)
    if both is not None:
        raise ValueError(f"plan {both.case.name!r} is judged: it cannot be run to calibrate")
    runs.execute(predicted, progress)
    for one in predicted:
        if one.plan_hash in runs.left_out:
            raise ValueError(f"plan {one.case.name!r} did not run: {runs.left_out[one.plan_hash].reason}")
    return with_pipeline_factors(
        profile, [Rehearsal(simulated=one.simulated, executed=runs.timed(one)) for one in predicted]
    )


def predict(case: Case, profile: Profile) -> Predicted:
    """Check, price and simulate; ValueError when the plan is refused."""
    found = emulated.predict(case.plan, profile)
    return Predicted(case=case, **{field.name: getattr(found, field.name) for field in fields(found)})


def write_predictions(every: Sequence[Predicted], folder: Path, name: str = PREDICTIONS) -> None:
    """All predictions with the hashes of their plans, before anything runs that they are held against.

    Raises:
        ValueError: predictions are there already and differ, or two plans are the same.
    """
    hashes = [one.plan_hash for one in every]
    twice = next((one for one in every if hashes.count(one.plan_hash) > 1), None)
    if twice is not None:
        raise ValueError(f"plan {twice.case.name!r} stands twice in the suite")
    rows = [
        {
            "plan": one.case.name,
            "part": one.case.part,
            "plan_hash": one.plan_hash,
            "predicted_s": one.simulated.iteration_s,
        }
        for one in every
    ]
    text = json.dumps(rows, indent=1) + "\n"
    path = folder / name
    if path.is_file() and path.read_text() != text:
        raise ValueError(f"{path} holds other predictions; start anew, without --resume or elsewhere")
    for one in every if name == PREDICTIONS else ():
        write_plan(one.case.plan, folder / f"{one.plan_hash:.16}.plan.json")
        write_trace(one.simulated, folder / f"{one.plan_hash:.16}.sim.json")
    write_text(text, path)


Renew = Callable[[Sequence[Predicted], float | None], Sequence[Predicted]]


def unchanged(in_force: Sequence[Predicted], drift: float | None) -> Sequence[Predicted]:
    """Predictions hold, however the machine drifts."""
    del drift
    return in_force


@dataclass(frozen=True, slots=True)
class _Done:
    """A plan that ran in a round, beside the prediction that held then; no steps where it was left out."""

    predicted: Predicted
    turn: int
    traces: tuple[Trace, ...]

    @property
    def readings_s(self) -> list[float | None]:
        """Of the yardstick, beside every step."""
        return [yardstick_s(trace) for trace in self.traces]


class Runs:
    """The executed steps in a folder.

    Args:
        folder: of the suite.
        rounds: every plan runs once in each, so that drift of the machine meets all plans alike;
            emulated plans, whose steps are medians already and take all ranks' time, only in the first.
        steps: timed in a round.
        pool: of the ranks; None: the device plays all ranks of every plan.
    """

    def __init__(
        self, folder: Path, *, rounds: int, steps: int, pool: Pool | None, device: torch.device = CPU
    ) -> None:
        self._folder = folder / "runs"
        self._rounds, self._steps, self._pool, self._device = rounds, steps, pool, device
        self._log = folder / "runs.jsonl"
        self._worst, self._worst_error = "", 0.0
        self._done: list[_Done] = []  # in the order in which they ran
        self.left_out: dict[str, LeftOut] = {}  # plan hash -> why it did not run

    def execute(self, every: Sequence[Predicted], progress: Progress, renew: Renew = unchanged) -> None:
        """Run what has not run yet. A plan that the runtime refuses, or that fails, is left out.

        `renew` is called between two rounds, with the drift of the machine in the first of them, and gives
        the predictions that hold for the second.
        """
        in_force = tuple(every)
        num_turns = sum(1 for turn in range(self._rounds) for _ in self._of_turn(turn, in_force))
        for turn in range(self._rounds):
            if turn > 0:
                in_force = tuple(renew(in_force, self._drift(turn - 1)))
            for one in self._of_turn(turn, in_force):
                at = len(self._done)
                progress(at, num_turns, f"round {turn + 1}: {one.case.name}{self._worst}")
                self._done.append(_Done(one, turn, self._execute_one(one, turn)))
        progress(num_turns, num_turns, "all plans have run")

    def _execute_one(self, one: Predicted, turn: int) -> tuple[Trace, ...]:
        """The steps of a plan in a round; those that lie there already are not run again."""
        paths = [self._path(one, f"{turn}.{step}") for step in range(self._steps)]
        if not all(path.is_file() for path in paths) and one.plan_hash not in self.left_out:
            traces = self._run(one, steps=self._steps, collect=Collect.NOTHING)
            for trace, path in zip(traces, paths, strict=False):
                write_trace(trace, path)
            self._note(one, turn, traces)
        return tuple(read_trace(path) for path in paths if path.is_file())

    def _drift(self, turn: int) -> float | None:
        """Of the machine in one round."""
        mine = [done for done in self._done if done.turn == turn]
        calibrated_s = yardstick_s(mine[0].predicted.simulated) if mine else None
        return drift_of(calibrated_s, [reading for done in mine for reading in done.readings_s])

    def runs_of(self, one: Predicted) -> tuple[Run, ...]:
        """A plan's runs, each beside the prediction that held then and the drift of the machine around it."""
        calibrated_s = [yardstick_s(done.predicted.simulated) for done in self._done]
        drifts = smoothed(calibrated_s, [done.readings_s for done in self._done])
        return tuple(
            Run(
                predicted_s=done.predicted.simulated.iteration_s,
                executed_s=tuple(trace.iteration_s for trace in done.traces),
                drift=drift,
            )
            for done, drift in zip(self._done, drifts, strict=True)
            if done.predicted.plan_hash == one.plan_hash and done.traces
        )

    def watch(self, every: Sequence[Predicted], progress: Progress) -> None:
        """One more step of every plan with its memory watched, which makes it slower: it is not timed."""
        for done, one in enumerate(every):
            progress(done, len(every), f"memory of {one.case.name}")
            path = self._path(one, "watched")
            if self._pool is None or one.case.part is Part.EMULATED:  # one process holds all ranks
                continue
            if not path.is_file() and one.plan_hash not in self.left_out:
                for trace in self._run(one, steps=1, collect=Collect.MEMORY):
                    write_trace(trace, path)
        progress(len(every), len(every), "all plans were watched")

    def timed(self, one: Predicted) -> tuple[Trace, ...]:
        """The timed steps of a plan, round by round."""
        names = (f"{turn}.{step}" for turn in range(self._rounds) for step in range(self._steps))
        paths = (self._path(one, name) for name in names)
        return tuple(read_trace(path) for path in paths if path.is_file())

    def watched(self, one: Predicted) -> Trace | None:
        """The step whose memory was watched; None when there is none."""
        path = self._path(one, "watched")
        return read_trace(path) if path.is_file() else None

    def _note(self, one: Predicted, turn: int, traces: Sequence[Trace]) -> None:
        """Append what a run took to `runs.jsonl`, and keep the worst error in sight."""
        if not traces:
            return
        steps_s = [trace.iteration_s for trace in traces]
        error = one.simulated.iteration_s / statistics.median(steps_s) - 1
        note = {"plan": one.case.name, "round": turn, "executed_s": steps_s, "error": error}
        with self._log.open("a", encoding="utf-8") as log:
            log.write(json.dumps(note) + "\n")
        if abs(error) > self._worst_error:
            self._worst_error = abs(error)
            self._worst = f" (worst so far {error:+.1%}: {one.case.name})"

    def _of_turn(self, turn: int, every: Sequence[Predicted]) -> Iterator[Predicted]:
        return (one for one in every if turn == 0 or one.case.part is not Part.EMULATED)

    def _path(self, one: Predicted, name: str) -> Path:
        return self._folder / f"{one.plan_hash:.16}.{name}.run.json"

    def _run(self, one: Predicted, *, steps: int, collect: Collect) -> tuple[Trace, ...]:
        try:
            if self._pool is None:
                return execute_emulated(one.plan, self._device, steps=steps, profile=one.profile).steps
            if one.case.part is Part.EMULATED:
                settings = RunSettings(steps=steps, warmup=WARMUP, timeout_s=WAIT_S)
                return emulate_on(
                    self._pool, one.case.plan, settings, num_processes=PAIR, profile=one.profile
                )
            return run_local(
                one.case.plan,
                RunSettings(steps=steps, warmup=WARMUP, timeout_s=WAIT_S, collect=collect),
                pool=self._pool,
            ).traces
        except (ValueError, RankError, WorldFailed) as error:
            kind = "refused" if isinstance(error, ValueError) else "failed"
            reason = f"{kind}: {' '.join(str(error).split())}"
            self.left_out[one.plan_hash] = LeftOut(name=one.case.name, reason=reason)
            return ()
