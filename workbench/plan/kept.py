"""What is derived of a plan once, and stays with the plan object."""

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from workbench.plan.plan import Plan

Given = ParamSpec("Given")
Result = TypeVar("Result")


def kept(derive: Callable[Concatenate[Plan, Given], Result]) -> Callable[Concatenate[Plan, Given], Result]:
    """A function of a plan, and of what is hashable, that answers again what it has answered before.

    The answers live as long as the plan object, like its look-up tables; `replace` makes a plan without them.
    """
    name = _name(derive)

    @wraps(derive)
    def answer(plan: Plan, /, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        answers: dict[Any, Result] = vars(plan).setdefault(name, {})
        key = args if not kwargs else (args, *sorted(kwargs.items()))
        if key not in answers:
            answers[key] = derive(plan, *args, **kwargs)
        return answers[key]

    return answer


def give(plan: Plan, derive: Callable[[Plan], Result], answer: Result) -> None:
    """Let a kept function of a plan alone answer so, of a plan that stands for more than it holds."""
    vars(plan).setdefault(_name(derive), {})[()] = answer


def _name(derive: Callable[..., object]) -> str:
    return f"{derive.__module__}.{derive.__qualname__}"
