"""Which layers of a module the backward recomputes: none, all, or some that are spread evenly over it."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise

from workbench.model.layer import Layer, LayerKind
from workbench.plan.plan import ModuleSettings, Plan, Recompute
from workbench.plan.stage import Stage


@lru_cache(maxsize=4096)
def recomputed_layers(recompute: Recompute, count: int | None, num_layers: int) -> tuple[bool, ...]:
    """[layers] whether the backward recomputes each layer of a module.

    Layer i of L is one of `count` where (i + 1) * count // L > i * count // L. So distances between them
    differ by at most one layer, the last layer is one of them, and every cut into stages of equally many
    layers has equally many of them, give or take one.

    Args:
        recompute: of the module.
        count: number of recomputed layers, from 0 to `num_layers`; None: all.
        num_layers: of the module.

    Complexity: O(layers).
    """
    if recompute is Recompute.NONE:
        return (False,) * num_layers
    num = num_layers if count is None else count
    return tuple((i + 1) * num // num_layers > i * num // num_layers for i in range(num_layers))


def recomputed_of(plan: Plan, module: str) -> tuple[bool, ...]:
    """[layers of the module] whether backwards recompute each."""
    settings = plan.settings.of(module)
    num_layers = len(plan.model.module(module).layers)
    return recomputed_layers(settings.recompute, settings.recompute_layers, num_layers)


def recomputed_in(plan: Plan, stage: Stage) -> tuple[bool, ...]:
    """[layers of the stage] whether backwards recompute each."""
    return recomputed_of(plan, stage.module)[slice(*stage.layers)]


def blocks_by_stage(layers: Sequence[Layer], count: int | None, stage_layers: Sequence[int]) -> list[int]:
    """[stages] recomputed blocks of each stage, if `count` layers of a module are recomputed; None: all.

    Args:
        layers: of the module.
        count: as of `recomputed_layers`.
        stage_layers: number of layers of each stage.

    Complexity: O(layers).
    """
    flags = recomputed_layers(Recompute.FULL, count, len(layers))
    are_blocks = [flag and layer.kind is LayerKind.BLOCK for flag, layer in zip(flags, layers, strict=True)]
    return [sum(are_blocks[first:last]) for first, last in pairwise(accumulate(stage_layers, initial=0))]


def check_recompute_layers(where: str, settings: ModuleSettings, num_layers: int) -> None:
    """Raise ValueError where `recompute_layers` are not fewer than all layers of the module `where`."""
    if settings.recompute_layers is not None and settings.recompute_layers >= num_layers:
        raise ValueError(
            f"{where}: recompute_layers must be fewer than its {num_layers} layers, got "
            f"{settings.recompute_layers}; nearest: leave it out, which recomputes all of them"
        )
