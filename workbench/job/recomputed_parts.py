"""Recomputation of parts of blocks, as a job asks for it."""

from workbench.job.notations.checked_values import nearest_of
from workbench.model.block_modules import BlockModule, part_of
from workbench.model.layer import LayerKind
from workbench.model.model_graph import Module
from workbench.plan.kernels import Kernels
from workbench.plan.plan import Recompute, Settings


def check_recomputed_parts(where: str, settings: Settings, module: Module) -> None:
    """Raise ValueError for parts that no block of the module has, or where what they save is not known.

    Complexity: O(distinct layers x parts).
    """
    own = settings.of(module.name)
    if not own.computed_again:
        return
    if own.recompute is not Recompute.NONE:
        raise ValueError(
            f"{where}: recompute_modules want recompute {Recompute.NONE.value!r}, got "
            f"{own.recompute.value!r}; nearest: one of the two left out"
        )
    if settings.kernels is Kernels.EAGER:
        raise ValueError(
            f"{where}: recompute_modules want kernels {Kernels.FUSED.value!r}, whose kept activations follow "
            f"from a block's parts, got {settings.kernels.value!r}; nearest: recompute 'blocks'"
        )
    blocks = {layer.operators: layer for layer in module.layers if layer.kind is LayerKind.BLOCK}.values()
    known = [part for part in BlockModule if any(part_of(block, (part,)) for block in blocks)]
    for part in own.computed_again:
        if part not in known:
            raise ValueError(
                f"{where}: recompute_modules want parts that its blocks have, got {part.value!r}; "
                f"{nearest_of(part, known)}"
            )
