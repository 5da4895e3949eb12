"""Megatron-Bridge's `module_parallelisms`: degrees and first rank of every module.

Source: Megatron-Bridge, `ModuleParallelismConfig` and `MegatronMIMOParallelismConfig`. Modules with the
same ranks are colocated; a `rank_offset` that is absent is 0, as there.

The notation cannot express where stages are cut, or a pipeline degree that is left to be searched. Experts
that are both cut and distributed, which layouts cannot express, are refused. The order of stages in a
module's ranks is not part of it: here stages vary slowest, there replicas do.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from workbench.job.module_layout import ModuleLayout
from workbench.job.notations.checked_values import check_keys, count_of, mapping_of, nearest_of

PARALLELISMS = "module_parallelisms"
LANGUAGE = ("language", "llm", "language_model")  # the notation's names for the language model
_DEGREES = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "context_parallel_size": "cp",
    "expert_model_parallel_size": "ep",
    "data_parallel_size": "dp",
}
_OFFSET = "rank_offset"
_WHOLE_EXPERTS = "expert_tensor_parallel_size"


def read_parallelisms(
    content: Mapping[str, Any], *, modules: Sequence[str], llm: str
) -> tuple[ModuleLayout, ...]:
    """Layouts in the model's order.

    Args:
        content: a mapping with the one key `module_parallelisms`.
        modules: names of the model's modules.
        llm: the module that `language` or `llm` means where no module has that name.

    Raises:
        ValueError: an unknown key or module, a duplicate module, a size that is not a count, experts both
            distributed and cut.
    """
    check_keys(content, (PARALLELISMS,))
    layout_of: dict[str, ModuleLayout] = {}
    for key, entry in mapping_of(content[PARALLELISMS], where=PARALLELISMS).items():
        name = llm if key not in modules and key in LANGUAGE else key
        if name not in modules:
            raise ValueError(f"{PARALLELISMS} has no module {key!r}; {nearest_of(key, modules)}")
        if name in layout_of:
            raise ValueError(f"{PARALLELISMS}: {key!r} and another key both stand for module {name!r}")
        layout_of[name] = _read(
            name, mapping_of(entry, where=f"{PARALLELISMS}.{key}"), f"{PARALLELISMS}.{key}."
        )
    return tuple(layout_of[name] for name in modules if name in layout_of)


def _read(name: str, content: Mapping[str, Any], where: str) -> ModuleLayout:
    check_keys(content, (*_DEGREES, _OFFSET, _WHOLE_EXPERTS), where=where)
    if content.get(_WHOLE_EXPERTS, 1) != 1:
        raise ValueError(
            f"{where}{_WHOLE_EXPERTS}: a distributed expert is whole, want 1, got {content[_WHOLE_EXPERTS]}"
        )
    given = {key: count_of(content[key], where=where + key) for key in _DEGREES if _has(content, key)}
    return ModuleLayout(
        module=name,
        pp=given.get("pipeline_model_parallel_size", 1),
        tp=given.get("tensor_model_parallel_size", 1),
        cp=given.get("context_parallel_size", 1),
        ep=given.get("expert_model_parallel_size", 1),
        dp=given.get("data_parallel_size"),
        rank_offset=count_of(content.get(_OFFSET, 0), where=where + _OFFSET, least=0),
    )


def _has(content: Mapping[str, Any], key: str) -> bool:
    """Whether a degree is given; the data-parallel size may be null: the number of processes decides."""
    return key in content and not (key == "data_parallel_size" and content[key] is None)


def write_parallelisms(layouts: Sequence[ModuleLayout], *, dp: int = 1) -> dict[str, Any]:
    """The content that `read_parallelisms` reads; open rank offsets are written out.

    Args:
        layouts: in the model's order.
        dp: replicas of a module whose layout has no dp.

    Raises:
        ValueError: the notation cannot express a layout.
    """
    written: dict[str, Any] = {}
    end = 0
    for layout in layouts:
        if layout.stage_layers:
            raise ValueError(
                f"{PARALLELISMS} cannot express stage_layers of {layout.module!r}, got "
                f"{list(layout.stage_layers)}"
            )
        if layout.pp is None:
            raise ValueError(f"{PARALLELISMS} wants pp of {layout.module!r}; its layout leaves it open")
        offset = end if layout.rank_offset is None else layout.rank_offset
        replicas = layout.dp or dp
        end = max(end, offset + layout.tp * layout.cp * layout.pp * replicas)
        written[layout.module] = {
            "tensor_model_parallel_size": layout.tp,
            "pipeline_model_parallel_size": layout.pp,
            "context_parallel_size": layout.cp,
            "data_parallel_size": replicas,
            _OFFSET: offset,
        }
        if layout.ep > 1:
            written[layout.module]["expert_model_parallel_size"] = layout.ep
    return {PARALLELISMS: written}
