"""Iterations under a hail of kills: whoever dies, no example is lost or seen twice."""

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
PRODUCER_DIES, TRAINER_DIES = 0.05, 0.01  # chances per iteration
SERVER_DEATHS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Chaos:
    """What happened, and whether every finished iteration had its own examples, each once."""

    iterations: int
    examples: int
    producers_killed: int
    trainers_killed: int
    servers_killed: int
    exactly_once: bool


def survived(folder: Path, iterations: int, *, seed: int, cores: set[int]) -> Chaos:
    """Run so many iterations; what a trainer had not finished when it died, the next one does again.

    The trainer's checkpoint is the number of iterations it has finished, its only memory.
    """
    draw_photographs(folder, BATCH_SIZE * NUM_BATCHES, SIDE_PX, seed=seed)
    ids = [record.id for record in read_records(folder)]
    rng = random.Random(seed)
    deaths = set(rng.sample(range(1, iterations), min(SERVER_DEATHS, iterations - 1)))
    hail = _Hail(folder, rng, cores)
    seen: Counter[int] = Counter()
    right = True
    finished = 0
    try:
        while finished < iterations:
            batch = hail.loader(finished).next()
            hail.maybe_kill_a_producer()
            if rng.random() < TRAINER_DIES:
                hail.kill_trainer()
                continue
            start = finished % NUM_BATCHES * BATCH_SIZE
            found = [example.id for example in batch.examples]
            right &= batch.position == finished and sorted(found) == ids[start : start + BATCH_SIZE]
            seen.update(found)
            finished += 1
            if finished in deaths:
                hail.kill_server()
    finally:
        hail.close()
    whole, rest = divmod(iterations, NUM_BATCHES)
    expected = {each: whole + (index < rest * BATCH_SIZE) for index, each in enumerate(ids)}
    return Chaos(
        iterations=iterations,
        examples=seen.total(),
        producers_killed=hail.producers_killed,
        trainers_killed=hail.trainers_killed,
        servers_killed=hail.servers_killed,
        exactly_once=right and seen == Counter(expected),
    )


class _Hail:
    def __init__(self, folder: Path, rng: random.Random, cores: set[int]) -> None:
        self._folder, self._rng, self._cores = folder, rng, cores
        self._server: ServerProcess = self._start(0)
        self._loader: ServedLoader | None = None
        self.producers_killed = self.trainers_killed = self.servers_killed = 0

    def loader(self, finished: int) -> ServedLoader:
        """The trainer's end; a new trainer starts after what was finished."""
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
        """Its socket vanishes without a word to the server."""
        assert self._loader is not None
        self._loader.abandon()
        self._loader = None
        self.trainers_killed += 1

    def kill_server(self) -> None:
        """Another one takes its port; the trainer is not told."""
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
