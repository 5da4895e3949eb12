"""The next layout after nodes are lost, about to leave, or waiting, without any communication."""

import pickle
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from runtime.elastic.job import ElasticJob, plan_step
from runtime.elastic.moves import Move, moves_between
from workbench.elastic.copies import copies_between
from workbench.elastic.instantiate import fastest
from workbench.elastic.layout import NodeLayout, first_layout
from workbench.elastic.reconfigure import CannotContinueError, drain, join, survive
from workbench.timing.accept import accept


@dataclass(frozen=True, slots=True, kw_only=True)
class Replanned:
    """The next layout, and the moves that lead to it, with the world whose ranks execute them."""

    layout: NodeLayout
    moves: tuple[Move, ...]


def start_layout(job: ElasticJob, nodes: Sequence[str]) -> NodeLayout:
    """The fastest layout of the nodes.

    Raises:
        CannotContinueError: too few nodes.
        ValueError: fewer microbatches than pipelines.
    """
    need = job.templates.specification.threshold
    if len(nodes) < need:
        raise CannotContinueError(f"{len(nodes)} nodes are left, {need} are needed to start")
    return first_layout(nodes, _fastest_sizes(job, len(nodes)))


def after_loss(
    job: ElasticJob, layout: NodeLayout, lost: Collection[str], joining: Sequence[str]
) -> Replanned:
    """The layout without the lost nodes and with waiting ones; the new world's ranks execute the moves.

    Raises:
        CannotContinueError: too few nodes are left, including waiting ones, or a layer is lost.
    """
    layer_bytes = job.layer_bytes()
    after = layout if not lost else survive(job.templates, layout, lost, layer_bytes, joining).layout
    if joining:
        new = [node for node in joining if node not in after.nodes]
        sizes = _fastest_sizes(job, after.num_nodes + len(new))
        after = join(job.templates, after, new, sizes, layer_bytes).layout
    copies = copies_between(job.templates, layout, after, lost, layer_bytes)
    return Replanned(layout=after, moves=moves_between(job, layout, after, copies, after))


def after_warning(job: ElasticJob, layout: NodeLayout, leaving: Collection[str]) -> Replanned:
    """The layout without nodes that will leave; the current world's ranks execute the moves.

    Raises:
        CannotContinueError: too few nodes will be left.
    """
    drained = drain(job.templates, layout, leaving, job.layer_bytes())
    return Replanned(
        layout=drained.layout, moves=moves_between(job, layout, drained.layout, drained.copies, layout)
    )


def _fastest_sizes(job: ElasticJob, num_nodes: int) -> tuple[int, ...]:
    return fastest(job.templates, num_nodes, job.num_microbatches, job.sum_s).sizes


def write_plan(job: ElasticJob, layout: NodeLayout, step: int, path: Path) -> None:
    """Write the accepted plan of a step, lowered and pickled, for all ranks to read.

    Raises:
        ValueError: the plan was refused.
    """
    lowered, _ = accept(plan_step(job, layout, job.batch(step)))
    path.write_bytes(pickle.dumps(lowered))
