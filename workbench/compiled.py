"""Functions in machine code: compiled, and the compiler imported, when one of them is first called."""

import errno
import tempfile
from collections.abc import Callable
from functools import update_wrapper
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar, cast

from workbench.on_demand import OnDemand

numba = OnDemand("numba")
Given = ParamSpec("Given")
Result = TypeVar("Result")


def compiled(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """The function in machine code; kept in its folder where that can be written.

    It may call other functions that are compiled so, of its own module or imported by their names.
    """
    return cast(Callable[Given, Result], _Compiled(function))


class _Compiled(Generic[Given, Result]):
    def __init__(self, function: Callable[Given, Result]) -> None:
        update_wrapper(self, function)
        self._function = function
        self._machine_code: Callable[Given, Result] | None = None

    def __call__(self, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        return (self._machine_code or self._compile())(*args, **kwargs)

    def _compile(self) -> Callable[Given, Result]:
        """As numba has it, which it compiles for each kind of arguments; so are those that it calls."""
        code, names = cast(Any, self._function).__code__, cast(Any, self._function).__globals__
        folder = Path(code.co_filename).parent
        made = self._machine_code = numba.njit(cache=can_keep_files(folder))(self._function)
        for name in code.co_names:
            called = names.get(name)
            if isinstance(called, _Compiled):
                names[name] = called._machine_code or called._compile()
        return cast(Callable[Given, Result], made)


def can_keep_files(folder: Path) -> bool:
    """Whether numba can: it makes a file to find out, and says of any failure that there is no place.

    Raises:
        OSError: this process may open no further file, which says nothing of the folder.
    """
    kept = folder / "__pycache__"
    try:
        with tempfile.TemporaryFile(dir=kept if kept.is_dir() else folder):
            return True
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        return False
