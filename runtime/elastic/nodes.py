"""The processes of all nodes on this machine, as the supervisor starts, orders, awaits and ends them."""

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
from runtime.elastic.orders import Broken, Moment, Order, Paused, Reply, Save, Saved
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
class Replies:
    """Replies that arrived until all had answered, one had failed, or time was up.

    Args:
        answers: of the expected kind.
        broken: failures that processes reported; the cause may be another process.
        gone: processes whose connection broke.
        silent: processes that have not replied.
    """

    answers: dict[Member, Reply] = field(default_factory=dict)
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
            member, failure = next(iter(self.broken.items()))
            return f"{member}: {failure.text}"
        return f"no answer from {', '.join(map(str, self.silent))}"


class Nodes:
    """All nodes. A node is all its processes: when one of them ends, the others are ended too.

    Processes are forked from this one, which has already imported torch. Every wait is bounded, and no
    message is long enough to block its sender.

    Args:
        logs: folder for the processes' standard error: gloo and torch report every broken connection, and
            here connections are broken on purpose.
    """

    def __init__(self, job: ElasticJob, logs: Path) -> None:
        self._job, self._logs = job, logs
        self._context = multiprocessing.get_context("fork")
        self._processes: dict[Member, _Process] = {}
        self._doomed: dict[str, type[Reply]] = {}
        self._unheard: set[str] = set()
        self._saves = count(1)
        torch.set_num_threads(1)  # a forked child would inherit a thread pool without its threads

    def start(self, node: str) -> None:
        """Start all processes of a node.

        Raises:
            ValueError: the node already exists.
        """
        if any(member.node == node for member in self._processes):
            raise ValueError(f"node {node!r} is there already")
        for slot in range(self._job.ranks_per_node):
            self._processes[Member(node=node, slot=slot)] = self._fork(f"{node}.{slot}")

    def process_ids(self, node: str) -> tuple[int, ...]:
        """Process ids of a node, in the order of its ranks; empty when it is gone."""
        return tuple(
            process.process.pid or 0
            for member, process in list(self._processes.items())
            if member.node == node
        )

    def moments(self, node: str) -> tuple[Moment, ...]:
        """Current activities of the processes of a node."""
        return tuple(
            Moment(process.moment.value)
            for member, process in list(self._processes.items())
            if member.node == node
        )

    def doom(self, nodes: Iterable[str], kind: type[Reply]) -> None:
        """Take no more replies of a kind from nodes that are about to be killed.

        What these replies would complete is then not complete before the kill, however late it comes.
        """
        self._doomed |= dict.fromkeys(nodes, kind)

    def spare(self) -> None:
        """Take all replies again."""
        self._doomed.clear()
        self._unheard.clear()

    def is_unheard(self, node: str) -> bool:
        """Whether a doomed node has sent a reply that was not taken."""
        return node in self._unheard

    def send(self, member: Member, order: object) -> None:
        """Send an order without waiting; a lost process is detected when its reply is awaited."""
        process = self._processes.get(member)
        if process is not None:
            with suppress(OSError):
                process.pipe.send_bytes(pickle.dumps(order))

    def gather(self, members: Iterable[Member], kind: type[Reply], within_s: float) -> Replies:
        """Wait for a reply of a kind from each member, until one is broken or gone.

        Replies to earlier orders are dropped.
        """
        return self._gather(
            members,
            lambda reply: isinstance(reply, kind),
            within_s,
            lambda replies: bool(replies.broken or replies.gone),
        )

    def pause(self, members: Iterable[Member], within_s: float) -> Replies:
        """Pause all members; failures that they reported before are ignored."""
        members = list(members)
        for member in members:
            self.send(member, Order.PAUSE)
        return self._gather(members, lambda reply: isinstance(reply, Paused), within_s, lambda replies: False)

    def save(self, parts: Mapping[Member, tuple[Path, tuple[Owner, ...]]], within_s: float) -> Replies:
        """Have each member write layers to a folder, and wait for all of them, even if one fails.

        A member that has replied, or is gone, no longer writes. Replies to earlier saves are dropped.
        """
        number = next(self._saves)
        for member, (folder, owners) in parts.items():
            self.send(member, Save(number=number, folder=folder, owners=owners))
        return self._gather(
            parts,
            lambda reply: isinstance(reply, Saved) and reply.number == number,
            within_s,
            lambda replies: False,
        )

    def _gather(
        self,
        members: Iterable[Member],
        is_answer: Callable[[Reply], bool],
        within_s: float,
        is_over: Callable[[Replies], bool],
    ) -> Replies:
        replies, deadline = Replies(), time.monotonic() + within_s
        waiting: dict[mpc.Connection, Member] = {}
        for member in members:
            process = self._processes.get(member)
            if process is None:
                replies.gone.append(member)
            else:
                waiting[process.pipe] = member
        watch = StopWatch()
        while waiting and not is_over(replies):
            left_s = deadline - time.monotonic()
            ready = mpc.wait(list(waiting), timeout=min(max(0.0, left_s), LOOK_EVERY_S))
            if not ready and left_s <= 0:
                break
            self._end_stopped(watch, waiting.values())
            for pipe in ready:
                assert isinstance(pipe, mpc.Connection)
                self._receive(pipe, waiting, is_answer, replies)
        if not is_over(replies):
            replies.silent = list(waiting.values())
        return replies

    def _end_stopped(self, watch: StopWatch, members: Iterable[Member]) -> None:
        """Kill processes that have been stopped for long, so that their connections break."""
        by_id = {self._processes[member].process.pid or 0: member for member in members}
        for pid in watch.stopped(by_id):
            self._processes[by_id[pid]].process.kill()
            sys.stderr.write(
                f"{by_id[pid]}, process {pid}: stopped by a signal and not continued, so killed\n"
            )

    def _receive(
        self,
        pipe: mpc.Connection,
        waiting: dict[mpc.Connection, Member],
        is_answer: Callable[[Reply], bool],
        replies: Replies,
    ) -> None:
        try:
            reply = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            replies.gone.append(waiting.pop(pipe))
            return
        if isinstance(reply, self._doomed.get(waiting[pipe].node, ())):
            self._unheard.add(waiting[pipe].node)
        elif is_answer(reply):
            replies.answers[waiting.pop(pipe)] = reply
        elif isinstance(reply, Broken):
            replies.broken[waiting[pipe]] = reply

    def dead(self, nodes: Iterable[str]) -> tuple[str, ...]:
        """Those of the given nodes of which a process has ended."""
        alive = {member.node for member in self._processes} - {
            member.node for member, process in self._processes.items() if not process.process.is_alive()
        }
        return tuple(node for node in nodes if node not in alive)

    def end(self, nodes: Iterable[str]) -> None:
        """Kill all remaining processes of nodes."""
        gone = set(nodes)
        ended = [member for member in self._processes if member.node in gone]
        for member in ended:
            self._processes[member].process.kill()
        for member in ended:
            process = self._processes.pop(member)
            process.process.join(JOIN_S)
            if process.process.is_alive():
                sys.stderr.write(f"{member}, process {process.process.pid}: killed, and does not end\n")
            process.pipe.close()

    def close(self) -> None:
        """End all nodes."""
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
    gc.freeze()  # collections then skip everything that the parent has imported
    ended_by_default()
    live(job, pipe, moment)
