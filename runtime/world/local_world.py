"""Joining a world: on one machine by a file and over loopback, without name servers."""

import os
import socket
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, Store, TCPStore

from runtime.world.device import CPU, backend_of
from runtime.world.failure import RankError, first_line
from workbench.supervised import end_with_launcher

INTERFACE = "GLOO_SOCKET_IFNAME"
LOOPBACK = ("lo", "lo0")  # of Linux, of macOS
AGENT = "TORCHELASTIC_RUN_ID"  # set if torchrun's agent started this process
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"  # "True" if it listens at the launcher's address itself
MEETING = "world"  # name of the file
LAST_PORT = 2**16 - 1
NUM_NAMED = 8  # listed absent ranks


def join_here(
    file: Path, *, rank: int, size: int, wait_s: float, backend: str | None = None, device: torch.device = CPU
) -> None:
    """Join a world whose ranks are all processes of this machine.

    torch's TCPStore looks up the name of every peer's address, at both ends, and at the server in the one
    thread that serves all; gloo looks up the address of this machine's name for every group. A lost answer of
    the name server stalls a rank, or all, for five seconds.

    Args:
        file: for their addresses; must be new for every world, and is not removed.
        wait_s: limit for joining, and of every collective.
        backend: in torch's name; None: that of the device.
        device: of this rank. NCCL's communicators are bound to it and connected at once.
    """
    _join(
        _file_store(file),
        rank=rank,
        size=size,
        wait_s=wait_s,
        backend=backend or backend_of(device),
        device=device,
    )


def join_launched(environment: Mapping[str, str], *, wait_s: float, device: torch.device = CPU) -> None:
    """Join the world of a launcher such as torchrun, on one machine or on several.

    If all its ranks are on this machine and torchrun made a folder for them, which is new for every attempt,
    they meet there; others meet at the launcher's address. From then on a process of torchrun ends with its
    agent.

    Raises:
        ValueError: missing or invalid variables in the environment.
        RankError: a rank did not join within `wait_s`, or the meeting point is not available.
    """
    if AGENT in environment:
        end_with_launcher()
    rank, size = (_number(environment, name) for name in ("RANK", "WORLD_SIZE"))
    if rank >= size:
        raise ValueError(f"RANK: want less than WORLD_SIZE, {size}, got {rank}")
    file = meeting_of(environment)
    store: Store
    if file is None:
        port = _number(environment, "MASTER_PORT")
        if port > LAST_PORT:
            raise ValueError(f"MASTER_PORT: want at most {LAST_PORT}, got {port}")
        where = f"{_setting(environment, 'MASTER_ADDR')}:{port}"
        store = _tcp_store(environment, where, rank, wait_s)
    else:
        where, store = str(file), _file_store(file)
    _meet(store, where, rank=rank, size=size, wait_s=wait_s)
    _join(store, rank=rank, size=size, wait_s=wait_s, backend=backend_of(device), device=device)


def meeting_of(environment: Mapping[str, str]) -> Path | None:
    """The file by which the ranks of torchrun's environment can meet; None if there is none for all.

    `TORCHELASTIC_ERROR_FILE` is <the attempt's folder>/<local rank>/error.json, empty without folders.
    """
    size, here = environment.get("WORLD_SIZE"), environment.get("LOCAL_WORLD_SIZE")
    own = Path(environment.get("TORCHELASTIC_ERROR_FILE", ""))
    is_alone = size is not None and size == here
    is_own_folder = own.is_absolute() and own.parent.name == environment.get("LOCAL_RANK")
    return own.parents[1] / MEETING if is_alone and is_own_folder else None


def _setting(environment: Mapping[str, str], name: str) -> str:
    if not environment.get(name):
        raise ValueError(f"{name} is not set; a launcher, such as torchrun, sets it")
    return environment[name]


def _number(environment: Mapping[str, str], name: str) -> int:
    text = _setting(environment, name)
    if not text.isdecimal():
        raise ValueError(f"{name}: want a whole number, got {text!r}")
    return int(text)


def _file_store(file: Path) -> FileStore:
    if (loopback := _loopback()) is not None:
        os.environ.setdefault(INTERFACE, loopback)
    return FileStore(str(file), -1)


def _tcp_store(environment: Mapping[str, str], where: str, rank: int, wait_s: float) -> TCPStore:
    """The store at the launcher's address, of its agent or of the first rank."""
    host, _, port = where.rpartition(":")
    listens = rank == 0 and environment.get(AGENT_STORE) != "True"
    try:
        return TCPStore(
            host,
            int(port),
            is_master=listens,
            timeout=timedelta(seconds=wait_s),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except dist.DistError as error:
        doing = "cannot listen" if listens else f"no answer within {wait_s:g} s"
        hint = "; set MASTER_PORT to a free port for all ranks" if listens else ""
        raise RankError(
            f"{doing} at {where}, where all ranks meet: {first_line(error)}{hint}", peers=(0,)
        ) from error


def _meet(store: Store, where: str, *, rank: int, size: int, wait_s: float) -> None:
    """Wait until all ranks have joined, and name absent ones, which gloo would not."""

    def came(other: int) -> str:
        return f"came/{other}"

    try:
        store.set(came(rank), "")
        if store.add("came", 1) == size:
            store.set("all came", "")
        store.wait(["all came"], timedelta(seconds=wait_s))
    except RuntimeError as error:
        try:
            absent = [other for other in range(size) if not store.check([came(other)])]
        except RuntimeError:
            raise RankError(f"{where}, where all ranks meet, is gone", peers=(0,)) from error
        if absent:
            named = ", ".join(map(str, absent[:NUM_NAMED])) + ", ..." * (len(absent) > NUM_NAMED)
            raise RankError(
                f"{len(absent)} of {size} ranks have not reached {where} within {wait_s:g} s: {named}",
                peers=tuple(absent),
            ) from error


def _join(store: Store, *, rank: int, size: int, wait_s: float, backend: str, device: torch.device) -> None:
    store.set_timeout(timedelta(seconds=wait_s))
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=wait_s),
        device_id=_bound(device),
    )


def _bound(device: torch.device) -> torch.device | None:
    """The device to which the world's communicators are bound; none for gloo."""
    return None if device.type == "cpu" else device


def _loopback() -> str | None:
    names = {name for _, name in socket.if_nameindex()}
    return next((name for name in LOOPBACK if name in names), None)
