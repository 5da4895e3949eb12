"""Trains on nodes that join and leave: a vote on every step, and a new layout when nodes change."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from runtime.elastic.history import Cause, ElasticFailed, Reshaped, StepDone
from runtime.elastic.job import ElasticJob, Member, members_of
from runtime.elastic.moves import Move
from runtime.elastic.nodes import Nodes, Replies
from runtime.elastic.orders import Begin, Fetch, Fetched, Order, Paused, Ready, TrainStep, Vote
from runtime.elastic.prepared import Preparation
from runtime.elastic.progress import Progress, save_progress
from runtime.elastic.replan import Replanned, after_loss, after_warning, start_layout, write_plan
from runtime.world.scratch import ScratchFolder
from workbench.elastic.layout import NodeLayout
from workbench.float_sum import float_sum
from workbench.plan.lru_cache import CLEAR_EVERY, clear_caches

MOST_UNEXPLAINED = 2  # consecutive failures without a lost node


@dataclass(slots=True)
class _Change:
    """A change of the layout in progress: what `Reshaped` takes over from it."""

    noticed_s: float
    stopped_s: float
    attempts: int = 0
    planning_s: float = 0.0
    is_prepared: bool = False
    copying_s: float = 0.0
    num_bytes: int = 0


class ElasticTraining:
    """The supervisor of an elastic job on this machine. It computes nothing and reads no state.

    A step has two phases: every rank votes when all its gradients are complete, and updates its weights when
    all have voted; the update needs no communication. So all survivors have always seen the same steps, and
    an aborted step is repeated from its start.

    Oobleck chapter, sections 2.5 and 2.6.
    Differs: one supervisor replaces the source's agents and coordinator, and outlives all nodes.

    Args:
        job: to train.
        nodes: at the start.
        start: save to resume from.

    Raises:
        ValueError: too few nodes, or fewer microbatches than pipelines.
    """

    def __init__(self, job: ElasticJob, nodes: Sequence[str], *, start: Progress | None = None) -> None:
        self.job, self._start = job, start
        self.step = 0 if start is None else start.step
        self.steps: list[StepDone] = []
        self.changes: list[Reshaped] = []
        self.layout = start_layout(job, nodes)  # of the current or last world
        self._is_held = False  # some process has state
        self._is_world = False  # the layout's processes form a world
        self._lost: list[str] = []  # nodes still in the layout, or at the start of the change
        self._warned: list[str] = []
        self._left: list[str] = []  # warned nodes that left, within the current change
        self._waiting: list[str] = []
        self._change: _Change | None = None
        self._num_unexplained = self._generation = 0
        self._planned: tuple[int, NodeLayout] | None = None
        self._scratch = ScratchFolder("elastic-")
        self._preparation = Preparation(job, self._scratch.path)
        self.nodes = Nodes(job, self._scratch.path)
        for node in nodes:
            self.nodes.start(node)

    def __enter__(self) -> "ElasticTraining":
        return self

    def __exit__(self, *_: object) -> None:
        self.nodes.close()
        self._preparation.close()
        self._scratch.close()

    @property
    def losses(self) -> tuple[float, ...]:
        """Losses of all completed steps."""
        return tuple(done.loss for done in self.steps)

    @property
    def is_prepared(self) -> bool:
        """Whether every possible loss or join of one node is planned."""
        return self._preparation.is_complete

    def join(self, nodes: Sequence[str]) -> None:
        """Start nodes; they join before the next step.

        Those beyond the number that templates were planned for wait until there is room.

        Raises:
            ValueError: a node that already exists.
        """
        for node in nodes:
            self.nodes.start(node)
            self._waiting.append(node)

    def warn(self, nodes: Sequence[str]) -> None:
        """Announce nodes that will be preempted: they are copied from, and leave before the next step.

        Raises:
            ValueError: a node that is not in the layout.
        """
        present = self._at_work()
        for node in nodes:
            if node not in present:
                raise ValueError(
                    f"node {node!r} was warned but is not training; nodes are {', '.join(present)}"
                )
        self._warned += [node for node in nodes if node not in self._warned]

    def train(self, until: int) -> None:
        """Train until `until` steps are taken since the seed, across changes of nodes.

        Raises:
            CannotContinueError: too few nodes are left.
            ElasticFailed: a process failed without dying.
        """
        while self.step < until:
            self._lose(self.nodes.dead(self._at_work()), time.monotonic())
            if self._lost or not self._is_world or self._welcome():
                self._reshape()
            elif self._warned:
                self._drain()
            else:
                self._take_step()

    def save(self, folder: Path) -> Progress:
        """Write all weights and moments between two steps, each layer by one of its processes.

        Raises:
            ElasticFailed, OSError: as `save_progress`.
        """
        return save_progress(self.nodes, self.job, self.layout, self._lost, self.step, folder)

    def _at_work(self) -> list[str]:
        return [node for node in self.layout.nodes if node not in self._lost]

    def _members(self, layout: NodeLayout) -> tuple[Member, ...]:
        return members_of(layout, self.job.ranks_per_node)

    def _welcome(self) -> list[str]:
        """Waiting nodes for which there is room."""
        dead = self.nodes.dead(self._waiting)
        self.nodes.end(dead)
        self._waiting = [node for node in self._waiting if node not in dead]
        room = self.job.templates.specification.num_nodes - len(self._at_work())
        return self._waiting[: max(0, room)]

    def _lose(self, nodes: Sequence[str], noticed_s: float) -> None:
        """Handle lost nodes: end their remaining processes."""
        if not nodes:
            return
        self._open(noticed_s)
        self.nodes.end(nodes)
        at_work = self._at_work()
        self._lost += [node for node in nodes if node in at_work]
        self._warned = [node for node in self._warned if node not in nodes]
        self._waiting = [node for node in self._waiting if node not in nodes]

    def _open(self, noticed_s: float) -> _Change:
        """The change in progress, or a new one; an interrupted one continues."""
        if self._change is None:
            self._change = _Change(noticed_s=noticed_s, stopped_s=noticed_s)
        return self._change

    def _take_step(self) -> None:
        members, path = self._members(self.layout), self._plan_file(self.layout)
        for member in members:
            self.nodes.send(member, TrainStep(step=self.step, plan=path))
        replies = self.nodes.gather(members, Vote, self.job.step_s)
        if replies.is_trouble:
            self._stop(replies, members)
            return
        for member in members:
            self.nodes.send(member, Order.COMMIT)
        loss = float_sum(reply.loss for reply in replies.answers.values() if isinstance(reply, Vote))
        done = StepDone(step=self.step, loss=loss, end_s=time.monotonic(), sizes=self.layout.sizes)
        self.steps.append(done)
        self.step += 1
        self._num_unexplained = 0
        self._plan_file(self.layout)  # the next step's, while the ranks update their weights

    def _plan_file(self, layout: NodeLayout) -> Path:
        """File of the next step's plan, written once."""
        path = self._scratch.path / f"step{self.step}"
        if self._planned != (self.step, layout):
            (path.parent / f"step{self.step - 2}").unlink(missing_ok=True)
            if self.step % CLEAR_EVERY == 0:
                clear_caches()
            write_plan(self.job, layout, self.step, path)
            self._planned = (self.step, layout)
        return path

    def _stop(self, replies: Replies, members: Sequence[Member]) -> None:
        """Handle a failure: pause all processes, find lost or hanging ones, and abandon the world."""
        noticed_s = time.monotonic()
        alive = [member for member in members if member not in replies.gone]
        paused = self.nodes.pause(alive, self.job.wait_s)
        gone = tuple(dict.fromkeys(m.node for m in (*replies.gone, *paused.gone, *paused.silent)))
        self._open(noticed_s).stopped_s = time.monotonic()
        self._lose(gone, noticed_s)
        self._is_world = False
        self._num_unexplained = 0 if gone else self._num_unexplained + 1
        if self._num_unexplained >= MOST_UNEXPLAINED:
            raise ElasticFailed(f"step {self.step}: {replies.describe()}")
        for member, reply in paused.answers.items():
            if isinstance(reply, Paused) and reply.step not in (None, self.step):
                raise ElasticFailed(f"{self.step} steps were taken, but {member} has seen {reply.step}")

    def _reshape(self) -> None:
        """Choose the next layout, and form a world for it."""
        joining = self._welcome()
        start_s = time.monotonic()
        change = self._open(start_s)
        change.attempts += 1
        replanned, path, change.is_prepared = self._next_layout(joining)
        change.planning_s += time.monotonic() - start_s
        members = self._members(replanned.layout)
        self._begin(members, path, replanned.moves)
        self._plan_file(replanned.layout)  # if another step's was prepared: plan while the ranks connect
        replies = self.nodes.gather(members, Ready, self.job.step_s)
        if replies.is_trouble:
            self._stop(replies, members)
        else:
            self._settle(change, replanned.layout, joining, replies)

    def _next_layout(self, joining: Sequence[str]) -> tuple[Replanned, Path, bool]:
        """The next layout, the file of a plan on it, and whether both were prepared."""
        if not self._is_held:
            layout = start_layout(self.job, [*self._at_work(), *joining])
            return Replanned(layout=layout, moves=()), self._plan_file(layout), False
        prepared = self._preparation.find(self.layout, self._lost, joining)
        if prepared is not None:
            return prepared.replanned, prepared.plan, True
        replanned = after_loss(self.job, self.layout, self._lost, joining)
        return replanned, self._plan_file(replanned.layout), False

    def _begin(self, members: Sequence[Member], path: Path, moves: Sequence[Move]) -> None:
        self._generation += 1
        self._is_world = False
        for rank, member in enumerate(members):
            order = Begin(
                rendezvous=self._scratch.path / f"world{self._generation}",
                rank=rank,
                plan=path,
                step=self.step,
                moves=_of_rank(moves, rank),
                is_first=not self._is_held,
                start=None if self._start is None else self._start.folder,
            )
            self.nodes.send(member, order)

    def _settle(self, change: _Change, layout: NodeLayout, joined: Sequence[str], replies: Replies) -> None:
        """Complete a change: the new world is formed, and its processes have their layers."""
        ready = [reply for reply in replies.answers.values() if isinstance(reply, Ready)]
        change.copying_s += max(reply.copying_s for reply in ready)
        change.num_bytes += sum(reply.num_bytes for reply in ready)
        names = ((self._lost, Cause.LOSS), (self._left, Cause.WARNING), (joined, Cause.JOIN))
        self.changes.append(
            Reshaped(
                step=self.step,
                cause=next((cause for nodes, cause in names if nodes and self._is_held), Cause.START),
                lost=(*self._lost, *self._left),
                joined=tuple(joined),
                ready_s=time.monotonic(),
                groups_s=max(reply.groups_s for reply in ready),
                sizes=layout.sizes,
                **asdict(change),
            )
        )
        self.layout, self._is_held, self._is_world, self._change = layout, True, True, None
        self._waiting = [node for node in self._waiting if node not in joined]
        self._lost, self._left = [], []
        self._preparation.begin(layout, self.step)

    def _drain(self) -> None:
        """Copy layers from warned nodes, then end these; the next world is without them."""
        change = self._open(time.monotonic())
        replanned = after_warning(self.job, self.layout, self._warned)
        members, path = self._members(self.layout), self._plan_file(self.layout)
        change.planning_s += time.monotonic() - change.noticed_s
        for rank, member in enumerate(members):
            self.nodes.send(member, Fetch(plan=path, moves=_of_rank(replanned.moves, rank)))
        replies = self.nodes.gather(members, Fetched, self.job.step_s)
        if replies.is_trouble:
            self._stop(replies, members)
            return
        fetched = [reply for reply in replies.answers.values() if isinstance(reply, Fetched)]
        change.copying_s += max(reply.copying_s for reply in fetched)
        change.num_bytes += sum(reply.num_bytes for reply in fetched)
        self.nodes.end(self._warned)
        self._left, self._warned = self._warned, []
        self.layout, self._is_world = replanned.layout, False


def _of_rank(moves: Sequence[Move], rank: int) -> tuple[Move, ...]:
    return tuple(move for move in moves if rank in (move.source_rank, move.destination_rank))
