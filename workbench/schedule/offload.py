"""Stages whose weights are on the host between their forwards and their backwards."""

from collections.abc import Collection, Sequence

from workbench.schedule.action import Action, Pass


def with_offload(actions: Sequence[Action], stages: Collection[int]) -> tuple[Action, ...]:
    """Return a program that offloads these stages between their forwards and their backwards.

    OFFLOAD follows a stage's last F, ONLOAD precedes its first B or I, or ends the program where it has
    none: weights are back for the next step. In the total order that programs are restrictions of,
    both are next to a pass of their stage, so nothing can deadlock that could not before.

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
    program: list[Action] = []
    for index, action in enumerate(actions):
        if first_backward.get(action.stage) == index:
            if last_forward[action.stage] > index:
                raise ValueError(
                    f"stage {action.stage} cannot be offloaded: {actions[last_forward[action.stage]]} comes "
                    f"after {action}; want all microbatches in one window"
                )
            program.append(Action(action.stage, Pass.ONLOAD))
        program.append(action)
        if last_forward.get(action.stage) == index:
            program.append(Action(action.stage, Pass.OFFLOAD))
    program += [Action(stage, Pass.ONLOAD) for stage in last_forward if stage not in first_backward]
    return tuple(program)
