"""Predicts plans before they run, then runs them round by round; every step is kept as a file.

Files of a folder: `measurement.json` and `profile.json` (this machine), `rehearsals/` (plans run to
calibrate), `predictions.json` (written before the first judged plan runs), `<hash>.plan.json`,
`<hash>.sim.json`, `runs/<hash>.<round>.<step>.run.json`, `runs/<hash>.watched.run.json`, and
`runs.jsonl` (a line for every run as it ends).
What is there already is not done again.
"""

import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch

from experiments.fidelity import emulated
from experiments.fidelity.cases import PAIR, Case, LeftOut, Part
from experiments.fidelity.emulated import WAIT_S, WARMUP, Prediction, execute_emulated
from experiments.fidelity.many_ranks import emulate_on
from runtime.launch import run_local
from runtime.measure.plans import BenchSettings, measure
from runtime.rank_job import Collect, RunSettings
from runtime.world.device import CPU
from runtime.world.failure import RankError, WorldFailed
from runtime.world.pool import Pool
from workbench.calibrate.fit import fit
from workbench.calibrate.in_pipeline import Rehearsal, with_pipeline_factors
from workbench.cost.profile import Profile
from workbench.plan.codec import plan_hash, write_plan
from workbench.trace import Trace
from workbench.trace_json import read_trace, write_trace
from workbench.whole_file import write_text

BETWEEN = 10  # plans

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
    device: torch.device = CPU,
) -> Profile:
    """One profile for all plans; as many processes work while a layer is timed as there are cores.

    Args:
        every: plans; the executor's overhead is that of the first.
        pool: None: this process measures alone, on the device.
        budget_s: of each kind of pass of each group of layers.
    """
    plans = [case.plan for case in every]
    cores = plans[0].cluster.nodes[0].num_cores or 1
    concurrency = 1 if pool is None else min(cores, pool.num_workers)
    measured = measure(
        plans,
        pool,
        settings=BenchSettings(concurrency=concurrency, budget_s=budget_s, device=device),
        path=folder / "measurement.json",
        progress=progress,
    )
    return fit("this machine", [measured])


def rehearse(
    profile: Profile, every: Sequence[Case], judged: Sequence[Case], runs: "Runs", progress: Progress
) -> Profile:
    """The profile with what running plans show: how much longer passes take in a pipeline.

    Raises:
        ValueError: a plan that is judged too, or one that did not run.
    """
    told = {plan_hash(case.plan) for case in judged}
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


def write_predictions(every: Sequence[Predicted], folder: Path) -> None:
    """All predictions with the hashes of their plans, before anything runs.

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
    path = folder / "predictions.json"
    if path.is_file() and path.read_text() != text:
        raise ValueError(f"{path} holds other predictions; start anew, without --resume or elsewhere")
    for one in every:
        write_plan(one.case.plan, folder / f"{one.plan_hash:.16}.plan.json")
        write_trace(one.simulated, folder / f"{one.plan_hash:.16}.sim.json")
    write_text(text, path)


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
        self.left_out: dict[str, LeftOut] = {}  # plan hash -> why it did not run

    def execute(
        self, every: Sequence[Predicted], progress: Progress, between: Callable[[], object] = lambda: None
    ) -> None:
        """Run what has not run yet. A plan that the runtime refuses, or that fails, is left out.

        `between` is called every few plans, while nothing runs.
        """
        turns = tuple(self._turns(every))
        for done, (turn, one) in enumerate(turns):
            if done % BETWEEN == 0:
                between()
            progress(done, len(turns), f"round {turn + 1}: {one.case.name}{self._worst}")
            paths = [self._path(one, f"{turn}.{step}") for step in range(self._steps)]
            if all(path.is_file() for path in paths) or one.plan_hash in self.left_out:
                continue
            traces = self._run(one, steps=self._steps, collect=Collect.NOTHING)
            for trace, path in zip(traces, paths, strict=False):
                write_trace(trace, path)
            self._note(one, turn, traces)
        progress(len(turns), len(turns), "all plans have run")

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

    def _turns(self, every: Sequence[Predicted]) -> Iterator[tuple[int, Predicted]]:
        for turn in range(self._rounds):
            for one in every:
                if turn == 0 or one.case.part is not Part.EMULATED:
                    yield turn, one

    def _path(self, one: Predicted, name: str) -> Path:
        return self._folder / f"{one.plan_hash:.16}.{name}.run.json"

    def _run(self, one: Predicted, *, steps: int, collect: Collect) -> tuple[Trace, ...]:
        try:
            if self._pool is None:
                return execute_emulated(one.plan, self._device, steps=steps, profile=one.profile).steps
            if one.case.part is Part.EMULATED:
                settings = RunSettings(steps=steps, warmup=WARMUP, timeout_s=WAIT_S)
                return emulate_on(self._pool, one.case.plan, settings, num_processes=PAIR)
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
