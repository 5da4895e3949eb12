"""A fixed piece of work, whose time shows the machine's current speed."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from workbench.float_sum import float_sum

PRODUCT = 256  # rows and columns
COPIED = 2**18  # elements: 1 MiB
WARMUP = 1
LEAST_TURNS = 2
MOST_S = 0.1  # per reading


class Yardstick:
    """Two products and two copies on one device, by one thread; a few milliseconds at most.

    Its operands fit in a core's cache and are new for each reading, so that neither earlier work nor other
    load on memory affects it, and nothing of it remains.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def turns_s(self, budget_s: float) -> list[float]:
        """Seconds of each turn until the budget is spent; at least two turns, at most a tenth of a second."""
        with one_thread():
            x = torch.ones(PRODUCT, PRODUCT, device=self._device)
            y, source = torch.empty_like(x), torch.ones(COPIED, device=self._device)
            target = torch.empty_like(source)
            seconds: list[float] = []
            stop_s = time.perf_counter() + min(budget_s, MOST_S)
            while len(seconds) < WARMUP + LEAST_TURNS or time.perf_counter() < stop_s:
                start_s = time.perf_counter()
                for _ in range(2):
                    torch.mm(x, x, out=y)
                target.copy_(source)
                source.copy_(target)
                self._wait()
                seconds.append(time.perf_counter() - start_s)
        return seconds[WARMUP:]

    def read(self, budget_s: float) -> float:
        """Mean seconds of a turn, which includes occasional pauses of the machine, as a step does."""
        seconds = self.turns_s(budget_s)
        return float_sum(seconds) / len(seconds)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def yardstick_of(process: int, device: torch.device) -> Yardstick | None:
    """The yardstick that this process reads; None for processes without a core of their own."""
    reads = device.type != "cpu" or process < (os.cpu_count() or 1)
    return Yardstick(device) if reads else None


@contextmanager
def one_thread() -> Iterator[None]:
    """Context with one torch thread."""
    before = torch.get_num_threads()
    if before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
