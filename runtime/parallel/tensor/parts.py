"""Which part of every weight a rank of a plan holds, to compare it with whole ones."""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from runtime.models.choose import adapter_of
from runtime.parallel.expert.cuts import parts_of, place_of
from workbench.plan.plan import Plan

Part = Callable[[Tensor], Tensor]


def held_parts(plan: Plan, rank: int) -> dict[tuple[str, str], Part]:
    """(module, Hugging Face name) -> what makes the rank's part of a whole weight; whole ones are absent.

    Raises:
        ValueError: a stage that its tensor-parallel ranks cannot share.

    Complexity: O(weights of the rank), with layers built on the meta device.
    """
    found: dict[tuple[str, str], Part] = {}
    for stage in plan.stages_on.get(rank, ()):
        if stage.tp == stage.ep == 1:
            continue
        place = place_of(stage, rank)
        adapter = adapter_of(plan.model.module(stage.module))
        for index in range(*stage.layers):
            layer = adapter.build(index)
            parts = parts_of(layer, tp=stage.tp, ep=stage.ep)
            for local in (*parts.tensor.cut, *parts.experts):
                name = layer.hugging_face_name(local)
                name = adapter.aliases.get(name, name)
                found[stage.module, name] = partial(place.own, local, parts)
    return found
