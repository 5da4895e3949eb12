"""A world of ranks on one machine: they meet in a file and talk over loopback, so no name server is asked."""

import os
import socket
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from runtime.world.device import CPU, backend_of
from workbench.supervised import end_with_launcher

INTERFACE = "GLOO_SOCKET_IFNAME"
LOOPBACK = ("lo", "lo0")  # of Linux, of macOS
AGENT = "TORCHELASTIC_RUN_ID"  # set where torchrun's agent started this process
MEETING = "world"  # a file's name


def join_here(
    file: Path, *, rank: int, size: int, wait_s: float, backend: str | None = None, device: torch.device = CPU
) -> None:
    """Join a world whose ranks are all processes of this machine.

    torch's TCPStore looks up the name of every peer's address, on both ends and on the server's side in
    the one thread that serves all; gloo looks up the address of this machine's name for every group.
    An answer of the name server that is lost stalls a rank, or all, for five seconds.

    Args:
        file: where they leave their addresses; no earlier world has written to it. It stays there.
        wait_s: for the others to come, and for every collective.
        backend: as torch names it; None: that of the device.
        device: of this rank. NCCL's communicators are bound to it and connected at once.
    """
    if (loopback := _loopback()) is not None:
        os.environ.setdefault(INTERFACE, loopback)
    store = FileStore(str(file), -1)
    store.set_timeout(timedelta(seconds=wait_s))
    dist.init_process_group(
        backend or backend_of(device),
        store=store,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=wait_s),
        device_id=_bound(device),
    )


def join_launched(environment: Mapping[str, str], *, wait_s: float, device: torch.device = CPU) -> None:
    """Join the world that a launcher describes, as torchrun does, on one machine or on many.

    Where all its ranks are on this machine and torchrun made a folder for them, which is new for every
    attempt, they meet there; all others meet at the launcher's address. From here on a process of torchrun
    ends with its agent.
    """
    if AGENT in environment:
        end_with_launcher()
    file = meeting_of(environment)
    if file is None:
        dist.init_process_group(
            backend_of(device), timeout=timedelta(seconds=wait_s), device_id=_bound(device)
        )
    else:
        rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        join_here(file, rank=rank, size=size, wait_s=wait_s, device=device)


def meeting_of(environment: Mapping[str, str]) -> Path | None:
    """The file in which the ranks of torchrun's environment can meet; None where there is none for all.

    `TORCHELASTIC_ERROR_FILE` is <the attempt's folder>/<local rank>/error.json, empty without folders.
    """
    size, here = environment.get("WORLD_SIZE"), environment.get("LOCAL_WORLD_SIZE")
    own = Path(environment.get("TORCHELASTIC_ERROR_FILE", ""))
    is_alone = size is not None and size == here
    is_own_folder = own.is_absolute() and own.parent.name == environment.get("LOCAL_RANK")
    return own.parents[1] / MEETING if is_alone and is_own_folder else None


def _bound(device: torch.device) -> torch.device | None:
    """What the world's communicators are bound to: gloo knows no such thing."""
    return None if device.type == "cpu" else device


def _loopback() -> str | None:
    names = {name for _, name in socket.if_nameindex()}
    return next((name for name in LOOPBACK if name in names), None)
