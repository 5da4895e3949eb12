"""Fidelity of predictions: every plan predicted, then executed, and the difference explained.

Setup:   gloo ranks on this machine with one thread each; two ranks pinned to a core of their own,
         three or four ranks on two cores, and up to eight by emulation. Real transformers layers,
         random weights and data.
Ours:    one calibration, with ten plans that run for it and are not judged; all predictions are written, with
         the plans' hashes, before the first judged plan runs; then all run round by round, so that drift of
         the machine affects all alike. A yardstick is read at every step; where the machine has drifted by
         more than a tenth in a round, rehearsals run again before the next.
         On a GPU, which is one device, the emulated part alone: one process calibrates, and the GPU executes
         all ranks, those of the rehearsals too. Messages and collectives take an assumed link's time in
         prediction and emulation alike.
Run:     python -m experiments.fidelity.run [--device DEVICE] [--json] [--plans N] [--part PART] [--quick]
         [--resume]
"""

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from experiments.fidelity.cases import CROWD, Case, LeftOut, Machine, Part, cases, quick
from experiments.fidelity.draw import RESULT, drawing
from experiments.fidelity.many_ranks import MANY
from experiments.fidelity.plan_runs import Predicted, Runs, calibrate, predict, rehearse, write_predictions
from experiments.fidelity.rehearsals import rehearsals
from experiments.fidelity.report import PlanRow, lines, plan_row, summary
from experiments.fidelity.work import ASSUMED, UNMEASURED, emulated_machine
from experiments.harness.command import command_line, run_main
from experiments.harness.drawing import PLOTS, save
from experiments.harness.record import commit
from runtime.measure.microbench import header_here
from runtime.world.device import CPU, NAMES, device_of
from runtime.world.pool import Pool
from workbench.cost.profile import Profile, write_profile
from workbench.drift import is_beyond
from workbench.report.progress import ticking
from workbench.whole_file import write_text

OUT = Path("out/fidelity")
QUICK_PLANS = 6
REHEARSED = 4  # steps of a plan in a round


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """How much is run: plans (None: all) of one part or all, rounds, and timed steps in a round."""

    plans: int | None = None
    part: Part | None = None
    rounds: int = 3
    steps: int = 2
    budget_s: float = 0.2  # of each kind of pass of each group of layers, at each visit
    visits: int = 2  # of a group of layers


@dataclass(slots=True, kw_only=True)
class Pace:
    """Calibration of the machine's current pace by executing plans that are not judged.

    Args:
        measured: profile of isolated layers.
        plans: executed to calibrate, none of them judged.
        judged: plans predicted with the calibration.
        runs_in: makes the runs of a folder.
        out: folder of the suite; every rehearsal has a subfolder.
        rehearsed: number of rehearsals so far.
    """

    measured: Profile
    plans: Sequence[Case]
    judged: Sequence[Case]
    runs_in: Callable[..., Runs]
    out: Path
    is_quiet: bool
    rehearsed: int = 0

    def predictions(self) -> tuple[Profile, tuple[Predicted, ...]]:
        """Rehearse now, and predict all judged plans with the result."""
        folder = self.out / "rehearsals" / (str(self.rehearsed) if self.rehearsed else "")
        runs = self.runs_in(folder, steps=REHEARSED)
        with ticking("rehearsals", None, quiet=self.is_quiet) as ticker:
            profile = rehearse(self.measured, self.plans, self.judged, runs, ticker.at)
        self.rehearsed += 1
        return profile, tuple(predict(case, profile) for case in self.judged)

    def renewed(self, in_force: Sequence[Predicted], drift: float | None) -> Sequence[Predicted]:
        """Predictions of the next round: new ones where the machine has drifted since the last rehearsal."""
        if not is_beyond(drift):
            return in_force
        _, predictions = self.predictions()
        write_predictions(predictions, self.out, f"predictions.{self.rehearsed}.json")
        return predictions


