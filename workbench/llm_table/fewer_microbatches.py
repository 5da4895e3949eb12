"""Predict a row from fewer microbatches: all are alike, so a few give the time of each and the peak
memory.
"""

from dataclasses import replace

from workbench.llm_table.llm_row import LlmRow
from workbench.llm_table.row_plan import schedule_of
from workbench.plan.plan import Plan
from workbench.schedule.action import CLOSING, COMPUTE, Action

Orders = tuple[tuple[Action, ...], ...]

ROUNDS = 3  # of interleaved 1F1B until a rank holds as much of each of its stages as it ever does


def with_few(row: LlmRow) -> LlmRow:
    """The row with just enough microbatches for every stage to reach its peak memory.

    A stage of 1F1B holds at most as many microbatches as there are stages from it to the last, plus one in
    steady state. Interleaved 1F1B ends what it began in the round before last, so that a third round is the
    first to find the ranks as every later one does. From then on every microbatch repeats the one before it,
    and the last ones end as they would after more.
    """
    most = row.pp + 1 if row.virtual_stages == 1 else ROUNDS * row.pp
    if row.num_microbatches <= most or (row.virtual_stages > 1 and row.num_microbatches % row.pp):
        return row
    return replace(row, global_batch=most * row.dp * row.micro_batch)


def passes_of_all(plan: Plan, row: LlmRow) -> Orders | None:
    """The passes of all the row's microbatches, by the programs of a plan of few.

    None: the plan's passes are in another order than the schedule's own, or gather weights beside them.
    """
    if _scheduled_passes(plan, row, len(plan.microbatches)) != _passes_of_plan(plan):
        return None
    return _scheduled_passes(plan, row, row.num_microbatches)


def _passes_of_plan(plan: Plan) -> Orders | None:
    known = (*COMPUTE, *CLOSING)
    if any(action.kind not in known for program in plan.programs for action in program.actions):
        return None
    return tuple(tuple(a for a in program.actions if a.kind in COMPUTE) for program in plan.programs)


def _scheduled_passes(plan: Plan, row: LlmRow, num_microbatches: int) -> Orders:
    """The schedule's own passes, in the order of the plan's programs."""
    (chain,) = plan.chain.values()
    spec = schedule_of(row).spec
    orders = spec.chain([stage.id for stage in chain], row.pp, num_microbatches)
    by_ranks = {stage.flat_ranks: order for stage, order in zip(chain, orders, strict=False)}
    return tuple(by_ranks[program.ranks] for program in plan.programs)
