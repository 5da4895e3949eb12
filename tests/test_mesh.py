"""Groups of ranks wait no longer than the job says."""

import time

import pytest
import torch

from runtime.world.communicators import build_mesh
from runtime.world.pool import Place, Pool
from tests.plans import disjoint_plan
from tests.tiny_valm import tiny_batch, tiny_valm
from workbench.model.trainable import Trainable
from workbench.plan.lower import lower
from workbench.plan.lowered import Lowered

TIMEOUT_S = 1.0


def wait_alone(place: Place, lowered: Lowered) -> tuple[float, str]:
    """Seconds after which the first member of a gradient group gives up on the second, and what it says."""
    mesh = build_mesh(lowered, torch.device("cpu"), TIMEOUT_S)
    if mesh.rank != 2:
        return 0.0, ""
    (members,) = mesh.reduction
    start_s = time.monotonic()
    with pytest.raises(RuntimeError) as failure:
        mesh.start_all_reduce(torch.zeros(1), members).wait()
    return time.monotonic() - start_s, str(failure.value)


def test_groups_have_the_timeout_of_the_job(pool: Pool) -> None:
    """The world's is longer here; a group made without a timeout would wait for half an hour."""
    cuts = {"vision": (5,), "audio": (4,), "llm": (6,)}
    plan = disjoint_plan(tiny_valm(llm=Trainable.ALL), tiny_batch(), cuts, replicas=2)
    lowered = lower(plan)
    found = pool.run(wait_alone, len(plan.ranks), lowered, timeout_s=40.0)
    waited_s, said = found[2]
    assert TIMEOUT_S <= waited_s < 20.0
    assert said
