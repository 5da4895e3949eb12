"""What is derived of a plan once, and stays with the plan object; likewise of what was lowered from it."""

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from workbench.plan.plan import Plan

Given = ParamSpec("Given")
Result = TypeVar("Result")
Owner = TypeVar("Owner")
_ITSELF: Any = object()  # in the place of an answer that is the plan: one that names itself is in a cycle


def cached_on_instance(
    derive: Callable[Concatenate[Owner, Given], Result],
) -> Callable[Concatenate[Owner, Given], Result]:
    """A function of a plan, and of what is hashable, that answers again what it has answered before.

    The answers live as long as the plan object, like its look-up tables; `replace` makes a plan without them.
    None may name the plan but be it: with what is kept of it, a plan that is dropped goes at once, and does
    not wait for the garbage collector.
    """
    name = _name(derive)

    @wraps(derive)
    def answer(plan: Owner, /, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        answers: dict[Any, Any] = vars(plan).setdefault(name, {})
        key = args if not kwargs else (args, *sorted(kwargs.items()))
        if key not in answers:
            found = derive(plan, *args, **kwargs)
            answers[key] = _ITSELF if found is plan else found
        known = answers[key]
        return cast(Result, plan if known is _ITSELF else known)

    return answer


def set_cached(plan: Plan, derive: Callable[[Plan], Result], answer: Result) -> None:
    """Let a cached function of a plan alone return this, of a plan that stands for more than it holds."""
    vars(plan).setdefault(_name(derive), {})[()] = answer


def _name(derive: Callable[..., object]) -> str:
    return f"{derive.__module__}.{derive.__qualname__}"
