"""One process of an elastic job, which keeps weights and moments while worlds change."""

import multiprocessing.connection as mpc
import os
import pickle
import queue
import signal
import threading
import time
import traceback
from collections.abc import Sequence
from typing import Any

import torch

from runtime.elastic.interruptible import BACKEND, InterruptibleGloo, open_sockets, sever
from runtime.elastic.job import ElasticJob, Reduction
from runtime.elastic.layerwise import last_backwards
from runtime.elastic.moves import CPU, Holdings, Move, carry_out, read_state, write_state
from runtime.elastic.orders import (
    Begin,
    Broken,
    Fetch,
    Fetched,
    Moment,
    Order,
    Paused,
    Ready,
    Reply,
    Save,
    Saved,
    TrainStep,
    Vote,
    moment_of,
)
from runtime.elastic.world import World, empty_layers, read_lowered
from runtime.world.allocator import keep_freed_memory
from runtime.world.communicators import build_mesh
from runtime.world.failure import RankError
from runtime.world.local_world import join_here
from runtime.world.mesh import Mesh
from workbench.plan.lru_cache import CLEAR_EVERY, clear_caches

SEVER_EVERY_S = 0.02
MOST_TEXT = 2000  # characters of an error or a trace that are reported
TORN = 3  # exit code: the update was interrupted, so this state is invalid


class _StoppedError(RankError):
    """The supervisor sent PAUSE instead of the expected COMMIT."""


