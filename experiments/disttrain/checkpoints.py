"""Sections 3 and 6: a job that is killed repeatedly while it saves ends like one that is never killed.

Paper:   DistTrain, sections 3 and 6: asynchronous checkpoints, restart from the latest. It prints no number.
Setup:   a Llama of 6 blocks on 2 stages x 2 replicas, AdamW, float32, four gloo processes, a checkpoint after
         every step. The whole job (ranks and the processes that save) gets SIGKILL up to 150 ms after a save
         has begun, and the next job resumes from the latest whole checkpoint.
Ours:    executed. Losses and weights at the end are compared bit by bit with a job that was never killed.
         Stall: the time that a save takes from the training; the fork alone unless the save before it still
         runs.
Run:     python -m experiments.disttrain.checkpoints [--kills 20] [--seed 0] [--json]
"""

import multiprocessing
import os
import pickle
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from experiments.harness.command import command_line
from experiments.harness.outcome import Evidence, Outcome, outcome_of
from experiments.harness.script import finished
from experiments.oobleck.chaos_job import elastic_job
from runtime.elastic.job import plan_step
from runtime.launch import RunResult, run_lowered
from runtime.run_settings import Collect, RunSettings
from runtime.state.checkpoint import Begin, checkpoints_in
from runtime.state.checkpoint_files import PART, check_whole, clear_parts, identity_of
from runtime.state.tensor_files import MANIFEST
from workbench.elastic.layout import NodeLayout
from workbench.plan.lower import lower
from workbench.plan.lowered import Lowered

KILLS, SEED = 20, 0
STEPS_PER_KILL = 3  # so that the job lasts longer than its killers
LATEST_S = 0.15  # after the beginning of a save
JOB_S = 120.0  # nothing here may last longer


@dataclass(frozen=True, slots=True, kw_only=True)
class Killed:
    """A killed job: the step where the next one continues, and the ranks that had written their part."""

    step: int
    parts_written: int
    num_ranks: int


def job_plan() -> Lowered:
    """A plan of two stages in two replicas."""
    job = elastic_job(4, layers_per_rank=4)
    return lower(plan_step(job, NodeLayout(pipelines=(("a", "b"), ("c", "d"))), job.batch(0)))


def run_job(lowered: Lowered, settings: RunSettings, folder: Path, pipe: Connection) -> None:
    """Run a job in its own session, so that one signal ends all of it."""
    os.setsid()
    identity = identity_of(lowered.plan, settings.dtype(lowered.plan), settings.seed)
    saves = checkpoints_in(folder, 1, Begin.LATEST, identity)
    pipe.send_bytes(pickle.dumps(run_lowered(lowered, replace(settings, checkpoints=saves))))


