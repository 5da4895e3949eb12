"""Layouts and plans after every single loss and join, planned in the background and later only looked up."""

import multiprocessing
import os
import pickle
import shutil
import signal
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

from runtime.elastic.job import ElasticJob
from runtime.elastic.replan import Replanned, after_loss, write_plan
from workbench.elastic.layout import NodeLayout
from workbench.supervised import Parent, as_parent, end_with
from workbench.termination import ended_by_default, forking
from workbench.whole_file import write_bytes

NEWCOMER = "the node that joins"  # placeholder for its name
DONE = "done"
LAST_TO_RUN = 19  # niceness: training has priority
JOIN_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """The next layout with its moves, and a plan on it: of the step that was next when it was made."""

    replanned: Replanned
    plan: Path


class Preparation:
    """A process that plans ahead for the loss of each node of a layout, and for the join of one.

    The plan of any step suffices to form a new world: groups, stages and moves depend only on the layout. The
    plan of the step itself can be made while the ranks connect and copy.

    Args:
        folder: for the plans; the caller creates and removes it.
    """

    def __init__(self, job: ElasticJob, folder: Path) -> None:
        self._job, self._root = job, folder
        self._number = 0
        self._layout: NodeLayout | None = None
        self._pipe, there = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("fork").Process(
            target=_serve, args=(job, there, folder, as_parent()), name="preparation", daemon=True
        )
        with forking():
            self._process.start()
        there.close()

    def begin(self, layout: NodeLayout, step: int) -> None:
        """Start planning for all changes of this layout; earlier requests are dropped."""
        self._number += 1
        self._layout = layout
        with suppress(OSError):  # the process is gone: changes are planned when they occur
            self._pipe.send((self._number, layout, step))

    def find(self, layout: NodeLayout, lost: Sequence[str], joining: Sequence[str]) -> Prepared | None:
        """The prepared plan for this change of the layout; None where there is none, or not yet."""
        if layout != self._layout or len(lost) + len(joining) != 1:
            return None
        return read_prepared(self._folder, layout, lost, joining)

    @property
    def is_complete(self) -> bool:
        """Whether all changes of the last layout are planned."""
        return (self._folder / DONE).exists()

    @property
    def _folder(self) -> Path:
        return _folder_of(self._root, self._number)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join(JOIN_S)
        self._pipe.close()


def prepare(job: ElasticJob, layout: NodeLayout, step: int, folder: Path, go_on: Callable[[], bool]) -> None:
    """Write plans for every single loss and join of a layout, as long as `go_on` returns true.

    Complexity: O(nodes x planning a step).
    """
    folder.mkdir(parents=True)
    for name, lost, joining in _changes(job, layout):
        if not go_on():
            return
        with suppress(ValueError):  # training stops at such a change, and reports why then
            replanned = after_loss(job, layout, lost, joining)
            write_plan(job, replanned.layout, step, folder / f"{name}.plan")
            write_bytes(pickle.dumps(replanned), folder / f"{name}.moves")
    write_bytes(b"", folder / DONE)


def read_prepared(
    folder: Path, layout: NodeLayout, lost: Sequence[str], joining: Sequence[str]
) -> Prepared | None:
    """One of the plans that `prepare` has written for a layout; None if it is missing."""
    name = f"loss{layout.nodes.index(lost[0])}" if lost else "join"
    try:
        replanned = pickle.loads((folder / f"{name}.moves").read_bytes())
    except FileNotFoundError:
        return None
    assert isinstance(replanned, Replanned)
    if joining:
        replanned = replace(replanned, layout=_named(replanned.layout, joining[0]))
    return Prepared(replanned=replanned, plan=folder / f"{name}.plan")


def _changes(job: ElasticJob, layout: NodeLayout) -> Iterator[tuple[str, Collection[str], Sequence[str]]]:
    """Yield (name, lost, joining) of each possible change of one node."""
    yield from ((f"loss{index}", (node,), ()) for index, node in enumerate(layout.nodes))
    if layout.num_nodes < job.templates.specification.num_nodes:
        yield "join", (), (NEWCOMER,)


def _named(layout: NodeLayout, newcomer: str) -> NodeLayout:
    return NodeLayout(
        pipelines=tuple(
            tuple(newcomer if node == NEWCOMER else node for node in pipeline)
            for pipeline in layout.pipelines
        )
    )


def _folder_of(root: Path, number: int) -> Path:
    return root / f"prepared{number}"


def _serve(job: ElasticJob, pipe: Connection, root: Path, parent: Parent) -> None:
    end_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor decides when to stop
    ended_by_default()
    os.nice(LAST_TO_RUN)
    while True:
        number, layout, step = pipe.recv()
        prepare(job, layout, step, _folder_of(root, number), lambda: not pipe.poll())
        pipe.poll(None)  # until a newer request arrives
        shutil.rmtree(_folder_of(root, number))
