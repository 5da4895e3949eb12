"""A rank on a device with NCCL's behaviour: the real executor, and ones that cannot cope with it."""

import os
import signal
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any
from unittest import mock

import torch.distributed as dist

import runtime.world.communicators
from experiments.nccl.manners import ALL, ENOUGH_S, Manner, QueuingDevice, well_mannered
from runtime.data.batches import DataSource
from runtime.rank_job import run_steps
from runtime.rank_report import RankReport
from runtime.run_settings import RunSettings
from runtime.step.stage_module import build_stage_module
from runtime.world.clock import Awaited, Stamp
from runtime.world.communicators import build_mesh
from runtime.world.device import CPU
from runtime.world.mesh import Mesh
from runtime.world.pool import Place
from runtime.world.streams import StreamClock, Watch
from workbench.plan.lowered import Lowered


class Variant(Enum):
    """An executor: the real one, or one that cannot cope with one behaviour."""

    AS_BUILT = "as built"
    WAITS_FOR_THE_DEVICE = "posts receives before an action and waits for the device after it"
    OPENS_LATE = "posts receives before an action, in communicators that were never used"
    TRUSTS_FUTURES = "reads what has come when its future is done"
    SUMS_TOO_EARLY = "starts sums beside the passes before what they sum has come"
    WAITS_FOR_EVER = "leaves the bounds of waits to the communicator"


LACKS = {
    Manner.DEVICE_WAIT: Variant.WAITS_FOR_THE_DEVICE,
    Manner.FIRST_USE: Variant.OPENS_LATE,
    Manner.EARLY_FUTURES: Variant.TRUSTS_FUTURES,
    Manner.ENDLESS_WAITS: Variant.WAITS_FOR_EVER,
}


@dataclass(frozen=True, slots=True)
class Doom:
    """A signal that a rank sends itself at a position of its program."""

    rank: int
    position: int
    signal: int = signal.SIGKILL


@dataclass(frozen=True, slots=True, kw_only=True)
class Conduct:
    """How a case runs."""

    manners: frozenset[Manner] = ALL
    variant: Variant = Variant.AS_BUILT
    doom: Doom | None = None


class OrderedMesh(Mesh):
    """A mesh over gloo whose rows are matched by order."""

    __slots__ = ()

    @property
    def orders_rows(self) -> bool:
        return True


class PostingFirst(StreamClock):
    """Posts receives before the action that they overlap with."""

    posts_before = True


class WaitingForDevice(PostingFirst):
    """Also waits for everything in flight after each action, as at other stamps."""

    def stamp(self) -> Stamp:
        self._streams.synchronize()
        return super().stamp()


class TrustingFutures(StreamClock):
    """Lets the host wait for futures, instead of streams for works."""

    def wait(self, work: dist.Work, awaited: Awaited) -> None:
        del awaited
        work.get_future().wait()


class HastySums(StreamClock):
    """Lets only the computation wait for works, not a side stream."""

    def wait(self, work: dist.Work, awaited: Awaited) -> None:
        assert isinstance(self._streams, QueuingDevice)
        if self._streams.lane is None:
            super().wait(work, awaited)


def clock_of(device: QueuingDevice, variant: Variant, timeout_s: float) -> StreamClock:
    bound_s = ENOUGH_S if variant is Variant.WAITS_FOR_EVER else timeout_s
    kind = {
        Variant.WAITS_FOR_THE_DEVICE: WaitingForDevice,
        Variant.OPENS_LATE: PostingFirst,
        Variant.TRUSTS_FUTURES: TrustingFutures,
        Variant.SUMS_TOO_EARLY: HastySums,
    }.get(variant, StreamClock)
    return kind(device, Watch(bound_s, device.abort))


def run_with_manners(
    rank_place: Place, lowered: Lowered, settings: RunSettings, source: DataSource, conduct: Conduct
) -> RankReport:
    """This process's rank of the plan; the process group, gloo's, exists already."""
    device = QueuingDevice(conduct.manners)
    clock = clock_of(device, conduct.variant, settings.timeout_s)

    def make(**fields: Any) -> Mesh:
        return OrderedMesh(**fields | {"clock": clock})

    late = conduct.variant is Variant.OPENS_LATE
    unopened = mock.patch.object(runtime.world.communicators, "_send_first", return_value=None)
    with well_mannered(device), unopened if late else nullcontext():
        mesh = build_mesh(lowered, CPU, settings.timeout_s, make)
        try:
            watched = replace(rank_place, report=_doomed(rank_place.report, mesh.rank, conduct.doom))
            return run_steps(watched, mesh, lowered, settings, source, build_stage_module)
        finally:
            clock.close()


def _doomed(report: Callable[[int], None], rank: int, doom: Doom | None) -> Callable[[int], None]:
    def tell(position: int) -> None:
        report(position)
        if doom is not None and (rank, position) == (doom.rank, doom.position):
            os.kill(os.getpid(), doom.signal)

    return tell
