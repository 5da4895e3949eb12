"""Simulates preprocessing beside training: CPU nodes, a bounded stream, and stalls of the trainer."""

from collections.abc import Generator
from dataclasses import dataclass
from math import isfinite

from simpy.core import Environment
from simpy.events import Event
from simpy.resources.store import Store

from sim.cores import SharedCores
from workbench.float_sum import float_sum

Flow = Generator[Event, object, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuNode:
    """A host of `num_producers` producer processes, which share `cores` cores."""

    cores: int
    num_producers: int

    def __post_init__(self) -> None:
        if min(self.cores, self.num_producers) < 1:
            raise ValueError(
                f"CPU node: want >= 1 core and >= 1 producer, got {self.cores} and {self.num_producers}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Preprocessing:
    """A preprocessing setup: the work, its producers and the trainer.

    Args:
        produce_s: [batches][examples] seconds of one example on a core of its own: decoding it, and the
            overhead of handing it over.
        step_s: seconds of a training step, once its batch is there.
        window: batches prepared ahead, including the one that the trainer works on.
        nodes: hosts of the producers.
        travel_s: from a producer to the server, per example; it keeps the producer waiting.
        handover_s: from the last example to the trainer, per batch, in the background.
        unpack_s: the trainer's own work on a batch that has arrived.
    """

    produce_s: tuple[tuple[float, ...], ...]
    step_s: float
    window: int
    nodes: tuple[CpuNode, ...]
    travel_s: float = 0.0
    handover_s: float = 0.0
    unpack_s: float = 0.0

    def __post_init__(self) -> None:
        check_seconds(self.produce_s, self.step_s, self.travel_s, self.handover_s, self.unpack_s)
        if self.window < 1 or not self.nodes:
            raise ValueError(f"want a window >= 1 and >= 1 CPU node, got {self.window} and {self.nodes}")


def check_seconds(batches_s: tuple[tuple[float, ...], ...], *others_s: float) -> None:
    """Raise ValueError where there are no batches, or times that are negative or not finite."""
    times_s = [*others_s, *(example_s for batch in batches_s for example_s in batch)]
    if not batches_s or any(not isfinite(time_s) or time_s < 0 for time_s in times_s):
        raise ValueError("preprocessing: want >= 1 batch and times >= 0 s that are finite")


def disaggregated_stalls_s(setup: Preprocessing) -> tuple[float, ...]:
    """[batches] seconds that the trainer waits for each batch, with producers on nodes of their own.

    Examples are taken in the order of the stream. Batch p opens when the trainer turns to batch
    p - window + 1, so no more than `window` batches exist at a time. With several
    producers, the last examples of a batch and the first of the next are in work at the same time.

    Complexity: O(E log P) for E examples and P producers.
    """
    env = Environment()
    stream = _Stream(env, setup)
    trainer = env.process(_train(env, setup, stream))
    for node in setup.nodes:
        cores: SharedCores[Event] = SharedCores(env, node.cores, _end)
        for _ in range(node.num_producers):
            env.process(_produce(env, setup, stream, cores))
    env.run(until=trainer)
    return tuple(stream.stalls_s)


def colocated_stalls_s(
    decode_s: tuple[tuple[float, ...], ...], *, cores: int = 1, worker_share: float = 1.0
) -> tuple[float, ...]:
    """[batches] seconds that a trainer needs to decode its own batches on `cores` of its cores.

    Args:
        worker_share: fraction of those cores' time that training leaves for decoding.
    """
    check_seconds(decode_s)
    if cores < 1 or not 0 < worker_share <= 1:
        raise ValueError(f"want >= 1 core and a share in (0, 1], got {cores} and {worker_share}")
    return tuple(max((float_sum(batch) / cores, *batch)) / worker_share for batch in decode_s)


class _Stream:
    """The examples that wait for a producer, and which batches are complete."""

    def __init__(self, env: Environment, setup: Preprocessing) -> None:
        self.waiting = Store(env)
        self.arrived = [env.event() for _ in setup.produce_s]
        self.left = [len(batch) for batch in setup.produce_s]
        self.stalls_s: list[float] = []


def _train(env: Environment, setup: Preprocessing, stream: _Stream) -> Flow:
    opened = 0
    for position in range(len(setup.produce_s)):
        while opened < min(position + setup.window, len(setup.produce_s)):
            for produce_s in setup.produce_s[opened]:
                stream.waiting.put((opened, produce_s))
            if not setup.produce_s[opened]:
                stream.arrived[opened].succeed()
            opened += 1
        start_s = env.now
        yield stream.arrived[position]
        yield env.timeout(setup.unpack_s)
        stream.stalls_s.append(env.now - start_s)
        yield env.timeout(setup.step_s)


def _produce(env: Environment, setup: Preprocessing, stream: _Stream, cores: SharedCores[Event]) -> Flow:
    while True:
        task = yield stream.waiting.get()
        assert isinstance(task, tuple), "the trainer puts pairs"
        position, produce_s = task
        ended = env.event()
        cores.work(produce_s, ended)
        yield ended
        yield env.timeout(setup.travel_s)
        stream.left[position] -= 1
        if not stream.left[position]:
            env.process(_hand_over(env, setup, stream.arrived[position]))


def _end(work: Event) -> None:
    work.succeed()


def _hand_over(env: Environment, setup: Preprocessing, arrived: Event) -> Flow:
    yield env.timeout(setup.handover_s)
    arrived.succeed()
