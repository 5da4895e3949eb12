"""Accepts a plan after every check there is, or says why not."""

from workbench.memory.account import MemoryTable, check_memory, memory_table
from workbench.plan.check import check
from workbench.plan.deadlock import check_deadlock
from workbench.plan.key_exchange import check_key_exchange
from workbench.plan.lower import lower
from workbench.plan.lowered import Lowered
from workbench.plan.plan import Plan


def accept(plan: Plan) -> tuple[Lowered, MemoryTable]:
    """The plan lowered, with its account of memory.

    Raises:
        ValueError: it is unsound, can deadlock under one of the models, or does not fit.
    """
    lowered = checked(plan)
    memory = memory_table(lowered)
    check_memory(lowered, memory)
    return lowered, memory


def checked(plan: Plan) -> Lowered:
    """The plan lowered, after every check but that of memory; ValueError as `accept`."""
    check(plan)
    check_key_exchange(plan)
    lowered = lower(plan)
    check_deadlock(lowered)
    return lowered
