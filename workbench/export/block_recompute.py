"""Recomputation as Megatron expresses it: of all blocks, or of equally many in every stage, its first ones.

Source: megatron-core 0.19.2 (Apache-2.0): TransformerConfig.recompute_method, core/recompute.py.
"""

from collections.abc import Sequence
from dataclasses import replace

from workbench.export.approximation import Change, job_of
from workbench.export.expressible import blocks_alone
from workbench.export.module_layouts import placed_modules
from workbench.job.job import Job
from workbench.model.model_graph import Module
from workbench.plan.plan import ModuleSettings, Plan, Recompute
from workbench.plan.recomputed_layers import blocks_by_stage


def recomputed_blocks(plan: Plan, module: Module) -> int:
    """The least number of blocks of every stage that recomputes no fewer than the plan, at least 1."""
    settings = plan.settings.of(module.name)
    stage_layers = placed_modules(plan)[module.name].layout.stage_layers
    return max(1, *blocks_by_stage(module.layers, settings.recompute_layers, stage_layers))


def recomputed_alike(plan: Plan, before: Sequence[Change]) -> Sequence[Change]:
    """Recompute blocks alone, equally many of every stage or all of its blocks, no fewer than the plan does.

    That they are the first of a stage is not priced: it changes nothing where all blocks cost the same.

    Args:
        before: changes that are made earlier, after which stages may have other layers.
    """
    alone = blocks_alone(plan)
    some = [each.module for each in plan.settings.modules if each.recompute_layers is not None]
    if not some:
        return alone
    names = ", ".join(map(repr, some))
    moved = Change(
        has=f"recomputed blocks spread evenly over {names}",
        gets="the first blocks of every stage recomputed",
    )
    job = job_of(plan)
    for change in (*before, *alone):
        job = job if change.make is None else change.make(job)
    if _with_equal_blocks(job).settings == job.settings:
        return (*alone, moved)
    more = Change(
        has=f"different numbers of recomputed blocks in stages of {names}",
        gets="equally many in every stage, no fewer",
        make=_with_equal_blocks,
    )
    return (*alone, moved, more)


def _with_equal_blocks(job: Job) -> Job:
    settings = job.settings
    for own in job.settings.modules:
        if own.recompute_layers is not None:
            settings = settings.with_module(_equal(job, own, own.recompute_layers))
    return replace(job, settings=settings)


def _equal(job: Job, settings: ModuleSettings, count: int) -> ModuleSettings:
    """The least number of blocks, from `count` on, that lie alike in all stages; all if there is none."""
    module = job.model.module(settings.module)
    (num_blocks,) = blocks_by_stage(module.layers, None, (len(module.layers),))
    layout = next((each for each in job.layouts if each.module == module.name), None)
    stage_layers = () if layout is None else layout.stage_layers
    if not stage_layers and (layout is None or layout.pp in (None, 1)):
        stage_layers = (len(module.layers),)
    fitting = (n for n in range(count, num_blocks) if stage_layers and _is_equal(module, n, stage_layers))
    return settings.recomputing(Recompute.BLOCKS, next(fitting, None))


def _is_equal(module: Module, count: int, stage_layers: Sequence[int]) -> bool:
    counts = blocks_by_stage(module.layers, count, stage_layers)
    blocks = blocks_by_stage(module.layers, None, stage_layers)
    return max(counts) > 0 and all(n == min(max(counts), of) for n, of in zip(counts, blocks, strict=True))
