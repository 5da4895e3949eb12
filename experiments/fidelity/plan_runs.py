"""Predicts plans before they run, then runs them round by round; every step is stored as a file.

Files of a folder: `measurement.json` and `profile.json` (this machine), `rehearsals/` (plans run to
calibrate), `predictions.json` (written before the first judged plan runs; `predictions.<number>.json` where
rehearsals ran again), `<hash>.plan.json`, `<hash>.sim.json`, `runs/<hash>.<round>.<step>.run.json`,
`runs/<hash>.watched.run.json`, and `runs.jsonl` (a line for every run as it ends). Existing files are not
computed again.
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
from experiments.fidelity.in_pipeline import Rehearsal, with_pipeline_factors
from experiments.fidelity.many_ranks import emulate_on
from runtime.launch import run_local
from runtime.measure.plans import BenchSettings, measure
from runtime.run_settings import Collect, RunSettings
from runtime.world.device import CPU
from runtime.world.failure import RankError, WorldFailed
from runtime.world.pool import Pool
from workbench.calibrate.fit import fit
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
    """A plan of the suite with its prediction."""

    case: Case


def calibrate(
    cases: Sequence[Case],
    pool: Pool | None,
    folder: Path,
    progress: Progress,
    *,
    budget_s: float,
    visits: int = 1,
    device: torch.device = CPU,
) -> Profile:
    """Measure one profile for all plans; layers are timed with as many processes as cores.

    Args:
        cases: of the plans; the executor's overhead is measured on the first.
        pool: None: this process measures alone, on the device.
        budget_s: for each kind of pass of each group of layers, per visit.
        visits: of each group of layers, with all other groups in between.
    """
    plans = [case.plan for case in cases]
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
    profile: Profile, cases: Sequence[Case], judged: Sequence[Case], runs: "Runs", progress: Progress
) -> Profile:
    """Return the profile with pipeline factors fitted to executed plans.

    Factors of an earlier rehearsal are discarded.

    Raises:
        ValueError: one of the plans is also judged, or did not run.
    """
    judged_hashes = {plan_hash(case.plan) for case in judged}
    profile = replace(profile, in_pipeline=(), without_messages=())
    predicted = [predict(case, profile) for case in cases]
    both = next((prediction for prediction in predicted if prediction.plan_hash in judged_hashes), None)
    if both is not None:
        raise ValueError(f"plan {both.case.name!r} is judged: it cannot be run to calibrate")
    runs.execute(predicted, progress)
    for prediction in predicted:
        if prediction.plan_hash in runs.left_out:
            raise ValueError(
                f"plan {prediction.case.name!r} did not run: {runs.left_out[prediction.plan_hash].reason}"
            )
    return with_pipeline_factors(
        profile,
        [
            Rehearsal(simulated=prediction.simulated, executed=runs.timed(prediction))
            for prediction in predicted
        ],
    )


def predict(case: Case, profile: Profile) -> Predicted:
    """Check, price and simulate; ValueError when the plan is refused."""
    prediction = emulated.predict(case.plan, profile)
    return Predicted(
        case=case, **{field.name: getattr(prediction, field.name) for field in fields(prediction)}
    )


def write_predictions(predictions: Sequence[Predicted], folder: Path, name: str = PREDICTIONS) -> None:
    """Write all predictions with the hashes of their plans before any of them is executed.

    Raises:
        ValueError: different predictions are stored already, or two plans are equal.
    """
    hashes = [prediction.plan_hash for prediction in predictions]
    twice = next((prediction for prediction in predictions if hashes.count(prediction.plan_hash) > 1), None)
    if twice is not None:
        raise ValueError(f"plan {twice.case.name!r} stands twice in the suite")
    rows = [
        {
            "plan": prediction.case.name,
            "part": prediction.case.part,
            "plan_hash": prediction.plan_hash,
            "predicted_s": prediction.simulated.iteration_s,
        }
        for prediction in predictions
    ]
    text = json.dumps(rows, indent=1) + "\n"
    path = folder / name
    if path.is_file() and path.read_text() != text:
        raise ValueError(f"{path} holds other predictions; start anew, without --resume or elsewhere")
    for prediction in predictions if name == PREDICTIONS else ():
        write_plan(prediction.case.plan, folder / f"{prediction.plan_hash:.16}.plan.json")
        write_trace(prediction.simulated, folder / f"{prediction.plan_hash:.16}.sim.json")
    write_text(text, path)


Renew = Callable[[Sequence[Predicted], float | None], Sequence[Predicted]]


def unchanged(in_force: Sequence[Predicted], drift: float | None) -> Sequence[Predicted]:
    """Keep the predictions, however the machine drifts."""
    del drift
    return in_force


@dataclass(frozen=True, slots=True)
class _Done:
    """A plan executed in a round, with the prediction valid then; no steps where it was left out."""

    predicted: Predicted
    turn: int
    traces: tuple[Trace, ...]

    @property
    def readings_s(self) -> list[float | None]:
        """The yardstick's seconds beside every step."""
        return [yardstick_s(trace) for trace in self.traces]


