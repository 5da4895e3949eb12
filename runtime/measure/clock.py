"""Timing on one device, and statistics of many times."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from workbench.calibrate.sustained_rows import DeviceNotes

WARMUP = 2
LEAST_REPEATS = 5
MOST_REPEATS = 200
BATCH = 5  # calls queued on a GPU at a time
CYCLES_PER_S = 2e9  # approximate clock of a GPU
AHEAD = 1.5  # lead of the host before a batch, in multiples of the time that it takes to issue the batch
LEAST_AHEAD_S, MOST_AHEAD_S = 5e-4, 2e-2
AHEAD_TURNS = 8  # maximum lead of the host over a GPU, in turns of a loop
LEAST_TURNS = 4
SETTLE_S = 0.5  # until clocks and power of a GPU under load are those of training

Stamp = float | torch.cuda.Event
Reading = tuple[float | None, float | None]  # Hz, W


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """Result of a loop: seconds per call, turn by turn, and readings of the device."""

    seconds: tuple[float, ...]
    loop_s: float
    notes: DeviceNotes


class Clock:
    """Takes time stamps on a device: CUDA events in its current stream, or the host's clock on a CPU.

    Taking a CUDA stamp does not wait; reading the time between two waits for the later one.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.is_cuda = self.device.type == "cuda"

    def stamp(self) -> Stamp:
        """A time stamp of now, on the device."""
        if not self.is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between_s(self, start: Stamp, end: Stamp) -> float:
        """Seconds from one stamp to a later one."""
        if isinstance(start, float):
            assert isinstance(end, float), "stamps of one clock"
            return end - start
        assert not isinstance(end, float), "stamps of one clock"
        end.synchronize()
        return start.elapsed_time(end) * 1e-3

    def wait(self) -> None:
        """Wait until the device has completed all its work."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def time_s(self, call: Callable[[], object]) -> float:
        """Seconds of one call."""
        start = self.stamp()
        call()
        return self.between_s(start, self.stamp())

    def repeat(self, call: Callable[[], object], budget_s: float) -> list[float]:
        """Seconds of repeated calls after warm-up: at least five, then until the budget is spent.

        A GPU sleeps briefly first, so that the host gets ahead and no call waits for its launch.
        """
        issuing_s = 0.0
        for _ in range(WARMUP):  # the last one compiles nothing
            begin_s = time.perf_counter()
            call()
            issuing_s = time.perf_counter() - begin_s
        ahead_s = min(max(LEAST_AHEAD_S, AHEAD * BATCH * issuing_s), MOST_AHEAD_S)
        seconds: list[float] = []
        stop_s = time.perf_counter() + budget_s
        while len(seconds) < LEAST_REPEATS or (len(seconds) < MOST_REPEATS and time.perf_counter() < stop_s):
            if self.is_cuda:
                torch.cuda._sleep(round(CYCLES_PER_S * ahead_s))
            stamps = [(self.stamp(), call(), self.stamp()) for _ in range(BATCH)]
            seconds += [self.between_s(start, end) for start, _, end in stamps]
        return seconds

    @property
    def settle_s(self) -> float:
        """Seconds of load until the device's times are those of training; 0 for a CPU."""
        return SETTLE_S if self.is_cuda else 0.0

    def loop(self, calls: Sequence[Callable[[], object]], loop_s: float) -> Loop:
        """Repeat the calls in turn for `loop_s` seconds, and for at least four turns.

        The first half of the turns is dropped, as the device settles.
        """
        for call in calls:
            call()
        before = self.gauge()
        during: Reading | None = None
        begin_s = time.perf_counter()
        stamps = [self.stamp()]
        while len(stamps) <= LEAST_TURNS or time.perf_counter() < begin_s + loop_s:
            for call in calls:
                call()
            stamps.append(self.stamp())
            if len(stamps) > AHEAD_TURNS:
                self.between_s(stamps[0], stamps[-AHEAD_TURNS])  # waits, which keeps the queue short
            if during is None and time.perf_counter() >= begin_s + loop_s / 2:
                during = self.gauge()
        turns = [self.between_s(start, end) / len(calls) for start, end in pairwise(stamps)]
        return Loop(
            seconds=tuple(turns[len(turns) // 2 :]),
            loop_s=time.perf_counter() - begin_s,
            notes=notes_of(before, during or (None, None), self.gauge()),
        )

    def gauge(self) -> Reading:
        """Current Hz of the compute units and W of the board, from the driver; None where not available."""
        if not self.is_cuda:
            return None, None
        return _read(torch.cuda.clock_rate, self.device, 1e6), _read(torch.cuda.power_draw, self.device, 1e-3)


def notes_of(before: Reading, during: Reading, after: Reading) -> DeviceNotes:
    """Three readings of a gauge, as stored in rows."""
    return DeviceNotes(
        clock_before_hz=before[0],
        clock_during_hz=during[0],
        clock_after_hz=after[0],
        power_before_w=before[1],
        power_during_w=during[1],
        power_after_w=after[1],
    )


def _read(ask: Callable[[torch.device], int], device: torch.device, unit: float) -> float | None:
    """A reading of the driver; None, without an error, where the driver gives none."""
    try:
        return ask(device) * unit
    except Exception:  # anything that NVML's package raises, also that it is missing
        return None


def quartile_spread(seconds: Sequence[float]) -> float:
    """(third quartile - first quartile) / median; 0 for fewer than two values."""
    if len(seconds) < 2:
        return 0.0
    first, middle, third = statistics.quantiles(seconds, n=4, method="inclusive")
    return (third - first) / middle if middle > 0 else 0.0


def summary(seconds: Sequence[float]) -> dict[str, Any]:
    """Median and spread of times, as stored in rows."""
    return {"seconds": statistics.median(seconds), "spread": quartile_spread(seconds)}
