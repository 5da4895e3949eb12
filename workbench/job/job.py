"""The job: a model, a cluster, a batch and settings, which strategies turn into plans."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from workbench.cost.hardware import Cluster
from workbench.cost.products import ProductFormat
from workbench.data.sample import Sample
from workbench.field_kinds import check_kinds
from workbench.headline import Headline
from workbench.job.device_pools import Aim, Pool, check_pools, check_profiles, dollars_per_hour, pools_of
from workbench.job.job_file import read_spec
from workbench.job.joint_layouts import join
from workbench.job.module_layout import ModuleLayout, has_layout, layout_from_spec
from workbench.job.notations.checked_values import nearest_of
from workbench.job.parts import batch_of, cluster_of, model_of
from workbench.job.recomputed_parts import check_recomputed_parts
from workbench.job.schema import JobSpec, LayoutSpec
from workbench.masks.patterns import check_masks
from workbench.model.block_modules import BlockModule
from workbench.model.item_tokens import check_lengths
from workbench.model.model_graph import TEXT, ModelGraph
from workbench.plan.expert_groups import check_expert_degree
from workbench.plan.kernels import Kernels
from workbench.plan.key_exchange import check_heads
from workbench.plan.lru_cache import Identity, LruCache
from workbench.plan.plan import KeyExchange, ModuleSettings, Precision, Recompute, Settings, Sharding
from workbench.plan.recomputed_layers import check_recompute_layers
from workbench.schedule.choice import Schedule, usual

_SOUND: LruCache[None] = LruCache(64)  # checked batches of models


@dataclass(frozen=True, kw_only=True)
class Job(Headline):
    """Everything that a strategy needs; built from a job.yaml or in Python.

    Args:
        name: name of the job.
        model: the DAG of modules.
        cluster: the ranks that exist.
        batch: samples of one step; ids are unique.
        microbatch_samples: samples that the LLM processes together.
        replicas: data-parallel copies of every module whose layout has no dp.
        layouts: of modules; one without a layout has pp None, tp 1, cp 1 and the job's joint replicas.
        max_ranks: number of the cluster's ranks that may be used; None: all.
        schedule: the order of passes.
        settings: precision and per-module settings.
        profile: name or path of the machine's profile.
        pools: kinds of devices, where there are several or they have a price.
        aim: what searches for stage counts minimise; DOLLARS needs a price of every rank.
        dollars_per_rank_hour: price of every rank without pools; None: not given.
        joint_replicas: those in each replica of the LLM, see `Stage`.
    """

    name: str
    model: ModelGraph
    cluster: Cluster
    batch: tuple[Sample, ...]
    microbatch_samples: int = 1
    replicas: int = 1
    layouts: tuple[ModuleLayout, ...] = ()
    max_ranks: int | None = None
    schedule: Schedule = field(default_factory=Schedule)
    settings: Settings = field(default_factory=Settings)
    profile: str = ""
    pools: tuple[Pool, ...] = ()
    aim: Aim = Aim.SECONDS
    dollars_per_rank_hour: float | None = None
    joint_replicas: int = 1

    @property
    def headline(self) -> str:
        """See `Headline`."""
        names = ", ".join(module.name for module in self.model.modules)
        size = f"{self.cluster.num_ranks} ranks, {len(self.batch)} samples a step"
        return f"<Job {self.name!r}: {names}; {size}>"

    def dollars_per_hour(self, ranks: Sequence[int]) -> float | None:
        """Dollars an hour of some ranks together; None where a rank has no price."""
        if self.pools or self.dollars_per_rank_hour is None:
            return dollars_per_hour(self.pools, ranks)
        return len(ranks) * self.dollars_per_rank_hour

    @property
    def has_prices(self) -> bool:
        """Whether every rank has a price."""
        return self.dollars_per_hour(range(self.cluster.num_ranks)) is not None

    @property
    def usable_ranks(self) -> int:
        """Ranks of the cluster that may be used."""
        return (
            self.cluster.num_ranks if self.max_ranks is None else min(self.max_ranks, self.cluster.num_ranks)
        )

    @property
    def cheapest_per_hour(self) -> float:
        """The lowest dollars an hour of any rank; 0 where a price is missing."""
        if not self.pools:
            return self.dollars_per_rank_hour or 0.0
        return min(pool.dollars_per_hour or 0.0 for pool in self.pools)

    def __post_init__(self) -> None:
        check_kinds(self, f"job {self.name!r}: ")
        _check_model(self)
        modules = [module.name for module in self.model.modules]
        check_pools(self.name, self.pools, modules, self.cluster.num_ranks)
        _check_batch(self)
        _check_layouts(self)


def load_job(path: str | Path) -> Job:
    """Read the job of a job.yaml, whose paths are relative to the file.

    Raises:
        ValueError: one line that names the file, the place, the rule and the value.
    """
    file = Path(path)
    spec = read_spec(file)
    try:
        return job_from_spec(spec, folder=file.parent)
    except ValueError as error:
        message = " ".join(str(error).split())
        raise ValueError(f"{file}: {message}") from None


def job_from_spec(spec: JobSpec, *, folder: Path) -> Job:
    """The job that a checked file describes; `folder` is where its relative paths start."""
    model = model_of(spec.name, spec.model, folder=folder)
    profile_path = folder / spec.profile
    profile = str(profile_path) if profile_path.is_file() else spec.profile
    pools: tuple[Pool, ...] = ()
    if spec.cluster.pools is None:
        cluster = cluster_of(spec.name, spec.cluster, profile=profile)
    else:
        inter = spec.cluster.inter
        cluster, pools = pools_of(spec.cluster.pools, name=spec.name, inter=inter, folder=folder)
        check_profiles(pools, profile)
    is_local = any(node.num_cores is not None for node in cluster.nodes)
    automatic = Kernels.EAGER if is_local else Kernels.FUSED
    _check_names(spec.name, spec.layouts, model)
    _check_products(spec, is_local=is_local)
    settings = Settings(
        precision=Precision(spec.precision),
        optimizer_precision=spec.optimizer_precision,
        optimizer=spec.optimizer,
        kernels=automatic if spec.kernels == "auto" else Kernels(spec.kernels),
        modules=tuple(
            settings
            for name, layout in spec.layouts.items()
            if (settings := _module_settings(name, layout)) != ModuleSettings(module=name)
        ),
    )
    joined = join(
        [layout_from_spec(name, layout) for name, layout in spec.layouts.items() if has_layout(layout)],
        model.llm.name,
        replicas=spec.batch.replicas,
        microbatch_samples=spec.batch.microbatch_samples,
        where=f"job {spec.name!r}",
    )
    return Job(
        name=spec.name,
        model=model,
        cluster=cluster,
        batch=batch_of(spec.batch, model, folder=folder),
        max_ranks=spec.max_ranks,
        schedule=replace(usual(spec.schedule.kind), **spec.schedule.model_dump(exclude_none=True)),
        settings=settings,
        profile=profile,
        pools=pools,
        dollars_per_rank_hour=spec.cluster.dollars_per_gpu_hour,
        **joined._asdict(),
    )


def _check_names(job: str, given: Iterable[str], model: ModelGraph) -> None:
    names = [module.name for module in model.modules]
    for name in given:
        if name not in names:
            raise ValueError(f"job {job!r}: no module {name!r}; {nearest_of(name, names)}")


def _check_products(spec: JobSpec, *, is_local: bool) -> None:
    for name, layout in spec.layouts.items():
        if is_local and layout.products is not ProductFormat.SAME:
            raise ValueError(
                f"job {spec.name!r}: module {name!r}: products {layout.products.value!r} want GPUs, got "
                f"processes of this machine; nearest: {ProductFormat.SAME.value!r}"
            )


def _module_settings(name: str, layout: LayoutSpec) -> ModuleSettings:
    return ModuleSettings(
        module=name,
        recompute=Recompute(layout.recompute),
        recompute_layers=layout.recompute_layers,
        computed_again=tuple(part for part in BlockModule if part in layout.recompute_modules),
        sharding=Sharding(layout.sharding),
        instances=layout.instances,
        reshard_after=layout.reshard_after,
        key_exchange=layout.key_exchange,
        sequence_parallel=layout.sequence_parallel,
        products=layout.products,
    )


def _check_model(job: Job) -> None:
    llms = [module.name for module in job.model.modules if module.modality == TEXT]
    if len(llms) != 1:
        raise ValueError(
            f"job {job.name!r}: want exactly one module of modality 'text', got {llms or 'none'}"
        )
    for edge in job.model.edges:
        source = job.model.module(edge.source).layers[edge.after_layer].feature_width
        for layer in edge.entered:
            target = job.model.module(edge.target).entering_width(layer)
            if source != target:
                raise ValueError(f"job {job.name!r}: edge {edge.name} joins width {source} to {target}")
    joined = {end for edge in job.model.edges for end in (edge.source, edge.target)}
    for module in job.model.modules:
        if module.modality != TEXT and module.name not in joined:
            raise ValueError(f"job {job.name!r}: module {module.name!r} has no edge")


def _check_batch(job: Job) -> None:
    if not job.batch or job.microbatch_samples < 1 or job.replicas < 1:
        raise ValueError(
            f"job {job.name!r}: want >= 1 sample, microbatch_samples and replicas, got "
            f"{len(job.batch)}, {job.microbatch_samples} and {job.replicas}"
        )
    try:  # once for a batch: searches replace everything else of a job many times
        _SOUND.get_or(
            (Identity(job.model), Identity(job.batch)), lambda: _check_samples(job.model, job.batch)
        )
    except ValueError as error:
        raise ValueError(f"job {job.name!r}: {error}") from None


def _check_samples(model: ModelGraph, batch: Sequence[Sample]) -> None:
    ids = [sample.id for sample in batch]
    if len(set(ids)) != len(ids):
        twice = next(sample_id for sample_id in ids if ids.count(sample_id) > 1)
        raise ValueError(f"sample ids must be unique, {twice} is twice")
    check_masks(batch)
    check_lengths(model, batch)
    known = [module.modality for module in model.modules]
    for sample in batch:
        for segment in sample.segments:
            if segment.modality not in known:
                raise ValueError(
                    f"sample {sample.id} has a segment of modality {segment.modality!r}, which no module "
                    f"works on; {nearest_of(segment.modality, known)}"
                )


def _check_layouts(job: Job) -> None:
    named = (*(each.module for each in job.layouts), *(each.module for each in job.settings.modules))
    _check_names(job.name, named, job.model)
    for settings in job.settings.modules:
        where, module = f"job {job.name!r}: module {settings.module!r}", job.model.module(settings.module)
        check_recompute_layers(where, settings, module.layers)
        check_recomputed_parts(where, job.settings, module)
    for layout in job.layouts:
        if [other.module for other in job.layouts].count(layout.module) > 1:
            raise ValueError(f"job {job.name!r}: module {layout.module!r} has two layouts")
        num_layers = len(job.model.module(layout.module).layers)
        if layout.pp is not None and layout.pp > num_layers:
            raise ValueError(
                f"job {job.name!r}: module {layout.module!r} has {num_layers} layers, "
                f"which cannot make {layout.pp} stages; nearest: pp {num_layers}"
            )
        _check_stage_layers(job, layout, num_layers)
        _check_tensor_parallel(job, layout)
        where = f"job {job.name!r}: module {layout.module!r}"
        layers = job.model.module(layout.module).layers
        check_expert_degree(where, layout.ep, (layout.joint_replicas, layout.cp, layout.tp), layers)
        if layout.cp > 1 and job.settings.of(layout.module).key_exchange is KeyExchange.ALL_TO_ALL:
            check_heads(
                f"job {job.name!r}: all-to-all attention", layout.module, layers, tp=layout.tp, cp=layout.cp
            )
    if job.max_ranks is not None and not 1 <= job.max_ranks <= job.cluster.num_ranks:
        raise ValueError(
            f"job {job.name!r}: max_ranks must be 1 to {job.cluster.num_ranks}, the ranks of cluster "
            f"{job.cluster.name!r}, got {job.max_ranks}"
        )


def _check_stage_layers(job: Job, layout: ModuleLayout, num_layers: int) -> None:
    """Raise ValueError unless stage_layers cover the module, with equally many stages on every block."""
    if not layout.stage_layers:
        return
    where = f"job {job.name!r}: module {layout.module!r}"
    if sum(layout.stage_layers) != num_layers:
        *others, last = layout.stage_layers
        nearest = num_layers - sum(others)
        hint = f"; nearest: {nearest} in place of the last {last}" if nearest > 0 else ""
        raise ValueError(
            f"{where} has {num_layers} layers, got stage_layers {list(layout.stage_layers)} "
            f"with {sum(layout.stage_layers)}{hint}"
        )
    is_llm = job.model.module(layout.module).modality == TEXT
    virtual = job.schedule.virtual_stages if is_llm else 1
    if layout.pp is not None and len(layout.stage_layers) != layout.pp * virtual:
        raise ValueError(
            f"{where}: pp {layout.pp} with {virtual} stages per rank wants {layout.pp * virtual} "
            f"stage_layers, got {len(layout.stage_layers)}"
        )
    if len(layout.stage_layers) % virtual:
        raise ValueError(
            f"{where}: {len(layout.stage_layers)} stage_layers are no multiple of {virtual} stages per rank"
        )


def _check_tensor_parallel(job: Job, layout: ModuleLayout) -> None:
    for heads in sorted(job.model.module(layout.module).kv_heads):
        if heads % layout.tp:
            valid = [degree for degree in range(1, heads + 1) if heads % degree == 0]
            nearest = min(valid, key=lambda degree: abs(degree - layout.tp))
            raise ValueError(
                f"job {job.name!r}: tp of module {layout.module!r} must divide its {heads} key/value "
                f"heads, got {layout.tp}; nearest: {nearest}"
            )
