"""Processes that a signal stops are noticed within five seconds and named; healthy ones never are.

The seconds are of looks: how long the watcher waits for a core between two of them is the machine's affair.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch.distributed as dist

from experiments.oobleck import chaos_job
from runtime.data.batches import SyntheticSource
from runtime.elastic.training import ElasticTraining
from runtime.launch import run_lowered
from runtime.next_plan import Planner
from runtime.preprocess.local_producers import LocalProducers
from runtime.run_settings import RunSettings
from runtime.state.checkpoint import Checkpoints
from runtime.world import scratch
from runtime.world.failure import WorldFailed
from runtime.world.pool import Place, Pool
from runtime.world.scratch import ScratchFolder
from sim.predict import IterationJudge
from tests.plans import disjoint_plan
from tests.test_joint_search import small
from tests.test_orphans import command_of, descendants_of
from tests.test_strategies import cost
from tests.test_torchrun import process_of, start
from tests.tiny_valm import tiny_batch, tiny_valm
from tests.waiting import PATIENCE_S, eventually
from workbench import stopped
from workbench.plan.codec import write_plan
from workbench.plan.lower import lower
from workbench.search.joint.move import Space
from workbench.search.joint.starts import start_tasks
from workbench.search.joint.workers import LocalProcesses
from workbench.stopped import LOOKS, StopWatch, is_stopped
from workbench.strategies.registry import PLANNERS
from workbench.termination import Ended, ended_by_default, ending_by_signal, forking, noting

NOTICED_S = 5.0
CUTS = {"vision": (5,), "audio": (4,), "llm": (6,)}
BUSY = "while True: pass"
LOOKED_S = 1.5  # without a pause
QUICK_S = 0.05

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").is_file(), reason="looks at /proc")


@contextmanager
def program(text: str) -> Iterator[int]:
    with subprocess.Popen([sys.executable, "-c", text]) as process:
        try:
            yield process.pid
        finally:
            process.kill()


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """Process -> looks of this process's watches that have found it stopped. They are quick."""
    found: Counter[int] = Counter()

    def noted(process: int) -> bool:
        found[process] += (is_so := is_stopped(process))
        return is_so

    monkeypatch.setattr(stopped, "is_stopped", noted)
    monkeypatch.setattr(stopped, "LOOK_EVERY_S", QUICK_S)
    return found


class TestWatch:
    def test_its_looks_take_less_than_five_seconds(self):
        assert (LOOKS + 1) * stopped.LOOK_EVERY_S < NOTICED_S

    def test_only_looks_that_all_find_it_stopped_count(self, monkeypatch):
        monkeypatch.setattr(stopped, "LOOK_EVERY_S", 0.0)
        watch = StopWatch()
        with program("input()") as process:
            os.kill(process, signal.SIGSTOP)
            assert eventually(lambda: is_stopped(process))
            assert [watch.stopped((process,)) for _ in range(LOOKS - 1)] == [()] * (LOOKS - 1)
            os.kill(process, signal.SIGCONT)
            assert eventually(lambda: not is_stopped(process))
            assert watch.stopped((process,)) == ()
            os.kill(process, signal.SIGSTOP)
            assert eventually(lambda: is_stopped(process))
            looks = [watch.stopped((process,)) for _ in range(LOOKS)]
            assert looks == [()] * (LOOKS - 1) + [(process,)]

    def test_it_looks_no_more_often_than_it_should(self, monkeypatch):
        monkeypatch.setattr(stopped, "LOOK_EVERY_S", QUICK_S)
        watch = StopWatch()
        with program("input()") as process:
            os.kill(process, signal.SIGSTOP)
            start_s = time.monotonic()
            assert eventually(lambda: watch.stopped((process,)) == (process,))
            assert time.monotonic() - start_s >= (LOOKS - 1) * QUICK_S

    def test_a_process_without_a_core_is_not_stopped(self, monkeypatch):
        """Eight that compute, on however few cores: none is ever seen stopped, nor is one that waits."""
        monkeypatch.setattr(stopped, "LOOK_EVERY_S", 0.0)
        watch = StopWatch()
        with program("input()") as waiting:
            burners = [subprocess.Popen(["nice", sys.executable, "-c", BUSY]) for _ in range(8)]
            try:
                known = (waiting, *(each.pid for each in burners))
                assert not eventually(lambda: watch.stopped(known) != (), LOOKED_S)
            finally:
                for each in burners:
                    each.kill()
                    each.wait()

    def test_a_process_that_is_not_there_is_not_stopped(self):
        assert not is_stopped(2**22 + 1)


def stop_second(place: Place) -> None:
    place.report(4)
    if place.process == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.barrier()


