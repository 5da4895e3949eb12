"""Groups of ranks wait no longer than the job says."""

import time
from datetime import timedelta

import pytest
import torch
from torch.distributed.distributed_c10d import _set_pg_timeout

from runtime.world.communicators import build_mesh
from runtime.world.pool import Place, Pool
from tests.plans import disjoint_plan
from tests.tiny_valm import tiny_batch, tiny_valm
from workbench.model.trainable import Trainable
from workbench.plan.lower import lower
from workbench.plan.lowered import Lowered

TIMEOUT_S = 17.0
SHORT_S = 0.3
CPU = torch.device("cpu")


def wait_alone(place: Place, lowered: Lowered) -> tuple[set[float], float]:
    """Timeouts of a rank's groups; seconds after which the first member of a gradient group whose timeout is
    short gives up on the second."""
    mesh = build_mesh(lowered, CPU, TIMEOUT_S)
    kinds = (mesh.reduction, mesh.units, mesh.pair, mesh.context, mesh.tensor, mesh.experts, mesh.everyone)
    groups = [group for kind in kinds for group in kind.values()]
    timeouts_s = {group._get_backend(CPU).options._timeout.total_seconds() for group in groups}
    if mesh.rank != 2:
        return timeouts_s, 0.0
    ((members, group),) = mesh.reduction.items()
    _set_pg_timeout(timedelta(seconds=SHORT_S), group)
    start_s = time.monotonic()
    with pytest.raises(RuntimeError):
        mesh.start_all_reduce(torch.zeros(1), members).wait()
    return timeouts_s, time.monotonic() - start_s


def test_groups_have_the_timeout_of_the_job(pool: Pool) -> None:
    """All of them, and gloo heeds it; one made without a timeout would wait for half an hour."""
    cuts = {"vision": (5,), "audio": (4,), "llm": (6,)}
    plan = disjoint_plan(tiny_valm(llm=Trainable.ALL), tiny_batch(), cuts, replicas=2)
    lowered = lower(plan)
    found = pool.run(wait_alone, len(plan.ranks), lowered)
    assert {timeout_s for timeouts_s, _ in found for timeout_s in timeouts_s} == {TIMEOUT_S}
    assert SHORT_S <= found[2][1] < TIMEOUT_S
