"""How fast the machine is at the moment: the same layers, timed while calibrating and again between runs."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from runtime.measure.layers import Kind, Part, WindowTimes, time_window
from runtime.measure.windows import Window, windows_of
from runtime.world.device import CPU
from runtime.world.pool import Place, Pool
from workbench.plan.plan import Plan

BUDGET_S = 0.3  # of each kind of pass
WAIT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauge:
    """Reads the seconds of one forward and backward of a few layers, on as many processes as calibrate.

    What it reads apart from its first readings is drift of the machine: no prediction knows of it.

    Args:
        pool: None: this process reads alone, on the device.
    """

    plan: Plan
    window: Window
    pool: Pool | None
    num_processes: int
    log: Path
    device: torch.device = CPU

    def read(self, when: str) -> float:
        """Time the layers now, and note it."""
        seconds = _whole_s(self._times())
        with self.log.open("a", encoding="utf-8") as log:
            log.write(json.dumps({"when": when, "seconds": seconds}) + "\n")
        return seconds

    def _times(self) -> Sequence[WindowTimes]:
        if self.pool is None:
            alone = Place(0, 1, lambda position: None)
            return [time_window(alone, self.plan, self.window, BUDGET_S, str(self.device))]
        return self.pool.run(
            time_window, self.num_processes, self.plan, self.window, BUDGET_S, timeout_s=WAIT_S
        )

    def drift(self) -> float | None:
        """Median reading between runs over the median while calibrating, minus 1; None without both."""
        if not self.log.is_file():
            return None
        return drift_of([json.loads(line) for line in self.log.read_text().splitlines()])


CALIBRATING, RUNNING = "calibrating", "running"


def drift_of(notes: Sequence[dict[str, float | str]]) -> float | None:
    """Of noted readings; see `Gauge.drift`."""
    by_time = {
        when: [float(note["seconds"]) for note in notes if note["when"] == when]
        for when in (CALIBRATING, RUNNING)
    }
    if not all(by_time.values()):
        return None
    return statistics.median(by_time[RUNNING]) / statistics.median(by_time[CALIBRATING]) - 1


def gauge_of(plan: Plan, pool: Pool | None, folder: Path, device: torch.device = CPU) -> Gauge:
    """A gauge of the plan's widest window of layers."""
    window = max(windows_of(plan, sizes=1), key=lambda found: found.layers[1] - found.layers[0])
    cores = plan.cluster.nodes[0].num_cores or 1
    return Gauge(
        plan=plan,
        window=window,
        pool=pool,
        num_processes=1 if pool is None else min(cores, pool.num_workers),
        log=folder / "gauge.jsonl",
        device=device,
    )


def _whole_s(times: Sequence[WindowTimes]) -> float:
    """Mean over processes of the summed medians of all layers."""
    return statistics.fmean(
        sum(
            statistics.median(seconds)
            for (_, kind, part), seconds in of_process.seconds.items()
            if kind is Kind.WHOLE and part in (Part.FORWARD, Part.BACKWARD)
        )
        for of_process in times
    )
