"""Resolves the name of a device, or raises an error of one line."""

import os
from collections.abc import Mapping

import torch

from workbench.job.device import Device

CPU = torch.device("cpu")
NAMES = tuple(Device)


def device_of(name: str | None, *, index: int = 0, sharers: int = 1) -> torch.device:
    """The device of one process; a GPU becomes the current device.

    The only place that checks for a GPU: everything else works on a given device.

    Args:
        name: `cpu` or `cuda`; None: a GPU where torch sees one, else the CPU. Callers that
            pass None print the choice.
        index: of the GPU on this machine.
        sharers: processes of this machine that need a GPU each.

    Raises:
        ValueError: an unknown name, no GPU, or fewer GPUs than processes.
    """
    if name is not None and name not in NAMES:
        raise ValueError(f"device {name!r}: want one of {', '.join(NAMES)}")
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return CPU
    if not torch.cuda.is_available():
        raise ValueError(f"device cuda: torch {torch.__version__} sees no GPU here; want cpu, or a GPU")
    count = torch.cuda.device_count()
    if sharers > count or index >= count:
        wanted = max(sharers, index + 1)
        raise ValueError(
            f"device cuda: {wanted} ranks of this machine want a GPU each, it has {count}; "
            "want cpu, or fewer ranks"
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def launched_device(name: str | None, environment: Mapping[str, str] = os.environ) -> torch.device:
    """The device of a process that torchrun started: the GPU of its local rank; errors as `device_of`."""
    index = int(environment.get("LOCAL_RANK", "0"))
    return device_of(name, index=index, sharers=int(environment.get("LOCAL_WORLD_SIZE", "1")))


def backend_of(device: torch.device) -> str:
    """The backend of a world on such devices, in torch's name; objects are sent by gloo."""
    return "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"


def kind_of_device(device: torch.device) -> str:
    """The kind of a device, as jobs, plans and profiles name it: `cpu`, `H100`."""
    return "cpu" if device.type == "cpu" else kind_of(torch.cuda.get_device_name(device))


def kind_of(device_name: str) -> str:
    """The name of a GPU in jobs: `NVIDIA A100-SXM4-80GB` is an `A100-80GB`."""
    first, *rest = device_name.removeprefix("NVIDIA ").split()[0].split("-")
    return "-".join([first, *(part for part in rest if part.endswith("GB"))])
