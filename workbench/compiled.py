"""Functions in machine code: compiled, and the compiler imported, when one of them is first called."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, update_wrapper
from typing import Any, Generic, ParamSpec, TypeVar, cast

from workbench.on_demand import OnDemand

numba, numba_events = OnDemand("numba"), OnDemand("numba.core.event")
_TOLD: list[Callable[[], None]] = []  # asked to be called
Given = ParamSpec("Given")
Result = TypeVar("Result")


def compiled(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """The function in machine code, kept beside its module or else in the user's cache.

    It may call other functions that are compiled so, of its own module or imported by their names.
    """
    return cast(Callable[Given, Result], _Compiled(function))


@contextmanager
def telling(tell: Callable[[], None]) -> Iterator[None]:
    """Within it `tell` is called once, before the first function that is kept nowhere is compiled."""
    _TOLD.append(tell)
    try:
        yield
    finally:
        if tell in _TOLD:
            _TOLD.remove(tell)


@cache
def _listen() -> None:
    """To numba, whose event it is that something is compiled and not read."""

    def tell(*said: object) -> None:
        del said
        while _TOLD:
            _TOLD.pop()()

    listener = type("Listener", (numba_events.Listener,), {"on_start": tell, "on_end": lambda *said: None})
    numba_events.register("numba:compile", listener())


class _Compiled(Generic[Given, Result]):
    def __init__(self, function: Callable[Given, Result]) -> None:
        update_wrapper(self, function)
        self._function = function
        self._machine_code: Callable[Given, Result] | None = None

    def __call__(self, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        return (self._machine_code or self._compile())(*args, **kwargs)

    def _compile(self) -> Callable[Given, Result]:
        """As numba has it, which it compiles for each kind of arguments; so are those that it calls."""
        _listen()
        names = cast(Any, self._function).__globals__
        made = self._machine_code = _in_machine_code(self._function)
        for name in cast(Any, self._function).__code__.co_names:
            called = names.get(name)
            if isinstance(called, _Compiled):
                names[name] = called._machine_code or called._compile()
        return made


def _in_machine_code(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """Kept in a file where numba finds a place for it.

    Raises:
        OSError: this process may open no further file, which says nothing of places.
    """
    try:
        return cast(Callable[Given, Result], numba.njit(cache=True)(function))
    except RuntimeError:  # said of any failure to make a file
        check_descriptors()
        return cast(Callable[Given, Result], numba.njit(function))


def check_descriptors() -> None:
    """OSError where this process may open no further file."""
    os.close(os.open(os.devnull, os.O_RDONLY))