class Killings:
    """Runs the same job again after each kill."""

    def __init__(self, lowered: Lowered, settings: RunSettings, folder: Path, rng: random.Random) -> None:
        self._lowered, self._settings, self._folder, self._rng = lowered, settings, folder, rng
        self._context = multiprocessing.get_context("fork")
        self._identity = identity_of(lowered.plan, settings.dtype(lowered.plan), settings.seed)

    def kill(self) -> Killed:
        """Start the job, kill it while it saves something new; raise RuntimeError where it never does."""
        before = self._step()
        process, pipe = self._start()
        deadline, target = time.monotonic() + JOB_S, before + self._rng.randrange(STEPS_PER_KILL)
        while self._step() < target or not self._parts():
            if time.monotonic() > deadline or not process.is_alive():
                raise RuntimeError(f"the job saved nothing after step {before}")
            time.sleep(0.0005)
        time.sleep(self._rng.uniform(0, LATEST_S))
        os.killpg(process.pid or 0, signal.SIGKILL)
        process.join(JOB_S)
        pipe.close()
        written = sum((part / MANIFEST).is_file() for part in self._parts())
        return Killed(step=self._whole_step(), parts_written=written, num_ranks=len(self._identity.ranks))

    def finish(self) -> RunResult:
        """Start the job and let it end."""
        process, pipe = self._start()
        if not pipe.poll(JOB_S):
            os.killpg(process.pid or 0, signal.SIGKILL)
            raise RuntimeError(f"the job is not done after {JOB_S:g} s")
        result = pickle.loads(pipe.recv_bytes())
        process.join(JOB_S)
        assert isinstance(result, RunResult)
        return result

    def _start(self) -> tuple[multiprocessing.process.BaseProcess, Connection]:
        clear_parts(self._folder)  # those seen from now on are this job's
        here, child_end = self._context.Pipe()
        arguments = (self._lowered, self._settings, self._folder, child_end)
        process = self._context.Process(target=run_job, args=arguments)
        process.start()
        child_end.close()
        return process, here

    def _step(self) -> int:
        """The step of the newest checkpoint with its final name."""
        names = (path.name for path in self._folder.glob("step-*") if path.suffix != PART)
        return max((int(name.removeprefix("step-")) for name in names), default=0)

    def _whole_step(self) -> int:
        """The step of the newest checkpoint, after reading all of it; 0 where there is none.

        Raises:
            TornError: it has its final name but is torn.
        """
        step = self._step()
        if step:
            check_whole(self._folder / f"step-{step:010}", self._identity)
        return step

    def _parts(self) -> list[Path]:
        return list(self._folder.glob(f"step-*{PART}/rank-*"))


def same_weights(first: RunResult, other: RunResult) -> bool:
    """Whether weights are equal bit for bit on every rank."""
    return all(
        state.weights.keys() == other_state.weights.keys()
        and all(torch.equal(state.weights[key], other_state.weights[key]) for key in state.weights)
        for state, other_state in zip(first.states, other.states, strict=True)
    )


def checkpoint_evidence(killed: Sequence[Killed], last: RunResult, alone: RunResult) -> Evidence:
    """Evidence on what the kills interrupted, and whether the end is the same."""
    evidence = Evidence()
    stalls_s = sorted(last.save_stalls_s)
    evidence.ours = {
        "kills": len(killed),
        "kills_before_any_part_was_written": sum(kill.parts_written == 0 for kill in killed),
        "kills_between_parts": sum(0 < kill.parts_written < kill.num_ranks for kill in killed),
        "kills_after_the_last_part": sum(kill.parts_written == kill.num_ranks for kill in killed),
        "steps": len(last.losses),
        "stall_p50_s": stalls_s[len(stalls_s) // 2],
        "stall_worst_s": stalls_s[-1],
    }
    evidence.claim(
        f"after {len(killed)} kills the losses of all {len(last.losses)} steps are those of a job left "
        "alone, bit by bit;",
        last.losses == alone.losses,
    )
    evidence.claim("so are the weights;", same_weights(last, alone))
    evidence.claim(
        "a job goes on from where the one before was, or further;",
        all(before.step <= after.step for before, after in pairwise(killed)),
    )
    evidence.notes.append("executed, not simulated; a finished checkpoint that is torn would end this script")
    return evidence


def checkpoints(kills: int, seed: int) -> Outcome:
    """Kill, finish, compare."""
    lowered = job_plan()
    steps = STEPS_PER_KILL * kills + STEPS_PER_KILL
    settings = RunSettings(steps=steps, collect=Collect.STATE, timeout_s=30.0)
    with tempfile.TemporaryDirectory(prefix="checkpoints-") as folder:
        killings = Killings(lowered, settings, Path(folder), random.Random(seed))
        killed = [killings.kill() for _ in range(kills)]
        last = killings.finish()
    return outcome_of(
        "disttrain/checkpoints", [checkpoint_evidence(killed, last, run_lowered(lowered, settings))]
    )


def main() -> int:
    """Run, report, write the result file."""
    parser = command_line(__doc__)
    parser.add_argument("--kills", type=int, default=KILLS)
    parser.add_argument("--seed", type=int, default=SEED)
    arguments = parser.parse_args()
    return finished(checkpoints(arguments.kills, arguments.seed), as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
