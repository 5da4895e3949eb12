"""Joins data-parallel replicas where a layout distributes experts among more ranks than a stage has.

A job file counts as its users do: `replicas` or `dp` of eight, tp 1 and ep 8 are eight replicas whose ranks
distribute the experts. A `Job` counts what runs together: one replica of eight joint ones, with a microbatch
of eight times as many samples.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import gcd
from typing import NamedTuple

from workbench.job.module_layout import ModuleLayout


class LayoutFields(NamedTuple):
    """The fields of a `Job` that its layouts decide; with one joint replica, as a job file counts them."""

    layouts: tuple[ModuleLayout, ...]
    replicas: int
    microbatch_samples: int
    joint_replicas: int


def join(
    layouts: Sequence[ModuleLayout], llm: str, *, replicas: int, microbatch_samples: int, where: str
) -> LayoutFields:
    """Join replicas as the language model's ep wants; without need nothing changes.

    Another module with replicas of its own joins as many of them as divide both.

    Args:
        layouts: each replica by itself.
        llm: name of the language model.
        replicas: of modules whose layout has no dp.
        microbatch_samples: of one replica.
        where: the job, for messages.

    Raises:
        ValueError: ep that is no multiple of a stage's ranks, or not by a divisor of the replicas.
    """
    given = next((layout for layout in layouts if layout.module == llm), ModuleLayout(module=llm))
    num_ranks, dp = given.tp * given.cp, given.dp or replicas
    if num_ranks % given.ep == 0 or dp == 1:  # what else is wrong with it, the job says
        return LayoutFields(tuple(layouts), replicas, microbatch_samples, 1)
    num_joint, rest = divmod(given.ep, num_ranks)
    if rest or dp % num_joint:
        possible = [each for each in range(1, dp + 1) if dp % each == 0]
        nearest = min(possible, key=lambda each: (abs(each * num_ranks - given.ep), each)) * num_ranks
        raise ValueError(
            f"{where}: module {llm!r}: ep must divide tp x cp = {num_ranks}, or be that times a divisor of "
            f"its {dp} replicas, got {given.ep}; nearest: {nearest}"
        )
    joined_dp = dp // num_joint
    return LayoutFields(
        tuple(_joined(layout, layout.dp or replicas, num_joint, joined_dp) for layout in layouts),
        joined_dp,
        microbatch_samples * num_joint,
        num_joint,
    )


def _joined(layout: ModuleLayout, dp: int, num_joint: int, replicas: int) -> ModuleLayout:
    own = gcd(dp, num_joint)
    return replace(layout, dp=None if dp // own == replicas else dp // own, joint_replicas=own)
