"""Process groups of gloo whose forming can be given up."""

import queue
import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo

from runtime.world.failure import RankError

BACKEND = "elastic_gloo"
LOOK_EVERY_S = 0.005


class Forming:
    """Makes this process's groups, each in a thread of its own that is left behind when forming is given up.

    gloo connects all ranks of a group before it returns, and while it does so it cannot be told that
    a peer has died: it waits for the dead one to call, or calls it again and again, until its
    timeout. There is no connection yet that could be severed. The thread that is left behind ends
    with that timeout; it touches nothing that later groups use.
    """

    def __init__(self) -> None:
        self._is_given_up = threading.Event()
        dist.Backend.register_backend(BACKEND, self._form, extended_api=True, devices="cpu")

    def give_up(self) -> None:
        """Whoever is forming a group, or will, fails at once, until `allow`."""
        self._is_given_up.set()

    def allow(self) -> None:
        """Groups may be formed again."""
        self._is_given_up.clear()

    def _form(self, options: Any, backend_options: object) -> ProcessGroupGloo:
        """The creator that torch calls for every group.

        Raises:
            RankError: forming was given up.
            RuntimeError: gloo's own, a peer that did not come in time.
        """
        del backend_options
        outcome: queue.SimpleQueue[Callable[[], ProcessGroupGloo]] = queue.SimpleQueue()
        threading.Thread(target=_connect, args=(options, outcome), name="forming", daemon=True).start()
        while not self._is_given_up.is_set():
            try:
                return outcome.get(timeout=LOOK_EVERY_S)()
            except queue.Empty:
                continue
        raise RankError(f"the forming of group {options.group_id} was given up")


def _connect(options: Any, outcome: "queue.SimpleQueue[Callable[[], ProcessGroupGloo]]") -> None:
    try:
        formed = ProcessGroupGloo(options.store, options.group_rank, options.group_size, options.timeout)
    except RuntimeError as error:
        failure = error

        def fail() -> ProcessGroupGloo:
            raise failure

        outcome.put(fail)
    else:
        outcome.put(lambda: formed)
