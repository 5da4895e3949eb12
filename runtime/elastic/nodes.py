"""The processes of all nodes on this machine: started, told, heard, and ended node by node."""

import gc
import multiprocessing
import multiprocessing.connection as mpc
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import torch

from runtime.elastic.job import ElasticJob, Member
from runtime.elastic.member import live
from runtime.elastic.moves import Owner
from runtime.elastic.orders import Broken, Moment, Order, Paused, Save, Saved, Told
from workbench.stopped import LOOK_EVERY_S, StopWatch
from workbench.supervised import Parent, as_parent, end_with
from workbench.termination import ended_by_default, forking

JOIN_S = 5.0
STDERR = 2


@dataclass(slots=True)
class _Process:
    process: ForkProcess
    pipe: mpc.Connection
    moment: Any


@dataclass(slots=True)
class Heard:
    """What came until all had answered, one was in trouble, or time was up.

    Args:
        answers: of the kind that was waited for.
        broken: failures that processes told of; the cause may be another process.
        gone: processes whose connection broke.
        silent: those that have said nothing.
    """

    answers: dict[Member, Told] = field(default_factory=dict)
    broken: dict[Member, Broken] = field(default_factory=dict)
    gone: list[Member] = field(default_factory=list)
    silent: list[Member] = field(default_factory=list)

    @property
    def is_trouble(self) -> bool:
        return bool(self.broken or self.gone or self.silent)

    def describe(self) -> str:
        """The first cause in one line."""
        if self.gone:
            return f"{self.gone[0]} is gone"
        if self.broken:
            member, told = next(iter(self.broken.items()))
            return f"{member}: {told.text}"
        return f"no answer from {', '.join(map(str, self.silent))}"


