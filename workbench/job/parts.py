"""Builds the model, the cluster and the batch of a job.yaml."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from graphlib import CycleError
from itertools import cycle
from pathlib import Path
from typing import Any

from workbench.cost.hardware import Cluster, Node, uniform
from workbench.cost.profile import Profile, load_profile
from workbench.data.corpus import (
    ItemSize,
    ItemTokens,
    Mixture,
    fixed_samples,
    mixed_samples,
)
from workbench.data.sample import Sample, Segment
from workbench.job.batch_schema import BatchSpec, ItemSpec, MixtureSpec
from workbench.job.links import link_of, num_cards
from workbench.job.notations.checked_values import nearest_of
from workbench.job.sample_sizes import named_sizes, sized_batch
from workbench.job.schema import ClusterSpec, ModelSpec, ModuleSpec, ProjectorStepSpec
from workbench.model.expert_load import with_expert_load
from workbench.model.families.family import Generator
from workbench.model.families.registry import ARCHITECTURES
from workbench.model.hf_config import modality_of, module_from_config, part_for, read_config
from workbench.model.item_tokens import (
    check_item,
    clip_tokens,
    ends_lone_tiles,
    image_tokens,
    lone_tile,
    native_tokens,
    video_of,
)
from workbench.model.lora import Adapted, Lora
from workbench.model.model_graph import GENERATED, TEXT, ModelGraph, Module, connect
from workbench.model.module_order import producers_first
from workbench.model.processor_config import read_processor, with_processor
from workbench.model.projector import Merge, Projector, ProjectorKind, ProjectorStep
from workbench.model.trainable import Trainable, with_adapters
from workbench.model.transformer import Norm
from workbench.model.zoo import from_shape, role_of, shape_names
from workbench.model.zoo_cornstarch import SIZES, cornstarch_module
from workbench.units import GIB


def zoo_names() -> tuple[str, ...]:
    """Names that `zoo:` in a job.yaml accepts."""
    return (*shape_names(), *SIZES)


def model_of(name: str, spec: ModelSpec, *, folder: Path) -> ModelGraph:
    """The DAG of modules; an encoder's projector ends with the width of its consumer.

    Raises:
        ValueError: unknown model or module, no LLM or several, a cycle, a module without edge.
    """
    configs = {called: _config(module, folder) for called, module in spec.modules.items()}
    modality = {called: _modality(spec.modules[called], configs[called]) for called in configs}
    for called, module in spec.modules.items():
        configs[called] = _processed(module, configs[called], modality=modality[called], folder=folder)
    llms = [called for called, module_modality in modality.items() if module_modality == TEXT]
    if len(llms) != 1:
        raise ValueError(f"model.modules: want exactly one LLM (modality text), got {llms or 'none'}")
    (llm,) = llms
    generators = [called for called in configs if _generates(spec.modules[called], configs[called])]
    edges = spec.edges
    if edges is None:
        others = [called for called in spec.modules if called != llm]
        edges = tuple((llm, called) if called in generators else (called, llm) for called in others)
    order = _consumers_first(edges, list(spec.modules))
    consumer_of = {**dict(reversed(edges)), **dict.fromkeys(generators, llm)}
    built: dict[str, Module] = {}
    for called in (llm, *(other for other in order if other != llm)):
        if called in generators and (llm, called) not in edges:
            raise ValueError(
                f"model.edges: generator {called!r} is fed by nothing; want an edge [{llm}, {called}]"
            )
        if called != llm and called not in consumer_of:
            raise ValueError(f"model.edges: module {called!r} feeds nothing; want an edge [{called}, {llm}]")
        width = None if called == llm else built[consumer_of[called]].layers[0].out_width
        module = spec.modules[called]
        built[called] = _module(called, module, configs[called], modality=modality[called], width=width)
    singles = [[built[called]] for called in spec.modules]
    return connect(name, *singles, *([built[source], built[target]] for source, target in edges))


def _consumers_first(edges: Sequence[tuple[str, str]], names: Sequence[str]) -> list[str]:
    for end in (end for edge in edges for end in edge):
        if end not in names:
            raise ValueError(f"model.edges: no module {end!r}; {nearest_of(end, names, 0.4)}")
    try:
        return producers_first(names, [(target, source) for source, target in edges])
    except CycleError as error:
        cycle = " > ".join(reversed(error.args[1][1:]))
        raise ValueError(f"model.edges: must be acyclic, got the cycle {cycle}") from None


def _generates(spec: ModuleSpec, config: Mapping[str, Any] | None) -> bool:
    """Whether the module generates something from the LLM's hidden states."""
    if config is not None:
        return isinstance(ARCHITECTURES.get(str(config.get("model_type"))), Generator)
    zoo = str(spec.zoo)
    return zoo in shape_names() and role_of(zoo) == GENERATED


