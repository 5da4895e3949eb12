"""A TCP port for a test."""

import os
import socket
from contextlib import suppress


def free_port() -> int:
    """One that nobody listens on, and that no connection gets meanwhile: systems give those higher ones."""
    for port in range(20_000 + os.getpid() % 10_000, 32_000):
        with socket.socket() as bound, suppress(OSError):
            bound.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")
