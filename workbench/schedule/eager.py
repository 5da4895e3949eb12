"""Forwards run further ahead of backwards than 1F1B has them."""

from collections.abc import Mapping, Sequence

from workbench.schedule.action import Action, Pass


def with_eager_forwards(
    actions: Sequence[Action], followers: Mapping[int, Mapping[int, int]], lead: int
) -> tuple[Action, ...]:
    """A program in which every forward of some stages stands where the one `lead` before it stood.

    Source: Entrain (dissertation, section 4.5.3): as many forwards as memory allows before the first
    backward. The first `lead` + 1 forwards come together, and the last `lead` places fall empty.
    Safe when the same is done to all stages of a chain that reads no other: their forwards keep
    their order, and nobody waits for one longer than before.

    Args:
        actions: of one rank, in order.
        followers: the stages to hurry -> microbatch -> the one that its forward follows; such forwards
            count as one.
        lead: forwards further ahead, >= 0.

    Raises:
        ValueError: a negative lead.

    Complexity: O(actions) for each stage.
    """
    if lead < 0:
        raise ValueError(f"want lead >= 0, got {lead}")
    found = tuple(actions)
    for stage, leader_of in followers.items():
        found = _hurried(found, stage, leader_of, lead)
    return found


def _hurried(
    actions: tuple[Action, ...], stage: int, leader_of: Mapping[int, int], lead: int
) -> tuple[Action, ...]:
    blocks: list[list[Action]] = []
    for action in actions:
        if action.stage == stage and action.kind is Pass.F:
            if action.microbatch in leader_of and blocks:
                blocks[-1].append(action)
            else:
                blocks.append([action])
    firsts = {block[0]: number for number, block in enumerate(blocks)}
    moved = {action for block in blocks for action in block}
    result: list[Action] = []
    for action in actions:
        if action in firsts:
            number = firsts[action]
            here = blocks[: lead + 1] if number == 0 else blocks[number + lead : number + lead + 1]
            result += [each for block in here for each in block]
        elif action not in moved:
            result.append(action)
    return tuple(result)
