"""Schedule files of torch.distributed.pipelining (compute_only): a line per rank, a cell per action."""

from collections.abc import Mapping, Sequence

from workbench.schedule.action import COMPUTE, Action


def to_torch_csv(programs: Sequence[Sequence[Action]], index_of: Mapping[int, int]) -> str:
    """A chain's programs as torch writes and loads them: line r is the program of pipeline rank r.

    Only passes are written: torch refuses other actions in this format, adds
    collectives itself when it loads the file, and has no letter for STEP.

    Args:
        programs: actions of one rank per pipeline rank, in pipeline order. Each microbatch has a
            backward on each stage, whole or as I and W: torch accepts nothing else.
        index_of: stage -> its position in the chain, which is torch's number for it. Actions of other
            stages are left out.

    Complexity: O(actions).
    """
    return "".join(",".join(_cells(actions, index_of)) + "\n" for actions in programs)


def _cells(actions: Sequence[Action], index_of: Mapping[int, int]) -> list[str]:
    return [
        str(action._replace(stage=index_of[action.stage]))
        for action in actions
        if action.stage is not None and action.stage in index_of and action.kind in COMPUTE
    ]
