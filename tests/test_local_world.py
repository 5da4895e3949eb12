"""Ranks on one machine meet without asking a name server."""

import os
import shutil
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from runtime.world import local_world
from runtime.world.failure import RankError
from runtime.world.local_world import AGENT, INTERFACE, MEETING, join_launched, meeting_of
from runtime.world.pool import Place, Pool
from tests.free_port import free_port
from tests.waiting import PATIENCE_S, eventually

LAUNCHED = {
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "TORCHELASTIC_ERROR_FILE": "/made/run_x/attempt_0/1/error.json",
}

# Stands in front of libc's resolver and notes every question.
LISTENER = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>

static void note(const char *name) {
    FILE *file = fopen(getenv("ASKED"), "a");
    if (file) { fprintf(file, "%s\\n", name); fclose(file); }
}

int getaddrinfo(const char *name, const char *service, const struct addrinfo *hints,
                struct addrinfo **found) {
    int (*real)(const char *, const char *, const struct addrinfo *, struct addrinfo **) =
        dlsym(RTLD_NEXT, "getaddrinfo");
    note("address of a name");
    return real(name, service, hints, found);
}

int getnameinfo(const struct sockaddr *address, socklen_t size, char *host, socklen_t host_size,
                char *service, socklen_t service_size, int flags) {
    int (*real)(const struct sockaddr *, socklen_t, char *, socklen_t, char *, socklen_t, int) =
        dlsym(RTLD_NEXT, "getnameinfo");
    if (!(flags & NI_NUMERICHOST)) note("name of an address");
    return real(address, size, host, host_size, service, service_size, flags);
}
"""

WORLDS = """
import os
from pathlib import Path
import torch.distributed as dist
from runtime.world.pool import Pool
from tests.test_local_world import sum_in_groups

asked = Path(os.environ["ASKED"])
with Pool(2) as pool:
    assert pool.run(sum_in_groups, 2) == [3.0, 3.0]
