"""Simulates preprocessing beside training: CPU nodes with cores, a bounded stream, a trainer that stalls."""

from collections.abc import Generator
from dataclasses import dataclass
from math import isfinite

from simpy.core import Environment
from simpy.events import Event
from simpy.resources.store import Store

from sim.cores import SharedCores

Flow = Generator[Event, object, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuNode:
    """A host of producers. `num_producers` processes share `cores` cores."""

    cores: int
    num_producers: int

    def __post_init__(self) -> None:
        if min(self.cores, self.num_producers) < 1:
            raise ValueError(
                f"CPU node: want >= 1 core and >= 1 producer, got {self.cores} and {self.num_producers}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Preprocessing:
    """What is prepared, by whom, and for how fast a trainer.

    Args:
        produce_s: [batches][examples] seconds of one example on a core of its own: its decode, and what
            comes with handing it over.
        step_s: of a training step, once its batch is there.
        window: batches prepared ahead, the one that the trainer works on included.
        nodes: where producers run.
        travel_s: from a producer to the server, per example; it keeps the producer waiting.
        handover_s: from the last example to the trainer, per batch, in the background.
        unpack_s: the trainer's own work for a batch that is there.
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
    """ValueError where there are no batches, or times that are none."""
    times_s = [*others_s, *(each for batch in batches_s for each in batch)]
    if not batches_s or any(not isfinite(time_s) or time_s < 0 for time_s in times_s):
        raise ValueError("preprocessing: want >= 1 batch and times >= 0 s that are finite")


def disaggregated_stalls_s(given: Preprocessing) -> tuple[float, ...]:
    """[batches] seconds that the trainer waits for each batch, producers being apart from it.

    Examples are taken in the order of the stream. Batch p opens when the trainer turns to batch
    p - window + 1, so no more than `window` batches exist at a time. The last examples of a batch and the
    first of the next are in work at once where there are several producers.

    Complexity: O(E log P) for E examples and P producers.
    """
    env = Environment()
    stream = _Stream(env, given)
    trainer = env.process(_train(env, given, stream))
    for node in given.nodes:
        cores: SharedCores[Event] = SharedCores(env, node.cores, _end)
        for _ in range(node.num_producers):
            env.process(_produce(env, given, stream, cores))
    env.run(until=trainer)
    return tuple(stream.stalls_s)


def colocated_stalls_s(
    decode_s: tuple[tuple[float, ...], ...], *, cores: int = 1, worker_share: float = 1.0
) -> tuple[float, ...]:
    """[batches] seconds that a trainer takes to decode its own batches on `cores` of its cores.

    Args:
        worker_share: of those cores' time that training leaves for it.
    """
    check_seconds(decode_s)
    if cores < 1 or not 0 < worker_share <= 1:
        raise ValueError(f"want >= 1 core and a share in (0, 1], got {cores} and {worker_share}")
    return tuple(max((sum(batch) / cores, *batch)) / worker_share for batch in decode_s)


class _Stream:
    """Which examples wait for a producer, and which batches are whole."""

    def __init__(self, env: Environment, given: Preprocessing) -> None:
        self.waiting = Store(env)
        self.here = [env.event() for _ in given.produce_s]
        self.left = [len(batch) for batch in given.produce_s]
        self.stalls_s: list[float] = []


def _train(env: Environment, given: Preprocessing, stream: _Stream) -> Flow:
    opened = 0
    for position in range(len(given.produce_s)):
        while opened < min(position + given.window, len(given.produce_s)):
            for produce_s in given.produce_s[opened]:
                stream.waiting.put((opened, produce_s))
            if not given.produce_s[opened]:
                stream.here[opened].succeed()
            opened += 1
        start_s = env.now
        yield stream.here[position]
        yield env.timeout(given.unpack_s)
        stream.stalls_s.append(env.now - start_s)
        yield env.timeout(given.step_s)


def _produce(env: Environment, given: Preprocessing, stream: _Stream, cores: SharedCores[Event]) -> Flow:
    while True:
        task = yield stream.waiting.get()
        assert isinstance(task, tuple), "the trainer puts pairs"
        position, produce_s = task
        ended = env.event()
        cores.work(produce_s, ended)
        yield ended
        yield env.timeout(given.travel_s)
        stream.left[position] -= 1
        if not stream.left[position]:
            env.process(_hand_over(env, given, stream.here[position]))


def _end(work: Event) -> None:
    work.succeed()


def _hand_over(env: Environment, given: Preprocessing, here: Event) -> Flow:
    yield env.timeout(given.handover_s)
    here.succeed()
