"""Elastic training: what its nodes do, and the processes that they are."""

import errno
import gc
import os
import pickle
import signal
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from experiments.oobleck import chaos_job
from experiments.oobleck.chaos_job import batch, elastic_job
from runtime.elastic import member
from runtime.elastic.history import ElasticFailed
from runtime.elastic.job import ElasticJob, plan_step
from runtime.elastic.moves import Holdings, write_state
from runtime.elastic.orders import TrainStep
from runtime.elastic.progress import Progress, read_progress
from runtime.elastic.replan import start_layout
from runtime.elastic.run import NodeKiller, Ran, Saving, latest_progress, run_elastic
from runtime.elastic.training import ElasticTraining
from runtime.elastic.world import World
from runtime.world.busy_cores import process_seconds
from runtime.world.communicators import build_mesh
from runtime.world.pool import Place, Pool
from workbench.cli.elastic_training import finish
from workbench.elastic.step_events import StepEvents, told_events
from workbench.plan import lru_cache
from workbench.plan.lower import lower
from workbench.plan.lowered import Lowered
from workbench.plan.plan import Sharding


@pytest.mark.usefixtures("heeds_interrupts")
def test_a_signal_lets_the_step_end_and_saves_and_a_second_one_ends_everything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    job = chaos_job.elastic_job(2)
    events = StepEvents(first=0, start=("a", "b"), events=())
    ranks: list[int] = []
    warned: list[str] = []

    def tell(training: ElasticTraining) -> None:
        ranks[:] = [rank for node in ("a", "b") for rank in training.nodes.process_ids(node)]
        if len(training.steps) == 2:
            os.kill(os.getpid(), signal.SIGINT)

    def tell_twice(training: ElasticTraining) -> None:
        tell(training)
        tell(training)

    before = signal.getsignal(signal.SIGINT)
    saving = Saving(folder=tmp_path, every=1)
    ran = run_elastic(job, events, 9, start=None, saving=saving, tell=tell, warn=warned.append)
    assert (ran.signal, ran.refusal, len(ran.steps)) == (signal.SIGINT, None, 2)
    assert ran.saved is not None
    assert [path.name for path in tmp_path.iterdir()] == ["step2"]
    assert process_seconds(ranks) == {}
    with pytest.raises(KeyboardInterrupt):
        run_elastic(job, events, 9, start=None, saving=None, tell=tell_twice, warn=warned.append)
    assert process_seconds(ranks) == {}
    assert warned == []
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(SystemExit, match="130"):
        finish(ran)
    said = f"workbench: interrupted after 2 steps; progress after 2 steps is in {tmp_path / 'step2'}\n"
    assert capsys.readouterr().err == said  # and no second line, as by the code of Ctrl-C


