"""Layers that a backward runs again are timed around the checkpoint, in both passes."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from runtime.measure.clock import Clock
from runtime.measure.layers import LayerKind, Part, time_window
from runtime.measure.plans import BenchSettings, layer_tasks
from runtime.measure.windows import windows_of
from runtime.step import stage_module
from runtime.world.pool import Place
from tests.plans import disjoint_plan
from tests.tiny_valm import tiny_batch, tiny_valm
from workbench.calibrate.measurement import LayerRow
from workbench.model.trainable import Trainable
from workbench.plan.plan import ModuleSettings, Recompute

ALONE = Place(0, 1, lambda position: None)
TAKES_ONE = {
    (LayerKind.RECOMPUTED, Part.FORWARD),
    (LayerKind.RECOMPUTED, Part.BACKWARD),
    (LayerKind.RECOMPUTED_IDLE, Part.FORWARD),
}


class Ticks:
    """A clock that only moves when a layer runs under a checkpoint: by 1."""

    def __init__(self) -> None:
        self.now = 0.0

    def stamp(self) -> float:
        """In place of a clock's."""
        return self.now

    def checkpoint(self, layer: nn.Module, *arguments: Any, **options: Any) -> Tensor:
        """In place of torch's."""
        output: Tensor = checkpoint(partial(self._run, layer), *arguments, **options)
        return output

    def _run(self, layer: Callable[..., Tensor], *arguments: object) -> Tensor:
        self.now += 1
        return layer(*arguments)


@pytest.mark.parametrize("module", ["vision", "audio", "llm"])
def test_a_layer_that_is_run_again_is_timed_once_in_either_pass(
    monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    """Neither pass has the other's run of a layer, or another layer's."""
    ticks = Ticks()
    monkeypatch.setattr(stage_module, "checkpoint", ticks.checkpoint)
    monkeypatch.setattr(Clock, "stamp", ticks.stamp)
    cuts = {"vision": (5,), "audio": (4,), "llm": (3, 3)}
    plan = disjoint_plan(tiny_valm(llm=Trainable.ALL), tiny_batch(), cuts)
    for window in (each for each in windows_of(plan, sizes=1) if each.module == module):
        found = time_window(ALONE, plan, replace(window, is_recomputed=True), 0.0).seconds
        for (_, kind, part), seconds in found.items():
            assert set(seconds) == {1.0 if (kind, part) in TAKES_ONE else 0.0}
        layers = range(*window.layers)
        assert {(index, *one) for index in layers for one in TAKES_ONE} <= set(found)


def test_it_is_timed_where_some_plan_wants_it_of_the_module() -> None:
    cuts = {"vision": (5,), "audio": (4,), "llm": (3, 3)}
    plan = disjoint_plan(tiny_valm(llm=Trainable.ALL), tiny_batch(), cuts)
    again = replace(
        plan,
        settings=replace(plan.settings, modules=(ModuleSettings(module="llm", recompute=Recompute.FULL),)),
    )
    settings = BenchSettings(sizes=1, budget_s=0.0)
    for plans, wanted in (((plan,), set()), ((plan, again), {"llm"})):
        found = set()
        for task in layer_tasks(plans, None, settings):
            rows = [row for row in task.measure() if isinstance(row, LayerRow)]
            assert task.is_done(rows)
            if all(row.recompute_forward_s for row in rows):
                found.add(task.what.partition("[")[0])
                assert not task.is_done([replace(row, recompute_forward_s=None) for row in rows])
        assert found == wanted
