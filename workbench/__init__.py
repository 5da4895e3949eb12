"""Plans of multimodal training, simulated, executed and compared.

    import workbench

    job = workbench.load_job("examples/tiny.yaml")
    plan = workbench.plan(job, profile="A40")
    predicted = workbench.simulate(plan, profile="A40")
    ran = workbench.run(plan)
    print(workbench.compare(predicted, ran.traces).as_json())

Each name is imported on first use. `workbench.plan` and `workbench.search` are also packages: they can be
called, and their modules are imported as usual.
"""

import sys
from collections.abc import Callable
from importlib import import_module
from inspect import Signature, signature
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workbench.api import plan, run, search, simulate
    from workbench.job.job import Job, load_job
    from workbench.job.run_options import RunOptions
    from workbench.plan.lower import lower
    from workbench.plan.plan import Plan
    from workbench.report.compare import compare
    from workbench.trace import Trace

__all__ = [
    "Job",
    "Plan",
    "RunOptions",
    "Trace",
    "compare",
    "load_job",
    "lower",
    "plan",
    "run",
    "search",
    "simulate",
]

_MODULE_OF = {
    "Job": "workbench.job.job",
    "Plan": "workbench.plan.plan",
    "RunOptions": "workbench.job.run_options",
    "Trace": "workbench.trace",
    "compare": "workbench.report.compare",
    "load_job": "workbench.job.job",
    "lower": "workbench.plan.lower",
    "run": "workbench.api",
    "simulate": "workbench.api",
}
_CALLABLE = ("plan", "search")  # packages that are also functions


def __getattr__(name: str) -> Any:
    if name in _CALLABLE:
        return import_module(f"{__name__}.{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _CalledPackage(ModuleType):
    """A package that can be called like the function of its name in `workbench.api`."""

    @property
    def _function(self) -> Callable[..., Any]:
        function: Callable[..., Any] = getattr(
            import_module("workbench.api"), self.__name__.rpartition(".")[2]
        )
        return function

    @property
    def __signature__(self) -> Signature:
        return signature(self._function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)


class _Face(ModuleType):
    """This module; importing one of its packages binds it here, which must not hide the function."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _CALLABLE and isinstance(value, ModuleType):
            value.__class__ = _CalledPackage
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Face
