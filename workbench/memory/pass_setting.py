"""What the tensors of a microbatch's passes depend on in one stage: work, lengths, masks and features."""

from dataclasses import replace
from fractions import Fraction
from math import ceil

from workbench.cost.roofline import Grid, RowWork, Work
from workbench.masks.patterns import CAUSAL
from workbench.memory.setting import Setting
from workbench.model.layer import TokenCount
from workbench.model.model_graph import TEXT
from workbench.plan.joint import microbatch_apart, replicas_apart, stage_apart
from workbench.plan.plan import Microbatch, Plan
from workbench.plan.routing import routing_of
from workbench.plan.stage import Stage
from workbench.plan.token_owners import held_runs
from workbench.plan.work import even_work_of, mean_tokens, with_experts_load


def setting_of(plan: Plan, stage: Stage, microbatch: Microbatch) -> Setting:
    """Return the setting of a microbatch on the rank of the stage that holds most of its tokens."""
    if stage.joint_replicas > 1:
        return _joint_setting(plan, stage, microbatch)
    routing, module = routing_of(plan), plan.model.module(stage.module)
    lengths = sorted(routing.tokens(module, item, TokenCount.IN) for item in microbatch.items)
    return Setting(
        _largest_work(plan, stage, microbatch),
        Grid(stage.tp, stage.cp, stage.ep),
        plan.settings.precision.num_bytes,
        is_gathered=lengths[0] != lengths[-1],
        looked_up=_looked_up(plan, stage, microbatch),
        lengths=tuple(lengths),
        computed_again=plan.settings.of(stage.module).computed_again,
        products=plan.settings.of(stage.module).products,
        key_exchange=plan.settings.of(stage.module).key_exchange,
        masked_tokens=_masked_tokens(plan, stage, microbatch, sum(lengths)),
    )


def _joint_setting(plan: Plan, stage: Stage, microbatch: Microbatch) -> Setting:
    """Return the setting of the joint replica with most tokens, whose experts get the rows of all."""
    parts = (microbatch_apart(plan, microbatch, number) for number in range(stage.joint_replicas))
    means = mean_tokens(plan, microbatch)
    settings = [
        (setting_of(replicas_apart(plan), stage_apart(stage, number), part), mean)
        for number, (part, mean) in enumerate(zip(parts, means, strict=True))
        if part.rows
    ]
    setting, mean = max(settings, key=lambda pair: pair[0].work.tokens(TokenCount.IN))
    grid = Grid(stage.tp, stage.cp, stage.ep)
    return setting._replace(work=with_experts_load(setting.work, mean), grid=grid)


def _masked_tokens(plan: Plan, stage: Stage, microbatch: Microbatch, num_tokens: int) -> int:
    """Return all tokens if a sample's mask is not causal; 0 otherwise, and under context parallelism."""
    if plan.model.module(stage.module).modality != TEXT or stage.cp > 1:
        return 0
    masks = {plan.sample[item.sample].mask for item in microbatch.items}
    return num_tokens if masks - {CAUSAL} else 0


def _largest_work(plan: Plan, stage: Stage, microbatch: Microbatch) -> Work:
    """Return the microbatch's work as if every rank held as many tokens as the one that holds most.

    That may be another rank than the one with the most pairs, which `work_of` takes.
    """
    work = even_work_of(plan, microbatch)
    if stage.cp == 1:
        return work
    factor_in = _excess(plan, stage, microbatch, TokenCount.IN)
    factor_out = _excess(plan, stage, microbatch, TokenCount.OUT)
    return Work(tuple(_scaled_row(row, factor_in, factor_out) for row in work.rows))


def _excess(plan: Plan, stage: Stage, microbatch: Microbatch, count: TokenCount) -> Fraction:
    """Return the tokens on the rank that holds most, as a multiple of an even share."""
    runs_of_ranks = held_runs(routing_of(plan), microbatch, count)
    counts = [sum(run.num_tokens for run in runs) for runs in runs_of_ranks]
    return Fraction(max(counts) * stage.cp, sum(counts))


def _scaled_row(row: RowWork, factor_in: Fraction, factor_out: Fraction) -> RowWork:
    return replace(
        row,
        tokens_in=ceil(row.tokens_in * factor_in),
        tokens_out=ceil(row.tokens_out * factor_out),
        reader_tokens=ceil(row.reader_tokens * factor_in),
    )


def _looked_up(plan: Plan, stage: Stage, microbatch: Microbatch) -> float | None:
    """Return the text tokens on one rank if the sequence has other modules' features, too; else None."""
    if plan.model.module(stage.module).modality != TEXT:
        return None
    segments = [s for item in microbatch.items for s in plan.sample[item.sample].segments]
    text = sum(segment.tokens_out for segment in segments if segment.modality == TEXT)
    return None if text == sum(s.tokens_out for s in segments) else text / stage.cp