def _config(spec: ModuleSpec, folder: Path) -> dict[str, Any] | None:
    if isinstance(spec.config, str):
        return read_config(folder / spec.config)
    return spec.config


def _processed(
    spec: ModuleSpec, config: dict[str, Any] | None, *, modality: str, folder: Path
) -> dict[str, Any] | None:
    """The configuration with the item sizes of the processor in the same folder, if there is one."""
    if config is None or not isinstance(spec.config, str):
        return config
    processor = read_processor(folder / spec.config)
    return with_processor(part_for(config, modality), processor) if processor else config


def _modality(spec: ModuleSpec, config: Mapping[str, Any] | None) -> str:
    if spec.modality is not None:
        return spec.modality
    if config is not None:
        return modality_of(config)
    zoo = str(spec.zoo)
    if zoo not in zoo_names():
        raise ValueError(f"model.modules: unknown zoo model {zoo!r}; {nearest_of(zoo, zoo_names(), 0.4)}")
    if zoo in SIZES:
        return SIZES[zoo].modality
    role = role_of(zoo)
    return TEXT if role == "llm" else role


def _module(
    name: str, spec: ModuleSpec, config: Mapping[str, Any] | None, *, modality: str, width: int | None
) -> Module:
    module = _without_adapters(name, spec, config, modality=modality, width=width)
    if spec.expert_load_cv:
        module = with_expert_load(module, spec.expert_load_cv)
    if spec.lora is None or spec.lora.rank == 0:
        return module
    lora = Lora(rank=spec.lora.rank, alpha=spec.lora.alpha)
    return with_adapters(module, lora, Adapted(spec.lora.modules))


def _without_adapters(
    name: str, spec: ModuleSpec, config: Mapping[str, Any] | None, *, modality: str, width: int | None
) -> Module:
    trainable = Trainable(spec.trainable)
    projector = None if spec.projector is None else _projector(spec.projector)
    if config is not None:
        return module_from_config(
            config,
            name=name,
            modality=modality,
            trainable=trainable,
            projector=projector,
            feature_layer=spec.feature_layer,
            llm_width=width,
        )
    assert projector is None or isinstance(projector, Projector), "steps belong to a configuration"
    zoo = str(spec.zoo)
    if modality == TEXT and projector is not None:
        raise ValueError(f"module {name!r} is the LLM: it has no projector, got {projector.value!r}")
    builder = cornstarch_module if zoo in SIZES else from_shape
    module = builder(zoo, module=name, llm_width=width, projector=projector, trainable=trainable)
    return replace(module, modality=modality)


def _projector(steps: str | Sequence[ProjectorStepSpec]) -> ProjectorKind:
    if isinstance(steps, str):
        return Projector(steps)
    return tuple(_step(step) for step in steps)


def _step(spec: ProjectorStepSpec) -> ProjectorStep:
    return ProjectorStep(
        norm=None if spec.norm is None else Norm(spec.norm),
        eps=spec.eps,
        offset=spec.offset,
        merge=spec.merge,
        how=Merge(spec.how),
        linear=None if spec.linear == "out" else spec.linear,
        linear_out=spec.linear == "out",
        bias=spec.bias,
        act=spec.act,
        softmax=spec.softmax,
    )


def cluster_of(name: str, spec: ClusterSpec, *, profile: str) -> Cluster:
    """The cluster of a job file; memory and links that the file leaves out are the profile's.

    Raises:
        ValueError: something is left out and the profile does not have it.
    """
    profile_if_needed = _profile_if_needed(spec, profile)
    device = "cpu" if spec.local is not None else str(spec.device)
    node = Node(
        device=device,
        num_ranks=spec.local.ranks if spec.local is not None else spec.ranks_per_node or 1,
        memory_bytes=_memory_bytes(spec, profile_if_needed),
        num_cores=spec.local.cores if spec.local is not None else None,
    )
    num_nodes = spec.nodes or 1
    intra = link_of("intra", spec.intra, profile_if_needed)
    if num_nodes == 1 and spec.inter is None:
        return uniform(name, node, num_nodes=num_nodes, intra=intra, inter=intra)
    inter, cards = (
        link_of("inter", spec.inter, profile_if_needed),
        num_cards(spec.inter, profile_if_needed, node.num_ranks),
    )
    return uniform(name, replace(node, num_cards=cards), num_nodes=num_nodes, intra=intra, inter=inter)


