"""`check` refuses what a run would, in the same words."""

from dataclasses import replace

import pytest

from tests.test_cli import job, plan, refuse
from workbench.model.block_modules import BlockModule
from workbench.plan.codec import read_plan, write_plan
from workbench.plan.plan import Plan
from workbench.plan.runnable import check_runnable

__all__ = ["job", "plan"]  # fixtures


def with_items(made: Plan, modality: str, tokens_in: int, tokens_out: int) -> Plan:
    """Every item of the modality of that size."""
    batch = tuple(
        replace(
            sample,
            segments=tuple(
                replace(each, tokens_in=tokens_in, tokens_out=tokens_out)
                if each.modality == modality
                else each
                for each in sample.segments
            ),
        )
        for sample in made.batch
    )
    return replace(made, batch=batch)


@pytest.mark.parametrize(("tokens_in", "tokens_out"), [(1, 50), (16, 5), (17, 16)])
def test_tokens_that_do_not_shrink_evenly_are_refused_by_check_and_run(plan, tokens_in, tokens_out):
    """On the commit before, `check` took them and a rank refused them."""
    write_plan(with_items(read_plan(plan), "vision", tokens_in, tokens_out), plan)
    words = f"{tokens_in} tokens do not shrink evenly to {tokens_out}"
    for command in (("check", plan), ("run", plan, "--local")):
        refuse(*command, words=words, folder=plan.parent)


def test_what_shrinks_evenly_is_runnable(plan):
    made = read_plan(plan)
    for tokens_in, tokens_out in ((16, 16), (16, 4), (16, 1)):
        check_runnable(with_items(made, "vision", tokens_in, tokens_out))


def test_recomputation_by_module_is_refused(plan):
    made = read_plan(plan)
    settings = made.settings.of("llm")
    again = replace(settings, computed_again=(BlockModule.CORE_ATTN,))
    others = tuple(each for each in made.settings.modules if each.module != "llm")
    with pytest.raises(ValueError, match=r"module 'llm': the runtime computes whole layers again or nothing"):
        check_runnable(replace(made, settings=replace(made.settings, modules=(*others, again))))
