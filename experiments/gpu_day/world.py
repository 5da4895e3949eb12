"""A world of one rank: how it starts, the cost of its collectives, and a step with its trace.

On a GPU the world is NCCL's, on a CPU gloo's. Measurements that need more ranks are missing.
"""

import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from experiments.gpu_day.campaign import Cell, Extent, Measured, Session
from experiments.gpu_day.jobs import on_one_rank
from runtime.data.batches import SyntheticSource
from runtime.launch import result_of
from runtime.measure.clock import Clock, quartile_spread
from runtime.rank_job import run_rank
from runtime.run_settings import RunSettings
from runtime.world.device import device_of
from runtime.world.local_world import join_here
from runtime.world.pool import Place
from workbench.metrics import time_by_kind
from workbench.plan.codec import plan_hash
from workbench.timing.accept import accept

WAIT_S = 30.0
BUDGET_S = 0.05
SIZES = (2**10, 2**20, 2**26)  # elements
COLLECTIVES, STEP = "collectives", "a step"


def cells(session: Session) -> tuple[Cell, ...]:
    """A world for each, so that one that does not start is not the end of the other."""
    del session
    return (Cell(COLLECTIVES), Cell(STEP, bound_s=240.0))


def measure(session: Session, key: str) -> Measured:
    """Seconds of starting and ending a world, and of what is done in between."""
    device = device_of(session.device)
    return _collectives(device) if key == COLLECTIVES else _step(session, device)


@contextmanager
def _world(device: torch.device) -> Iterator[float]:
    """A world of this process alone; the seconds that it took to start."""
    with tempfile.TemporaryDirectory(prefix="world-") as folder:
        begin_s = time.perf_counter()
        file = Path(folder) / "world"
        join_here(file, rank=0, size=1, wait_s=WAIT_S, device=device)
        try:
            yield time.perf_counter() - begin_s
        finally:
            dist.destroy_process_group()


def _collectives(device: torch.device) -> Measured:
    clock = Clock(device)
    with _world(device) as start_s:
        begin_s = time.perf_counter()
        dist.barrier()
        clock.wait()
        barrier_s = time.perf_counter() - begin_s
        rows = []
        for size in SIZES:
            x = torch.randn(size, device=device)
            before = x.clone()
            dist.all_reduce(x)
            if not torch.equal(x, before):
                raise ValueError(f"all-reduce of {size} elements in a world of one changed them")
            seconds = clock.repeat(lambda x=x: dist.all_reduce(x), BUDGET_S)  # type: ignore[misc]
            rows.append(
                {"elements": size, "median_s": statistics.median(seconds), "spread": quartile_spread(seconds)}
            )
        backend = str(dist.get_backend())
    values = {"backend": backend, "start_s": start_s, "barrier_s": barrier_s, "all_reduce": rows}
    return Measured(values, f"started in {start_s:.2f} s")


def _step(session: Session, device: torch.device) -> Measured:
    """A tiny plan, whatever the extent: what it takes is no figure of the device."""
    named = on_one_rank(Session(session.device, Extent.SMALL, session.folder))[0]
    lowered, _ = accept(named.plan)
    settings = RunSettings(steps=2, warmup=1, timeout_s=WAIT_S)
    alone, source = Place(0, 1, lambda position: None), SyntheticSource(settings.seed)
    with _world(device):
        report = run_rank(alone, lowered, settings, source, device=device)
    result = result_of(lowered, [report], settings, device)
    values = {
        "plan": named.name,
        "plan_hash": plan_hash(named.plan),
        "losses": list(result.losses),
        "iteration_s": [trace.iteration_s for trace in result.traces],
        "spans": len(result.trace.spans),
        "kinds_s": {kind.value: seconds for kind, seconds in time_by_kind(result.trace).items()},
    }
    return Measured(values, f"{len(result.trace.spans)} spans, loss {result.losses[-1]:.4g}")