print(asked.read_text() if asked.exists() else "nothing")
dist.TCPStore("localhost", 0, is_master=True)
print(set(asked.read_text().splitlines()))
"""


def sum_in_groups(place: Place) -> float:
    """Of the world and of a group made after it."""
    total = torch.tensor([1.0 + place.process])
    dist.all_reduce(total)
    dist.all_reduce(total, op=dist.ReduceOp.AVG, group=dist.new_group([0, 1]))
    return float(total)


@pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("cc") is None, reason="listens by LD_PRELOAD of a C library"
)
def test_ranks_of_a_pool_ask_no_name_server(tmp_path: Path) -> None:
    """Beside them torch's own store, which does: so the listener hears."""
    source, library = tmp_path / "listener.c", tmp_path / "listener.so"
    source.write_text(LISTENER)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True, timeout=60)
    heard = {"LD_PRELOAD": str(library), "ASKED": str(tmp_path / "asked"), "OMP_NUM_THREADS": "1"}
    environment = {name: value for name, value in os.environ.items() if name != INTERFACE} | heard
    done = subprocess.run(
        [sys.executable, "-c", WORLDS],
        env=environment,
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    nothing, control = done.stdout.splitlines()
    assert nothing == "nothing"
    assert "name of an address" in control


@pytest.mark.parametrize(
    "other",
    [
        pytest.param({"WORLD_SIZE": "4"}, id="ranks-elsewhere"),
        pytest.param({"TORCHELASTIC_ERROR_FILE": ""}, id="torchrun-without-folders"),
        pytest.param({"TORCHELASTIC_ERROR_FILE": "/somewhere/error.json"}, id="a-file-of-another-kind"),
    ],
)
def test_only_ranks_that_share_a_new_folder_meet_in_it(other: dict[str, str]) -> None:
    assert meeting_of(LAUNCHED) == Path("/made/run_x/attempt_0") / MEETING
    assert meeting_of(LAUNCHED | other) is None
    assert meeting_of({}) is None


def join(place: Place, folder: Path) -> int:
    first = dist.group.WORLD  # the pool's: its connections stay until the other rank has joined it too
    dist.destroy_process_group()
    mine = {"RANK": str(place.process), "LOCAL_RANK": str(place.process)}
    error_file = {"TORCHELASTIC_ERROR_FILE": str(folder / str(place.process) / "error.json")}
    join_launched(LAUNCHED | mine | error_file, wait_s=30.0)
    del first
    return dist.get_world_size()


def test_launched_ranks_of_one_machine_need_no_address(pool: Pool, tmp_path: Path) -> None:
    assert "MASTER_ADDR" not in LAUNCHED
    assert pool.run(join, 2, tmp_path) == [2, 2]
    assert (tmp_path / MEETING).exists()


class Together(SimpleNamespace):
    """A store at which a rank's wait begins when all that come have come, however long they took."""

    def wait(self, keys: list[str], within: timedelta) -> None:
        self.store.add("waiting", 1)
        assert eventually(lambda: self.store.add("waiting", 0) == self.num_coming)
        self.store.wait(keys, within)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


def refusal(place: Place, launched: dict[str, str], ranks: tuple[int, ...], wait_s: float) -> str:
    """Why this process cannot join the world as one of these ranks."""
    dist.barrier()  # others may still connect to the pool's world, which this one leaves
    dist.destroy_process_group()
    if len(ranks) > 1:
        own = local_world._tcp_store

        def store(environment: dict[str, str], where: str, rank: int, _: float) -> Together:
            return Together(store=own(environment, where, rank, PATIENCE_S), num_coming=len(ranks))

        local_world._tcp_store = store  # type: ignore[assignment]
    try:
        join_launched(launched | {"RANK": str(ranks[place.process])}, wait_s=wait_s)
    except (ValueError, RankError) as error:
        return str(error)
    return "joined"


def test_a_rank_that_does_not_come_is_named_by_all_others() -> None:
    """In the time that is asked for, where gloo says "Wait timeout", and torch how many came."""
    where = {"WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with Pool(2) as own:
        first, third = own.run(refusal, 2, where, (0, 2), 0.5)
    meant = f"2 of 4 ranks have not reached 127.0.0.1:{where['MASTER_PORT']} within 0.5 s: 1, 3"
    assert first == meant
    # The first rank listens for all; who began later may find it gone.
    gone = f"127.0.0.1:{where['MASTER_PORT']}, where all ranks meet, is gone"
    assert third in (meant, gone)


def test_ranks_of_one_machine_name_those_that_do_not_come(pool: Pool, tmp_path: Path) -> None:
    error_file = {"LOCAL_RANK": "0", "TORCHELASTIC_ERROR_FILE": str(tmp_path / "0" / "error.json")}
    here = {"WORLD_SIZE": "40", "LOCAL_WORLD_SIZE": "40"} | error_file
    (said,) = pool.run(refusal, 1, here, (1,), 0.5)
    where = f"{tmp_path / MEETING} within 0.5 s"
    assert said == f"39 of 40 ranks have not reached {where}: 0, 2, 3, 4, 5, 6, 7, 8, ..."


def test_where_nobody_listens_is_told(pool: Pool) -> None:
    where = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    (said,) = pool.run(refusal, 1, where, (1,), 0.5)
    assert said.startswith(
        f"no answer within 0.5 s at 127.0.0.1:{where['MASTER_PORT']}, where all ranks meet"
    )
    assert "\n" not in said


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"MASTER_PORT": ""}, "MASTER_PORT is not set; a launcher, such as torchrun, sets it"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE: want a whole number, got 'two'"),
        ({"MASTER_PORT": "port"}, "MASTER_PORT: want a whole number, got 'port'"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT: want at most 65535, got 65536"),
        ({"RANK": "2"}, "RANK: want less than WORLD_SIZE, 2, got 2"),
    ],
)
def test_what_a_launcher_left_out_is_named(changed: dict[str, str], said: str) -> None:
    whole = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    assert AGENT not in whole
    with pytest.raises(ValueError, match=said):
        join_launched(whole | changed, wait_s=1.0)


def test_a_port_in_use_is_named_with_the_way_to_another() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        where = f"127.0.0.1:{listening.getsockname()[1]}"
        names = {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": where.split(":")[1],
        }
        with pytest.raises(RankError, match=f"cannot listen at {where}.*; set MASTER_PORT to a free port"):
            join_launched(names, wait_s=5.0)
