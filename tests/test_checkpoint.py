"""Checkpoints: a killed run goes on bit by bit as if nothing had been; torn and foreign ones are refused."""

import json
import os
import random
import signal
import threading
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
import torch

from experiments.disttrain.checkpoints import checkpoints
from runtime.launch import RunResult, run_lowered
from runtime.run_settings import Collect, RunSettings
from runtime.state.checkpoint import RANDOM, Begin, Checkpoints, RankCheckpoints, Shared, checkpoints_in
from runtime.state.checkpoint_files import (
    ForeignError,
    Identity,
    Whole,
    check_whole,
    identity_of,
    latest_whole,
    rank_folder,
)
from runtime.state.rank_state import RankNotes
from runtime.state.tensor_files import TornError, read_manifest, write_tensors
from runtime.world.pool import Place, Pool, WorldFailed
from tests.plans import disjoint_plan
from tests.test_next_batches import FOLLOWING, plan_with_owners
from tests.test_parity import mixed
from tests.test_sharded_optimizer import WHOLE, sharded
from tests.tiny_models import mixed_batch, plan_of, two_encoders
from tests.tiny_valm import tiny_batch
from tests.waiting import eventually
from workbench.memory.checkpoint_bytes import checkpoint_bytes
from workbench.plan.build import with_programs
from workbench.plan.lower import lower
from workbench.plan.lowered import Lowered
from workbench.plan.plan import Sharding

STEPS = 5
SETTINGS = RunSettings(steps=STEPS, collect=Collect.STATE, timeout_s=20.0)


@pytest.fixture(scope="module")
def lowered() -> Lowered:
    """Three stages on three ranks."""
    return lower(with_programs(plan_of(two_encoders(), mixed_batch())))


@pytest.fixture(scope="module")
def saved(lowered: Lowered, pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunResult]:
    """Checkpoints of a whole run, and what came of it."""
    folder = tmp_path_factory.mktemp("saved")
    return folder, run_lowered(lowered, saving(folder), pool=pool)


def saving(folder: Path, start: Whole | None = None, *, steps: int = SETTINGS.steps) -> RunSettings:
    return replace(
        SETTINGS,
        steps=steps,
        timeout_s=120.0,
        checkpoints=Checkpoints(folder=folder, every=3, start=start),
    )


def identity(lowered: Lowered) -> Identity:
    return identity_of(lowered.plan, SETTINGS.dtype(lowered.plan), SETTINGS.seed)


def latest_step(folder: Path, lowered: Lowered) -> int | None:
    whole = latest_whole(folder, identity(lowered))
    return None if whole is None else whole.step


def assert_same(one: RunResult, other: RunResult) -> None:
    """To the last bit: all losses, and all weights at the end."""
    assert one.losses == other.losses
    for mine, theirs in zip(one.states, other.states, strict=True):
        assert mine.weights.keys() == theirs.weights.keys()
        assert all(torch.equal(mine.weights[key], theirs.weights[key]) for key in mine.weights)


def test_saving_changes_nothing_and_leaves_the_last_two(lowered, pool, saved):
    folder, result = saved
    assert_same(result, run_lowered(lowered, SETTINGS, pool=pool))
    assert sorted(path.name for path in folder.iterdir()) == ["step-0000000003", "step-0000000005"]
    assert len(result.save_stalls_s) == 2
    assert latest_step(folder, lowered) == STEPS


def test_a_run_goes_on_from_a_checkpoint_to_the_last_bit(lowered, pool, saved, tmp_path):
    folder, result = saved
    whole = check_whole(folder / "step-0000000003", identity(lowered))
    assert_same(result, run_lowered(lowered, saving(tmp_path, whole), pool=pool))


@pytest.mark.parametrize("sharding", [Sharding.NONE, Sharding.OPTIMIZER])
def test_replicas_write_each_tensor_once_and_go_on_from_it(sharding, pool, tmp_path):
    """As many bytes as a checkpoint is predicted to have; of a sharded optimizer, parts are padded."""
    plan = disjoint_plan(mixed("llm"), tiny_batch(), WHOLE, replicas=2)
    if sharding is Sharding.OPTIMIZER:
        plan = sharded(plan)
    lowered = lower(plan)
    result = run_lowered(lowered, saving(tmp_path / "first"), pool=pool)
    whole = check_whole(tmp_path / "first" / "step-0000000003", identity(lowered))
    tensors = [read_manifest(path.parent).tensors for path in whole.folder.rglob("tensors.json")]
    written = sum(
        4 * prod(form.shape)
        for held in tensors
        for name, form in held.items()
        if name != RANDOM and not name.endswith("/step")
    )
    padded_bytes = 0 if sharding is Sharding.NONE else 2 * 4  # an element of either moment
    predicted = checkpoint_bytes(plan.model, plan.settings)
    assert predicted <= written <= predicted + padded_bytes
    assert_same(result, run_lowered(lowered, saving(tmp_path / "second", whole), pool=pool))


