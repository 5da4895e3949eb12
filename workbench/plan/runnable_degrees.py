"""Over how many ranks the runtime divides a module that it can run."""

from collections.abc import Iterator
from itertools import chain

from workbench.model.item_tokens import family_of, packs_tiles
from workbench.model.layer import Attention, Layer, Matmul, Shard
from workbench.model.model_graph import Module
from workbench.plan.lru_cache import Identity, LruCache

_REASONS: LruCache[str] = LruCache(4096)  # empty: it can


def check_degrees(module: Module, *, tp: int, cp: int) -> None:
    """Raise ValueError where it runs on one rank, and not on so many.

    Complexity: O(operators of the module), once.
    """
    if found := _reason(module, tp, cp):
        raise ValueError(f"module {module.name!r}: {found}")


def may_divide(module: Module, *, tp: int, cp: int) -> bool:
    """Whether a search may: `check_degrees` accepts it, or the module cannot run at all."""
    return module.source is None or not _reason(module, tp, cp)


def _reason(module: Module, tp: int, cp: int) -> str:
    """Empty where it is divided so."""
    return _REASONS.get_or((Identity(module), tp, cp), lambda: next(_reasons(module, tp, cp), ""))


def _reasons(module: Module, tp: int, cp: int) -> Iterator[str]:
    family = family_of(module)
    if cp > 1 and family is not None and not family.shares_tokens:
        yield f"{family.model_type} does not share tokens over ranks; want cp 1, got {cp}"
    if cp > 1 and packs_tiles(module):
        yield f"tiles are put together on one rank; want cp 1, got {cp}"
    operators = chain.from_iterable(layer.operators for layer in module.layers)
    if cp > 1 and any(isinstance(operator, Attention) and operator.is_capped for operator in operators):
        yield f"attention over several ranks has no soft cap; want cp 1, got {cp}"
    if tp > 1:
        yield from chain.from_iterable(_uncut(layer, tp) for layer in module.layers)


def _uncut(layer: Layer, tp: int) -> Iterator[str]:
    """A norm over the width of all heads wants them on one rank; what is cut, a feature for each."""
    for matmul in (each for each in layer.operators if isinstance(each, Matmul)):
        if matmul.shard is Shard.ROW and matmul.in_features < tp:
            yield (
                f"the {matmul.in_features} features between the matmuls of {layer.name} are not cut over tp "
                f"{tp}; nearest: tp {matmul.in_features}"
            )
    heads = {operator.head_dim for operator in layer.operators if isinstance(operator, Attention)}
    for norm in (each for each in layer.operators if each.name in ("q_norm", "k_norm")):
        if any(weight.num_elements not in heads for weight in norm.parameters()):
            yield (
                f"a norm over the queries of all heads is not cut by tensor parallelism; want tp 1, got {tp}"
            )
