"""Elastic training under its events: signals, saves that meet a dead node, kills of nodes at rest."""

import os
import signal
from pathlib import Path

import pytest

from experiments.oobleck import chaos_job
from runtime.elastic.progress import Progress
from runtime.elastic.run import NodeKiller, Saving, run_elastic
from runtime.elastic.training import ElasticTraining
from runtime.world.busy_cores import process_seconds
from workbench.elastic.step_events import StepEvents


@pytest.mark.usefixtures("heeds_interrupts")
def test_a_signal_lets_the_step_end_and_saves_and_a_second_one_ends_everything(tmp_path: Path):
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


def test_progress_that_another_training_has_removed_since_it_was_read_is_named(tmp_path: Path):
    events = StepEvents(first=3, start=("a", "b"), events=())
    gone, saving = Progress(folder=tmp_path / "step3", step=3), Saving(folder=tmp_path)
    with pytest.raises(ValueError, match=r"step3: another training has removed it since it was read"):
        run_elastic(
            chaos_job.elastic_job(2), events, 4, start=gone, saving=saving, tell=lambda _: None, warn=print
        )


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
