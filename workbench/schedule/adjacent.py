"""Moves forwards so that some directly follow others of their stage."""

from collections.abc import Mapping, Sequence

from workbench.schedule.action import Action, Pass


def with_followers(
    actions: Sequence[Action], followers: Mapping[int, Mapping[int, int]]
) -> tuple[Action, ...]:
    """Return a program in which some forwards directly follow others of their stage.

    Safe if all stages of a chain have the same followers, and inputs of a follower are ready when those of
    its leader are: then every follower can be placed right after its leader in a total order of all passes,
    and every pass still comes after its inputs.

    Args:
        actions: of one rank, in order.
        followers: stage -> microbatch -> the earlier microbatch that its forward shall follow.

    Complexity: O(actions).
    """
    follower_of = {
        Action(stage, Pass.F, leader): Action(stage, Pass.F, follower)
        for stage, pairs in followers.items()
        for follower, leader in pairs.items()
    }
    followers_moved = set(follower_of.values())
    reordered: list[Action] = []
    for action in actions:
        if action not in followers_moved:
            reordered.append(action)
            if action in follower_of:
                reordered.append(follower_of[action])
    return tuple(reordered)
