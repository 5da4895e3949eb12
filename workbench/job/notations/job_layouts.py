"""Reads and writes a job's layouts in any of the notations."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from pydantic import ValidationError

from workbench.job.job import Job
from workbench.job.module_layout import PLACES, ModuleLayout, layout_from_spec
from workbench.job.notations import cornstarch, layout_string, torchtitan
from workbench.job.notations.bridge import PARALLELISMS, read_parallelisms, write_parallelisms
from workbench.job.notations.checked_values import check_keys, count_of, mapping_of, nearest_of
from workbench.job.other_layouts import apart
from workbench.job.schema import LayoutSpec


class Notation(StrEnum):
    """The notation of a layout; JOB is `layouts` of a job.yaml."""

    JOB = "job"
    BRIDGE = "bridge"
    MEGATRON = "megatron"
    TORCHTITAN = "torchtitan"
    CORNSTARCH = "cornstarch"


_STRING, _PARTS = "pipeline_model_parallel_layout", "module_fqns_per_model_part"
_TELLS = {
    "layouts": Notation.JOB,
    PARALLELISMS: Notation.BRIDGE,
    _STRING: Notation.MEGATRON,
    _PARTS: Notation.TORCHTITAN,
    "encoder_specs": Notation.CORNSTARCH,
    "language_model_spec": Notation.CORNSTARCH,
}
MEGATRON_SIZES = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "context_parallel_size": "cp",
}
TORCHTITAN_SIZES = {
    "tensor_parallel_degree": "tp",
    "pipeline_parallel_degree": "pp",
    "context_parallel_degree": "cp",
    "data_parallel_replicate_degree": "dp",
}


def notation_of(content: Mapping[str, Any]) -> Notation:
    """The notation that a file is in, by its keys; ValueError for none or several."""
    notations = {notation for key, notation in _TELLS.items() if key in content}
    if len(notations) != 1:
        near = "; ".join(f"{key!r}: {nearest_of(str(key), list(_TELLS))}" for key in list(content)[:1])
        raise ValueError(
            f"want the keys of one notation ({', '.join(_TELLS)}), got "
            f"{' and '.join(sorted(notations)) or near or 'nothing'}"
        )
    return notations.pop()


def read_layouts(content: Mapping[str, Any], job: Job) -> tuple[ModuleLayout, ...]:
    """Layouts of the job's modules, in the model's order.

    A notation for the language model alone leaves the other modules as the job has them.

    Args:
        content: keys and values of one notation.
        job: the job whose model it is for.

    Raises:
        ValueError: as the notation's reader, or counts that differ from the job's.
    """
    notation = notation_of(content)
    names = [module.name for module in job.model.modules]
    llm = job.model.llm.name
    if notation is Notation.BRIDGE:
        return read_parallelisms(content, modules=names, llm=llm)
    if notation is Notation.CORNSTARCH:
        spec = cornstarch.read_spec(content)
        _check_counts(content, spec, job)
        encoders = [name for name in names if name != llm]
        return cornstarch.layouts_of(spec, encoders=encoders, llm=llm)
    if notation is Notation.JOB:
        return _read_job(content, names)
    llm_layout = (
        _read_megatron(content, job) if notation is Notation.MEGATRON else _read_torchtitan(content, job)
    )
    layout_of = {layout.module: layout for layout in apart(job).layouts} | {llm: llm_layout}
    return tuple(layout_of[name] for name in names if name in layout_of)


def write_layouts(job: Job, notation: Notation) -> dict[str, Any]:
    """Keys and values of the notation for the job's layouts.

    A notation for the language model alone leaves the other modules out.

    Raises:
        ValueError: the notation cannot express a layout.
    """
    each_apart = apart(job)
    given = {layout.module: layout for layout in each_apart.layouts}
    layouts = [given.get(m.name, ModuleLayout(module=m.name)) for m in job.model.modules]
    llm = next(layout for layout in layouts if layout.module == job.model.llm.name)
    if notation is Notation.BRIDGE:
        return write_parallelisms(layouts, dp=each_apart.replicas)
    if notation is Notation.CORNSTARCH:
        spec = cornstarch.write_spec(cornstarch.spec_of(layouts, llm=llm.module))
        return spec | _counts(job)
    if notation is Notation.JOB:
        return {"layouts": {layout.module: _words(layout) for layout in layouts}}
    if notation is Notation.MEGATRON:
        _check_sayable(llm, notation, MEGATRON_SIZES, job)
        cuts: dict[str, Any] = {_STRING: layout_string.layout_string(llm.stage_layers)}
        return cuts | _sizes(llm, MEGATRON_SIZES)
    _check_sayable(llm, notation, TORCHTITAN_SIZES, job)
    return {_PARTS: torchtitan.parts_of(llm.stage_layers)} | _sizes(llm, TORCHTITAN_SIZES)


def _sizes(layout: ModuleLayout, words: Mapping[str, str]) -> dict[str, int]:
    """The layout's degrees, by the notation's keys."""
    sizes = {key: getattr(layout, name) for key, name in words.items()}
    return {key: size for key, size in sizes.items() if size is not None}


def _num_blocks(job: Job) -> int:
    """The number of the language model's transformer layers, between its embedding and its head."""
    return len(job.model.llm.layers) - 2


