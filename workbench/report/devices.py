"""Check which device traces are of."""

from collections.abc import Sequence
from pathlib import Path

from workbench.timing.provenance import DEVICE
from workbench.trace import Trace

CPU = "cpu"


def device_of_trace(trace: Trace) -> str | None:
    """The kind of device of the run or of the prediction; None if the trace does not state it."""
    return next((value for name, value in trace.details if name == DEVICE), None)


def check_devices(traces: Sequence[tuple[Path, Trace]], *, wanted: str) -> None:
    """Refuse traces of another device than `cpu`, or of more than one kind of GPU.

    Raises:
        ValueError: names the first file of another device, or without a stated one.
    """
    kinds = [device_of_trace(trace) for _, trace in traces]
    gpus = [kind for kind in kinds if kind not in (None, CPU)]
    expected = CPU if wanted == CPU else next(iter(gpus), str(wanted))
    for (path, trace), kind in zip(traces, kinds, strict=True):
        if kind != expected:
            description = "does not say of which device it is" if kind is None else f"is of device {kind!r}"
            raise ValueError(f"{path}: this {trace.executor} trace {description}, want {expected!r}")
