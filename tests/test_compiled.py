"""Functions that are compiled when they are first called."""

import os
import resource
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from workbench.compiled import can_keep_files, compiled
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


def test_a_folder_that_keeps_no_files_is_told_from_a_process_without_descriptors(tmp_path):
    assert can_keep_files(tmp_path)
    assert not can_keep_files(tmp_path / "none")
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
            can_keep_files(tmp_path)
