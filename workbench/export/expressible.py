"""Parts of a plan that several systems cannot express, with their replacements."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from workbench.cost.products import ProductFormat
from workbench.export.approximation import Change, in_settings, longest_tokens, padded, with_schedule
from workbench.export.module_layouts import placed_modules, schedule_like
from workbench.export.trained import Trained
from workbench.job.job import Job
from workbench.model.block_modules import BlockModule
from workbench.plan.optimizer import Optimizer
from workbench.plan.plan import ModuleSettings, Plan, Precision, Recompute, Sharding
from workbench.plan.recomputed_layers import recomputed_layers
from workbench.schedule.choice import Schedule, ScheduleKind
from workbench.schedule.sharded import ReshardAfter

CAUSAL = "causal"


def unplaced(plan: Plan) -> str | None:
    """Reason why no layouts describe the plan's stages; None: they do."""
    try:
        placed_modules(plan)
    except ValueError as error:
        return str(error)
    return None


def without_source(trained: Trained) -> str | None:
    """A module that was not built from a transformers configuration."""
    for module in trained.model.modules:
        if module.source is None:
            return f"module {module.name!r}, which has no transformers configuration"
    return None


def masked(trained: Trained) -> str | None:
    """A mask other than the causal one."""
    masks = sorted({sample.mask for sample in trained.batch} - {CAUSAL})
    return f"mask {masks[0]!r} of samples" if masks else None


def too_precise(trained: Trained) -> str | None:
    """Double precision."""
    return "precision float64" if trained.settings.precision is Precision.FLOAT64 else None


def other_optimizer(trained: Trained) -> str | None:
    """An optimizer other than AdamW."""
    rule = trained.settings.optimizer
    return None if rule is Optimizer.ADAMW else f"optimizer {rule.value!r}"


def frozen_parts(trained: Trained) -> str | None:
    """Frozen layers of the language model, or adapters of any module."""
    if reason := with_adapters(trained):
        return reason
    module = trained.model.llm
    frozen = not all(layer.trainable for layer in module.layers)
    return f"frozen layers of {module.name!r}" if frozen else None


def with_adapters(trained: Trained) -> str | None:
    """Adapters beside frozen products (LoRA)."""
    adapted = (m.name for m in trained.model.modules if any(layer.has_adapters for layer in m.layers))
    name = next(adapted, None)
    return None if name is None else f"lora adapters of {name!r}"


def narrow_products(plan: Plan) -> str | None:
    """Products in a narrow format."""
    for own in plan.settings.modules:
        if own.products is not ProductFormat.SAME:
            return f"products {own.products.value!r} of {own.module!r}"
    return None


def wide_optimizer(plan: Plan) -> Sequence[Change]:
    """For systems that keep gradients and optimizer in float32 with bfloat16 weights."""
    settings = plan.settings
    wide = settings.optimizer_precision or settings.precision
    if wide.num_bytes >= Precision.FLOAT32.num_bytes:
        return ()
    return (
        Change(
            has=f"gradients and optimizer in {wide}",
            gets="gradients and optimizer in float32",
            make=lambda job: replace(
                job, settings=replace(job.settings, optimizer_precision=Precision.FLOAT32)
            ),
        ),
    )


def equal_lengths(plan: Plan) -> Sequence[Change]:
    """For systems that pad every sample to the longest."""
    lengths = sorted({sample.num_tokens for sample in plan.batch})
    if len(lengths) == 1:
        return ()
    return (
        Change(
            has=f"samples of {lengths[0]} to {lengths[-1]} tokens, each at its own length",
            gets=f"every sample padded to {longest_tokens(plan)} tokens",
            make=padded,
        ),
    )


def one_of_schedules(plan: Plan, allowed: Collection[ScheduleKind]) -> Sequence[Change]:
    """Use 1F1B if the plan's schedule is not among these."""
    kind = schedule_like(plan).kind
    if kind in allowed:
        return ()
    return (
        Change(
            has=f"the order of passes of schedule {kind}",
            gets=f"schedule {ScheduleKind.ONE_F_ONE_B}",
            make=lambda job: with_schedule(job, Schedule()),
        ),
    )