def _profile_if_needed(spec: ClusterSpec, profile: str) -> Profile | None:
    single = spec.local is not None or spec.nodes == 1
    if spec.memory_gib is not None and spec.intra is not None and (single or spec.inter is not None):
        return None
    try:
        return load_profile(profile)
    except ValueError as error:
        raise ValueError(
            f"cluster: memory_gib and links that are left out are the profile's: {error}"
        ) from None


def _memory_bytes(spec: ClusterSpec, profile: Profile | None) -> int:
    if spec.memory_gib is not None:
        return round(spec.memory_gib * GIB)
    assert profile is not None
    return profile.memory_bytes


def batch_of(spec: BatchSpec, model: ModelGraph, *, folder: Path) -> tuple[Sample, ...]:
    """The samples of one step; sizes that the file leaves out are the encoders' native ones."""
    if spec.pack_tokens is not None:
        return _drawn(spec, model, folder)
    masks = (spec.mask,) if isinstance(spec.mask, str) else spec.mask
    samples = [_with_lone_tiles(sample, model) for sample in _drawn(spec, model, folder)]
    return tuple(replace(sample, mask=mask) for sample, mask in zip(samples, cycle(masks), strict=False))


def _with_lone_tiles(sample: Sample, model: ModelGraph) -> Sample:
    """Make images that share a sample a single tile each, if their model does so."""
    lone_tiles = {
        module.modality: lone_tile(module)
        for module in model.modules
        if ends_lone_tiles(module) and len(sample.of(module.modality)) > 1
    }

    def shortened(segment: Segment) -> Segment:
        tile = lone_tiles.get(segment.modality)
        if tile is None or segment.num_tiles == 1:
            return segment
        return Segment(segment.modality, segment.k, *tile)

    return replace(sample, segments=tuple(map(shortened, sample.segments))) if lone_tiles else sample


def _drawn(spec: BatchSpec, model: ModelGraph, folder: Path) -> tuple[Sample, ...]:
    if spec.sizes is not None:
        return sized_batch(
            model,
            spec.samples,
            named_sizes(spec.sizes, folder),
            tiling=spec.tiling,
            pack_tokens=spec.pack_tokens,
        )
    content = spec.fixed or spec.mixture
    assert content is not None
    encoders = {module.modality: module for module in model.encoders}
    for modality in content.items:
        if modality not in encoders:
            raise ValueError(
                f"batch.items: no encoder of modality {modality!r}; {nearest_of(modality, encoders, 0.4)}"
            )
    sizes = {modality: _sizes(encoders[modality], item) for modality, item in content.items.items()}
    if isinstance(content, MixtureSpec):
        mixtures = {
            modality: Mixture(sizes=sizes[modality], most_items=item.most or 1, missing=item.missing)
            for modality, item in content.items.items()
        }
        return mixed_samples(spec.samples, text_tokens=content.text_tokens, items=mixtures, seed=content.seed)
    items = {modality: sizes[modality] * item.each for modality, item in content.items.items()}
    return fixed_samples(spec.samples, text_tokens=content.text_tokens, items=items)


def _sizes(module: Module, item: ItemSpec) -> tuple[ItemSize, ...]:
    """The sizes that items of this encoder may have; for a long audio clip, its windows."""
    if item.tokens is not None:
        tokens = ItemTokens(*item.tokens)
        check_item(module, tokens)
        return (tokens,)
    if item.images or item.videos:
        images = (image_tokens(module, *image) for image in item.images or ())
        return (*images, *(video_of(module, *video) for video in item.videos or ()))
    if item.seconds is not None:
        return clip_tokens(module, item.seconds)
    native = native_tokens(module)
    if native is None:
        raise ValueError(
            f"module {module.name!r} takes items of any size: "
            f"want 'images', 'videos', 'seconds' or 'tokens' under batch items {module.modality!r}"
        )
    return (ItemTokens(*native),)
