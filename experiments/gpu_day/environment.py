"""Part: the software and the device, and the ceilings of its copies and products on random data."""

import importlib
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
import transformers
from torch.nn import functional

from experiments.gpu_day.campaign import Cell, Extent, Measured, Session
from runtime.measure.clock import Clock, quartile_spread
from runtime.measure.microbench import header_here
from runtime.world.device import device_of

BUDGET_S = {Extent.FULL: 1.0, Extent.SMALL: 0.02}
PRODUCTS = {Extent.FULL: (8192, 16384), Extent.SMALL: (256, 512)}
COPY_BYTES = {Extent.FULL: 2**32, Extent.SMALL: 2**22}
HOST_BYTES = {Extent.FULL: 2**28, Extent.SMALL: 2**20}
PRECISION = {"cuda": torch.bfloat16, "cpu": torch.float32}
IMPORTS = (  # what plans, their predictions and their execution load
    "workbench.plan.codec",
    "workbench.cost.profile",
    "workbench.calibrate.fit",
    "workbench.job.job",
    "sim.step.engine",
    "runtime.emulation.emulate",
    "runtime.launch",
    "runtime.measure.microbench",
)
HOST = "host"
SMALL, ISSUED, ROUNDS = 64, 200, 5  # rows and columns; calls of a round
DIRECTIONS = TO_DEVICE, TO_HOST = "to the device", "to the host"
PROPERTIES = ("name", "total_memory", "multi_processor_count", "L2_cache_size", "major", "minor")


def facts(session: Session) -> dict[str, Any]:
    """What measures here: the header of a measurement, as JSON has it.

    Raises:
        ValueError: there is no such device.
    """
    packages = [("transformers", transformers.__version__)]
    return asdict(header_here(device_of(session.device), packages))


def cells(session: Session) -> tuple[Cell, ...]:
    """Imports, properties, what the host takes, products, copies; pinned copies where there is a GPU."""
    keys = ["imports", "device", HOST, *(f"product {size}" for size in PRODUCTS[session.extent]), "copy"]
    if session.device == "cuda":
        keys += [f"copy {direction}" for direction in DIRECTIONS]
    return tuple(Cell(key) for key in keys)


def measure(session: Session, key: str) -> Measured:
    """One of them."""
    if key == "imports":
        return _imports()
    if key == "device":
        return Measured(facts(session) | _properties(session.device))
    if key == HOST:
        return _host(device_of(session.device))
    clock = Clock(device_of(session.device))
    budget_s = BUDGET_S[session.extent]
    if key.startswith("product "):
        return _product(clock, int(key.split()[1]), budget_s)
    if key == "copy":
        return _copy(clock, COPY_BYTES[session.extent], budget_s)
    return _host_copy(clock, HOST_BYTES[session.extent], budget_s, key.removeprefix("copy "))


def _imports() -> Measured:
    import_errors: dict[str, str] = {}
    for name in IMPORTS:
        try:
            importlib.import_module(name)
        except ImportError as error:
            import_errors[name] = str(error)
        else:
            import_errors[name] = ""
    failing = {name: why for name, why in import_errors.items() if why}
    if failing:
        raise ValueError("; ".join(f"{name} does not import: {why}" for name, why in failing.items()))
    return Measured({"imported": list(import_errors)}, f"{len(import_errors)} modules")


def _host(device: torch.device) -> Measured:
    """Seconds that the host takes for a turn of a loop, and to issue small operators one after the other."""
    small = torch.zeros(SMALL, SMALL, dtype=PRECISION[device.type], device=device)
    weight = torch.zeros(SMALL, dtype=small.dtype, device=device)
    calls: dict[str, Callable[[], object]] = {
        "a turn of a loop": lambda: None,
        "view": lambda: small.view(-1),
        "add": lambda: small.add_(1.0),
        "linear": lambda: functional.linear(small, small, weight),
        "layer_norm": lambda: functional.layer_norm(small, (SMALL,), weight, weight),
    }
    issue_s = {f"{name}_s": _issue_s(call, device) for name, call in calls.items()}
    return Measured(issue_s, f"{issue_s['add_s'] * 1e6:.3g} us a launch")


def _issue_s(call: Callable[[], object], device: torch.device) -> float:
    """Median over rounds; before each the device has done all it was given."""
    clock, rounds = Clock(device), []
    for _ in range(ROUNDS + 1):
        clock.wait()
        begin_s = time.perf_counter()
        for _ in range(ISSUED):
            call()
        rounds.append((time.perf_counter() - begin_s) / ISSUED)
    return statistics.median(rounds[1:])


def _properties(device: str) -> dict[str, Any]:
    if device == "cpu":
        return {"properties": None}
    properties = torch.cuda.get_device_properties(device_of(device))
    return {"properties": {name: getattr(properties, name, None) for name in PROPERTIES}}


def _product(clock: Clock, size: int, budget_s: float) -> Measured:
    dtype = PRECISION[clock.device.type]
    x, w = (torch.randn(size, size, dtype=dtype, device=clock.device) for _ in range(2))
    seconds = clock.repeat(lambda: x @ w, budget_s)
    rate = 2.0 * size**3 / statistics.median(seconds)
    values = {"size": size, "precision": str(dtype).removeprefix("torch."), "flop_per_s": rate}
    return Measured(values | _times(seconds), f"{rate / 1e12:.4g} TFLOP/s", rate)


def _copy(clock: Clock, num_bytes: int, budget_s: float) -> Measured:
    source = torch.randn(num_bytes // 4, device=clock.device)
    target = torch.empty_like(source)
    seconds = clock.repeat(lambda: target.copy_(source), budget_s)
    rate = 2.0 * num_bytes / statistics.median(seconds)  # read and written
    return Measured(
        {"bytes_per_s": rate, "num_bytes": num_bytes} | _times(seconds), f"{rate / 1e12:.4g} TB/s"
    )


def _host_copy(clock: Clock, num_bytes: int, budget_s: float, direction: str) -> Measured:
    host = torch.randn(num_bytes // 4).pin_memory()
    there = torch.randn(num_bytes // 4, device=clock.device)
    target, source = (there, host) if direction == TO_DEVICE else (host, there)
    seconds = clock.repeat(lambda: target.copy_(source, non_blocking=True), budget_s)
    rate = num_bytes / statistics.median(seconds)
    return Measured({"bytes_per_s": rate, "num_bytes": num_bytes} | _times(seconds), f"{rate / 1e9:.4g} GB/s")


def _times(seconds: list[float]) -> dict[str, float]:
    return {"median_s": statistics.median(seconds), "spread": quartile_spread(seconds)}
