"""A piece of work that is always the same: its time says how fast the machine is at the moment."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

PRODUCT = 256  # rows and columns
COPIED = 2**18  # elements: 1 MiB
WARMUP = 1
LEAST_TURNS = 2
MOST_S = 0.1  # of one reading


class Yardstick:
    """Two products and two copies on one device, by one thread: some milliseconds at most.

    Its operands fit in a core's cache and are made anew for each reading, so that neither what ran before
    nor what others do with the memory decides what it says, and nothing of it is left behind.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def turns_s(self, budget_s: float) -> list[float]:
        """Seconds of turn after turn until the budget is spent, two at least; a tenth of a second at most."""
        with one_thread():
            x = torch.ones(PRODUCT, PRODUCT, device=self._device)
            y, here = torch.empty_like(x), torch.ones(COPIED, device=self._device)
            there = torch.empty_like(here)
            found: list[float] = []
            stop_s = time.perf_counter() + min(budget_s, MOST_S)
            while len(found) < WARMUP + LEAST_TURNS or time.perf_counter() < stop_s:
                start_s = time.perf_counter()
                for _ in range(2):
                    torch.mm(x, x, out=y)
                there.copy_(here)
                here.copy_(there)
                self._wait()
                found.append(time.perf_counter() - start_s)
        return found[WARMUP:]

    def read(self, budget_s: float) -> float:
        """Mean seconds of a turn: what stops the machine now and then is in it, as it is in a step."""
        found = self.turns_s(budget_s)
        return sum(found) / len(found)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def yardstick_of(process: int, device: torch.device) -> Yardstick | None:
    """The one that this process reads; None for processes that have no core to themselves to read it on."""
    reads = device.type != "cpu" or process < (os.cpu_count() or 1)
    return Yardstick(device) if reads else None


@contextmanager
def one_thread() -> Iterator[None]:
    """However many there were, until it ends."""
    before = torch.get_num_threads()
    if before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