def run(out: Path, extent: Extent, *, is_quiet: bool, alone: torch.device | None = None) -> dict[str, Any]:
    """Run the suite; continues an earlier run in the same folder.

    Args:
        alone: a device that emulates all ranks; None: they are processes of this machine.

    Returns:
        What `--json` prints; also written to `out/fidelity.json`.
    """
    started_s = time.monotonic()
    left_out: list[LeftOut] = []
    device = alone or CPU
    machine = None if alone is None else _machine_of(alone)
    with Pool(CROWD) if alone is None else nullcontext() as pool:
        unpriced = _chosen(cases(UNMEASURED, lambda _: None, machine), extent)
        with ticking("calibrating", None, quiet=is_quiet) as ticker:
            out.mkdir(parents=True, exist_ok=True)
            measured = calibrate(
                unpriced,
                pool,
                out,
                ticker.at,
                budget_s=extent.budget_s,
                visits=extent.visits,
                device=device,
            )
        link = measured.machine_link("intra").link if alone is None else ASSUMED
        chosen = _chosen(cases(link, left_out.append, machine), extent)
        runs_in = partial(Runs, rounds=extent.rounds, pool=pool, device=device)
        pace = Pace(
            measured=measured,
            plans=rehearsals(link, machine),
            judged=chosen,
            runs_in=runs_in,
            out=out,
            is_quiet=is_quiet,
        )
        profile, predicted = pace.predictions()
        write_profile(profile, out / "profile.json")
        write_predictions(predicted, out)
        runs = runs_in(out, steps=extent.steps)
        with ticking("plans", None, quiet=is_quiet) as ticker:
            runs.execute(predicted, ticker.at, pace.renewed)
        with ticking("memory", None, quiet=is_quiet) as ticker:
            runs.watch(predicted, ticker.at)
    rows = rows_of(predicted, runs)
    result = _provenance(profile, device) | summary(rows, (*left_out, *runs.left_out.values()))
    result["recalibrated"] = pace.rehearsed - 1
    result["noise"] = list(profile.noise)
    result["seconds"] = time.monotonic() - started_s
    write_text(json.dumps(result, indent=1) + "\n", out / "fidelity.json")
    return result


def rows_of(predicted: Sequence[Predicted], runs: Runs) -> tuple[PlanRow, ...]:
    """Rows of the plans that have been executed."""
    timed = ((prediction, runs.timed(prediction)) for prediction in predicted)
    return tuple(
        plan_row(prediction, traces, runs.runs_of(prediction), runs.watched(prediction))
        for prediction, traces in timed
        if traces
    )


def _chosen(all_cases: Sequence[Case], extent: Extent) -> tuple[Case, ...]:
    of_part = [case for case in all_cases if extent.part in (None, case.part)]
    return tuple(of_part) if extent.plans is None else quick(of_part, extent.plans)


def _machine_of(device: torch.device) -> Machine:
    """A machine of as many ranks as the emulated part has, with a device of this kind each."""
    return lambda part, link: emulated_machine(device, MANY, link)


def _provenance(profile: Profile, device: torch.device) -> dict[str, Any]:
    header = header_here(device)
    return {
        "suite": "fidelity",
        "command": "python -m experiments.fidelity.run",
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="minutes"),
        "device": header.device_name,
        "versions": dict(header.versions),
        "profile": profile.name,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 when every plan ran and every goal holds, 1 otherwise, 2 for bad input."""
    options = _parse(arguments)
    return run_main(lambda: _main(options, print))


def _main(options: argparse.Namespace, show: Callable[[str], None]) -> int:
    if options.plans is not None and options.plans < 1:
        raise ValueError(f"--plans: want at least one plan, got {options.plans}")
    extent = Extent(plans=options.plans, part=options.part)
    if options.quick:
        plans = options.plans or QUICK_PLANS
        extent = Extent(plans=plans, part=options.part, rounds=1, budget_s=0.1, visits=1)
    device = device_of(options.device)
    alone = None if device == CPU else device
    if alone is not None:
        extent = _emulated_alone(extent)
    if not options.resume:
        _clear(options.out)
    result = run(options.out, extent, is_quiet=False, alone=alone)
    for line in lines(result):
        show(line)
    if extent == Extent():
        write_text(json.dumps(result, indent=1) + "\n", RESULT)
        save(drawing(result), PLOTS, "fidelity")
    if options.json:
        show(json.dumps(result))
    return 0 if all(result["goals"].values()) and not result["left_out"] else 1


def _emulated_alone(extent: Extent) -> Extent:
    if extent.part not in (None, Part.EMULATED):
        raise ValueError(
            f"--part {extent.part}: its ranks are processes of this machine's cores, and one GPU plays all "
            f"ranks itself; want --part {Part.EMULATED}"
        )
    return replace(extent, part=Part.EMULATED, visits=1)


def _clear(out: Path) -> None:
    """Remove the files of an earlier run and nothing else in the folder."""
    for folder in ("runs", "rehearsals"):
        shutil.rmtree(out / folder, ignore_errors=True)
    for pattern in (
        "measurement.json",
        "predictions*.json",
        "runs.jsonl",
        "*.plan.json",
        "*.sim.json",
    ):
        for path in out.glob(pattern):
            path.unlink()


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("--device", choices=NAMES, default=CPU.type, help="device that runs the plans")
    parser.add_argument("--plans", type=int, help="so many plans, evenly out of all; default: all")
    parser.add_argument(
        "--part", type=Part, choices=[part for part in Part if part is not Part.REHEARSAL], help="these alone"
    )
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_PLANS} plans, one round")
    parser.add_argument("--resume", action="store_true", help="continue from the files in the folder")
    parser.add_argument("--out", type=Path, default=OUT, help="folder for predictions and steps")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