class Nodes:
    """A node is all its processes: when one of them ends, the others are ended too.

    Processes are forked from this one, which has imported torch already. Every wait is bounded,
    and no message is long enough to block its sender.

    Args:
        logs: folder for what processes write to standard error: gloo and torch report every
            connection that breaks, and here connections are broken on purpose.
    """

    def __init__(self, job: ElasticJob, logs: Path) -> None:
        self._job, self._logs = job, logs
        self._context = multiprocessing.get_context("fork")
        self._processes: dict[Member, _Process] = {}
        self._saves = count(1)
        torch.set_num_threads(1)  # a forked child must not inherit a thread pool that it does not have

    def start(self, node: str) -> None:
        """Start all processes of a node.

        Raises:
            ValueError: it is there already.
        """
        if any(member.node == node for member in self._processes):
            raise ValueError(f"node {node!r} is there already")
        for slot in range(self._job.ranks_per_node):
            self._processes[Member(node=node, slot=slot)] = self._fork(f"{node}.{slot}")

    def process_ids(self, node: str) -> tuple[int, ...]:
        """Of a node, in the order of its ranks; empty when it is gone."""
        return tuple(
            held.process.pid or 0 for member, held in list(self._processes.items()) if member.node == node
        )

    def moments(self, node: str) -> tuple[Moment, ...]:
        """What the processes of a node are doing."""
        return tuple(
            Moment(held.moment.value) for member, held in list(self._processes.items()) if member.node == node
        )

    def send(self, member: Member, order: object) -> None:
        """Returns at once; a process that is gone is noticed when it is waited for."""
        held = self._processes.get(member)
        if held is not None:
            with suppress(OSError):
                held.pipe.send_bytes(pickle.dumps(order))

    def gather(self, members: Iterable[Member], kind: type[Told], within_s: float) -> Heard:
        """Wait for one answer of a kind from each, and no longer when one is broken or gone.

        What else comes is of an earlier order, and dropped.
        """
        return self._gather(
            members,
            lambda told: isinstance(told, kind),
            within_s,
            lambda heard: bool(heard.broken or heard.gone),
        )

    def pause(self, members: Iterable[Member], within_s: float) -> Heard:
        """Stop all of them; failures that they told of before do not count."""
        members = list(members)
        for member in members:
            self.send(member, Order.PAUSE)
        return self._gather(members, lambda told: isinstance(told, Paused), within_s, lambda heard: False)

    def save(self, parts: Mapping[Member, tuple[Path, tuple[Owner, ...]]], within_s: float) -> Heard:
        """Have each write layers to a folder, and wait for all of them, whatever becomes of one.

        Who has answered, or is gone, writes no more. An answer to an earlier save is dropped.
        """
        number = next(self._saves)
        for member, (folder, owners) in parts.items():
            self.send(member, Save(number=number, folder=folder, owners=owners))
        return self._gather(
            parts,
            lambda told: isinstance(told, Saved) and told.number == number,
            within_s,
            lambda heard: False,
        )

    def _gather(
        self,
        members: Iterable[Member],
        is_answer: Callable[[Told], bool],
        within_s: float,
        is_over: Callable[[Heard], bool],
    ) -> Heard:
        heard, deadline = Heard(), time.monotonic() + within_s
        waiting: dict[mpc.Connection, Member] = {}
        for member in members:
            held = self._processes.get(member)
            if held is None:
                heard.gone.append(member)
            else:
                waiting[held.pipe] = member
        watch = StopWatch()
        while waiting and not is_over(heard):
            left_s = deadline - time.monotonic()
            ready = mpc.wait(list(waiting), timeout=min(max(0.0, left_s), LOOK_EVERY_S))
            if not ready and left_s <= 0:
                break
            self._end_stopped(watch, waiting.values())
            for pipe in ready:
                assert isinstance(pipe, mpc.Connection)
                self._hear(pipe, waiting, is_answer, heard)
        if not is_over(heard):
            heard.silent = list(waiting.values())
        return heard

    def _end_stopped(self, watch: StopWatch, members: Iterable[Member]) -> None:
        """Kill those that have been stopped for long: their connections break, as those of any that die."""
        by_id = {self._processes[member].process.pid or 0: member for member in members}
        for pid in watch.stopped(by_id):
            self._processes[by_id[pid]].process.kill()
            sys.stderr.write(
                f"{by_id[pid]}, process {pid}: stopped by a signal and not continued, so killed\n"
            )

    def _hear(
        self,
        pipe: mpc.Connection,
        waiting: dict[mpc.Connection, Member],
        is_answer: Callable[[Told], bool],
        heard: Heard,
    ) -> None:
        try:
            told = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            heard.gone.append(waiting.pop(pipe))
            return
        if is_answer(told):
            heard.answers[waiting.pop(pipe)] = told
        elif isinstance(told, Broken):
            heard.broken[waiting[pipe]] = told

    def dead(self, nodes: Iterable[str]) -> tuple[str, ...]:
        """Those of the nodes of which a process has ended."""
        alive = {member.node for member in self._processes} - {
            member.node for member, held in self._processes.items() if not held.process.is_alive()
        }
        return tuple(node for node in nodes if node not in alive)

    def end(self, nodes: Iterable[str]) -> None:
        """Kill what is left of nodes."""
        gone = set(nodes)
        ended = [member for member in self._processes if member.node in gone]
        for member in ended:
            self._processes[member].process.kill()
        for member in ended:
            held = self._processes.pop(member)
            held.process.join(JOIN_S)
            if held.process.is_alive():
                sys.stderr.write(f"{member}, process {held.process.pid}: killed, and does not end\n")
            held.pipe.close()

    def close(self) -> None:
        """End everything."""
        self.end({member.node for member in self._processes})

    def _fork(self, name: str) -> _Process:
        here, there = self._context.Pipe()
        moment = self._context.RawValue("i", Moment.IDLE)
        child = self._context.Process(
            target=_serve,
            args=(self._job, there, moment, self._logs / f"{name}.log", as_parent()),
            name=name,
            daemon=True,
        )
        with forking():
            child.start()
        there.close()
        return _Process(child, here, moment)


def _serve(job: ElasticJob, pipe: mpc.Connection, moment: Any, log: Path, parent: Parent) -> None:
    end_with(parent)
    with log.open("wb") as file:
        os.dup2(file.fileno(), STDERR)
    gc.freeze()  # what the parent had imported is not looked through again by every collection
    ended_by_default()
    live(job, pipe, moment)
