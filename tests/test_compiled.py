"""Functions that are compiled when they are first called."""

import os
import resource
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from workbench.compiled import check_descriptors, compiled
from workbench.on_demand import OnDemand


@compiled
def half(number: int) -> int:
    """Of it, rounded down."""
    return number // 2


@compiled
def steps_to_one(number: int) -> int:
    """Halvings."""
    return 0 if number <= 1 else 1 + steps_to_one(half(number))


def test_compiled_functions_call_each_other_and_themselves():
    assert steps_to_one(1024) == 10
    assert half(7) == 3
    assert (steps_to_one.__name__, steps_to_one.__doc__) == ("steps_to_one", "Halvings.")


def test_arguments_of_another_kind_are_compiled_for():
    assert half(np.float64(7.0)) == 3.0


def test_nothing_is_imported_before_the_first_call():
    script = (
        "import sys\n"
        "from workbench.balance.tokens.compiled import descending_order\n"
        "assert 'numba' not in sys.modules\n"
        "import numpy as np\n"
        "assert list(descending_order(np.array([1, 3, 2]))) == [1, 2, 0]\n"
        "assert 'numba' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_module_on_demand_is_the_module():
    fractions = OnDemand("fractions")
    assert fractions.Fraction(1, 2) + fractions.Fraction(1, 2) == 1
    assert fractions.Fraction is fractions.Fraction
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = fractions.nothing
    with pytest.raises(ImportError):
        _ = OnDemand("no_such_module").anything


SQUARE = """
from workbench.compiled import compiled

@compiled
def square(number: int) -> int:
    return number * number

print(square(7))
"""


def said_by(module: Path, cache: Path) -> str:
    return subprocess.run(
        [
            sys.executable,
            "-c",
            f"import sys; sys.path.insert(0, {str(module.parent)!r}); import {module.stem}",
        ],
        env=os.environ | {"XDG_CACHE_HOME": str(cache)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def test_machine_code_is_kept_beside_its_module_else_in_the_cache_of_the_user_else_nowhere(tmp_path: Path):
    module, cache = tmp_path / "package" / "square_of.py", tmp_path / "cache"
    module.parent.mkdir()
    module.write_text(SQUARE)
    assert said_by(module, cache) == "49\n"
    assert list(module.parent.glob("__pycache__/*.nbi"))
    assert not cache.exists()
    shutil.rmtree(module.parent / "__pycache__")
    (module.parent / "__pycache__").write_text("no folder")
    assert said_by(module, cache) == "49\n"
    assert list(cache.rglob("*.nbi"))
    shutil.rmtree(cache)
    cache.write_text("no folder")
    assert said_by(module, cache) == "49\n"


def test_whoever_waits_is_told_once_that_something_is_compiled_and_not_that_it_is_read(tmp_path: Path):
    module = tmp_path / "square_of.py"
    told = 'with telling(lambda: print("compiling")):\n    print(square(7), square(8), square(8.5))'
    module.write_text(
        SQUARE.replace("import compiled", "import compiled, telling").replace("print(square(7))", told)
    )
    assert said_by(module, tmp_path) == "compiling\n49 64 72.25\n"
    assert said_by(module, tmp_path) == "49 64 72.25\n"


def test_a_process_without_descriptors_says_so(tmp_path: Path):
    check_descriptors()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as held:
        held.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        highest = max(int(path.name) for path in Path("/proc/self/fd").iterdir())
        for _ in range(highest):  # none below it is free
            held.callback(os.close, os.open(tmp_path, os.O_RDONLY))
        lowest = os.open(tmp_path, os.O_RDONLY)
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
        with pytest.raises(OSError, match="Too many open files"):
            check_descriptors()
