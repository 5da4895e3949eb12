"""Memory of real runs: what is counted, that it never exceeds the prediction, how it is compared."""

import gc
import threading
from dataclasses import replace

import pytest
import torch

from experiments.fidelity.memory import TINY_MIXES, measure, summarise, tiny_job, variants
from runtime.activations import Allocations
from runtime.pool import Pool
from tests.test_compare import SIMULATED, executed
from workbench.cost.model import CostModel
from workbench.cost.profile import ideal_profile
from workbench.plan.plan import Plan
from workbench.report.compare import Group, compare
from workbench.strategies import cornstarch, encoders_replicated

MIB = 2**18  # float32 elements


def test_a_storage_counts_once_from_its_maker_to_its_last_tensor():
    weight = torch.nn.Parameter(torch.ones(10))
    with Allocations([weight, weight]) as memory:
        assert memory.num_bytes == 40
        made = torch.empty(MIB)
        view, alias = made.view(2, -1), made.detach()
        assert memory.num_bytes == 40 + 2**20
        _ = weight.view(2, 5)  # nothing new
        made.mul_(2.0)
        assert memory.num_bytes == 40 + 2**20
        del made, alias
        assert memory.num_bytes == 40 + 2**20
        del view
        assert memory.num_bytes == 40


def test_what_autograd_saves_counts_until_the_backward():
    weight = torch.nn.Parameter(torch.ones(MIB))
    gc.collect()
    with Allocations([weight]) as memory:
        loss = (weight.sin() * 2.0).cos().sum()  # keeps the input of cos, a MiB
        assert memory.num_bytes == pytest.approx(2 * 2**20, abs=64)
        loss.backward()
        del loss
        assert memory.num_bytes == 2 * 2**20  # the weight and its gradient
        assert memory.take_height().num_bytes >= 4 * 2**20
        assert memory.take_height().num_bytes == 2 * 2**20


def test_a_tensor_dropped_on_another_thread_is_gone():
    with Allocations([]) as memory:
        held = [torch.empty(MIB)]
        worker = threading.Thread(target=held.clear)
        worker.start()
        worker.join()
        assert memory.num_bytes == 0


COST = CostModel(ideal_profile())
CASES = {mix: lambda mix=mix: cornstarch.plan(tiny_job(mix), COST) for mix in TINY_MIXES}
CASES["encoders on all ranks"] = lambda: encoders_replicated.plan(tiny_job("all"), COST)
CASES |= {name: lambda job=job, plan=plan: plan(job, COST) for name, job, plan in variants()}


@pytest.mark.parametrize("name", CASES)
def test_measured_peak_is_at_most_the_predicted_one_and_near_it(name: str, pool: Pool):
    """On every rank; the mean within 3 %, each within 6 %."""
    plan: Plan = CASES[name]()
    summary = summarise(measure(name, plan, pool))
    assert summary.num_exceeded == 0
    assert summary.mean_abs_error <= 0.03
    assert summary.worst_abs_error <= 0.06


def test_times_are_of_the_timed_steps_and_memory_of_the_watched_one():
    fast = [replace(trace, memory=()) for trace in executed((0.8, 2.0), (1.2, 2.0))]
    slow = executed((5.0, 9.0))[0]
    comparison = compare(SIMULATED, [*fast, slow])
    assert comparison.total.executed == tuple(trace.iteration_s for trace in fast)
    (memory,) = comparison.of(Group.MEMORY)
    assert (memory.simulated, memory.executed) == (160, (160,))
    assert compare(SIMULATED, fast).of(Group.MEMORY) == ()
    assert compare(SIMULATED, [slow]).total.executed == (slow.iteration_s,)