@pytest.mark.parametrize(("own", "read"), [({"weight/llm/w": 2.0}, 2.0), ({}, 1.0)])
def test_a_replica_reads_its_own_tensors_where_an_earlier_version_wrote_them(own, read, tmp_path):
    notes = RankNotes(losses=(), python_random=random.getstate()).as_json()
    folder, random_state = tmp_path / "step-0000000001", {RANDOM: torch.get_rng_state()}
    for rank, values in enumerate(({"weight/llm/w": 1.0}, own)):
        tensors = {name: torch.full((2,), value) for name, value in values.items()}
        write_tensors(rank_folder(folder, rank), tensors | random_state, notes)
    settings = Checkpoints(folder=tmp_path, every=1, start=Whole(folder=folder, step=1))
    of_both = Identity(plan_hash="", dtype="", seed=0, ranks=(0, 1))
    shared, weight = Shared(writer=0, kinds=("weight",)), torch.zeros(2)
    saves = RankCheckpoints(settings, of_both, 1, shared=shared, timeout_s=1.0)
    assert saves.resume(lambda: {"weight/llm/w": weight}, []) == 1
    assert weight.tolist() == [read, read]


def test_a_run_over_batches_goes_on_at_its_batch(pool, tmp_path):
    lowered = lower(plan_with_owners("projectors-and-llm", llm=(6,)))
    settings = replace(SETTINGS, steps=4, timeout_s=60.0, following=FOLLOWING)  # a batch each
    first = replace(settings, timeout_s=120.0, checkpoints=Checkpoints(folder=tmp_path, every=3))
    result = run_lowered(lowered, first, pool=pool)
    whole = check_whole(tmp_path / "step-0000000003", identity(lowered))
    again = replace(settings, timeout_s=120.0, checkpoints=Checkpoints(folder=tmp_path, every=3, start=whole))
    assert_same(result, run_lowered(lowered, again, pool=pool))


def test_a_run_that_is_killed_while_it_saves_goes_on_to_the_last_bit(lowered, pool, tmp_path):
    pool.run(Place.__eq__, len(lowered.plan.ranks), None)  # all are forked

    def saves_again() -> bool:
        return any(tmp_path.glob("step-*[0-9]")) and any(tmp_path.glob("step-*.part/rank-*"))

    def kill_while_saving() -> None:
        eventually(saves_again)
        os.kill(pool.process_ids()[1], signal.SIGKILL)

    killer = threading.Thread(target=kill_while_saving)
    killer.start()
    with pytest.raises(WorldFailed, match="killed by SIGKILL"):
        run_lowered(lowered, saving(tmp_path, steps=100_000), pool=pool)
    killer.join()
    whole = latest_whole(tmp_path, identity(lowered))
    assert whole is not None
    steps = whole.step + 3
    undisturbed = run_lowered(lowered, replace(SETTINGS, steps=steps), pool=pool)
    assert_same(undisturbed, run_lowered(lowered, saving(tmp_path, whole, steps=steps), pool=pool))
    assert not list(tmp_path.glob("*.part"))


def copied(folder: Path, to: Path) -> Path:
    for path in (folder / "step-0000000005").rglob("*"):
        if path.is_file():
            target = to / "step-0000000005" / path.relative_to(folder / "step-0000000005")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    return to / "step-0000000005"


def test_torn_checkpoints_are_refused_by_name(lowered, saved, tmp_path):
    whole = copied(saved[0], tmp_path)
    file = whole / "rank-00001" / "tensors.safetensors"
    content = file.read_bytes()
    for damaged in (content[:-1], content[:-1] + bytes([content[-1] ^ 1])):
        file.write_bytes(damaged)
        with pytest.raises(
            TornError, match=r"step-0000000005 is torn: .*rank-00001/tensors.safetensors is not"
        ):
            check_whole(whole, identity(lowered))
    with pytest.raises(TornError, match=r"is torn.*; want an intact copy of one, or another folder"):
        latest_whole(tmp_path, identity(lowered))
    (whole / "rank-00002" / "tensors.json").unlink()
    file.write_bytes(content)
    with pytest.raises(TornError, match=r"rank-00002/tensors.json cannot be read"):
        check_whole(whole, identity(lowered))


def test_the_latest_whole_one_is_found_behind_a_torn_one(lowered, saved, tmp_path):
    later = copied(saved[0], tmp_path).rename(tmp_path / "step-0000000006")
    copied(saved[0], tmp_path)
    (later / "stamp.json").write_text("{")
    (tmp_path / "step-0000000008.part").mkdir()
    assert latest_step(tmp_path, lowered) == STEPS
    told = checkpoints_in(tmp_path, 2, Begin.LATEST, identity(lowered)).warning
    assert told is not None
    assert told.startswith(f"checkpoint {later} is torn: ")
    assert told.endswith(f"; resuming from {tmp_path / f'step-{STEPS:010}'}")


