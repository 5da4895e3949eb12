"""A TCP port for a test."""

import os
import socket
from contextlib import suppress

APART = 1009  # prime: processes that follow each other, times this, meet after thousands


def free_port() -> int:
    """One that nobody listens on, and that no connection gets meanwhile: systems give those higher ones.

    Processes that started one after the other, as those that share out the tests, begin far apart.
    """
    for port in range(20_000 + os.getpid() * APART % 10_000, 32_000):
        with socket.socket() as bound, suppress(OSError):
            bound.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")
