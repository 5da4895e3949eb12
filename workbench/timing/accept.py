"""Accepts a plan after every check there is, or says why not."""

from workbench.memory.account import MemoryTable, check_memory, memory_table
from workbench.plan.check import check
from workbench.plan.deadlock import check_deadlock
from workbench.plan.folded import Folded, checked_part, judged_part
from workbench.plan.key_exchange import check_key_exchange
from workbench.plan.lower import lower
from workbench.plan.lowered import Lowered
from workbench.plan.plan import Plan


def accept(plan: Plan) -> tuple[Lowered, MemoryTable]:
    """Return the plan lowered, with its memory account.

    Raises:
        ValueError: it is unsound, can deadlock under one of the models, or does not fit.
    """
    lowered = checked(plan)
    memory = memory_table(lowered)
    check_memory(lowered, memory)
    return lowered, memory


def judged(plan: Plan | Folded) -> tuple[Lowered, MemoryTable]:
    """As `accept`, but lowered with one replica of each set of equal ones, which represents all.

    Times, bytes and errors are those of the whole plan. Of replicas that share a port the memory account has
    one, and the lowered plan all, as they wait for each other.

    Raises:
        ValueError: as `accept`.
    """
    if isinstance(plan, Folded):
        part, timed, unfolded = plan.checked, plan.judged, None
        check(plan.one)
        check_key_exchange(plan.one)
    else:
        check(plan)
        check_key_exchange(plan)
        part, timed, unfolded = checked_part(plan), judged_part(plan), plan
    lowered = lower(part)
    try:
        check_deadlock(lowered)
    except ValueError:  # reported with the rows of the whole plan
        if unfolded is not None:
            check_deadlock(lower(unfolded))
        raise
    memory = memory_table(lowered)
    check_memory(lowered, memory)
    return lowered if timed is part else lower(timed), memory


def checked(plan: Plan) -> Lowered:
    """Return the plan lowered, after every check but that of memory; ValueError as `accept`."""
    check(plan)
    check_key_exchange(plan)
    lowered = lower(plan)
    check_deadlock(lowered)
    return lowered
