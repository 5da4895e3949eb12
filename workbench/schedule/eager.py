"""Moves forwards further ahead of backwards than in 1F1B."""

from collections.abc import Mapping, Sequence

from workbench.schedule.action import Action, Pass


def with_eager_forwards(
    actions: Sequence[Action], followers: Mapping[int, Mapping[int, int]], lead: int
) -> tuple[Action, ...]:
    """Return a program in which every forward of some stages moves to the position of the one `lead` before.

    Source: Entrain (dissertation, section 4.5.3): as many forwards as memory allows before the first
    backward. The first `lead` + 1 forwards come together, and the last `lead` positions become empty.
    Safe if the same is done to all stages of a chain that reads no other: their forwards keep their
    order, and none comes later than before.

    Args:
        actions: of one rank, in order.
        followers: the stages to change -> microbatch -> the one that its forward directly follows; such
            forwards count as one.
        lead: how many forwards further ahead, >= 0.

    Raises:
        ValueError: a negative lead.

    Complexity: O(actions) for each stage of the program.
    """
    if lead < 0:
        raise ValueError(f"want lead >= 0, got {lead}")
    program = tuple(actions)
    present = {stage for stage, _, _ in program}
    for stage, leader_of in followers.items():
        if stage in present:
            program = _with_lead(program, stage, leader_of, lead)
    return program


def _with_lead(
    actions: tuple[Action, ...], stage: int, leader_of: Mapping[int, int], lead: int
) -> tuple[Action, ...]:
    blocks: list[list[Action]] = []
    for action in actions:
        if action.stage == stage and action.kind is Pass.F:
            if action.microbatch in leader_of and blocks:
                blocks[-1].append(action)
            else:
                blocks.append([action])
    block_of = {block[0]: index for index, block in enumerate(blocks)}
    forwards = {action for block in blocks for action in block}
    program: list[Action] = []
    for action in actions:
        if action in block_of:
            index = block_of[action]
            due = blocks[: lead + 1] if index == 0 else blocks[index + lead : index + lead + 1]
            program += [forward for block in due for forward in block]
        elif action not in forwards:
            program.append(action)
    return tuple(program)
