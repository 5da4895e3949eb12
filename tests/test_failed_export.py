"""No failure of an export loses weights that were trained."""

import shutil
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from runtime.models.choose import adapter_of
from runtime.models.weights import weights_of
from runtime.state.save_folder import LOCK
from runtime.state.weights_export import (
    WHOLE,
    check_export,
    exporting,
    finish_export,
    part_folder,
    start_export,
    write_part,
)
from runtime.step.stage_module import build_stage_module
from runtime.world.owner import _start_of, this_process
from tests.test_checkpoint_attacks import files_of_at_most
from tests.test_export import tensors_of
from tests.test_lora_run import two_stages
from tests.test_weights import F32, plan_of
from workbench.model.lora import is_of_adapter
from workbench.model.model_graph import ModelGraph
from workbench.plan.plan import Plan

Weights = dict[tuple[str, str], Tensor]


def write_parts(plan: Plan, target: Path) -> Weights:
    """As all ranks do; returns what they held."""
    held: Weights = {}
    for stage in plan.stages:
        weights = build_stage_module(plan, stage, seed=9, dtype=F32).owned_weights()
        write_part(target, stage.module, stage.layers[0], weights)
        held |= {(stage.module, name): weight for name, weight in weights.items()}
    return held


def export_that_fails(plan: Plan, target: Path, fail: Callable[[ExitStack], None]) -> Weights:
    """What fails does so after all parts are written; returns what they hold.

    Args:
        fail: raises, or enters a context in which files cannot be written.
    """
    held: Weights = {}
    with pytest.raises((OSError, ValueError, RuntimeError)):
        _export(plan, target, fail, held)
    return held


def _export(plan: Plan, target: Path, fail: Callable[[ExitStack], None], held: Weights) -> None:
    with ExitStack() as failing, exporting(target, plan.model, dtype=F32):
        held |= write_parts(plan, target)
        fail(failing)


def full_disk(num_bytes: int) -> Callable[[ExitStack], None]:
    """Files get no longer once all parts are there."""
    return lambda failing: failing.enter_context(files_of_at_most(num_bytes))


def a_later_repetition(_: ExitStack) -> None:
    raise RuntimeError("rank 1 at 0F0")


def assert_same(kept: Weights, held: Weights) -> None:
    assert kept.keys() == held.keys()
    assert all(torch.equal(kept[key], held[key]) for key in held)


def test_weights_of_a_run_that_fails_after_they_were_written_can_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = plan_of()
    held = export_that_fails(plan, tmp_path / "out", a_later_repetition)
    assert [path.name for path in tmp_path.iterdir()] == ["out.trained"]
    assert_same(tensors_of(tmp_path / "out.trained"), held)
    assert capsys.readouterr().err.endswith("out was not completed; --weights reads them\n")
    for adapter in map(adapter_of, plan.model.modules):
        reader = weights_of(tmp_path / "out.trained", adapter)
        for name, shape in adapter.stored_shapes().items():
            assert torch.equal(reader.read(name, shape), held[adapter.module.name, name])


def test_on_a_disk_too_full_for_a_configuration_stages_are_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held = export_that_fails(plan_of(), tmp_path / "out", full_disk(20))
    assert_same(tensors_of(tmp_path / "out.trained"), held)
    assert capsys.readouterr().err.endswith("each stage is a file of safetensors\n")


def test_adapters_that_cannot_become_one_file_are_kept(tmp_path: Path) -> None:
    plan = two_stages()
    held = export_that_fails(plan, tmp_path / "out", full_disk(4_000))
    assert any(is_of_adapter(name) for _, name in held)
    assert not list((tmp_path / "out.trained").rglob("adapter_config.json"))
    assert_same(tensors_of(tmp_path / "out.trained"), held)