class Runs:
    """The executed steps in a folder.

    Args:
        folder: of the suite.
        rounds: every plan runs once in each, so that drift of the machine affects all plans alike;
            emulated plans, whose steps are medians already and take all ranks' time, only in the first.
        steps: timed steps per round.
        pool: of the ranks; None: the device emulates all ranks of every plan.
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

    def execute(self, predictions: Sequence[Predicted], progress: Progress, renew: Renew = unchanged) -> None:
        """Execute what has not been executed yet; a plan that the runtime refuses or that fails is left out.

        `renew` is called between two rounds with the machine's drift in the first of them, and returns the
        predictions valid for the second.
        """
        in_force = tuple(predictions)
        num_turns = sum(1 for turn in range(self._rounds) for _ in self._of_turn(turn, in_force))
        for turn in range(self._rounds):
            if turn > 0:
                in_force = tuple(renew(in_force, self._drift(turn - 1)))
            for prediction in self._of_turn(turn, in_force):
                at = len(self._done)
                progress(at, num_turns, f"round {turn + 1}: {prediction.case.name}{self._worst}")
                self._done.append(_Done(prediction, turn, self._execute_one(prediction, turn)))
        progress(num_turns, num_turns, "all plans have run")

    def _execute_one(self, prediction: Predicted, turn: int) -> tuple[Trace, ...]:
        """The steps of a plan in a round; stored ones are not executed again."""
        paths = [self._path(prediction, f"{turn}.{step}") for step in range(self._steps)]
        if not all(path.is_file() for path in paths) and prediction.plan_hash not in self.left_out:
            traces = self._run(prediction, steps=self._steps, collect=Collect.NOTHING)
            for trace, path in zip(traces, paths, strict=False):
                write_trace(trace, path)
            self._note(prediction, turn, traces)
        return tuple(read_trace(path) for path in paths if path.is_file())

    def _drift(self, turn: int) -> float | None:
        """Drift of the machine within one round."""
        done_in_turn = [done for done in self._done if done.turn == turn]
        calibrated_s = yardstick_s(done_in_turn[0].predicted.simulated) if done_in_turn else None
        return drift_of(calibrated_s, [reading for done in done_in_turn for reading in done.readings_s])

    def runs_of(self, prediction: Predicted) -> tuple[Run, ...]:
        """A plan's runs, each with the prediction valid then and the machine's drift around it."""
        calibrated_s = [yardstick_s(done.predicted.simulated) for done in self._done]
        drifts = smoothed(calibrated_s, [done.readings_s for done in self._done])
        return tuple(
            Run(
                predicted_s=done.predicted.simulated.iteration_s,
                executed_s=tuple(trace.iteration_s for trace in done.traces),
                drift=drift,
            )
            for done, drift in zip(self._done, drifts, strict=True)
            if done.predicted.plan_hash == prediction.plan_hash and done.traces
        )

    def watch(self, predictions: Sequence[Predicted], progress: Progress) -> None:
        """Execute one more, untimed, step of every plan with its memory observed, which slows it down."""
        for done, prediction in enumerate(predictions):
            progress(done, len(predictions), f"memory of {prediction.case.name}")
            path = self._path(prediction, "watched")
            if self._pool is None or prediction.case.part is Part.EMULATED:  # one process holds all ranks
                continue
            if not path.is_file() and prediction.plan_hash not in self.left_out:
                for trace in self._run(prediction, steps=1, collect=Collect.MEMORY):
                    write_trace(trace, path)
        progress(len(predictions), len(predictions), "all plans were watched")

    def timed(self, prediction: Predicted) -> tuple[Trace, ...]:
        """The timed steps of a plan, round by round."""
        names = (f"{turn}.{step}" for turn in range(self._rounds) for step in range(self._steps))
        paths = (self._path(prediction, name) for name in names)
        return tuple(read_trace(path) for path in paths if path.is_file())

    def watched(self, prediction: Predicted) -> Trace | None:
        """The step whose memory was observed; None when there is none."""
        path = self._path(prediction, "watched")
        return read_trace(path) if path.is_file() else None

    def _note(self, prediction: Predicted, turn: int, traces: Sequence[Trace]) -> None:
        """Append the run's duration to `runs.jsonl` and track the largest error."""
        if not traces:
            return
        steps_s = [trace.iteration_s for trace in traces]
        error = prediction.simulated.iteration_s / statistics.median(steps_s) - 1
        note = {"plan": prediction.case.name, "round": turn, "executed_s": steps_s, "error": error}
        with self._log.open("a", encoding="utf-8") as log:
            log.write(json.dumps(note) + "\n")
        if abs(error) > self._worst_error:
            self._worst_error = abs(error)
            self._worst = f" (worst so far {error:+.1%}: {prediction.case.name})"

    def _of_turn(self, turn: int, predictions: Sequence[Predicted]) -> Iterator[Predicted]:
        return (
            prediction for prediction in predictions if turn == 0 or prediction.case.part is not Part.EMULATED
        )

    def _path(self, prediction: Predicted, name: str) -> Path:
        return self._folder / f"{prediction.plan_hash:.16}.{name}.run.json"

    def _run(self, prediction: Predicted, *, steps: int, collect: Collect) -> tuple[Trace, ...]:
        try:
            if self._pool is None:
                return execute_emulated(
                    prediction.plan, self._device, steps=steps, profile=prediction.profile
                ).steps
            if prediction.case.part is Part.EMULATED:
                settings = RunSettings(steps=steps, warmup=WARMUP, timeout_s=WAIT_S)
                return emulate_on(
                    self._pool, prediction.case.plan, settings, num_processes=PAIR, profile=prediction.profile
                )
            return run_local(
                prediction.case.plan,
                RunSettings(steps=steps, warmup=WARMUP, timeout_s=WAIT_S, collect=collect),
                pool=self._pool,
            ).traces
        except (ValueError, RankError, WorldFailed) as error:
            kind = "refused" if isinstance(error, ValueError) else "failed"
            reason = f"{kind}: {' '.join(str(error).split())}"
            self.left_out[prediction.plan_hash] = LeftOut(name=prediction.case.name, reason=reason)
            return ()
