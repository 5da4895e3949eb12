"""What the tensors of a microbatch's passes depend on in one stage: work, lengths, masks and features."""

from dataclasses import replace
from fractions import Fraction
from math import ceil

from workbench.cost.roofline import Grid, RowWork, Work
from workbench.masks.patterns import CAUSAL
from workbench.memory.setting import Setting
from workbench.model.layer import TokenCount
from workbench.model.model_graph import TEXT
from workbench.plan.joint import own_rows
from workbench.plan.plan import Microbatch, Plan
from workbench.plan.routing import routing_of
from workbench.plan.stage import Stage
from workbench.plan.token_owners import held_runs
from workbench.plan.work import even_work_of, joint_works


def setting_of(plan: Plan, stage: Stage, microbatch: Microbatch) -> Setting:
    """Return the setting of a microbatch on the rank of the stage that holds most of its tokens."""
    routing, module = routing_of(plan), plan.model.module(stage.module)
    work = _largest_work(plan, stage, microbatch)
    if stage.joint_replicas > 1:
        microbatch = _largest_rows(plan, microbatch)
    lengths = sorted(routing.tokens(module, item, TokenCount.IN) for item in microbatch.items)
    return Setting(
        work,
        Grid(stage.tp, stage.cp, stage.ep),
        plan.settings.precision.num_bytes,
        is_gathered=lengths[0] != lengths[-1],
        looked_up=_looked_up(plan, stage, microbatch),
        lengths=tuple(lengths),
        computed_again=plan.settings.of(stage.module).computed_again,
        masked_tokens=_masked_tokens(plan, stage, microbatch, sum(lengths)),
    )


def _largest_rows(plan: Plan, microbatch: Microbatch) -> Microbatch:
    """Return the rows of the joint replica with most tokens."""
    routing, module = routing_of(plan), plan.model.module(microbatch.module)
    num_replicas = plan.chain[microbatch.module, microbatch.replica][0].joint_replicas
    return max(
        (own_rows(plan, microbatch, replica) for replica in range(num_replicas)),
        key=lambda own: sum(routing.tokens(module, item, TokenCount.IN) for item in own.items),
    )


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
    if stage.joint_replicas > 1:
        return max(joint_works(plan, microbatch), key=lambda work: work.tokens(TokenCount.IN))
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