class MemberProcess:
    """A process that executes the supervisor's orders and replies to them.

    A thread reads the orders, because a PAUSE must be received while the process waits for a lost rank: it
    interrupts the wait and severs all connections, so that the peers' waits and abandoned ones end too;
    repeatedly, since a connection may just be being opened.

    Args:
        moment: a shared integer, see `Moment`.
    """

    def __init__(self, job: ElasticJob, pipe: mpc.Connection, moment: Any) -> None:
        self._job, self._pipe, self._moment = job, pipe, moment
        self._spared = open_sockets()
        self._gloo = InterruptibleGloo()
        self._orders: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._pausing = threading.Event()  # set: no connection is severed
        self._held: Holdings = {}
        self._step: int | None = None
        self._world: World | None = None
        self._is_fresh = False  # the world's weights are not yet the kept ones

    def live(self) -> None:
        """Execute orders until the supervisor ends this process, or is gone itself."""
        threading.Thread(target=self._listen, name="orders", daemon=True).start()
        while True:
            order = self._orders.get()
            try:
                self._obey(order)
            except _StoppedError:
                self._pause()
            except Exception as error:
                if self._world is not None and not self._world.is_at(self._step):
                    os._exit(TORN)
                trace = "".join(traceback.format_exception(error))[-MOST_TEXT:]
                self._reply(Broken(text=_line_of(error), trace=trace))

    def _listen(self) -> None:
        while True:
            order = pickle.loads(self._pipe.recv_bytes())
            if order is Order.PAUSE:
                self._pausing.clear()
                self._gloo.interrupt()
            self._orders.put(order)
            while order is Order.PAUSE and not self._pausing.is_set():
                sever(self._spared)
                self._pausing.wait(SEVER_EVERY_S)

    def _obey(self, order: Any) -> None:
        match order:
            case Begin():
                self._begin(order)
            case Fetch():
                self._fetch(order)
            case TrainStep():
                self._train(order)
            case Save():
                self._reply(Saved(number=order.number, problem=self._save(order)))
            case Order.PAUSE:
                self._pause()
            case _:
                raise ValueError(f"an order out of turn: {order}")

    def _reply(self, reply: Reply) -> None:
        self._moment.value = Moment.IDLE
        self._pipe.send_bytes(pickle.dumps(reply))

    def _begin(self, order: Begin) -> None:
        if self._held and self._step != order.step:
            raise ValueError(f"this rank's state is of step {self._step}, the others' of step {order.step}")
        self._moment.value = Moment.GROUPS
        self._leave()
        start_s = time.perf_counter()
        lowered = read_lowered(order.plan)
        join_here(
            order.rendezvous,
            rank=order.rank,
            size=len(lowered.plan.ranks),
            wait_s=self._job.wait_s,
            backend=BACKEND,
        )
        clock = self._gloo.clock(self._job.wait_s)
        mesh = build_mesh(lowered, CPU, self._job.wait_s, lambda **fields: Mesh(**fields | {"clock": clock}))
        groups_s = time.perf_counter() - start_s
        self._moment.value = Moment.COPYING
        start_s = time.perf_counter()
        world = self._world = World(self._job, lowered.plan, mesh)
        empty = world.empty()
        if order.is_first:
            if order.start is not None:
                read_state(order.start, empty)
            self._held = empty
        num_bytes = self._receive(order.moves, mesh, empty)
        self._step, self._is_fresh = order.step, True
        copying_s = time.perf_counter() - start_s
        self._reply(Ready(groups_s=groups_s, copying_s=copying_s, num_bytes=num_bytes))

    def _fetch(self, order: Fetch) -> None:
        assert self._world is not None, "the supervisor knows who is in a world"
        self._moment.value = Moment.COPYING
        start_s = time.perf_counter()
        mesh = self._world.mesh
        arriving = dict.fromkeys(move.owner for move in order.moves if move.destination_rank == mesh.rank)
        empty = empty_layers(self._job, read_lowered(order.plan).plan, mesh.rank, arriving)
        num_bytes = self._receive(order.moves, mesh, empty)
        self._reply(Fetched(copying_s=time.perf_counter() - start_s, num_bytes=num_bytes))

    def _receive(self, moves: Sequence[Move], mesh: Mesh, empty: Holdings) -> int:
        arrived, num_bytes = carry_out(moves, mesh.rank, self._held, empty, clock=mesh.clock)
        self._held.update(arrived)
        return num_bytes

    def _train(self, order: TrainStep) -> None:
        world = self._world
        if world is None or self._step != order.step:
            raise ValueError(f"step {order.step} was ordered after {self._step} steps")
        if self._is_fresh:
            self._held, self._is_fresh = world.take_over(self._held), False
        if order.step % CLEAR_EVERY == 0:
            clear_caches()
        lowered = read_lowered(order.plan)
        program = lowered.plan.program.get(world.mesh.rank, ())

        is_within = self._job.reduction is Reduction.LAYERWISE and not self._job.is_sharded
        reducing = last_backwards(program) if is_within else {}

        def progress(position: int) -> None:
            moment = Moment.REDUCING if position in reducing else moment_of(program[position].kind)
            self._moment.value = moment

        def vote(loss: float) -> None:
            self._reply(Vote(step=order.step, loss=loss))
            self._moment.value = Moment.VOTED
            answer = self._orders.get()
            if answer is not Order.COMMIT:
                raise _StoppedError(f"rank {world.mesh.rank} was stopped before its update")
            self._step = order.step + 1

        with torch.enable_grad():
            world.run_step(lowered, self._held, order.step, progress=progress, vote=vote)
        self._moment.value = Moment.IDLE

    def _save(self, order: Save) -> str | None:
        """Write a save; returns why it failed, None if it did not."""
        try:
            write_state(order.folder, {owner: self._held[owner] for owner in order.owners})
        except Exception as error:
            return _line_of(error)
        return None

    def _pause(self) -> None:
        """Drop everything but weights and moments."""
        self._leave()
        self._pausing.set()
        self._gloo.allow()
        self._reply(Paused(step=self._step if self._held else None))

    def _leave(self) -> None:
        if self._world is not None:
            self._world.close()
            self._world = None
        self._gloo.leave_world()


def _line_of(error: Exception) -> str:
    """An error's message, in one line that fits a pipe."""
    return (" ".join(str(error).split()) or type(error).__name__)[:MOST_TEXT]


def live(job: ElasticJob, pipe: mpc.Connection, moment: Any) -> None:
    """Entry point of a forked process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor decides when to stop
    torch.set_num_threads(1)
    keep_freed_memory()
    MemberProcess(job, pipe, moment).live()
