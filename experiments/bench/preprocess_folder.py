"""Photographs drawn from a seed; a preprocessing server and its trainer as separate processes."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from runtime.data.records import INDEX

GRAIN_PX = 16
QUALITY = 90
TEXT = "What is to be seen in this picture?"
END_S = 20.0
MANY = 10**6  # batches: more than anybody waits for


def draw_photographs(folder: Path, number: int, side_px: int, *, seed: int) -> None:
    """Write one JPEG and one text per example: large soft shapes under fine grain, like photographs."""
    folder.mkdir()
    rng = np.random.default_rng(seed)
    lines = []
    for index in range(number):
        coarse = rng.integers(0, 256, (side_px // GRAIN_PX, side_px // GRAIN_PX, 3), dtype=np.uint8)
        soft = Image.fromarray(coarse).resize((side_px, side_px), Image.Resampling.BICUBIC)
        grain = rng.normal(0.0, 6.0, (side_px, side_px, 1))
        pixels = np.clip(np.asarray(soft, dtype=np.float32) + grain, 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{index}.jpg", quality=QUALITY)
        lines.append(f'{{"id": {index}, "segments": [{{"image": "{index}.jpg"}}, {{"text": "{TEXT}"}}]}}\n')
    (folder / INDEX).write_text("".join(lines), encoding="utf-8")


@dataclass(frozen=True, slots=True)
class ServerProcess:
    """A running server: its address and process."""

    address: str
    process: subprocess.Popen[str]

    def kill(self) -> None:
        """Kill it without letting it close its connections."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(END_S)


def start_server(
    folder: Path, batch_size: int, window: int, *, producers: int = 1, port: int = 0, cores: set[int]
) -> ServerProcess:
    """Start `workbench preprocess serve` with the server and its producers pinned to the cores."""
    sizes = {"max-pixels": 2**22, "batch-size": batch_size, "window": window}
    numbers = sizes | {"producers": producers, "port": port}
    options = [f"--{name}={value}" for name, value in numbers.items()]
    process = _started(["serve", str(folder), *options, "--open"], cores)
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        process.stdout.close()
        raise ValueError(f"server of {folder} ended with exit code {process.wait(END_S)}")
    return ServerProcess(line.split()[-1], process)


def _started(arguments: list[str], cores: set[int]) -> "subprocess.Popen[str]":
    """Start a command of `workbench preprocess` pinned to the cores."""
    command = [sys.executable, "-c", "from workbench.cli.app import main; main()", "preprocess", *arguments]
    with on_cores(cores):
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@contextmanager
def on_cores(cores: set[int]) -> Iterator[None]:
    """Pin this process and its children to the cores within the block."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def taking_batches(address: str, *, cores: set[int]) -> Iterator[None]:
    """Run a trainer that computes nothing, pinned to the cores, until the end of the block."""
    with _started(["run", address, f"--batches={MANY}", "--json"], cores) as process:
        try:
            yield
        finally:
            process.kill()


@contextmanager
def server_process(folder: Path, batch_size: int, window: int, *, cores: set[int]) -> Iterator[ServerProcess]:
    """Run a server until the end of the block."""
    server = start_server(folder, batch_size, window, cores=cores)
    try:
        yield server
    finally:
        end(server)


def end(server: ServerProcess) -> None:
    """Ask the process to end, and close its pipe."""
    server.process.terminate()
    try:
        server.process.wait(END_S)
    finally:
        assert server.process.stdout is not None
        server.process.stdout.close()
