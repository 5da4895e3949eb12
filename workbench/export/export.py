"""Makes a folder's files of a plan for a target, or says in one line why there are none."""

from workbench.export.approximation import Approximation, Prices, approximated, nearest
from workbench.export.folder import FORMAT, MARK, common_files
from workbench.export.target import Target
from workbench.plan.plan import Plan
from workbench.units import MS_PER_S

__all__ = ["FORMAT", "MARK", "export"]


def export(plan: Plan, target: Target, prices: Prices) -> dict[str, str]:
    """Texts by file name.

    Args:
        prices: what plans cost.

    Raises:
        ValueError: the target cannot say the plan: which part, the nearest plan that it can say, and its
            predicted cost.
    """
    part = target.refuses(plan)
    if part is not None:
        raise ValueError(refusal(plan, target, part, prices))
    try:
        found = _exact(plan, prices) if target.is_exact else approximated(plan, target.changes(plan), prices)
    except ValueError as error:
        raise ValueError(refusal(plan, target, str(error), prices)) from None
    return dict(target.files(found)) | common_files(target, found)


def _exact(plan: Plan, prices: Prices) -> Approximation:
    step_s = prices.step_s(plan)
    return Approximation(plan=plan, step_s=step_s, becomes=plan, becomes_s=step_s, differences=())


def refusal(plan: Plan, target: Target, part: str, prices: Prices) -> str:
    """The line that says why not, and what instead."""
    other = nearest(plan, target.ways, target.refuses, prices)
    told = f"{target.name} cannot say {part}"
    if other is None:
        return (
            f"{told}, and no other plan of this model; nearest: --to torchrun, which runs this one, "
            f"predicted {prices.step_s(plan) * MS_PER_S:.3f} ms a step"
        )
    words, seconds = other
    step_s = prices.step_s(plan)
    return (
        f"{told}; nearest: {words}, predicted {seconds * MS_PER_S:.3f} ms a step "
        f"({(seconds - step_s) * MS_PER_S:+.3f} ms)"
    )
