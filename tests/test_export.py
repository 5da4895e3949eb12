"""Trained weights leave a run as Hugging Face folders, bit by bit what the ranks held."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from runtime.launch import run_local
from runtime.run_settings import Collect, RunSettings
from runtime.state.weights_export import part_folder
from runtime.world.pool import Pool
from tests.plans import disjoint_plan
from tests.test_parity import mixed
from tests.test_schedule_golden import planned
from tests.tiny_valm import tiny_batch, tiny_valm
from workbench.model.trainable import Trainable
from workbench.plan.plan import Precision
from workbench.schedule.choice import ScheduleKind, usual

CUTS = {"vision": (5,), "audio": (4,), "llm": (3, 3)}


def tensors_of(folder: Path) -> dict[tuple[str, str], torch.Tensor]:
    """(module, name) -> tensor, of all files; each name once."""
    found: dict[tuple[str, str], torch.Tensor] = {}
    for path in sorted(folder.rglob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (not a mapping)
                assert (path.parent.name, name) not in found
                found[path.parent.name, name] = file.get_tensor(name)
    return found


@pytest.mark.parametrize(("tied", "replicas"), [(False, 1), (True, 1), (False, 2)])
def test_an_export_is_what_the_ranks_held_and_comes_back(
    tied: bool, replicas: int, tmp_path: Path, pool: Pool
) -> None:
    plan = disjoint_plan(tiny_valm(tied=tied), tiny_batch(), CUTS, replicas=replicas)
    target = tmp_path / "out"
    result = run_local(plan, RunSettings(steps=2, export=target, collect=Collect.STATE), pool=pool)
    held = {key: weight for state in reversed(result.states) for key, weight in state.weights.items()}
    written = tensors_of(target)
    assert ("llm", "lm_head.weight") in written if not tied else ("llm", "lm_head.weight") not in written
    assert written.keys() == held.keys()
    for key, weight in written.items():
        assert torch.equal(weight, held[key]), key

    again = run_local(
        plan, RunSettings(weights=target, export=tmp_path / "again", collect=Collect.STATE), pool=pool
    )
    assert again.losses[0] < result.losses[0]  # on the same data: it goes on where it was
    frozen = [key for key in written if key[0] == "vision" and key[1].startswith("encoder.layers")]
    assert frozen
    rewritten = tensors_of(tmp_path / "again")
    assert all(torch.equal(rewritten[key], written[key]) for key in frozen)
    assert not part_folder(target).exists()


def test_several_stages_of_a_module_on_a_rank_write_and_read_their_own_layers(
    tmp_path: Path, pool: Pool
) -> None:
    """A V with tied embedding and head, split backward: what one plan wrote another goes on from."""
    model = mixed("everything", tied=True)
    folded = planned(model, usual(ScheduleKind.ZB_V), (2, 3))
    first = run_local(folded, RunSettings(steps=2, export=tmp_path / "out", collect=Collect.STATE), pool=pool)
    held = {key: weight for state in reversed(first.states) for key, weight in state.weights.items()}
    written = tensors_of(tmp_path / "out")
    assert written.keys() == held.keys() - {("llm", "lm_head.weight")}
    for key, weight in written.items():
        assert torch.equal(weight, held[key]), key
    flat = disjoint_plan(model, tiny_batch(), CUTS)
    losses = [
        run_local(plan, RunSettings(weights=tmp_path / "out", precision=Precision.FLOAT64), pool=pool).losses[
            0
        ]
        for plan in (folded, flat)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    assert losses[0] < first.losses[0]


def test_an_untrained_round_trip_is_bit_equal(tmp_path: Path, pool: Pool) -> None:
    """With everything frozen but one projector's bias out of reach of rounding: nothing moves."""
    model = tiny_valm(vision=Trainable.NONE, audio=Trainable.PROJECTOR, llm=Trainable.NONE)
    batch = tiny_batch((1, 1), (0, 0))  # no clip, so no gradient reaches the audio projector
    plan = disjoint_plan(model, batch, CUTS)
    run_local(plan, RunSettings(seed=5, export=tmp_path / "one"), pool=pool)
    run_local(plan, RunSettings(seed=6, weights=tmp_path / "one", export=tmp_path / "two"), pool=pool)
    one, two = tensors_of(tmp_path / "one"), tensors_of(tmp_path / "two")
    still = [key for key in one if key[0] != "audio"]
    assert all(torch.equal(one[key], two[key]) for key in still)
    for path in (tmp_path / "one").rglob("*.json"):
        assert path.read_bytes() == (tmp_path / "two" / path.relative_to(tmp_path / "one")).read_bytes()


def test_permissions_are_those_of_any_new_file(tmp_path: Path, pool: Pool) -> None:
    plan = disjoint_plan(tiny_valm(), tiny_batch((0, 0), (0, 0)), CUTS)
    run_local(plan, RunSettings(export=tmp_path / "out"), pool=pool)
    (tmp_path / "plain").touch()
    modes = {path.stat().st_mode for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert modes == {(tmp_path / "plain").stat().st_mode}


def test_taken_folders_are_refused_before_the_run(tmp_path: Path, pool: Pool) -> None:
    plan = disjoint_plan(tiny_valm(), tiny_batch(), CUTS)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    before = sorted(tmp_path.rglob("*"))
    for name in ("full", "file", "link"):
        with pytest.raises(ValueError, match=f"export folder .*{name} exists already"):
            run_local(plan, RunSettings(export=tmp_path / name), pool=pool)
    with pytest.raises(OSError, match="file"):
        run_local(plan, RunSettings(export=tmp_path / "file" / "out"), pool=pool)
    assert sorted(tmp_path.rglob("*")) == before
    (tmp_path / "empty").mkdir()
    run_local(plan, RunSettings(export=tmp_path / "empty"), pool=pool)
    config = json.loads((tmp_path / "empty" / "llm" / "config.json").read_text())
    assert config["vocab_size"] == 61


def test_a_failed_run_leaves_no_parts(tmp_path: Path, pool: Pool) -> None:
    plan = disjoint_plan(tiny_valm(), tiny_batch(), CUTS)
    with pytest.raises(ValueError, match="has neither"):
        run_local(plan, RunSettings(weights=tmp_path / "no", export=tmp_path / "out"), pool=pool)
    assert not list(tmp_path.iterdir())


def test_progress_tells_the_loss_of_every_step(pool: Pool) -> None:
    plan = disjoint_plan(tiny_valm(), tiny_batch(), CUTS)
    told: list[tuple[int, int, float]] = []
    result = run_local(
        plan,
        RunSettings(steps=2, warmup=1, repetitions=2),
        pool=pool,
        progress=lambda *news: told.append(news),
    )
    assert [(done, total) for done, total, _ in told] == [(done, 6) for done in range(1, 7)]
    assert tuple(loss for _, _, loss in told) == result.losses * 2