def test_who_resumes_where_there_is_nothing_is_told_that_the_run_starts_anew(lowered, tmp_path):
    told = checkpoints_in(tmp_path, 2, Begin.LATEST, identity(lowered))
    assert told.warning == f"{tmp_path} holds no checkpoint: the run starts at its first step"
    assert checkpoints_in(tmp_path, 2, Begin.ANEW, identity(lowered)).warning is None


@pytest.mark.parametrize("begin", Begin)
def test_a_checkpoint_is_not_taken_for_the_folder_that_holds_it(lowered, saved, begin):
    """On the commit before, a run began anew inside it."""
    whole = saved[0] / "step-0000000005"
    with pytest.raises(ValueError, match=f"is a checkpoint itself: want the folder .*{saved[0]}$"):
        checkpoints_in(whole, 2, begin, identity(lowered))
    assert not (whole / "writer.json").exists()


def test_who_lost_a_run_is_told_how_it_goes_on(saved, tmp_path):
    """The newest complete checkpoint; one that was being written does not count."""
    later = tmp_path / "step-0000000012"
    later.mkdir()
    (tmp_path / "step-0000000014.part").mkdir()
    assert Checkpoints(folder=tmp_path, every=2).next_try == "--resume continues after step 12"
    later.rmdir()
    assert "has to start again" in Checkpoints(folder=tmp_path, every=2).next_try


def test_a_resumed_run_counts_the_steps_before_it(lowered, saved, tmp_path, pool):
    whole = Whole(folder=copied(saved[0], tmp_path), step=5)
    told = []
    settings = saving(tmp_path, whole, steps=STEPS + 2)
    run_lowered(lowered, settings, pool=pool, progress=lambda done, total, _: told.append((done, total)))
    total = settings.warmup + settings.steps
    assert told == [(done, total) for done in range(STEPS + 1, total + 1)]


def test_nothing_is_said_where_the_newest_one_is_whole(lowered, saved):
    assert checkpoints_in(saved[0], 2, Begin.LATEST, identity(lowered)).warning is None


def test_foreign_checkpoints_and_finished_runs_are_refused(lowered, saved, tmp_path):
    other = replace(identity(lowered), seed=7)
    with pytest.raises(ForeignError, match="is of seed 0, this run of 7"):
        latest_whole(saved[0], other)
    with pytest.raises(
        ForeignError, match=r"is of plan \w{12}, this run of (ab){6}; want the same plan, or another folder$"
    ):
        latest_whole(saved[0], replace(other, plan_hash="ab" * 32))
    assert latest_whole(tmp_path, other) is None
    with pytest.raises(ValueError, match="holds step-0000000005 already: want --resume"):
        checkpoints_in(saved[0], 2, Begin.ANEW, other)
    with pytest.raises(ValueError, match="has seen 5 steps already, the run has 5"):
        saving(tmp_path, Whole(folder=tmp_path, step=5))


def test_a_checkpoint_of_other_data_is_refused(lowered, saved, tmp_path):
    """A stamp that does not say them, as older ones, fits any; so does any where nobody says what is read."""
    stamp = copied(saved[0], tmp_path) / "stamp.json"
    own, other = (replace(identity(lowered), data=data) for data in ("random", "examples 1234"))
    assert latest_whole(tmp_path, own) == latest_whole(tmp_path, other)
    stamp.write_text(json.dumps(json.loads(stamp.read_text()) | {"data": "random"}))
    assert latest_whole(tmp_path, own) == latest_whole(tmp_path, identity(lowered))
    with pytest.raises(ForeignError, match="is of data random, this run of examples 1234"):
        latest_whole(tmp_path, other)
    with pytest.raises(ForeignError, match=r"this run of examples 1{12}; want the same data"):
        latest_whole(tmp_path, replace(own, data=f"examples {'1' * 64}"))


def test_a_checkpoint_that_names_its_plan_by_the_hash_of_before_is_found(lowered, saved):
    later = replace(identity(lowered), plan_hash="abc", named_hash=identity(lowered).plan_hash)
    assert latest_whole(saved[0], later) == latest_whole(saved[0], identity(lowered))


def test_a_save_that_cannot_be_written_ends_the_run_by_name(lowered, pool, tmp_path):
    (tmp_path / "step-0000000003.part").write_text("")
    with pytest.raises(WorldFailed, match=r"checkpoint after step 3 failed: .*Not a directory"):
        run_lowered(lowered, saving(tmp_path), pool=pool)


def test_a_whole_job_that_is_killed_while_it_saves_ends_as_one_left_alone():
    outcome = checkpoints(1, 1)
    assert [claim.text for claim in outcome.claims if not claim.holds] == []
    assert outcome.ours["kills"] == 1