def test_a_save_that_meets_a_dead_node_is_named_and_training_goes_on(tmp_path: Path):
    victims: list[str] = []
    warned: list[str] = []

    def tell(training: ElasticTraining) -> None:
        if training.step == 1:  # who is to write every layer in the save that comes next
            victims.append(training.layout.pipelines[-1][-1])
            os.kill(training.nodes.process_ids(victims[0])[0], signal.SIGKILL)

    events = StepEvents(first=0, start=("a", "b", "c"), events=())
    saving = Saving(folder=tmp_path, every=1)
    ran = run_elastic(
        chaos_job.elastic_job(3), events, 3, start=None, saving=saving, tell=tell, warn=warned.append
    )
    assert (ran.refusal, len(ran.steps)) == (None, 3)
    assert [change.lost for change in ran.changes] == [(), tuple(victims)]
    assert [text.partition(" of node")[0] for text in warned] == [
        "after 1 steps progress was not saved: rank 0"
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["step3"]


def test_saves_that_were_cut_off_are_removed_and_nothing_else_is(tmp_path: Path):
    (tmp_path / "step4" / "part0").mkdir(parents=True)
    (tmp_path / "step4" / ".progress.json.77.tmp").write_text("{")
    (tmp_path / "step5").mkdir()
    (tmp_path / "step6").mkdir()
    (tmp_path / "step6" / "progress.json").write_text("{}")
    (tmp_path / "steps-of-mine").mkdir()
    (tmp_path / "steps-of-mine" / "note").write_text("")
    events = StepEvents(first=0, start=("a", "b"), events=())
    saving = Saving(folder=tmp_path)
    run_elastic(
        chaos_job.elastic_job(2), events, 1, start=None, saving=saving, tell=lambda _: None, warn=print
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step1", "step6", "steps-of-mine"]


def writing(monkeypatch: pytest.MonkeyPatch, before: Callable[[Path], None]) -> None:
    """Have every process do something before it writes its part."""

    def write_after(folder: Path, held: Holdings) -> None:
        before(folder)
        write_state(folder, held)

    monkeypatch.setattr(member, "write_state", write_after)


def run_on_three(folder: Path, steps: int, every: int) -> tuple[Ran, list[str]]:
    """Of nodes that hold half of the layers each: a save has two parts."""
    warned: list[str] = []
    ran = run_elastic(
        chaos_job.elastic_job(3, num_faults=0, layers_per_rank=4),
        StepEvents(first=0, start=("a", "b", "c"), events=()),
        steps,
        start=None,
        saving=Saving(folder=folder, every=every),
        tell=lambda _: None,
        warn=warned.append,
    )
    return ran, warned


@pytest.mark.parametrize("slow_s", [0.0, 0.05, 0.5])
def test_a_save_after_one_that_failed_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow_s: float
):
    """Whenever the other process is done with its part of the one that failed."""
    failed, root = tmp_path / "failed", tmp_path / "saves"

    def fill_up_once(folder: Path) -> None:
        if folder.name == "part0" and not failed.exists():
            failed.touch()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if folder.name == "part1":
            time.sleep(slow_s)

    writing(monkeypatch, fill_up_once)
    ran, warned = run_on_three(root, 2, every=2)
    assert [text.partition(": rank")[0] for text in warned] == ["after 2 steps progress was not saved"]
    assert os.strerror(errno.ENOSPC) in warned[0]
    assert ran.refusal is None
    job = chaos_job.elastic_job(3, num_faults=0, layers_per_rank=4)
    assert (
        latest_progress(job, root, warn=pytest.fail) == ran.saved == Progress(folder=root / "step2", step=2)
    )
    assert [path.name for path in root.iterdir()] == ["step2"]


def test_a_disk_that_stays_full_costs_no_step_and_is_not_filled_further(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def fill_up(folder: Path) -> None:
        if folder.name == "part0":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    writing(monkeypatch, fill_up)
    ran, warned = run_on_three(tmp_path / "saves", 4, every=1)
    assert len(warned) == 4
    assert ran.refusal is not None
    assert os.strerror(errno.ENOSPC) in ran.refusal
    assert [change.step for change in ran.changes] == [0]
    assert [done.loss for done in ran.steps] == pytest.approx(chaos_job.one_process(4), rel=2e-6)
    assert list((tmp_path / "saves").iterdir()) == []


def test_an_answer_that_comes_too_late_is_not_taken_for_the_next_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Nor is the folder removed in which somebody may still write."""

    given_up = tmp_path / "given up"

    def be_slow(folder: Path) -> None:
        while folder == tmp_path / "late" / "part1" and not given_up.exists():
            time.sleep(0.01)

    writing(monkeypatch, be_slow)
    job = chaos_job.elastic_job(3, num_faults=0, layers_per_rank=4)
    with ElasticTraining(job, ("a", "b", "c")) as training:
        training.train(1)
        training.job = replace(job, wait_s=0.3, step_s=0.3)
        with pytest.raises(ElasticFailed, match="no answer from rank 0 of node"):
            training.save(tmp_path / "late")
        assert (tmp_path / "late").is_dir()
        given_up.touch()
        training.job = job
        saved = training.save(tmp_path / "next")
        assert read_progress(job, tmp_path / "next") == saved
        training.train(2)
    assert [change.step for change in training.changes] == [0]


def test_a_part_that_is_not_there_though_it_was_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(member, "write_state", lambda *_: None)
    ran, warned = run_on_three(tmp_path, 2, every=1)
    assert "progress was not saved" in warned[0]
    assert "part0/tensors.json cannot be read" in warned[0]
    assert (len(ran.steps), ran.saved) == (2, None)
    assert list(tmp_path.glob("step*")) == []


def test_progress_that_another_training_has_removed_since_it_was_read_is_named(tmp_path: Path):
    events = StepEvents(first=3, start=("a", "b"), events=())
    gone, saving = Progress(folder=tmp_path / "step3", step=3), Saving(folder=tmp_path)
    with pytest.raises(ValueError, match=r"step3: another training has removed it since it was read"):
        run_elastic(
            chaos_job.elastic_job(2), events, 4, start=gone, saving=saving, tell=lambda _: None, warn=print
        )


def test_a_kill_comes_into_its_step_and_its_recovery_however_late_the_killer_looks(
    monkeypatch: pytest.MonkeyPatch,
):
    """On the commit before, a step that was over by then counted, and so did a recovery."""
    monkeypatch.setattr("runtime.elastic.run.LOOK_EVERY_S", 1.0)
    events = told_events(["1:kill:node1", "recovery:kill:node2"], 4, first=0, steps=3)
    ran = run_elastic(
        chaos_job.elastic_job(4), events, 3, start=None, saving=None, tell=lambda _: None, warn=pytest.fail
    )
    assert [(change.step, sorted(change.lost), change.attempts) for change in ran.changes] == [
        (0, [], 1),
        (1, ["node1", "node2"], 2),
    ]
    assert [done.loss for done in ran.steps] == pytest.approx(chaos_job.one_process(3), rel=2e-6)


def test_a_node_keeps_nothing_of_steps_long_past(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """On the commit before, its caches had one more entry after every step."""
    sizes, train = tmp_path / "sizes", member.MemberProcess._train

    def noted(process: member.MemberProcess, order: TrainStep) -> None:
        train(process, order)
        with sizes.open("a") as file:
            file.write(f"{max(len(cache._entries) for cache in lru_cache._ALL)}\n")

    monkeypatch.setattr(member.MemberProcess, "_train", noted)
    monkeypatch.setattr(member, "CLEAR_EVERY", 4)
    before = max(len(cache._entries) for cache in lru_cache._ALL)
    with ElasticTraining(chaos_job.elastic_job(2), ("a", "b")) as training:
        training.train(12)
    found = [int(line) for line in sizes.read_text().splitlines()]
    assert len(found) >= 22  # the last ones may still be written when the nodes end
    assert max(found[8:]) <= max(4 + 1, before)


def test_nodes_that_never_compute_are_killed_at_the_end_of_the_step_or_spared():
    job = chaos_job.elastic_job(2)
    with ElasticTraining(job, ("a", "b")) as training:
        spared = NodeKiller(training.nodes, ["b"])
        spared.start()
        spared.give_up()
        assert (spared.killed_s, training.nodes.dead(["b"])) == ({}, ())
        killer = NodeKiller(training.nodes, ["b", "gone"])
        killer.start()
        killer.end()
        assert list(killer.killed_s) == ["b"]


STEPS = 4
RANKS_OF_NODES = {"two stages": (1, 1), "two replicas": (1, 1), "sharded": (2,)}


def job_of(name: str) -> ElasticJob:
    """Of two ranks."""
    if name == "sharded":
        job = elastic_job(1, num_faults=0, ranks_per_node=2, ranks_per_stage=2)
        return replace(job, sharding=Sharding.PARAMETERS)
    return elastic_job(2, num_faults=0, layers_per_rank=4 if name == "two stages" else 8)


class Left(NamedTuple):
    """Which executors, wires, gradients and plans of so many steps live after them, by step; which modules
    live after their world."""

    executors: list[bool]
    wires: list[bool]
    gradients: list[bool]
    num_plans: int
    modules: list[bool]


def trained(place: Place, name: str, plans: list[bytes]) -> Left:
    """Steps in a world, with the collector off."""
    job = job_of(name)
    gc.collect()
    gc.disable()
    try:
        first: Lowered = pickle.loads(plans[0])
        world = World(job, first.plan, build_mesh(first, torch.device("cpu"), 30.0))
        del first
        held, seen = world.empty(), []
        for step, content in enumerate(plans):
            lowered: Lowered = pickle.loads(content)
            world.run_step(lowered, held, step, progress=lambda position: None, vote=lambda loss: None)
            executor = world._executor
            assert executor is not None
            seen.append([weakref.ref(each) for each in (executor, executor._wires, executor._gradients)])
            del lowered, executor
        modules = [weakref.ref(module) for module in world.modules.values()]
        by_step = [[each() is not None for each in step] for step in seen]
        num_plans = sum(type(each) is Lowered for each in gc.get_objects())
        assert world._wires is not None
        world._wires.close()
        del world, held
        executors, wires, gradients = (list(column) for column in zip(*by_step, strict=True))
        return Left(executors, wires, gradients, num_plans, [each() is not None for each in modules])
    finally:
        gc.enable()


@pytest.mark.parametrize("name", RANKS_OF_NODES)
def test_a_replaced_executor_its_plan_and_the_modules_of_a_past_world_die_uncollected(
    name: str, pool: Pool
) -> None:
    """On the commit before, every step's stayed until the collector came: it held its own methods."""
    job = job_of(name)
    layout = start_layout(job, ("a", "b")[: len(RANKS_OF_NODES[name])])
    plans = [pickle.dumps(lower(plan_step(job, layout, batch(step)))) for step in range(STEPS)]
    only_last = [*[False] * (STEPS - 1), True]
    for left in pool.run(trained, 2, name, plans):
        assert (left.executors, left.wires, left.gradients) == (only_last, only_last, only_last)
        assert left.num_plans == 1
        assert left.modules
        assert not any(left.modules)
