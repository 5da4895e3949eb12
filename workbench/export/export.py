"""Create the files of a plan for a target, or explain in one line why that is impossible."""

from workbench.cost.products import ProductFormat
from workbench.export.approximation import (
    Approximation,
    Prices,
    approximated,
    llm_only,
    nearest,
    open_job,
)
from workbench.export.folder import FORMAT, MARK, common_files
from workbench.export.target import Target
from workbench.plan.plan import Plan
from workbench.plan.runnable import refusal_to_run
from workbench.planner.budget import UNLIMITED, Budget
from workbench.units import MS_PER_S

__all__ = ["FORMAT", "MARK", "export"]


def export(plan: Plan, target: Target, prices: Prices, budget: Budget = UNLIMITED) -> dict[str, str]:
    """Texts of the folder's files by name.

    Args:
        prices: of plans.
        budget: of planning alternatives that a refusal names.

    Raises:
        ValueError: the target cannot express the plan; names the part, the nearest plan that it can
            express, and its predicted cost.
    """
    part = target.refuses(plan)
    if part is not None:
        raise ValueError(refusal(plan, target, part, prices, budget))
    try:
        approximation = (
            _exact(plan, prices) if target.is_exact else approximated(plan, target.changes(plan), prices)
        )
    except ValueError as error:
        raise ValueError(refusal(plan, target, str(error), prices, budget)) from None
    return dict(target.files(approximation)) | common_files(target, approximation)


def _exact(plan: Plan, prices: Prices) -> Approximation:
    step_s = prices.step_s(plan)
    return Approximation(plan=plan, step_s=step_s, becomes=plan, becomes_s=step_s, differences=())


def refusal(plan: Plan, target: Target, part: str, prices: Prices, budget: Budget) -> str:
    """The error line: the part that cannot be expressed, and the nearest alternative.

    Where no layouts let the target express what the plan trains, nothing is planned for this line.
    """
    reason, is_narrow = f"{target.name} cannot express {part}", bool(plan.settings.narrow_products)
    lacks = target.lacks(plan) is not None
    if lacks and len(plan.model.modules) > 1 and target.lacks(llm_only(open_job(plan))) is None:
        return f"{reason}; nearest: the language model alone"
    alternative = None if lacks else nearest(plan, target.alternatives, target.refuses, prices, budget)
    if alternative is None and is_narrow:
        return f"{reason}; nearest: products {ProductFormat.SAME.value!r} and --to torchrun"
    if alternative is None and (why := refusal_to_run(plan)):
        return f"{reason}, nor any other plan of this model; it can be simulated, not run: {why}"
    if alternative is None:
        return (
            f"{reason}, nor any other plan of this model; nearest: --to torchrun, which runs this one, "
            f"predicted {prices.step_s(plan) * MS_PER_S:.3f} ms a step"
        )
    words, seconds = alternative
    words += f", products in {plan.settings.precision}" if is_narrow else ""
    step_s = prices.step_s(plan)
    return (
        f"{reason}; nearest: {words}, predicted {seconds * MS_PER_S:.3f} ms a step "
        f"({(seconds - step_s) * MS_PER_S:+.3f} ms)"
    )
