"""1F1B and GPipe: for a chain of stages in closed form, for a DAG by graph-aware 1F1B."""

from collections.abc import Mapping, Sequence

from workbench.schedule.action import Action, Pass
from workbench.schedule.eager import with_eager_forwards
from workbench.schedule.graph_aware import check_dag, graph_aware_1f1b, topological_positions
from workbench.schedule.parts import Programs, part_by_part
from workbench.schedule.spec import Problem, ScheduleSpec, check_chain

NOBODY: Mapping[int, int] = {}  # no forward of these stages follows another


def one_f_one_b(stages: Sequence[int], num_microbatches: int) -> tuple[tuple[Action, ...], ...]:
    """Return one forward, one backward on a chain.

    Source: Narayanan et al. 2019, "PipeDream", SOSP, in the synchronous form of Narayanan et al.
    2021, "Memory-efficient pipeline-parallel DNN training", ICML (PipeDream-Flush).

    The p-th stage from the end runs min(p, m) forwards, then alternates backward and forward, then
    drains. On stages of equal times f and b an iteration takes (m + p - 1)(f + b).

    Args:
        stages: [p] ids, first to last.
        num_microbatches: m.

    Returns:
        [p] programs, each of m forwards and m backwards.

    Complexity: O(p m).
    """
    check_chain(stages, num_microbatches)
    programs = []
    for position, stage in enumerate(stages):
        warmup = min(len(stages) - position, num_microbatches)
        forward = [Action(stage, Pass.F, index) for index in range(num_microbatches)]
        backward = [Action(stage, Pass.B, index) for index in range(num_microbatches)]
        steady = [
            action
            for pair in zip(backward[: num_microbatches - warmup], forward[warmup:], strict=True)
            for action in pair
        ]
        drain = backward[num_microbatches - warmup :]
        programs.append((*forward[:warmup], *steady, *drain))
    return tuple(programs)


def gpipe(stages: Sequence[int], num_microbatches: int) -> tuple[tuple[Action, ...], ...]:
    """Return all forwards, then all backwards in the same order, as torch's ScheduleGPipe.

    Source: Huang et al. 2019, "GPipe", NeurIPS. Same arguments and result as `one_f_one_b`.
    Complexity: O(p m).
    """
    check_chain(stages, num_microbatches)
    return tuple(
        tuple(Action(stage, kind, index) for kind in (Pass.F, Pass.B) for index in range(num_microbatches))
        for stage in stages
    )


def _on_dag(problem: Problem) -> Programs:
    """Return graph-aware 1F1B; `run_ahead` moves forwards of frozen encoders by that many microbatches."""
    programs = _graph_aware(problem)
    if not problem.run_ahead:
        return programs
    if not problem.frozen_sources:
        raise ValueError(
            "run_ahead is for frozen encoders, of which the model has none; nearest: trainable projector of "
            "an encoder, or run_ahead 0"
        )
    sources = dict.fromkeys(problem.frozen_sources, NOBODY)
    return {
        group: with_eager_forwards(actions, sources, problem.run_ahead) for group, actions in programs.items()
    }


def _forwards_first(problem: Problem) -> Programs:
    """Return GPipe on any DAG: each program's forwards, then its backwards, both in 1F1B's order.

    Within forwards, and within backwards, the total order of graph-aware 1F1B still has every pass after
    its inputs.
    """
    return {
        group: tuple(sorted(actions, key=lambda action: action.kind is not Pass.F))
        for group, actions in _graph_aware(problem).items()
    }


def _graph_aware(problem: Problem) -> Programs:
    """Schedule equal parts, such as replicas, once; errors name the stages of the whole problem."""
    check_dag(problem.nodes, problem.groups)
    topological_positions({node.stage: node for node in problem.nodes}, problem.groups)
    return part_by_part(problem.nodes, problem.groups, graph_aware_1f1b)


SPEC = ScheduleSpec(
    name="1f1b",
    summary="one forward, one backward; each stage runs one forward ahead of the next",
    chain=lambda stages, _, num_microbatches: one_f_one_b(stages, num_microbatches),
    dag=_on_dag,
    parameters=("run_ahead",),
    torch_name="1F1B",
)

SPEC_GPIPE = ScheduleSpec(
    name="gpipe",
    summary="all forwards, then all backwards",
    chain=lambda stages, _, num_microbatches: gpipe(stages, num_microbatches),
    dag=_forwards_first,
    torch_name="GPipe",
)
