"""Stages that leave the device between their forwards and their backwards."""

from collections.abc import Collection, Sequence

from workbench.schedule.action import Action, Pass


def with_offload(actions: Sequence[Action], stages: Collection[int]) -> tuple[Action, ...]:
    """A program in which these stages go to the host after their last forward and return for their backward.

    OFFLOAD stands behind a stage's last F, ONLOAD before its first B or I, or at the end where it has
    none: weights are back for the next step. In the total order that programs are restrictions of,
    both stand beside a pass of their stage, so nothing can deadlock that could not before.

    Source: Karnati et al., "Heterogeneous Parallelism for Multimodal Large Language Model Training",
        section 3.3 (encoder parameters offloaded between its phases).
    Differs: the copies take the stage's turn; the paper reloads beside the LLM's last backwards.

    Raises:
        ValueError: a stage whose last forward comes after its first backward.

    Complexity: O(actions).
    """
    first_backward: dict[int | None, int] = {}
    last_forward: dict[int | None, int] = {}
    for index, action in enumerate(actions):
        if action.stage in stages and action.kind is Pass.F:
            last_forward[action.stage] = index
        elif action.stage in stages and action.kind in (Pass.B, Pass.I):
            first_backward.setdefault(action.stage, index)
    found: list[Action] = []
    for index, action in enumerate(actions):
        if first_backward.get(action.stage) == index:
            if last_forward[action.stage] > index:
                raise ValueError(
                    f"stage {action.stage} cannot be offloaded: {actions[last_forward[action.stage]]} comes "
                    f"after {action}; want all microbatches in one window"
                )
            found.append(Action(action.stage, Pass.ONLOAD))
        found.append(action)
        if last_forward.get(action.stage) == index:
            found.append(Action(action.stage, Pass.OFFLOAD))
    found += [Action(stage, Pass.ONLOAD) for stage in last_forward if stage not in first_backward]
    return tuple(found)
