"""Iterations while processes are killed at random: no example is lost or seen twice."""

import os
import random
import signal
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from experiments.bench.preprocess_folder import ServerProcess, draw_photographs, end, start_server
from runtime.data.records import read_records
from runtime.preprocess.loader import ServedLoader, Subscription

BATCH_SIZE = 8
NUM_BATCHES = 5
SIDE_PX = 96
PRODUCERS = 2
WINDOW = 3
WAIT_S = 60.0
SEED = 0
PRODUCER_DIES, TRAINER_DIES = 0.05, 0.01  # chances per iteration
SERVER_DEATHS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Chaos:
    """The injected failures, and whether every finished iteration had its own examples, each once."""

    iterations: int
    examples: int
    producers_killed: int
    trainers_killed: int
    servers_killed: int
    exactly_once: bool


def survived(folder: Path, iterations: int, *, cores: set[int]) -> Chaos:
    """Run the iterations with failures; a trainer that dies repeats its unfinished iteration.

    The trainer's checkpoint is the number of iterations it has finished, its only memory.
    """
    draw_photographs(folder, BATCH_SIZE * NUM_BATCHES, SIDE_PX, seed=SEED)
    ids = [record.id for record in read_records(folder)]
    rng = random.Random(SEED)
    deaths = set(rng.sample(range(1, iterations), min(SERVER_DEATHS, iterations - 1)))
    killer = _Killer(folder, rng, cores)
    seen: Counter[int] = Counter()
    right = True
    finished = 0
    try:
        while finished < iterations:
            batch = killer.loader(finished).next()
            killer.maybe_kill_a_producer()
            if rng.random() < TRAINER_DIES:
                killer.kill_trainer()
                continue
            start = finished % NUM_BATCHES * BATCH_SIZE
            ids_of_batch = [example.id for example in batch.examples]
            right &= batch.position == finished and sorted(ids_of_batch) == ids[start : start + BATCH_SIZE]
            seen.update(ids_of_batch)
            finished += 1
            if finished in deaths:
                killer.kill_server()
    finally:
        killer.close()
    num_epochs, rest = divmod(iterations, NUM_BATCHES)
    expected = {example_id: num_epochs + (index < rest * BATCH_SIZE) for index, example_id in enumerate(ids)}
    return Chaos(
        iterations=iterations,
        examples=seen.total(),
        producers_killed=killer.producers_killed,
        trainers_killed=killer.trainers_killed,
        servers_killed=killer.servers_killed,
        exactly_once=right and seen == Counter(expected),
    )


class _Killer:
    def __init__(self, folder: Path, rng: random.Random, cores: set[int]) -> None:
        self._folder, self._rng, self._cores = folder, rng, cores
        self._server: ServerProcess = self._start(0)
        self._loader: ServedLoader | None = None
        self.producers_killed = self.trainers_killed = self.servers_killed = 0

    def loader(self, finished: int) -> ServedLoader:
        """The trainer's client; a restarted trainer continues after the last finished iteration."""
        if self._loader is None:
            subscription = Subscription(address=self._server.address, name="chaos", timeout_s=WAIT_S)
            self._loader = ServedLoader(subscription, start=finished)
        return self._loader

    def maybe_kill_a_producer(self) -> None:
        if self._loader is None or self._rng.random() >= PRODUCER_DIES:
            return
        pids = sorted(self._loader.status()["local"].values())
        with suppress(ProcessLookupError):  # it has been replaced in the meantime
            os.kill(self._rng.choice(pids), signal.SIGKILL)
            self.producers_killed += 1

    def kill_trainer(self) -> None:
        """Close its socket without telling the server."""
        assert self._loader is not None
        self._loader.abandon()
        self._loader = None
        self.trainers_killed += 1

    def kill_server(self) -> None:
        """Replace the server by another one on its port; the trainer is not told."""
        port = int(self._server.address.rsplit(":", 1)[1])
        self._server.kill()
        assert self._server.process.stdout is not None
        self._server.process.stdout.close()
        self._server = self._start(port)
        self.servers_killed += 1

    def close(self) -> None:
        if self._loader is not None:
            self._loader.close()
        end(self._server)

    def _start(self, port: int) -> ServerProcess:
        return start_server(
            self._folder, BATCH_SIZE, WINDOW, producers=PRODUCERS, port=port, cores=self._cores
        )
