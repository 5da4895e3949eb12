"""Core seconds of one example where producer and server share a core: its decode, and the whole hand-over."""

import os
import time
from contextlib import closing
from pathlib import Path

import numpy as np

from experiments.bench.preprocess_folder import on_cores, taking_batches
from runtime.data.records import read_records
from runtime.preprocess.connection import Connection, Message
from runtime.preprocess.example import packed
from runtime.preprocess.images import Rule
from runtime.preprocess.producer import answer_to
from runtime.preprocess.server import Server, ServerSettings

PASSES = 5  # that count, after one with cold caches and before anybody takes batches
WAIT_S = 60.0
TRAVEL_S = 0.005  # that a task is waited for before the server looks for what else there is


def produce_s(folder: Path, rule: Rule, *, batch_size: int, window: int, core: int) -> tuple[float, ...]:
    """Return [examples] core seconds to produce each example of whole batches: the median of five passes.

    This process is alternately the producer and the server on that core; another one, elsewhere, is the
    trainer, which takes each batch at once. Counted is this process's core time from one task to the next;
    what other processes use of the core is not.

    Raises:
        ValueError: the next task does not come within a minute.
    """
    num, elsewhere = len(read_records(folder)), os.sched_getaffinity(0)
    settings = ServerSettings(folder=folder, rule=rule, batch_size=batch_size, window=window, num_producers=0)
    with (
        on_cores({core}),
        closing(Server(settings)) as server,
        closing(Connection(server.address, None)) as producer,
    ):
        producer.send(packed("ready"))
        lent_s = []
        with taking_batches(server.address, cores=elsewhere):
            for _ in range((1 + PASSES) * num + 1):
                task = _next_task(server, producer)
                lent_s.append(time.process_time())
                producer.send(*answer_to(task, folder))
    passes_s = np.diff(lent_s)[num:].reshape(PASSES, num)
    return tuple(float(seconds) for seconds in np.median(passes_s, axis=0))


def _next_task(server: Server, producer: Connection) -> Message:
    end_s = time.monotonic() + WAIT_S
    while time.monotonic() < end_s:
        while (message := producer.receive(TRAVEL_S)) is not None:
            if message.kind == "task":
                return message
        server.turn()
    raise ValueError(f"server {server.address}: no task within {WAIT_S:g} s")