def computed_again(plan: Plan, allowed: Collection[BlockModule]) -> Sequence[Change]:
    """Keep results of block modules whose recomputation cannot be expressed."""
    refused = sorted(
        {part for each in plan.settings.modules for part in each.computed_again if part not in allowed}
    )
    if not refused:
        return ()

    def kept(settings: ModuleSettings) -> ModuleSettings:
        parts = tuple(part for part in settings.computed_again if part in allowed)
        return replace(settings, computed_again=parts)

    return in_settings(f"{', '.join(refused)} of blocks recomputed", "their results kept", kept)


def all_recomputed(plan: Plan) -> Sequence[Change]:
    """Recompute all layers of a module where the plan recomputes some."""
    some = [each.module for each in _settings_of_modules(plan) if each.recompute_layers is not None]
    if not some:
        return ()
    return in_settings(
        f"some layers of {', '.join(map(repr, some))} recomputed",
        "all of them",
        lambda settings: settings.recomputing(settings.recompute),
    )


def blocks_alone(plan: Plan) -> Sequence[Change]:
    """For systems that recompute blocks, not what stands before and after them."""
    whole = [each.module for each in _settings_of_modules(plan) if each.recompute is Recompute.FULL]
    if not whole:
        return ()

    def made(job: Job) -> Job:
        settings = job.settings
        for own in job.settings.modules:
            if own.recompute is Recompute.FULL:
                settings = settings.with_module(_of_blocks(job, own))
        return replace(job, settings=settings)

    has = f"embedding, projector or head of {', '.join(map(repr, whole))} recomputed with the blocks"
    return (Change(has=has, gets="blocks recomputed alone", make=made),)


def _of_blocks(job: Job, settings: ModuleSettings) -> ModuleSettings:
    """As many blocks recomputed as with the settings, at least one."""
    layers = job.model.module(settings.module).layers
    flags = recomputed_layers(Recompute.FULL, settings.recompute_layers, layers)
    of_blocks = recomputed_layers(Recompute.BLOCKS, None, layers)
    count = max(1, sum(a and b for a, b in zip(flags, of_blocks, strict=True)))
    return settings.recomputing(Recompute.BLOCKS, None if count >= sum(of_blocks) else count)


def sharded_as(plan: Plan, instead: Sharding, *refused: Sharding) -> Sequence[Change]:
    """Replace kinds of sharding that cannot be expressed."""
    used = {settings.sharding for settings in _settings_of_modules(plan)}
    inexpressible = sorted(used.intersection(refused))
    if not inexpressible:
        return ()

    def changed(settings: ModuleSettings) -> ModuleSettings:
        return settings.sharded(instead, settings.instances) if settings.sharding in refused else settings

    return in_settings(f"sharding {', '.join(inexpressible)}", f"sharding {instead}", changed)


def resharded_as(plan: Plan, instead: ReshardAfter, *refused: ReshardAfter) -> Sequence[Change]:
    """Replace times of resharding that cannot be expressed."""
    used = {each.reshard_after for each in _settings_of_modules(plan) if each.shards_parameters}
    inexpressible = sorted(used.intersection(refused))
    if not inexpressible:
        return ()

    def changed(settings: ModuleSettings) -> ModuleSettings:
        is_refused = settings.shards_parameters and settings.reshard_after in refused
        return replace(settings, reshard_after=instead) if is_refused else settings

    words = f"gathered parameters kept for a {', '.join(inexpressible)}"
    return in_settings(words, f"for a {instead}", changed)


def _settings_of_modules(plan: Plan) -> Sequence[ModuleSettings]:
    return [plan.settings.of(module.name) for module in plan.model.modules]


def sharded_alike(plan: Plan) -> Sequence[Change]:
    """For systems with one kind of sharding for all modules: that of the language model."""
    of_llm = plan.settings.of(plan.model.llm.name)

    def alike(settings: ModuleSettings) -> ModuleSettings:
        sharded = settings.sharded(of_llm.sharding, of_llm.instances)
        return replace(sharded, reshard_after=of_llm.reshard_after)

    if all(alike(settings) == settings for settings in _settings_of_modules(plan)):
        return ()
    return in_settings("modules that are sharded differently", f"sharding {of_llm.sharding} for all", alike)