def test_a_stopped_rank_of_a_run_is_ended_and_named(looks):
    reason = "rank 1 at 4: stopped by a signal and not continued"
    with Pool(2) as pool, pytest.raises(WorldFailed, match=reason):
        pool.run(stop_second, 2, where=lambda process, position: f"rank {process} at {position}")
    assert list(looks.values()) == [0, LOOKS]


def test_a_stopped_rank_under_torchrun_is_killed_by_its_neighbours_and_named(tmp_path):
    write_plan(disjoint_plan(tiny_valm(), tiny_batch(), CUTS), tmp_path / "plan.json")
    with start(tmp_path / "plan.json", "--steps", 100_000) as launcher:
        assert launcher.stderr is not None
        for line in launcher.stderr:
            if "running 100000 steps" in line:
                break
        ranks = [process_of(rank, launcher.pid) for rank in range(3)]
        os.kill(ranks[0], signal.SIGSTOP)
        assert eventually(lambda: not is_stopped(ranks[0]))
        _, told = launcher.communicate(timeout=PATIENCE_S)
    assert launcher.returncode != 0
    assert f"rank 0, process {ranks[0]}: stopped by a signal and not continued, so killed" in told
    assert "Signal 9 (SIGKILL)" in told[told.index("Root Cause") :]


def stopping(find: Callable[[], int | None]) -> threading.Thread:
    """Stops the first process that is found; one that ends at that instant is not the one."""

    def is_done() -> bool:
        if (process := find()) is None:
            return False
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGSTOP)
        return eventually(lambda: is_stopped(process), 0.1)

    def wait() -> None:
        while not is_done():
            time.sleep(0.001)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def test_a_stopped_member_of_elastic_training_is_a_lost_node_and_no_step_is(looks, capsys):
    job = chaos_job.elastic_job(3)
    with ElasticTraining(job, ("a", "b", "c")) as training:
        training.train(1)
        last = training.layout.pipelines[-1][-1]
        (member,) = training.nodes.process_ids(last)
        os.kill(member, signal.SIGSTOP)
        training.train(3)
        change = training.changes[-1]
    assert change.lost == (last,)
    assert looks[member] == LOOKS
    assert training.losses == pytest.approx(chaos_job.one_process(3), rel=2e-6)
    assert f"rank 0 of node {last!r}, process" in capsys.readouterr().err


def test_a_stopped_save_is_named(tmp_path):
    lowered = lower(disjoint_plan(tiny_valm(), tiny_batch(), CUTS))
    settings = RunSettings(steps=100_000, checkpoints=Checkpoints(folder=tmp_path, every=1))
    with Pool(3) as pool:
        pool.run(Place.__eq__, 3, None)

        def save() -> int | None:
            ours = pool.process_ids()
            return next(iter(descendants_of(ours[1])), None) if len(ours) == 3 else None

        stopper = stopping(save)
        with pytest.raises(WorldFailed, match=r"the checkpoint after step \d+ was stopped by a signal"):
            run_lowered(lowered, settings, source=SyntheticSource(0), pool=pool)
        stopper.join()
    assert not list(tmp_path.glob("*.part"))


def test_a_stopped_producer_is_replaced(tmp_path, looks, capsys):
    producers = LocalProducers(1, address="tcp://127.0.0.1:9", folder=tmp_path, keys=None, silence_s=60.0)
    try:
        (first,) = producers.pids.values()
        assert eventually(lambda: b"preprocess.producer" in command_of(first))
        os.kill(first, signal.SIGSTOP)
        assert eventually(lambda: producers.replace_lost() != ())
        assert looks[first] == LOOKS
        assert tuple(producers.pids.values()) != (first,)
        assert f"process {first}: stopped by a signal" in capsys.readouterr().err
    finally:
        producers.end()


def test_a_stopped_planner_is_named(looks):
    plan = disjoint_plan(tiny_valm(), tiny_batch(), CUTS)
    others = descendants_of(os.getpid())
    planner = Planner(plan)
    try:
        (process,) = descendants_of(os.getpid()) - others
        os.kill(process, signal.SIGSTOP)
        planner.ask(plan.batch)
        with pytest.raises(ValueError, match="planner of the next batch was stopped by a signal"):
            planner.fetch(PATIENCE_S)
        assert looks[process] == LOOKS
    finally:
        planner.close()


