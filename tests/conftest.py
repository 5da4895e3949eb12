"""Fixtures that all tests share."""

import atexit
import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

# Kernels run under Triton's interpreter where there is no GPU; read when anything first imports triton.
os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")

from experiments.doors.targets import fetched
from runtime.world.pool import Pool
from tests.command_line import JOB, accept
from tests.examples import LEAST, QUICK
from tests.thorough import left_out

torch.set_num_threads(1)  # ranks and tests run side by side
gc.disable()  # until all tests are collected: nothing of what is imported until then goes away

MAX_RANKS = 8
PAGE_TESTS = "test_report_page.py"

# Files that take longest, first: two workers that take files in turn then end together.
DEAREST = (
    "test_nccl_manners.py",
    "test_elastic_command.py",
    "test_fidelity.py",
    "test_gpu_day_small.py",
    "test_cli.py",
    "test_kernels_tasks.py",
    "test_checkpoint.py",
    "test_kernels_compile.py",
    "test_elastic.py",
    "test_launch.py",
    "test_kernels.py",
    "test_torchrun.py",
    "test_kernels_plan.py",
    "test_kernels_bench.py",
    "test_kernels_plan_compile.py",
    "test_wheel.py",
    "test_report_page.py",
)

# A run of the tests says the same twice; HYPOTHESIS_PROFILE=explore looks for new cases, and for longer.
# `make test` takes fewer cases of a property than `make test-all`, as of tests/thorough.py.
settings.register_profile(QUICK, deadline=None, derandomize=True, max_examples=LEAST)
settings.register_profile("fixed", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None, max_examples=500)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole files, the dearest first, others as they were; what `make test` leaves out is marked."""
    place = {name: index for index, name in enumerate(DEAREST)}
    items.sort(key=lambda item: place.get(item.path.name, len(place)))
    for item in left_out(items):
        item.add_marker("thorough")


def pytest_collection_finish() -> None:
    """Collections of the tests, and of the ranks forked from here, do not look through what was imported."""
    usual = gc.get_threshold()
    os.register_at_fork(after_in_child=lambda: gc.set_threshold(*usual))
    gc.set_threshold(20 * usual[0], *usual[1:])  # plans and configurations are many objects and few rings
    gc.enable()
    gc.freeze()
    atexit.register(leave_to_the_end)


def leave_to_the_end() -> None:
    """Extensions count at the very end what nobody gave back; the last collection is enough for that."""
    gc.unfreeze()
    gc.disable()


@pytest.fixture(scope="module", autouse=True)
def frozen_between_files() -> Iterator[None]:
    """What the tests of a file leave in caches is not looked through in those of others."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Searches of the tests find nothing that a user's kept, and keep nothing for one."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


def pytest_unconfigure(config: pytest.Config) -> None:
    """Say in the very last line that the report's page was not looked at: among skips it is overlooked."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    skipped = [] if reporter is None else reporter.stats.get("skipped", [])
    for report in skipped:
        if PAGE_TESTS in report.nodeid:
            reason = report.longrepr[-1].removeprefix("Skipped: ")
            reporter.write_line(f"The report's page was not tested in a browser: {reason}", yellow=True)
            return


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """One pool of gloo workers for the whole session; forked as jobs need them."""
    with Pool(MAX_RANKS) as workers:
        yield workers


@pytest.fixture(scope="session")
def packages() -> Path:
    """Packages of training systems, from the package index when first used."""
    found = fetched()
    if found is None:
        pytest.skip("not held: the package index gives no packages of the systems")
    return found


@pytest.fixture
def heeds_interrupts() -> Iterator[None]:
    """A shell's background jobs are started with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """The small job of `tests.command_line` in a file."""
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return path


@pytest.fixture
def plan(job: Path) -> Path:
    """A plan of that job, beside it."""
    path = job.with_name("plan.json")
    accept("plan", job, "-o", path)
    return path
