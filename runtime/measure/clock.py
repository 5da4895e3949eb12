"""Time on one device, and what many times come down to."""

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
BATCH = 5  # calls that a GPU is given at once
CYCLES_PER_S = 2e9  # of a GPU, about
AHEAD = 1.5  # times what the host takes to issue the calls of a batch, that it is ahead before the first one
LEAST_AHEAD_S, MOST_AHEAD_S = 5e-4, 2e-2
AHEAD_TURNS = 8  # of a loop, that the host may be ahead of a GPU
LEAST_TURNS = 4
SETTLE_S = 0.5  # after which clocks and power of a GPU under load are those of training

Stamp = float | torch.cuda.Event
Reading = tuple[float | None, float | None]  # Hz, W


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """What a loop found: seconds of a call turn by turn, and what the device said of itself."""

    seconds: tuple[float, ...]
    loop_s: float
    notes: DeviceNotes


class Clock:
    """Stamps on a device: CUDA events in its current stream, the host's clock on a CPU.

    A CUDA stamp waits for nothing; reading the time between two waits for the later one.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.is_cuda = self.device.type == "cuda"

    def stamp(self) -> Stamp:
        """Now, as the device sees it."""
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
        """Until the device has done all it was given."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def time_s(self, call: Callable[[], object]) -> float:
        """Seconds of one call."""
        start = self.stamp()
        call()
        return self.between_s(start, self.stamp())

    def repeat(self, call: Callable[[], object], budget_s: float) -> list[float]:
        """Seconds of call after call, warm-up left out: at least five, then until the budget is spent.

        A GPU first sleeps for a moment, so that the host is ahead of it and no call waits for its launch.
        """
        issuing_s = 0.0
        for _ in range(WARMUP):  # the last one compiles nothing
            begin_s = time.perf_counter()
            call()
            issuing_s = time.perf_counter() - begin_s
        ahead_s = min(max(LEAST_AHEAD_S, AHEAD * BATCH * issuing_s), MOST_AHEAD_S)
        found: list[float] = []
        stop_s = time.perf_counter() + budget_s
        while len(found) < LEAST_REPEATS or (len(found) < MOST_REPEATS and time.perf_counter() < stop_s):
            if self.is_cuda:
                torch.cuda._sleep(round(CYCLES_PER_S * ahead_s))
            stamps = [(self.stamp(), call(), self.stamp()) for _ in range(BATCH)]
            found += [self.between_s(start, end) for start, _, end in stamps]
        return found

    @property
    def settle_s(self) -> float:
        """How long the device works before its times are those of training; 0 for a CPU."""
        return SETTLE_S if self.is_cuda else 0.0

    def loop(self, calls: Sequence[Callable[[], object]], loop_s: float) -> Loop:
        """The calls one after the other, over and over, for so many seconds and four turns at least.

        The first half of the turns is left out: the device settles.
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
                self.between_s(stamps[0], stamps[-AHEAD_TURNS])  # waits: the queue stays short
            if during is None and time.perf_counter() >= begin_s + loop_s / 2:
                during = self.gauge()
        turns = [self.between_s(start, end) / len(calls) for start, end in pairwise(stamps)]
        return Loop(
            seconds=tuple(turns[len(turns) // 2 :]),
            loop_s=time.perf_counter() - begin_s,
            notes=notes_of(before, during or (None, None), self.gauge()),
        )

    def gauge(self) -> Reading:
        """Hz of the compute units and W of the board now, as the driver says; None where it does not."""
        if not self.is_cuda:
            return None, None
        return _read(torch.cuda.clock_rate, self.device, 1e6), _read(torch.cuda.power_draw, self.device, 1e-3)


def notes_of(before: Reading, during: Reading, after: Reading) -> DeviceNotes:
    """Three readings of a gauge as rows keep them."""
    return DeviceNotes(
        clock_before_hz=before[0],
        clock_during_hz=during[0],
        clock_after_hz=after[0],
        power_before_w=before[1],
        power_during_w=during[1],
        power_after_w=after[1],
    )


def _read(ask: Callable[[torch.device], int], device: torch.device, unit: float) -> float | None:
    """A number of the driver's; a machine whose driver says nothing is measured all the same."""
    try:
        return ask(device) * unit
    except Exception:  # whatever NVML's package raises, or that it is not installed
        return None


def quartile_spread(seconds: Sequence[float]) -> float:
    """(third quartile - first quartile) / median; 0 for fewer than two values."""
    if len(seconds) < 2:
        return 0.0
    first, middle, third = statistics.quantiles(seconds, n=4, method="inclusive")
    return (third - first) / middle if middle > 0 else 0.0


def summary(seconds: Sequence[float]) -> dict[str, Any]:
    """What rows keep of many times."""
    return {"seconds": statistics.median(seconds), "spread": quartile_spread(seconds)}
