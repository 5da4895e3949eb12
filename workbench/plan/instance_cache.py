"""Caches of what is derived from a plan or a lowered plan; they live as long as that object."""

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from workbench.plan.plan import Plan

Given = ParamSpec("Given")
Result = TypeVar("Result")
Owner = TypeVar("Owner")
_ITSELF: Any = object()  # stands for a result that is the plan itself, to avoid a reference cycle


def cached_on_instance(
    derive: Callable[Concatenate[Owner, Given], Result],
) -> Callable[Concatenate[Owner, Given], Result]:
    """Cache a function's results on its first argument, by its other arguments, which are hashable.

    Results live as long as the plan object, like its look-up tables; `replace` makes a plan without them. A
    result may be the plan but must not refer to it: so a plan that is dropped, with all that is cached on it,
    is freed at once and does not wait for the garbage collector.
    """
    name = _name(derive)

    @wraps(derive)
    def answer(plan: Owner, /, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        answers: dict[Any, Any] = vars(plan).setdefault(name, {})
        key = args if not kwargs else (args, *sorted(kwargs.items()))
        if key not in answers:
            derived = derive(plan, *args, **kwargs)
            answers[key] = _ITSELF if derived is plan else derived
        result = answers[key]
        return cast(Result, plan if result is _ITSELF else result)

    return answer


def set_cached(plan: Plan, derive: Callable[[Plan], Result], answer: Result) -> None:
    """Set the cached result of a function of a plan alone, for a plan that represents a larger one."""
    vars(plan).setdefault(_name(derive), {})[()] = answer


def _name(derive: Callable[..., object]) -> str:
    return f"{derive.__module__}.{derive.__qualname__}"
