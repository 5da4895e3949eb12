"""Over how many ranks the runtime can divide a module."""

from collections.abc import Iterator
from itertools import chain

from workbench.model.item_tokens import family_of, packs_tiles
from workbench.model.layer import Attention, Layer, LayerKind, Matmul, Recurrence, Shard
from workbench.model.model_graph import Module
from workbench.model.short_conv import has_short_conv
from workbench.plan.lru_cache import Identity, LruCache

_REASONS: LruCache[str] = LruCache(4096)  # empty: it can be divided


def check_degrees(module: Module, *, tp: int, cp: int) -> None:
    """Raise ValueError where the module runs on one rank, but not on this many.

    Complexity: O(operators of the module), once.
    """
    if reason := _reason(module, tp, cp):
        raise ValueError(f"module {module.name!r}: {reason}")


def may_divide(module: Module, *, tp: int, cp: int) -> bool:
    """Whether a search may divide it so: `check_degrees` accepts it, or the module cannot run at all."""
    return module.source is None or not _reason(module, tp, cp)


def _reason(module: Module, tp: int, cp: int) -> str:
    """Return why the module cannot be divided so; empty if it can."""
    return _REASONS.get_or((Identity(module), tp, cp), lambda: next(_reasons(module, tp, cp), ""))


def _reasons(module: Module, tp: int, cp: int) -> Iterator[str]:
    family = family_of(module)
    if cp > 1 and family is not None and not family.shares_tokens:
        yield f"{family.model_type} does not share tokens over ranks; want cp 1, got {cp}"
    if cp > 1 and packs_tiles(module):
        yield f"tiles are put together on one rank; want cp 1, got {cp}"
    operators = tuple(chain.from_iterable(layer.operators for layer in module.layers))
    rule = next((operator for operator in operators if isinstance(operator, Recurrence)), None)
    if cp > 1 and rule is not None:
        yield f"{rule.title} hands a state from token to token, on one rank; want cp 1, got {cp}"
    if cp > 1 and has_short_conv(operators):
        yield f"a short convolution reads neighbouring tokens, on one rank; want cp 1, got {cp}"
    if cp > 1 and any(isinstance(operator, Attention) and operator.is_capped for operator in operators):
        yield f"attention over several ranks has no soft cap; want cp 1, got {cp}"
    if cp > 1 and any(isinstance(each, Attention) and each.top_k is not None for each in operators):
        yield f"an indexer scores all keys of a sample, on one rank; want cp 1, got {cp}"
    if tp > 1 and family is not None and not family.shares_weights and _has_blocks(module):
        yield f"{family.model_type} has no tensor parallelism; want tp 1, got {tp}"
    if tp > 1:
        yield from chain.from_iterable(_layer_reasons(layer, tp) for layer in module.layers)


def _has_blocks(module: Module) -> bool:
    return any(layer.kind is LayerKind.BLOCK for layer in module.layers)


def _layer_reasons(layer: Layer, tp: int) -> Iterator[str]:
    """Yield why a layer cannot be divided: too few features, or a norm over the width of all heads."""
    for matmul in (op for op in layer.operators if isinstance(op, Matmul)):
        if matmul.shard is Shard.ROW and matmul.in_features < tp:
            yield (
                f"the {matmul.in_features} features between the matmuls of {layer.name} are not cut over tp "
                f"{tp}; nearest: tp {matmul.in_features}"
            )
    heads = {operator.head_dim for operator in layer.operators if isinstance(operator, Attention)}
    for norm in (op for op in layer.operators if op.name in ("q_norm", "k_norm")):
        if any(
            weight.num_elements not in heads and weight.shard is not Shard.COLUMN
            for weight in norm.parameters()
        ):
            yield (
                f"a norm over the queries of all heads is not cut by tensor parallelism; want tp 1, got {tp}"
            )
