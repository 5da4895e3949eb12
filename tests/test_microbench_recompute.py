"""Layers that a backward runs again are timed around the checkpoint, in both passes."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from runtime.measure.clock import Clock
from runtime.measure.layers import LayerKind, Part, time_window
from runtime.measure.windows import windows_of
from runtime.step import stage_module
from runtime.world.pool import Place
from tests.plans import disjoint_plan
from tests.tiny_valm import tiny_batch, tiny_valm
from workbench.model.trainable import Trainable

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
        found = time_window(ALONE, plan, window, 0.0).seconds
        for (_, kind, part), seconds in found.items():
            assert set(seconds) == {1.0 if (kind, part) in TAKES_ONE else 0.0}
        layers = range(*window.layers)
        assert {(index, *one) for index in layers for one in TAKES_ONE} <= set(found)
