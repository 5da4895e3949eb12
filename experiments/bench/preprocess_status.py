"""Latency of a preprocessing server's status while other peers send noise: median and 99th percentile.

`python -m experiments.bench.preprocess_status --json`. The server is a thread of this process, so it shares
its time with the noise.
"""

import json
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import zmq

from experiments.harness.command import Found, bench
from runtime.data.scenes import make
from runtime.preprocess.images import SquareRule
from runtime.preprocess.loader import ServedLoader, Subscription
from runtime.preprocess.server import MOST_BAD, Server, ServerSettings

NUM = 300  # questions per kind of noise
PER_QUESTION = 30  # messages of noise
TIMEOUT_S = 30.0
_WIDE = {"id": 0, "texts": [], "images": [[1, 1, 1, 1]] * 4000}
NOISES: Mapping[str, tuple[bytes, ...]] = {
    "nothing": (),
    "garbage": (b"x" * 10_000,),
    "long headers": (json.dumps({"kind": "done", "task": [0, 0], "example": _WIDE}).encode(),),
    "long frames": (b'{"kind":"done","task":[0,0],"example":{}}', bytes(2**20)),
}


def status_waits(address: str, noise: tuple[bytes, ...], *, num: int) -> list[float]:
    """Seconds until each answer, with noise sent before every question; noisy peers reconnect."""
    waits_s = []
    subscription = Subscription(address=address, timeout_s=TIMEOUT_S)
    with closing(ServedLoader(subscription)) as loader, zmq.Context() as context:
        for _ in range(num):
            sockets = shout(context, address, noise)
            start_s = time.monotonic()
            loader.status()
            waits_s.append(time.monotonic() - start_s)
            for socket in sockets:
                socket.close(linger=0)
    return waits_s


def shout(
    context: "zmq.Context[zmq.Socket[bytes]]", address: str, noise: tuple[bytes, ...]
) -> list["zmq.Socket[bytes]"]:
    """Send noise from several peers, each with fewer messages than would disconnect it."""
    sockets = []
    for _ in range(-(-PER_QUESTION // MOST_BAD) if noise else 0):
        socket = context.socket(zmq.DEALER)
        socket.connect(address)
        for _ in range(MOST_BAD - 1):
            socket.send_multipart(noise)
        sockets.append(socket)
    return sockets


def measured(num: int) -> dict[str, dict[str, float]]:
    """Median and 99th percentile in seconds, by kind of noise."""
    quantiles = {}
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        make(data, num_samples=8, seed=0, kinds=("image",))
        rule = SquareRule(image_px=32, patch_px=8)
        server = Server(ServerSettings(folder=data, rule=rule, batch_size=4, num_producers=0))
        stop = threading.Event()
        thread = threading.Thread(target=server.serve, args=(stop.is_set,))
        thread.start()
        try:
            for name, noise in NOISES.items():
                waits_s = sorted(status_waits(server.address, noise, num=num))
                quantiles[name] = {"p50_s": waits_s[num // 2], "p99_s": waits_s[num * 99 // 100]}
        finally:
            stop.set()
            thread.join()
    return quantiles


@bench(count="questions per kind of noise")
def run(count: int = NUM) -> Found:
    """Print a line per kind of noise."""
    quantiles = measured(count)
    for name, times in quantiles.items():
        print(f"{name:>14}: p50 {1e3 * times['p50_s']:.1f} ms, p99 {1e3 * times['p99_s']:.1f} ms")
    return Found(quantiles)
