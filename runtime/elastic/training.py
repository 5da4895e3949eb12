"""Trains on nodes that come and go: votes on every step, and a new layout when a node is lost or new."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from runtime.elastic.history import Cause, ElasticFailed, Reshaped, StepDone
from runtime.elastic.job import ElasticJob, Member, members_of
from runtime.elastic.moves import Move
from runtime.elastic.nodes import Heard, Nodes
from runtime.elastic.orders import Begin, Fetch, Fetched, Order, Paused, Ready, TrainStep, Vote
from runtime.elastic.prepared import Preparation
from runtime.elastic.progress import Progress, save_progress
from runtime.elastic.replan import Replanned, after_loss, after_warning, start_layout, write_plan
from runtime.world.scratch import ScratchFolder
from workbench.elastic.layout import NodeLayout
from workbench.plan.lru_cache import CLEAR_EVERY, clear_caches

MOST_UNEXPLAINED = 2  # disturbances in a row in which nobody was lost


@dataclass(slots=True)
class _Change:
    """A change of the layout that is under way, since its first sign."""

    noticed_s: float
    stopped_s: float
    attempts: int = 0
    planning_s: float = 0.0
    is_prepared: bool = False
    copying_s: float = 0.0
    num_bytes: int = 0


class ElasticTraining:
    """The supervisor of an elastic job, on this machine. It computes nothing and reads no state.

    A step is taken in two phases: every rank votes when all its gradients are whole, and updates its
    weights when all have voted; the update needs nobody else. So all survivors have always seen the
    same steps, and a step that was cut off is repeated whole.

    Oobleck chapter, sections 2.5 and 2.6.
    Differs: one supervisor stands for the source's agents and coordinator, and outlives all nodes.

    Args:
        job: what is trained.
        nodes: that are there at the start.
        start: progress to go on from.

    Raises:
        ValueError: too few nodes, or fewer microbatches than pipelines.
    """

    def __init__(self, job: ElasticJob, nodes: Sequence[str], *, start: Progress | None = None) -> None:
        self.job, self._start = job, start
        self.step = 0 if start is None else start.step
        self.steps: list[StepDone] = []
        self.changes: list[Reshaped] = []
        self.layout = start_layout(job, nodes)  # of the world that there is or was last
        self._is_held = False  # some process holds state
        self._is_world = False  # the layout's processes form a world
        self._lost: list[str] = []  # still in the layout, or they were when the change began
        self._warned: list[str] = []
        self._left: list[str] = []  # that were warned, within the present change
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
        """Of every step that counts."""
        return tuple(done.loss for done in self.steps)

    @property
    def is_prepared(self) -> bool:
        """Whether every single loss and join is planned that may come next."""
        return self._preparation.is_complete

    def join(self, nodes: Sequence[str]) -> None:
        """Start nodes; they are taken in before the next step.

        Those beyond the number that templates were planned for wait until there is room.

        Raises:
            ValueError: a node that is there already.
        """
        for node in nodes:
            self.nodes.start(node)
            self._waiting.append(node)

    def warn(self, nodes: Sequence[str]) -> None:
        """These nodes will be preempted: copy what only they hold, and leave them out before the next step.

        Raises:
            ValueError: a node that is not at work.
        """
        present = self._at_work()
        for node in nodes:
            if node not in present:
                raise ValueError(
                    f"node {node!r} was warned but is not at work; there are {', '.join(present)}"
                )
        self._warned += [node for node in nodes if node not in self._warned]

    def train(self, until: int) -> None:
        """Train until that many steps were taken since the seed, whatever happens to the nodes.

        Raises:
            CannotContinueError: too few nodes are left.
            ElasticFailed: a process failed that did not die.
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
        """Write all weights and moments between two steps, each layer by one of its holders.

        Raises:
            ElasticFailed, OSError: as `save_progress`.
        """
        return save_progress(self.nodes, self.job, self.layout, self._lost, self.step, folder)

    def _at_work(self) -> list[str]:
        return [node for node in self.layout.nodes if node not in self._lost]

    def _members(self, layout: NodeLayout) -> tuple[Member, ...]:
        return members_of(layout, self.job.ranks_per_node)

    def _welcome(self) -> list[str]:
        """Nodes that wait and find room."""
        dead = self.nodes.dead(self._waiting)
        self.nodes.end(dead)
        self._waiting = [node for node in self._waiting if node not in dead]
        room = self.job.templates.specification.num_nodes - len(self._at_work())
        return self._waiting[: max(0, room)]

    def _lose(self, nodes: Sequence[str], noticed_s: float) -> None:
        """Nodes are gone: whatever is left of them is ended."""
        if not nodes:
            return
        self._open(noticed_s)
        self.nodes.end(nodes)
        at_work = self._at_work()
        self._lost += [node for node in nodes if node in at_work]
        self._warned = [node for node in self._warned if node not in nodes]
        self._waiting = [node for node in self._waiting if node not in nodes]

    def _open(self, noticed_s: float) -> _Change:
        """The change under way; one that is disturbed goes on."""
        if self._change is None:
            self._change = _Change(noticed_s=noticed_s, stopped_s=noticed_s)
        return self._change

    def _take_step(self) -> None:
        members, path = self._members(self.layout), self._plan_file(self.layout)
        for member in members:
            self.nodes.send(member, TrainStep(step=self.step, plan=path))
        heard = self.nodes.gather(members, Vote, self.job.step_s)
        if heard.is_trouble:
            self._stop(heard, members)
            return
        for member in members:
            self.nodes.send(member, Order.COMMIT)
        loss = sum(told.loss for told in heard.answers.values() if isinstance(told, Vote))
        done = StepDone(step=self.step, loss=loss, end_s=time.monotonic(), sizes=self.layout.sizes)
        self.steps.append(done)
        self.step += 1
        self._num_unexplained = 0
        self._plan_file(self.layout)  # of the next step, while the ranks update their weights

    def _plan_file(self, layout: NodeLayout) -> Path:
        """Of the next step; written once."""
        path = self._scratch.path / f"step{self.step}"
        if self._planned != (self.step, layout):
            (path.parent / f"step{self.step - 2}").unlink(missing_ok=True)
            if self.step % CLEAR_EVERY == 0:
                clear_caches()
            write_plan(self.job, layout, self.step, path)
            self._planned = (self.step, layout)
        return path

    def _stop(self, heard: Heard, members: Sequence[Member]) -> None:
        """Something is wrong: stop everyone, find out who is gone or hangs, and give up the world."""
        noticed_s = time.monotonic()
        alive = [member for member in members if member not in heard.gone]
        paused = self.nodes.pause(alive, self.job.wait_s)
        gone = tuple(dict.fromkeys(m.node for m in (*heard.gone, *paused.gone, *paused.silent)))
        self._open(noticed_s).stopped_s = time.monotonic()
        self._lose(gone, noticed_s)
        self._is_world = False
        self._num_unexplained = 0 if gone else self._num_unexplained + 1
        if self._num_unexplained >= MOST_UNEXPLAINED:
            raise ElasticFailed(f"step {self.step}: {heard.describe()}")
        for member, told in paused.answers.items():
            if isinstance(told, Paused) and told.step not in (None, self.step):
                raise ElasticFailed(f"{self.step} steps were taken, but {member} has seen {told.step}")

    def _reshape(self) -> None:
        """The next layout, and a world for it."""
        joining = self._welcome()
        start_s = time.monotonic()
        change = self._open(start_s)
        change.attempts += 1
        replanned, path, change.is_prepared = self._next_layout(joining)
        change.planning_s += time.monotonic() - start_s
        members = self._members(replanned.layout)
        self._begin(members, path, replanned.moves)
        self._plan_file(replanned.layout)  # where another step's was prepared, while the ranks connect
        heard = self.nodes.gather(members, Ready, self.job.step_s)
        if heard.is_trouble:
            self._stop(heard, members)
        else:
            self._settle(change, replanned.layout, joining, heard)

    def _next_layout(self, joining: Sequence[str]) -> tuple[Replanned, Path, bool]:
        """Where to go, a plan on that layout for the new world, and whether both were there already."""
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

    def _settle(self, change: _Change, layout: NodeLayout, joined: Sequence[str], heard: Heard) -> None:
        """The new world stands; every one of its processes holds what the layout says."""
        ready = [told for told in heard.answers.values() if isinstance(told, Ready)]
        names = ((self._lost, Cause.LOSS), (self._left, Cause.WARNING), (joined, Cause.JOIN))
        self.changes.append(
            Reshaped(
                step=self.step,
                cause=next((cause for nodes, cause in names if nodes and self._is_held), Cause.START),
                lost=(*self._lost, *self._left),
                joined=tuple(joined),
                attempts=change.attempts,
                noticed_s=change.noticed_s,
                stopped_s=change.stopped_s,
                ready_s=time.monotonic(),
                planning_s=change.planning_s,
                is_prepared=change.is_prepared,
                groups_s=max(told.groups_s for told in ready),
                copying_s=change.copying_s + max(told.copying_s for told in ready),
                num_bytes=change.num_bytes + sum(told.num_bytes for told in ready),
                sizes=layout.sizes,
            )
        )
        self.layout, self._is_held, self._is_world, self._change = layout, True, True, None
        self._waiting = [node for node in self._waiting if node not in joined]
        self._lost, self._left = [], []
        self._preparation.begin(layout, self.step)

    def _drain(self) -> None:
        """Copies while the warned nodes are there; then they go, and the next world is without them."""
        change = self._open(time.monotonic())
        replanned = after_warning(self.job, self.layout, self._warned)
        members, path = self._members(self.layout), self._plan_file(self.layout)
        change.planning_s += time.monotonic() - change.noticed_s
        for rank, member in enumerate(members):
            self.nodes.send(member, Fetch(plan=path, moves=_of_rank(replanned.moves, rank)))
        heard = self.nodes.gather(members, Fetched, self.job.step_s)
        if heard.is_trouble:
            self._stop(heard, members)
            return
        fetched = [told for told in heard.answers.values() if isinstance(told, Fetched)]
        change.copying_s += max(told.copying_s for told in fetched)
        change.num_bytes += sum(told.num_bytes for told in fetched)
        self.nodes.end(self._warned)
        self._left, self._warned = self._warned, []
        self.layout, self._is_world = replanned.layout, False


def _of_rank(moves: Sequence[Move], rank: int) -> tuple[Move, ...]:
    return tuple(move for move in moves if rank in (move.source_rank, move.destination_rank))
