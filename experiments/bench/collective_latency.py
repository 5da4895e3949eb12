"""Latency of a collective after idling, sleeping or computing, compared with collectives back to back.

Setup:   two gloo ranks, each pinned to its own core where there are enough; a tensor of 256 KiB. Before every
         collective both ranks do nothing, sleep, or compute for some milliseconds.
Ours:    the median of 60 collectives. Calibration times them back to back.
Run:     python -m experiments.bench.collective_latency [--json]
"""

import statistics
import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from experiments.harness.command import Found, bench
from runtime.measure.microbench import header_here
from runtime.world.pool import Place, Pool
from runtime.world.tensor_collectives import GATHER, SCATTER

ROUNDS, WARMUP = 60, 10
NUM_ELEMENTS = 65536
BEFORE_MS = (0.0, 2.0, 4.0, 6.0, 12.0)


def _nothing(seconds: float) -> None:
    del seconds


def _compute(seconds: float) -> None:
    """Run matrix products of a small layer's size."""
    inputs, weight = torch.ones(128, 512), torch.ones(512, 512)
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        torch.mm(inputs, weight)


BEFORE: Mapping[str, Callable[[float], None]] = {
    "nothing": _nothing,
    "sleep": time.sleep,
    "compute": _compute,
}


def _all_reduce(whole: Tensor, part: Tensor) -> None:
    del part
    dist.all_reduce(whole)


COLLECTIVES: Mapping[str, Callable[[Tensor, Tensor], object]] = {
    "all_reduce": _all_reduce,
    "all_gather": GATHER,
    "reduce_scatter": lambda whole, part: SCATTER(part, whole),
}


def latency(place: Place, collective: str, before: str, before_s: float) -> float:
    """Return the median seconds of a collective on this rank."""
    del place
    whole, part = torch.zeros(NUM_ELEMENTS), torch.zeros(NUM_ELEMENTS // 2)
    seconds = []
    for _ in range(WARMUP + ROUNDS):
        BEFORE[before](before_s)
        start_s = time.perf_counter()
        COLLECTIVES[collective](whole, part)
        seconds.append(time.perf_counter() - start_s)
    return statistics.median(seconds[WARMUP:])


def measured() -> dict[str, dict[str, float]]:
    """Return collective -> preceding work -> milliseconds on the slower rank."""
    milliseconds: dict[str, dict[str, float]] = {}
    with Pool(2) as pool:
        for collective in COLLECTIVES:
            row = milliseconds.setdefault(collective, {})
            for before in BEFORE:
                for length_ms in BEFORE_MS if before != "nothing" else (0.0,):
                    latencies_s = pool.run(latency, 2, collective, before, length_ms / 1e3)
                    name = before if before == "nothing" else f"{before} {length_ms:g} ms"
                    row[name] = max(latencies_s) * 1e3
    return milliseconds


@bench()
def run() -> Found:
    """Measure the latencies and print them."""
    milliseconds = measured()
    names = list(next(iter(milliseconds.values())))
    print(f"{'before':16s}" + "".join(f"{collective:>18s}" for collective in milliseconds))
    for name in names:
        print(f"{name:16s}" + "".join(f"{row[name]:15.2f} ms" for row in milliseconds.values()))
    record = {"device": header_here().device_name, "milliseconds": milliseconds}
    return Found(record)
