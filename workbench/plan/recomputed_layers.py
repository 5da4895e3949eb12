"""Which layers of a module the backward recomputes: none, blocks, all, or some, spread evenly over these."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise

from workbench.model.layer import Layer, LayerKind
from workbench.plan.plan import ModuleSettings, Plan, Recompute
from workbench.plan.stage import Stage


def recomputed_layers(recompute: Recompute, count: int | None, layers: Sequence[Layer]) -> tuple[bool, ...]:
    """[layers] whether the backward recomputes each layer of a module.

    Of L layers, or blocks, number i is one of `count` where (i + 1) * count // L > i * count // L. So
    distances between them differ by at most one, the last is one of them, and every cut into stages of
    equally many has equally many of them, give or take one.

    Args:
        recompute: of the module.
        count: number of recomputed layers, or blocks, from 0 to all of them; None: all.
        layers: of the module.

    Complexity: O(layers).
    """
    if recompute is Recompute.BLOCKS:
        return _of_blocks(count, tuple(layer.kind is LayerKind.BLOCK for layer in layers))
    return _spread(0 if recompute is Recompute.NONE else count, len(layers))


@lru_cache(maxsize=4096)
def _spread(count: int | None, total: int) -> tuple[bool, ...]:
    num = total if count is None else count
    return tuple((i + 1) * num // total > i * num // total for i in range(total))


@lru_cache(maxsize=4096)
def _of_blocks(count: int | None, are_blocks: tuple[bool, ...]) -> tuple[bool, ...]:
    of_blocks = iter(_spread(count, sum(are_blocks)))
    return tuple(is_block and next(of_blocks) for is_block in are_blocks)


def recomputed_of(plan: Plan, module: str) -> tuple[bool, ...]:
    """[layers of the module] whether backwards recompute each."""
    settings = plan.settings.of(module)
    return recomputed_layers(settings.recompute, settings.recompute_layers, plan.model.module(module).layers)


def recomputed_in(plan: Plan, stage: Stage) -> tuple[bool, ...]:
    """[layers of the stage] whether backwards recompute each."""
    return recomputed_of(plan, stage.module)[slice(*stage.layers)]


def blocks_by_stage(layers: Sequence[Layer], count: int | None, stage_layers: Sequence[int]) -> list[int]:
    """[stages] recomputed blocks of each stage, if `count` blocks of a module are recomputed; None: all.

    Args:
        layers: of the module.
        count: as of `recomputed_layers`.
        stage_layers: number of layers of each stage.

    Complexity: O(layers).
    """
    flags = recomputed_layers(Recompute.BLOCKS, count, layers)
    return [sum(flags[first:last]) for first, last in pairwise(accumulate(stage_layers, initial=0))]


def recompute_text(recompute: str, count: int | None, parts: Sequence[str] = ()) -> str:
    """`none`, `blocks`, `full`, `16 blocks`, `16 layers`, or parts of blocks such as `norm+act`."""
    if parts:
        return "+".join(parts)
    noun = "block" if recompute == Recompute.BLOCKS else "layer"
    return str(recompute) if count is None else f"{count} {noun}{'s' * (count > 1)}"


def check_recompute_layers(where: str, settings: ModuleSettings, layers: Sequence[Layer]) -> None:
    """Raise ValueError where `recompute_layers` are not fewer than all that the module `where` has."""
    if settings.recompute_layers is None:
        return
    words = "blocks" if settings.recompute is Recompute.BLOCKS else "layers"
    total = sum(recomputed_layers(settings.recompute, None, layers))
    if settings.recompute_layers >= total:
        raise ValueError(
            f"{where}: recompute_layers must be fewer than its {total} {words}, got "
            f"{settings.recompute_layers}; nearest: leave it out, which recomputes all of them"
        )
