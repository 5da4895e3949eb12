"""Layouts that combine one choice of the language model with every choice of each encoder."""

from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from typing import NamedTuple

import numpy as np

from workbench.arrays import Floats
from workbench.planner.layout_choice import LayoutChoice, Mode, ModuleChoice


class Layouts(NamedTuple):
    """A sequence of layouts that are made on demand.

    Args:
        bounds_s: [L] lower bounds on their steps.
        at: index -> the layout.
    """

    bounds_s: Floats
    at: Callable[[int], LayoutChoice]


Bounded = tuple[float, LayoutChoice]  # lower bound on the step's seconds, and the layout


class Family(NamedTuple):
    """Layouts that share the LLM's choice.

    Args:
        bound_s: a cheap lower bound on their steps, without cutting the LLM into stages.
        most: upper bound on their number.
        closer_s: a tighter bound, which takes longer.
        layouts: all of them, each with its own bound.
    """

    bound_s: float
    most: int
    closer_s: Callable[[], float]
    layouts: Callable[[], Layouts]


class Part(NamedTuple):
    """Choices of one encoder, and the seconds of each, which all layouts with it share."""

    choices: Sequence[ModuleChoice]
    seconds: Floats


def part_of(choices: Sequence[ModuleChoice], seconds: Callable[[ModuleChoice], float]) -> Part:
    return Part(choices, np.array([seconds(choice) for choice in choices], dtype=np.float64))


def joined_s(joined: np.ufunc, parts: Iterable[Part]) -> Floats:
    """Joined seconds of all combinations, in the order of `itertools.product`; a fold that starts at 0."""
    return reduce(lambda seconds, part: joined.outer(seconds, part.seconds).ravel(), parts, np.zeros(1))


def combination(
    mode: Mode, llm: ModuleChoice, parts: Sequence[Part], index: int, *, offload: bool = False
) -> LayoutChoice:
    """The combination at an index in the order of `itertools.product`."""
    choice_indices = np.unravel_index(index, tuple(len(part.choices) for part in parts))
    encoders = tuple(part.choices[int(choice)] for part, choice in zip(parts, choice_indices, strict=True))
    return LayoutChoice(mode=mode, encoders=encoders, llm=llm, offload=offload)