def test_a_stopped_cleaner_is_killed_and_the_work_beside_it_stands(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(scratch, "JOIN_S", QUICK_S)
    before = descendants_of(os.getpid())
    with ScratchFolder("ranks-") as folder:
        (cleaner,) = descendants_of(os.getpid()) - before
        os.kill(cleaner, signal.SIGSTOP)
        assert eventually(lambda: is_stopped(cleaner))
    assert not folder.exists()
    assert cleaner not in descendants_of(os.getpid())
    told = f"cleaner of {folder}, process {cleaner}: does not end, so killed"
    assert told in capsys.readouterr().err


def length(place: Place, content: bytes) -> int:
    return len(content)


def test_a_worker_that_is_stopped_before_it_reads_its_order_is_named(looks):
    """The order is longer than a pipe holds, so that whoever sends it waits for whoever reads it."""
    with Pool(1) as pool:
        assert pool.run(length, 1, b"") == [0]
        (worker,) = pool.process_ids()
        os.kill(worker, signal.SIGSTOP)
        with pytest.raises(WorldFailed, match="stopped"):
            pool.run(length, 1, bytes(10_000_000))
        assert looks[worker] == LOOKS
        assert pool.run(length, 1, b"again") == [5]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_at_the_instant_of_a_fork_ends_the_child_and_not_its_copy_of_the_parents_stack(number):
    """On the commit before, the child unwound the stack that it had of its parent, and ended with 143.

    Signals do what they do by default, also where the tests run under nohup.
    """
    before = signal.signal(number, signal.SIG_DFL)
    with ending_by_signal(), forking():
        child = os.fork()
        if child == 0:
            try:
                os.kill(os.getpid(), number)
                ended_by_default()
            finally:
                os._exit(143)
    signal.signal(number, before)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -number


@pytest.mark.usefixtures("heeds_interrupts")
def test_an_interrupt_at_the_instant_of_a_fork_is_the_parents_alone():
    """On the commit before, the child printed the traceback of a KeyboardInterrupt."""
    with forking():
        child = os.fork()
        if child == 0:
            try:
                os.kill(os.getpid(), signal.SIGINT)
                ended_by_default()
                os._exit(0)
            finally:
                os._exit(130)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_stopped_search_worker_is_replaced_and_what_it_had_is_done(capsys):
    task = next(iter(start_tasks(small(), {"cornstarch": PLANNERS["cornstarch"]})))
    workers = LocalProcesses(Space(small(), cost(), {}), IterationJudge(cost()), 1)
    others = descendants_of(os.getpid())
    try:
        (undisturbed,) = workers.starts([task])
        found = descendants_of(os.getpid()) - others
        (worker,) = (pid for pid in found if b"spawn_main" in command_of(pid))
        os.kill(worker, signal.SIGSTOP)
        (start,) = workers.starts([task])
    finally:
        workers.close()
    assert start.value == undisturbed.value
    assert f"search worker, process {worker}: stopped by a signal" in capsys.readouterr().err


def test_a_search_worker_that_is_stopped_as_soon_as_it_is_there_is_replaced(capsys):
    task = next(iter(start_tasks(small(), {"cornstarch": PLANNERS["cornstarch"]})))
    others = descendants_of(os.getpid())

    def worker() -> int | None:
        found = descendants_of(os.getpid()) - others
        return next((pid for pid in found if b"spawn_main" in command_of(pid)), None)

    def let_go() -> None:
        for pid in descendants_of(os.getpid()) - others:
            os.kill(pid, signal.SIGCONT)

    stopper, net = stopping(worker), threading.Timer(PATIENCE_S, let_go)
    net.start()
    workers = LocalProcesses(Space(small(), cost(), {}), IterationJudge(cost()), 1)
    try:
        (start,) = workers.starts([task])
    finally:
        net.cancel()
        workers.close()
    stopper.join(PATIENCE_S)
    assert start.value > 0
    assert "stopped by a signal and not continued, so killed" in capsys.readouterr().err


@pytest.mark.usefixtures("heeds_interrupts")
def test_a_first_interrupt_is_answered_and_noted_and_a_second_one_is_one(capfd: pytest.CaptureFixture[str]):
    with noting(signal.SIGINT, answer="again: at once") as came:
        assert not came
        os.kill(os.getpid(), signal.SIGINT)
        assert came == [signal.SIGINT]
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert capfd.readouterr().err == "\nagain: at once\n"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_request_to_end_has_its_own_exit_code():
    """On the commit before, it had that of an interrupt."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with noting(signal.SIGTERM) as came:
            os.kill(os.getpid(), signal.SIGTERM)
            assert came == [signal.SIGTERM]
            with pytest.raises(Ended) as ended:
                os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.value.code == 143


def test_an_interrupt_that_is_ignored_stays_so():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with noting(signal.SIGINT, answer="never said") as came:
            os.kill(os.getpid(), signal.SIGINT)
            assert not came
    finally:
        signal.signal(signal.SIGINT, before)
