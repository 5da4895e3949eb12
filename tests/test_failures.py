"""A rank that dies, raises or hangs ends all ranks soon, and the cause is named."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from runtime.launch import run_lowered
from runtime.parallel.expert.group import ExpertGroup
from runtime.parallel.tensor.group import TensorGroup
from runtime.run_settings import RunSettings
from runtime.step.stage_module import StageInput, StageModule, build_stage_module
from runtime.world import pool
from runtime.world.failure import Failure, RankError, WorldFailed, death_of, failure_of, root_cause
from runtime.world.pool import Place, Pool
from tests.plans import disjoint_plan
from tests.tiny_valm import tiny_batch, tiny_valm
from tests.waiting import eventually
from workbench.plan.lower import lower
from workbench.plan.plan import Plan
from workbench.plan.stage import Stage

LIMIT_S = 60.0  # of what only a hang exceeds
LONG_S = 600.0  # that no test waits
CUTS = {"vision": (5,), "audio": (4,), "llm": (3, 3)}


@pytest.fixture(scope="module")
def fragile() -> Iterator[Pool]:
    """A pool of its own: these tests break it on purpose."""
    with Pool(4) as workers:
        yield workers


def echo(place: Place, value: int) -> tuple[int, int]:
    total = torch.tensor([value])
    dist.all_reduce(total)
    return place.process, int(total)


def die(place: Place, victim: int) -> None:
    place.report(7)
    if place.process == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def hang(place: Place, sleeper: int) -> None:
    place.report(3)
    if place.process == sleeper:
        time.sleep(60)


def refuse(place: Place, text: str) -> None:
    if place.process == 1:
        raise ValueError(text)
    dist.barrier()


def leave_unequally(place: Place) -> int:
    """One process needs nobody and is done before the others have joined."""
    time.sleep(0.01 * place.process)
    return place.process


def wait_long(place: Place) -> None:
    place.report(5)
    time.sleep(60)


def freeze(place: Place, victim: int) -> None:
    place.report(9)
    if place.process == victim:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.barrier()


def assert_works(pool: Pool) -> None:
    assert pool.run(echo, 3, 5) == [(0, 15), (1, 15), (2, 15)]


def test_the_pool_is_reused(fragile: Pool) -> None:
    assert_works(fragile)
    before = fragile.process_ids()
    assert_works(fragile)
    assert fragile.process_ids() == before


def test_killed_process_is_named_and_replaced(fragile: Pool) -> None:
    start_s = time.perf_counter()
    with pytest.raises(WorldFailed, match="worker 2 at 7: killed by SIGKILL") as caught:
        fragile.run(die, 4, 2, where=lambda process, position: f"worker {process} at {position}")
    assert time.perf_counter() - start_s < LIMIT_S
    assert caught.value.cause.signal_number == signal.SIGKILL
    assert_works(fragile)


def test_hanging_process_is_named_and_ended(fragile: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time is over when one hangs and the other has answered, however long they took until then."""
    assert_works(fragile)  # all are forked: only the parent's clock is another
    answered: list[int] = []
    answer = Pool._answer

    def noted(workers: Pool, process: int) -> object:
        answered.append(process)
        return answer(workers, process)

    def now_s() -> float:
        return time.monotonic() + LONG_S * (answered == [0] and fragile.position(1) == 3)

    monkeypatch.setattr(Pool, "_answer", noted)
    monkeypatch.setattr(pool, "time", SimpleNamespace(monotonic=now_s))
    with pytest.raises(WorldFailed, match=r"not done after 600 s: worker 1 at 3") as caught:
        fragile.run(hang, 2, 1, timeout_s=LONG_S, where=lambda process, at: f"worker {process} at {at}")
    assert caught.value.cause.process == 1
    monkeypatch.undo()
    assert_works(fragile)


def test_bad_input_stays_a_value_error(fragile: Pool) -> None:
    with pytest.raises(ValueError, match="microbatch 3 has no items"):
        fragile.run(refuse, 2, "microbatch 3 has no items")
    assert_works(fragile)