def _read_megatron(content: Mapping[str, Any], job: Job) -> ModuleLayout:
    check_keys(content, (_STRING, *MEGATRON_SIZES))
    text = content[_STRING]
    if not isinstance(text, str):
        raise ValueError(f"{_STRING}: want a layout string, e.g. 'Et*3|(tt|)*29L', got {text!r:.60}")
    stages = layout_string.stage_layers_of(text, num_blocks=_num_blocks(job))
    return _cut_layout(content, MEGATRON_SIZES, stages, job)


def _read_torchtitan(content: Mapping[str, Any], job: Job) -> ModuleLayout:
    check_keys(content, (_PARTS, *TORCHTITAN_SIZES))
    stages = torchtitan.stage_layers_of(content[_PARTS], num_blocks=_num_blocks(job))
    return _cut_layout(content, TORCHTITAN_SIZES, stages, job)


def _cut_layout(
    content: Mapping[str, Any], words: Mapping[str, str], stages: tuple[int, ...], job: Job
) -> ModuleLayout:
    sizes = {name: count_of(content[key], where=key) for key, name in words.items() if key in content}
    blocks = sizes.pop("pp", None) or max(1, len(stages) // job.schedule.virtual_stages)
    if len(stages) % blocks:
        raise ValueError(f"{len(stages)} stages do not lie evenly on pp = {blocks} blocks of ranks")
    return ModuleLayout(module=job.model.llm.name, pp=blocks, stage_layers=stages, **sizes)


def _read_job(content: Mapping[str, Any], names: list[str]) -> tuple[ModuleLayout, ...]:
    check_keys(content, ("layouts",))
    given = mapping_of(content["layouts"], where="layouts")
    for name in given:
        if name not in names:
            raise ValueError(f"layouts has no module {name!r}; {nearest_of(name, names)}")
    return tuple(_of_job(name, given[name]) for name in names if name in given)


def _of_job(name: str, entry: Any) -> ModuleLayout:
    mapping = mapping_of(entry, where=f"layouts.{name}")
    check_keys(mapping, PLACES, where=f"layouts.{name}.")
    try:
        spec = LayoutSpec.model_validate(mapping)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"layouts.{name}.{key}: {first['msg']}, got {first['input']!r:.60}") from None
    return layout_from_spec(name, spec)


def _words(layout: ModuleLayout) -> dict[str, Any]:
    """The layout's keys and values that differ from the defaults."""
    default = ModuleLayout(module=layout.module)
    values = {
        name: getattr(layout, name) for name in PLACES if getattr(layout, name) != getattr(default, name)
    }
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def _counts(job: Job) -> dict[str, Any]:
    each_apart = apart(job)
    return {
        "num_microbatches": max(1, len(job.batch) // (job.replicas * job.microbatch_samples)),
        "microbatch_size": each_apart.microbatch_samples,
        "dp_size": each_apart.replicas,
    }


def _check_counts(content: Mapping[str, Any], spec: cornstarch.MultimodalSpec, job: Job) -> None:
    """Raise ValueError where counts in a specification differ from those of the job's batch."""
    for key, count in _counts(job).items():
        if key in content and getattr(spec, key) != count:
            raise ValueError(
                f"{key} is {getattr(spec, key)}, the job's batch makes it {count}; change the batch"
            )


def _check_sayable(llm: ModuleLayout, notation: Notation, sayable: Mapping[str, str], job: Job) -> None:
    """Raise ValueError unless the notation can express the language model's layout."""
    if not llm.stage_layers:
        cuts = _even_cuts(len(job.model.llm.layers), (llm.pp or 1) * job.schedule.virtual_stages)
        raise ValueError(
            f"{notation} says where {llm.module!r} is cut; its layout has no stage_layers; nearest: "
            f"stage_layers: {cuts}"
        )
    if llm.ep > 1:
        raise ValueError(f"{notation} cannot express ep of {llm.module!r}, got {llm.ep}")
    for name in ("dp", "rank_offset"):
        if name not in sayable.values() and getattr(llm, name) is not None:
            raise ValueError(f"{notation} cannot express {name} of {llm.module!r}, got {getattr(llm, name)}")


def _even_cuts(num_layers: int, num_stages: int) -> list[int]:
    """Equal numbers of layers for every stage, one more for the first ones where they do not divide."""
    least, more = divmod(num_layers, min(num_stages, num_layers))
    return [least + (stage < more) for stage in range(min(num_stages, num_layers))]
