"""Processes that keep cores awake: at idle priority, while wanted, and never longer than their parent."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.world.cores import Keepers
from runtime.world.pool import Place, Pool
from tests.waiting import eventually

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="no idle priority elsewhere")


def state(process: int) -> str:
    """As the system's letter; empty where there is no such process."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:  # it may end between two looks, and amid one
        return ""


def test_a_core_is_kept_awake_while_wanted() -> None:
    keepers, core = Keepers(), min(os.sched_getaffinity(0))
    keepers.wake([core])
    (process,) = keepers.process_ids
    os.kill(
        process, signal.SIGINT
    )  # as by Ctrl-C while it starts: on the commit before, it printed a traceback
    assert eventually(lambda: os.sched_getscheduler(process) == os.SCHED_IDLE)
    assert os.sched_getaffinity(process) == {core}
    assert eventually(lambda: state(process) == "R")
    keepers.rest()
    assert eventually(lambda: state(process) == "T")
    keepers.wake([core])
    assert keepers.process_ids == (process,)
    assert eventually(lambda: state(process) == "R")
    keepers.close()
    assert keepers.process_ids == ()
    assert eventually(lambda: state(process) == "")


def test_it_ends_with_its_parent() -> None:
    program = (
        "import os, time; from runtime.world.cores import Keepers; keepers = Keepers();"
        "keepers.wake([min(os.sched_getaffinity(0))]); (one,) = keepers.process_ids;\n"
        "while os.sched_getscheduler(one) != os.SCHED_IDLE: time.sleep(0.01)\n"
        "keepers.rest(); print(one, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    process = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert eventually(lambda: state(process) in ("", "Z"))


def test_one_whose_parent_has_ended_ends_before_it_takes_the_priority_at_which_ends_take_long() -> None:
    program = "import os; from runtime.world import keep_awake; keep_awake.main(0, {}); os._exit(os.nice(0))"
    text = program.format(os.getpid())
    shell = ("sh", "-c", '"$0" -c "$1"; exit $?', sys.executable, text)  # the parent is the shell
    assert subprocess.run(shell, check=False).returncode == os.nice(0)


def _idle(place: Place) -> int:
    return place.process


@pytest.fixture
def num_cores() -> Iterator[int]:
    """Two, or one where there is no other: a machine may have hundreds."""
    available = os.sched_getaffinity(0)
    few = sorted(available)[:2]
    os.sched_setaffinity(0, few)
    yield len(few)
    os.sched_setaffinity(0, available)


def test_a_pool_keeps_them_for_jobs_with_a_core_a_process(num_cores: int) -> None:
    with Pool(num_cores + 1) as pool:
        pool.run(_idle, num_cores + 1)
        assert pool.all_process_ids() == pool.process_ids()
        pool.run(_idle, 1)
        (keeper,) = set(pool.all_process_ids()) - set(pool.process_ids())
        assert eventually(lambda: state(keeper) == "T")
    assert eventually(lambda: state(keeper) == "")