def test_kept_weights_are_not_mixed_with_those_of_another_run(tmp_path: Path) -> None:
    plan, target = plan_of(), tmp_path / "out"
    export_that_fails(plan, target, a_later_repetition)
    with pytest.raises(ValueError, match=r"out\.trained holds the weights of an earlier run; move it"):
        check_export(target, plan.model, None, F32)


def test_complete_parts_of_a_run_that_was_killed_are_kept(tmp_path: Path) -> None:
    plan, target = plan_of(), tmp_path / "out"
    start_export(target, plan.model)
    held = write_parts(plan, target)
    with pytest.raises(ValueError, match="holds the weights of an earlier run"):
        start_export(target, plan.model)
    assert_same(tensors_of(tmp_path / "out.trained"), held)


def test_a_second_run_does_not_touch_the_parts_of_the_first(tmp_path: Path) -> None:
    """It is refused before its work; once the first has ended, it takes over."""
    plan, target = plan_of(), tmp_path / "out"
    start_export(target, plan.model)
    write_part(target, "llm", 0, {"x": torch.zeros(1)})
    with subprocess.Popen(["sleep", "60"]) as first:
        owner = replace(this_process(), pid=first.pid, start=_start_of(first.pid) or 0)
        (part_folder(target) / LOCK).write_text(owner.as_json())
        before = sorted(part_folder(target).rglob("*"))
        with pytest.raises(ValueError, match=r"out\.part is being written to by .*; want another folder"):
            check_export(target, plan.model, None, F32)
        with pytest.raises(ValueError, match=r"out\.part is being written to by .*; want another folder"):
            start_export(target, plan.model)
        assert sorted(part_folder(target).rglob("*")) == before
        first.kill()
    start_export(target, plan.model)
    held = write_parts(plan, target)
    finish_export(target, plan.model)
    assert_same(tensors_of(target), held)
    assert not list(target.rglob(LOCK))


def test_too_little_space_is_found_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = plan_of().model
    full = SimpleNamespace(free=4 * model.num_parameters - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: full)
    with pytest.raises(ValueError, match=r"saves take about .* GiB more, .* GiB are free"):
        check_export(tmp_path / "new" / "out", model, None, F32)
    assert not list(tmp_path.iterdir())
    full.free += 1
    check_export(tmp_path / "new" / "out", model, None, F32)


def test_a_rank_that_writes_after_another_failed_does_not_bring_the_parts_back(tmp_path: Path) -> None:
    plan, target = plan_of(cut=False), tmp_path / "out"
    weights = build_stage_module(plan, plan.stages[-1], seed=8, dtype=F32).owned_weights()
    with pytest.raises(RuntimeError, match="rank 1"), exporting(target, plan.model, dtype=F32):
        raise RuntimeError("rank 1")
    with pytest.raises(ValueError, match=r"out\.part is gone, as the export has failed on another rank"):
        write_part(target, "llm", 0, weights)
    assert not list(tmp_path.iterdir())


def test_parts_written_while_others_are_deleted_do_not_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, target = plan_of(cut=False), tmp_path / "out"
    weights = build_stage_module(plan, plan.stages[-1], seed=8, dtype=F32).owned_weights()
    delete, late = shutil.rmtree, []

    def slow(folder: Path, **options: bool) -> None:
        delete(folder, **options)
        if folder.name == WHOLE:
            return  # what was made of the parts goes before them
        with pytest.raises(ValueError, match="is gone") as refused:
            write_part(target, "llm", 0, weights)
        late.append(refused)

    monkeypatch.setattr(shutil, "rmtree", slow)
    with pytest.raises(RuntimeError, match="rank 1"):
        fail_after_a_part(target, plan.model, weights)
    assert late
    assert not list(tmp_path.iterdir())


def fail_after_a_part(target: Path, model: ModelGraph, weights: dict[str, torch.Tensor]) -> None:
    with exporting(target, model, dtype=F32):
        write_part(target, "llm", 1, weights)
        raise RuntimeError("rank 1")