def test_a_cause_is_told_before_the_failures_that_follow_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the commit before, a process left its world first, and on a busy machine told why too late."""
    leave = pool._leave

    def leave_and_wait_for_a_core() -> None:
        leave()
        if multiprocessing.current_process().name == "rank1":
            time.sleep(60)

    monkeypatch.setattr(pool, "_leave", leave_and_wait_for_a_core)
    monkeypatch.setattr(pool, "GRACE_S", 0.5)
    with Pool(2) as workers, pytest.raises(ValueError, match="microbatch 3 has no items"):
        workers.run(refuse, 2, "microbatch 3 has no items")


def test_too_many_processes_are_refused(fragile: Pool) -> None:
    with pytest.raises(ValueError, match="has 4 workers, the job wants 5"):
        fragile.run(echo, 5, 1)


def test_nobody_leaves_before_all_are_done(fragile: Pool) -> None:
    """Whoever left early would cut off the others, who are still joining."""
    for _ in range(20):
        assert fragile.run(leave_unequally, 4, timeout_s=30.0) == [0, 1, 2, 3]


def test_frozen_process_is_named_though_the_others_would_wait_on(fragile: Pool) -> None:
    start_s = time.perf_counter()
    with pytest.raises(WorldFailed, match="worker 2 at 9: stopped by a signal"):
        fragile.run(freeze, 3, 2, timeout_s=LONG_S, where=lambda process, at: f"worker {process} at {at}")
    assert time.perf_counter() - start_s < LIMIT_S
    assert_works(fragile)


@pytest.mark.usefixtures("heeds_interrupts")
def test_an_interrupted_job_leaves_nothing_for_the_next_one(fragile: Pool) -> None:
    def interrupt_when_both_work() -> None:
        eventually(lambda: {fragile.position(0), fragile.position(1)} == {5}, LIMIT_S)
        os.kill(os.getpid(), signal.SIGINT)

    watcher = threading.Thread(target=interrupt_when_both_work)
    watcher.start()
    with pytest.raises(KeyboardInterrupt):
        fragile.run(wait_long, 2)
    watcher.join()
    assert_works(fragile)


def test_a_deadline_beyond_what_the_system_can_wait_for(fragile: Pool) -> None:
    assert fragile.run(echo, 2, 1, timeout_s=1e10, wait_s=60.0) == [(0, 2), (1, 2)]


def test_closing_ends_all_workers() -> None:
    with Pool(2) as workers:
        workers.run(echo, 2, 1)
        ids = workers.process_ids()
    for process_id in ids:
        with pytest.raises(ProcessLookupError):
            os.kill(process_id, 0)


class Broken(StageModule):
    """A stage that fails at its second microbatch."""

    def forward(self, inputs: StageInput) -> torch.Tensor:
        if inputs.data.items[0].sample == 1:
            raise KeyError("pixels")
        return super().forward(inputs)


def build_broken(
    plan: Plan,
    stage: Stage,
    *,
    seed: int,
    dtype: torch.dtype,
    weights: Path | None,
    device: torch.device | str,
    tensor: TensorGroup | None,
    experts: ExpertGroup | None,
) -> StageModule:
    built = build_stage_module(
        plan,
        stage,
        seed=seed,
        dtype=dtype,
        weights=weights,
        device=device,
        tensor=tensor,
        experts=experts,
    )
    if stage.id == 2:
        built.__class__ = Broken
    return built


def test_failing_action_is_named_with_its_exception(fragile: Pool) -> None:
    lowered = lower(disjoint_plan(tiny_valm(), tiny_batch(), CUTS))
    start_s = time.perf_counter()
    with pytest.raises(WorldFailed, match=r"^rank 2 in 2F1: KeyError: 'pixels'"):
        run_lowered(lowered, RunSettings(timeout_s=20.0), pool=fragile, build=build_broken)
    assert time.perf_counter() - start_s < LIMIT_S


def test_rank_killed_in_the_middle_of_a_run(fragile: Pool) -> None:
    lowered = lower(disjoint_plan(tiny_valm(), tiny_batch(), CUTS))
    fragile.run(echo, 4, 1)
    victim = fragile.process_ids()[3]

    def kill_when_it_is_at_work() -> None:
        eventually(lambda: fragile.position(3) > 0, LIMIT_S)
        os.kill(victim, signal.SIGKILL)

    killer = threading.Thread(target=kill_when_it_is_at_work)
    killer.start()
    start_s = time.perf_counter()
    with pytest.raises(WorldFailed, match=r"^rank 3 (at|before).*killed by SIGKILL"):
        run_lowered(lowered, RunSettings(steps=100_000, timeout_s=20.0), pool=fragile)
    assert time.perf_counter() - start_s < LIMIT_S
    killer.join()
    assert_works(fragile)


def test_the_cause_comes_before_its_echoes() -> None:
    echoed = failure_of(0, RankError("rank 0 before 1F0: row 3 from rank 1: closed", peers=(1,)))
    own = failure_of(1, RankError("rank 1 in 1F0: KeyError: 'pixels'"))
    dead = death_of(2, -signal.SIGKILL)
    assert root_cause([echoed, own]) is own
    assert root_cause([echoed, own, dead]) is dead
    first = Failure(process=4, time_s=1.0, kind="KeyError", text="early")
    assert root_cause([Failure(process=0, time_s=2.0, kind="KeyError", text="late"), first]) is first
    assert death_of(1, 3).describe("rank 1 at 1F0") == "rank 1 at 1F0: the process ended with exit code 3"
