"""Time on one device, and what many times come down to."""

import statistics
import time
from collections.abc import Callable, Sequence

import torch

WARMUP = 2
LEAST_REPEATS = 5
MOST_REPEATS = 200
BATCH = 5  # calls that a GPU is given at once
AHEAD_CYCLES = 1_000_000  # of a GPU, half a millisecond: what the host is ahead of it before the first call

Stamp = float | torch.cuda.Event


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
        for _ in range(WARMUP):
            call()
        found: list[float] = []
        stop_s = time.perf_counter() + budget_s
        while len(found) < LEAST_REPEATS or (len(found) < MOST_REPEATS and time.perf_counter() < stop_s):
            if self.is_cuda:
                torch.cuda._sleep(AHEAD_CYCLES)
            stamps = [(self.stamp(), call(), self.stamp()) for _ in range(BATCH)]
            found += [self.between_s(start, end) for start, _, end in stamps]
        return found


def quartile_spread(seconds: Sequence[float]) -> float:
    """(third quartile - first quartile) / median; 0 for fewer than two values."""
    if len(seconds) < 2:
        return 0.0
    first, middle, third = statistics.quantiles(seconds, n=4, method="inclusive")
    return (third - first) / middle if middle > 0 else 0.0
