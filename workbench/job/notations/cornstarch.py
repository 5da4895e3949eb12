"""Cornstarch's specifications: the layout of each module, in the model's own structure.

Source: Cornstarch v1, section 3.2 and Listing 1; ICML version, appendix A and Listing 1. Names of fields
are theirs.

The notation cannot express replicas of one module alone, a rank_offset (modules are consecutive), or where
stages are cut (the strategy decides).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from workbench.job.module_layout import ModuleLayout
from workbench.job.notations.checked_values import check_keys, count_of, mapping_of, nearest_of

_SIZES = ("tp_size", "cp_size", "pp_size")
_COUNTS = ("num_microbatches", "microbatch_size", "dp_size")
_KEYS = ("encoder_specs", "language_model_spec", *_COUNTS, "modality_parallelism")


class EncoderPlacing(StrEnum):
    """Where encoders run, as values of `modality_parallelism`.

    On their own ranks, all on the same ranks, or on every rank of the language model.
    """

    PARALLEL = "parallel"
    COLOCATED = "colocated"
    REPLICATED = "replicated"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelSpec:
    """The layout of one module: `pp_size` stages of tp_size x cp_size ranks."""

    tp_size: int = 1
    cp_size: int = 1
    pp_size: int = 1

    def __post_init__(self) -> None:
        for name in _SIZES:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")

    @property
    def num_ranks(self) -> int:
        return self.tp_size * self.cp_size * self.pp_size


@dataclass(frozen=True, slots=True, kw_only=True)
class MultimodalSpec:
    """The layout of a whole model.

    Args:
        encoder_specs: name -> specification; for a group of encoders, a `MultimodalSpec` without
            `language_model_spec`. Encoders that are not named get one rank.
        language_model_spec: None in a group.
        num_microbatches: microbatches of one replica.
        microbatch_size: samples that the language model processes together.
        modality_parallelism: an `EncoderPlacing`.
        dp_size: replicas of everything. Differs: Cornstarch derives them from the number of processes.

    Raises:
        ValueError: a count below one, another modality_parallelism, a language model in a group.
    """

    encoder_specs: "Mapping[str, ParallelSpec | MultimodalSpec]" = field(default_factory=dict)
    language_model_spec: ParallelSpec | None = None
    num_microbatches: int = 1
    microbatch_size: int = 1
    modality_parallelism: str = "parallel"
    dp_size: int = 1

    def __post_init__(self) -> None:
        for name in _COUNTS:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        where = self.modality_parallelism
        known = tuple(map(str, EncoderPlacing))
        if where not in known:
            raise ValueError(
                f"modality_parallelism must be one of {', '.join(known)}, got {where!r}; "
                f"{nearest_of(where, known)}"
            )
        for name, spec in self.encoder_specs.items():
            if isinstance(spec, MultimodalSpec) and spec.language_model_spec is not None:
                raise ValueError(
                    f"encoder_specs[{name!r}]: a group has no language model, leave out its spec"
                )

    @property
    def num_samples(self) -> int:
        """Samples of one step."""
        return self.dp_size * self.num_microbatches * self.microbatch_size

    def leaves(self) -> dict[str, ParallelSpec]:
        """Encoders by name in plans, with groups flattened: `senses.vision` is `vision` of group `senses`."""
        specs: dict[str, ParallelSpec] = {}
        for name, spec in self.encoder_specs.items():
            if isinstance(spec, ParallelSpec):
                specs[name] = spec
            else:
                specs |= {f"{name}.{inner}": leaf for inner, leaf in spec.leaves().items()}
        return specs

    def of_encoders(self, names: Sequence[str]) -> dict[str, ParallelSpec]:
        """The specification of every encoder of a model, in its order; ValueError for an unknown encoder."""
        given = self.leaves()
        for name in given:
            if name not in names:
                raise ValueError(f"encoder_specs names {name!r}; {nearest_of(name, names)}")
        return {name: given.get(name, ParallelSpec()) for name in names}


def layouts_of(spec: MultimodalSpec, *, encoders: Sequence[str], llm: str) -> tuple[ModuleLayout, ...]:
    """A specification as layouts of a job, encoders first.

    Args:
        encoders: names in plans, in the model's order.
        llm: name of the language model.

    Raises:
        ValueError: an unknown encoder.
    """
    specs = spec.of_encoders(encoders) | {llm: spec.language_model_spec or ParallelSpec()}
    return tuple(
        ModuleLayout(module=name, pp=parallel.pp_size, tp=parallel.tp_size, cp=parallel.cp_size)
        for name, parallel in specs.items()
    )


def spec_of(layouts: Sequence[ModuleLayout], *, llm: str) -> MultimodalSpec:
    """Layouts as a specification; its counts are 1, as layouts have none.

    Raises:
        ValueError: the notation cannot express a layout.
    """
    specs = {layout.module: _spec(layout) for layout in layouts}
    return MultimodalSpec(
        encoder_specs={name: spec for name, spec in specs.items() if name != llm},
        language_model_spec=specs.get(llm),
    )


def _spec(layout: ModuleLayout) -> ParallelSpec:
    for name, absent in (("ep", 1), ("dp", None), ("rank_offset", None), ("stage_layers", ())):
        if getattr(layout, name) != absent:
            raise ValueError(
                f"a ParallelSpec cannot express {name} of {layout.module!r}, got {getattr(layout, name)}"
            )
    if layout.pp is None:
        raise ValueError(f"a ParallelSpec wants pp_size of {layout.module!r}; its layout leaves pp open")
    return ParallelSpec(tp_size=layout.tp, cp_size=layout.cp, pp_size=layout.pp)


def read_spec(content: Mapping[str, Any]) -> MultimodalSpec:
    """The specification of keys and values.

    Raises:
        ValueError: an unknown key, or a size that is not a count; the message names the place.
    """
    return _read(content, where="")


def _read(content: Mapping[str, Any], *, where: str) -> MultimodalSpec:
    check_keys(content, _KEYS, where=where)
    encoders: dict[str, ParallelSpec | MultimodalSpec] = {}
    for name, entry in mapping_of(content.get("encoder_specs", {}), where=f"{where}encoder_specs").items():
        place = f"{where}encoder_specs.{name}."
        inner = mapping_of(entry, where=place.removesuffix("."))
        is_group = "encoder_specs" in inner
        encoders[name] = _read(inner, where=place) if is_group else _read_one(inner, where=place)
    llm = content.get("language_model_spec")
    counts = {key: count_of(content[key], where=f"{where}{key}") for key in _COUNTS if key in content}
    return MultimodalSpec(
        encoder_specs=encoders,
        language_model_spec=None
        if llm is None
        else _read_one(
            mapping_of(llm, where=f"{where}language_model_spec"), where=f"{where}language_model_spec."
        ),
        modality_parallelism=str(content.get("modality_parallelism", "parallel")),
        **counts,
    )


def _read_one(content: Mapping[str, Any], *, where: str) -> ParallelSpec:
    check_keys(content, _SIZES, where=where)
    return ParallelSpec(**{key: count_of(value, where=f"{where}{key}") for key, value in content.items()})


def write_spec(spec: MultimodalSpec) -> dict[str, Any]:
    """The content that `read_spec` reads; defaults are left out, except for sizes."""
    content: dict[str, Any] = {
        "encoder_specs": {
            name: write_spec(inner) if isinstance(inner, MultimodalSpec) else _sizes(inner)
            for name, inner in spec.encoder_specs.items()
        }
    }
    if spec.language_model_spec is not None:
        content["language_model_spec"] = _sizes(spec.language_model_spec)
    content |= {key: getattr(spec, key) for key in _COUNTS if getattr(spec, key) != 1}
    if spec.modality_parallelism != "parallel":
        content["modality_parallelism"] = str(spec.modality_parallelism)
    return content


def _sizes(spec: ParallelSpec) -> dict[str, int]:
    return {name: getattr(spec, name) for name in _SIZES}
