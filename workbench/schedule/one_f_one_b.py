"""Schedules of a chain of stages in closed form: 1F1B and GPipe."""

from collections.abc import Sequence

from workbench.schedule.action import Action, Pass


def one_f_one_b(stages: Sequence[int], num_microbatches: int) -> tuple[tuple[Action, ...], ...]:
    """One forward, one backward on a chain.

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
    _check(stages, num_microbatches)
    programs = []
    for place, stage in enumerate(stages):
        warmup = min(len(stages) - place, num_microbatches)
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
    """All forwards, then all backwards in the same order, as torch's ScheduleGPipe.

    Source: Huang et al. 2019, "GPipe", NeurIPS. Same arguments and result as `one_f_one_b`.
    Complexity: O(p m).
    """
    _check(stages, num_microbatches)
    return tuple(
        tuple(Action(stage, kind, index) for kind in (Pass.F, Pass.B) for index in range(num_microbatches))
        for stage in stages
    )


def _check(stages: Sequence[int], num_microbatches: int) -> None:
    if len(set(stages)) != len(stages) or not stages:
        raise ValueError(f"stages of a chain must be there and differ, got {list(stages)}")
    if num_microbatches < 1:
        raise ValueError(f"num_microbatches must be >= 1, got {num_microbatches}")
