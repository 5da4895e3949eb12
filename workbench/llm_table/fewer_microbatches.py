"""A row with fewer microbatches: all are alike, so that a few say what each costs and how many are held."""

from dataclasses import replace

from workbench.llm_table.llm_row import LlmRow
from workbench.llm_table.row_plan import schedule_of
from workbench.plan.plan import Plan
from workbench.schedule.action import CLOSING, COMPUTE, Action

Orders = tuple[tuple[Action, ...], ...]

ROUNDS = 2  # of interleaved 1F1B until a stage holds the most


def with_few(row: LlmRow) -> LlmRow:
    """The row with as many microbatches as it takes until every stage has held the most it ever will.

    A stage of 1F1B holds no more than as many as there are stages behind it, itself included, and one
    more while it takes turns; interleaved 1F1B begins to take turns in its second round. From there on,
    each microbatch does as the one before it, and the last ones end as they would of more.
    """
    most = row.pp + 1 if row.virtual_stages == 1 else ROUNDS * row.pp
    if row.num_microbatches <= most or (row.virtual_stages > 1 and row.num_microbatches % row.pp):
        return row
    return replace(row, global_batch=most * row.dp * row.micro_batch)


def passes_of_all(plan: Plan, row: LlmRow) -> Orders | None:
    """By the programs of a plan of few microbatches, the passes of all that the row has.

    None: the plan has passes in another order than its schedule's own, or gathers weights beside them.
    """
    if _orders(plan, row, len(plan.microbatches)) != _passes(plan):
        return None
    return _orders(plan, row, row.num_microbatches)


def _passes(plan: Plan) -> Orders | None:
    known = (*COMPUTE, *CLOSING)
    if any(action.kind not in known for program in plan.programs for action in program.actions):
        return None
    return tuple(tuple(a for a in program.actions if a.kind in COMPUTE) for program in plan.programs)


def _orders(plan: Plan, row: LlmRow, num_microbatches: int) -> Orders:
    """The schedule's own, in the order of the plan's programs."""
    (chain,) = plan.chain.values()
    spec = schedule_of(row).kind.spec
    orders = spec.chain([stage.id for stage in chain], row.pp, num_microbatches)
    by_ranks = {stage.flat_ranks: order for stage, order in zip(chain, orders, strict=False)}
    return tuple(by_ranks[program.ranks] for program in plan.programs)
