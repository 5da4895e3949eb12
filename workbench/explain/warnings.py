"""Warnings about a plan: idle ranks, too few microbatches, layouts that the strategy does not keep."""

from collections.abc import Iterator
from itertools import chain
from typing import Any

from workbench.job.job import Job
from workbench.job.module_layout import ModuleLayout
from workbench.job.other_layouts import apart
from workbench.plan.plan import Plan, Settings
from workbench.planner.assembly import layout_of
from workbench.planner.layout_choice import degrees_of
from workbench.planner.plan_layouts import joint_replicas_of

HEAVY = 2.0  # times the mean tokens, from which other samples wait for one


def warnings_of(plan: Plan, job: Job) -> tuple[str, ...]:
    """All warnings about a plan."""
    return (*unlike_layouts(plan, job), *_unlike_batch(plan, job), *waste_of(plan, job))


def waste_of(plan: Plan, job: Job) -> tuple[str, ...]:
    """One line for each way in which a job's plan leaves usable ranks idle."""
    return (*_unused(plan, job.usable_ranks), *_too_few(plan, job))


def unlike_layouts(plan: Plan, job: Job) -> tuple[str, ...]:
    """One line for each module whose layout in the plan differs from the job's, as strategies may choose."""
    layouts = (layout_of(job, module.name) for module in job.model.modules)
    return tuple(line for layout in layouts for line in _unlike(plan, layout, job.settings))


def _unlike(plan: Plan, layout: ModuleLayout, settings: Settings) -> Iterator[str]:
    degrees = degrees_of(plan, layout.module)
    chain_of = plan.chain[layout.module, plan.replicas(layout.module)[0]]
    has: dict[str, Any] = {name: getattr(degrees, name) for name in ("pp", "tp", "cp", "ep", "dp")}
    offset = min(min(stage.flat_ranks) for stage in plan.stages if stage.module == layout.module)
    has |= {"rank_offset": offset}
    has["stage_layers"] = [last - first for first, last in (stage.layers for stage in chain_of)]
    open_ones: dict[str, Any] = {"pp": None, "tp": 1, "cp": 1, "ep": 1, "dp": None}
    open_ones |= {"rank_offset": None, "stage_layers": []}
    requested = {name: getattr(layout, name) for name in has} | {"stage_layers": list(layout.stage_layers)}
    has |= _set(plan.settings, layout.module)
    open_ones |= _set(Settings(), layout.module)
    requested |= _set(settings, layout.module)
    unlike = [name for name in has if requested[name] not in (open_ones[name], has[name])]
    if unlike:
        wanted, got = (", ".join(f"{name} {each[name]}" for name in unlike) for each in (requested, has))
        where = f"the layout of {layout.module!r}"
        yield f"{plan.strategy} changes {where}: the job has {wanted}, the plan {got}"


def _unlike_batch(plan: Plan, job: Job) -> Iterator[str]:
    """Replicas and samples of a microbatch that the job states and the strategy chooses itself.

    Microbatches of several sizes are a grouping of samples, which is the strategy's.
    """
    llm, wanted = plan.model.llm.name, apart(job)
    replicas = len(plan.replicas(llm)) * joint_replicas_of(plan)
    sizes = {len(m.rows) for m in plan.microbatches if m.module == llm}
    has: dict[str, int] = {"replicas": replicas}
    if len(sizes) == 1:
        has["microbatch_samples"] = sizes.pop() // joint_replicas_of(plan)
    states_dp = any(layout.module == llm and layout.dp for layout in job.layouts)
    requested = {
        "replicas": 1 if states_dp else wanted.replicas,
        "microbatch_samples": wanted.microbatch_samples,
    }
    unlike = [name for name in has if requested[name] not in (1, has[name])]
    if unlike:
        asked, got = (", ".join(f"{name} {each[name]}" for name in unlike) for each in (requested, has))
        yield f"{plan.strategy} changes the batch: the job has {asked}, the plan {got}"


def _set(settings: Settings, module: str) -> dict[str, Any]:
    """What a job's layout says besides degrees, in its words."""
    chosen = settings.of(module)
    return {
        "recompute": chosen.recompute.value,
        "recompute_layers": chosen.recompute_layers,
        "recompute_modules": [part.value for part in chosen.computed_again],
        "sharding": chosen.sharding.value,
        "instances": chosen.instances,
        "reshard_after": chosen.reshard_after.value,
        "key_exchange": chosen.key_exchange.value,
        "sequence_parallel": chosen.sequence_parallel,
        "products": chosen.products.value,
    }


def _unused(plan: Plan, usable: int) -> Iterator[str]:
    used = len(plan.ranks)
    if used < usable:
        yield (
            f"{plan.strategy} leaves {usable - used} of {usable} ranks idle; want layouts or replicas that "
            f"use all, or max_ranks: {used}"
        )


def _too_few(plan: Plan, job: Job) -> Iterator[str]:
    """Replicas with fewer microbatches than consecutive stages, or than requested."""
    llm = plan.model.llm.name
    replicas = plan.replicas(llm)
    expected = len(job.batch) // (len(replicas) * joint_replicas_of(plan) * apart(job).microbatch_samples)
    short: dict[tuple[int, bool], list[int]] = {}
    for replica in replicas:
        depth = _depth(plan, llm, replica)
        count = len(plan.microbatches_of.get((llm, replica), ()))
        if depth > 1 and (count < depth or (count < expected and _heavy(plan) is not None)):
            short.setdefault((depth, count < depth), []).append(count)
    for (depth, always_waits), counts in short.items():
        fewest, most = min(counts), max(counts)
        span = f"{fewest}" if fewest == most else f"{fewest} to {most}"
        copies = f" in {len(counts)} of {len(replicas)} replicas" if len(replicas) > 1 else ""
        asked = f", the job asks for {expected}," if {fewest, most} != {expected} else ""
        waits = ", so some stages always wait" if always_waits else ""
        yield (
            f"{plan.strategy} has {span} microbatches{asked} on {depth} consecutive stages{copies}{waits}; "
            f"{_remedy(plan)}"
        )


def _depth(plan: Plan, llm: str, replica: int) -> int:
    """Consecutive blocks of ranks that a microbatch visits: an encoder's, then the LLM's."""
    llm_blocks = {stage.flat_ranks for stage in plan.chain[llm, replica]}
    encoders = (
        {stage.flat_ranks for stage in plan.chain[module.name, plan.replicas(module.name)[0]]}
        for module in plan.model.modules
        if module.name != llm and plan.replicas(module.name)
    )
    llm_ranks = {rank for stage in plan.stages if stage.module == llm for rank in stage.flat_ranks}
    separate_encoders = (blocks for blocks in encoders if llm_ranks.isdisjoint(chain.from_iterable(blocks)))
    return len(llm_blocks) + max((len(blocks) for blocks in separate_encoders), default=0)


def _heavy(plan: Plan) -> tuple[int, float] | None:
    """The heaviest sample and its multiple of the mean, if that is large."""
    tokens = {sample.id: sample.num_tokens for sample in plan.batch}
    heaviest = max(tokens, key=lambda sample: tokens[sample])
    times = tokens[heaviest] * len(tokens) / sum(tokens.values())
    return (heaviest, times) if times >= HEAVY else None


def _remedy(plan: Plan) -> str:
    heavy = _heavy(plan)
    if heavy is None:
        return "want more samples in the batch, or smaller microbatches"
    sample, times = heavy
    return (
        f"sample {sample} has {times:.2g} times the mean token count; want more samples in the batch, or "
        "context parallelism for it"
    )
