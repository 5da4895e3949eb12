"""Forwards brought forward to stand right behind another."""

from collections.abc import Mapping, Sequence

from workbench.schedule.action import Action, Pass


def with_followers(
    actions: Sequence[Action], followers: Mapping[int, Mapping[int, int]]
) -> tuple[Action, ...]:
    """A program in which some forwards follow others of their stage at once.

    Safe when all stages of a chain have the same followers, and inputs of a follower are there when
    those of its leader are: then every follower can be put right behind its leader in a total order
    of all passes, and every pass still comes after its inputs.

    Args:
        actions: of one rank, in order.
        followers: stage -> microbatch -> the microbatch that its forward shall follow, which comes earlier.

    Complexity: O(actions).
    """
    moved = {
        Action(stage, Pass.F, leader): Action(stage, Pass.F, follower)
        for stage, pairs in followers.items()
        for follower, leader in pairs.items()
    }
    staying = set(moved.values())
    found: list[Action] = []
    for action in actions:
        if action not in staying:
            found.append(action)
            if action in moved:
                found.append(moved[action])
    return tuple(found)
