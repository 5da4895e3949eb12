"""Functions compiled to machine code by numba, which is imported at the first call of one of them."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, update_wrapper
from typing import Any, Generic, ParamSpec, TypeVar, cast

from workbench.on_demand import OnDemand

numba, numba_events = OnDemand("numba"), OnDemand("numba.core.event")
_CALLBACKS: list[Callable[[], None]] = []  # callbacks before the next compilation
Given = ParamSpec("Given")
Result = TypeVar("Result")


def compiled(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """The function compiled to machine code, cached beside its module or in the user's cache.

    It may call other functions compiled this way, from its own module or imported by name.
    """
    return cast(Callable[Given, Result], _Compiled(function))


@contextmanager
def telling(tell: Callable[[], None]) -> Iterator[None]:
    """In this context `tell` is called once, before the first function without a cache entry is compiled."""
    _CALLBACKS.append(tell)
    try:
        yield
    finally:
        if tell in _CALLBACKS:
            _CALLBACKS.remove(tell)


@cache
def _listen() -> None:
    """Listen to numba's event of compiling a function, as opposed to reading it from a cache."""

    def tell(*event: object) -> None:
        del event
        while _CALLBACKS:
            _CALLBACKS.pop()()

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
        """Numba's dispatcher of the function, which compiles for each type of arguments; callees likewise."""
        _listen()
        names = cast(Any, self._function).__globals__
        machine_code = self._machine_code = _in_machine_code(self._function)
        for name in cast(Any, self._function).__code__.co_names:
            callee = names.get(name)
            if isinstance(callee, _Compiled):
                names[name] = callee._machine_code or callee._compile()
        return machine_code


def _in_machine_code(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """Numba's dispatcher, with a file cache where numba finds a place for it.

    Raises:
        OSError: this process may open no further file, which says nothing of places.
    """
    try:
        return cast(Callable[Given, Result], numba.njit(cache=True)(function))
    except RuntimeError:  # raised for any failure to create the cache file
        check_descriptors()
        return cast(Callable[Given, Result], numba.njit(function))


def check_descriptors() -> None:
    """Raise OSError where this process cannot open another file."""
    os.close(os.open(os.devnull, os.O_RDONLY))
