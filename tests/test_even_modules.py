"""Strategies on models with one module, or equal ones."""

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.doors.export_jobs import export_jobs
from sim.predict import predict
from workbench.balance.microbatches.even_modules import even_in_every_module
from workbench.balance.tokens.exchange import equal_counts_exchanged
from workbench.job.job import Job
from workbench.job.machines import cost_of
from workbench.strategies.registry import BY_NAME
from workbench.timing.accept import accept

Work = list[list[float]]


def sum_of_heaviest(work: Work, groups: list[list[int]]) -> float:
    return sum(max(sum(of_module[each] for each in group) for group in groups) for of_module in work)


def works(seed: int, num_modules: int, num_samples: int) -> Work:
    draw = random.Random(seed)
    return [
        [draw.choice((0.0, draw.expovariate(1.0))) for _ in range(num_samples)] for _ in range(num_modules)
    ]


def all_groupings(num_samples: int, num_groups: int) -> Iterator[list[list[int]]]:
    """Every division of the samples into groups of equal counts, each once."""
    size = num_samples // num_groups

    def divided(left: tuple[int, ...]) -> Iterator[list[list[int]]]:
        if not left:
            yield []
            return
        for others in itertools.combinations(left[1:], size - 1):
            group = [left[0], *others]
            for rest in divided(tuple(each for each in left if each not in group)):
                yield [group, *rest]

    return divided(tuple(range(num_samples)))


@given(st.integers(0, 10_000), st.integers(1, 3), st.sampled_from([(1, 1), (4, 1), (6, 2), (12, 3), (24, 6)]))
def test_groups_have_equal_counts_and_are_never_worse_than_what_they_begin_with(
    seed, num_modules, size
) -> None:
    num_samples, num_groups = size
    work = works(seed, num_modules, num_samples)
    groups = even_in_every_module(work, num_groups)
    assert {len(group) for group in groups} == {num_samples // num_groups}
    assert sorted(each for group in groups for each in group) == list(range(num_samples))
    owners = equal_counts_exchanged(np.array(work).sum(axis=0), num_groups)
    first = [np.flatnonzero(owners == group).tolist() for group in range(num_groups)]
    assert sum_of_heaviest(work, groups) <= sum_of_heaviest(work, first) * (1 + 1e-9)
    assert groups == even_in_every_module(work, num_groups)


@given(st.integers(0, 10_000))
def test_no_swap_of_two_samples_makes_them_better_unless_the_limit_is_reached(seed: int) -> None:
    work = works(seed, 2, 12)
    groups = even_in_every_module(work, 3)
    held = sum_of_heaviest(work, groups)
    for one, other in itertools.combinations(range(3), 2):
        for ours, theirs in itertools.product(groups[one], groups[other]):
            swapped = [list(group) for group in groups]
            swapped[one][swapped[one].index(ours)] = theirs
            swapped[other][swapped[other].index(theirs)] = ours
            assert sum_of_heaviest(work, swapped) >= held * (1 - 1e-8)


def test_they_are_near_the_best_of_all_groupings_of_twelve_samples() -> None:
    ratios, before = [], []
    for seed in range(20):
        work = works(seed, 2, 12)
        best = min(sum_of_heaviest(work, groups) for groups in all_groupings(12, 3))
        ratios.append(sum_of_heaviest(work, even_in_every_module(work, 3)) / best)
        before.append(sum_of_heaviest(work, even_in_every_module(work, 3, most_swaps=0)) / best)
    assert all(ratio >= 1 - 1e-9 for ratio in ratios)
    assert np.mean(ratios) < 1.03
    assert np.mean(before) > 1.08


def test_a_group_that_is_light_in_one_module_does_not_make_up_for_the_other() -> None:
    """Sums are even at once, if samples with images are together; modules are even if they are not."""
    work = [[3.0, 3.0, 0.0, 0.0], [0.0, 0.0, 3.0, 3.0]]
    groups = even_in_every_module(work, 2)
    assert sum_of_heaviest(work, groups) == 6.0
    assert sum_of_heaviest(work, [[0, 1], [2, 3]]) == 12.0


def test_samples_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="5 samples do not divide into 2 equal groups"):
        even_in_every_module([[1.0] * 5], 2)


@pytest.fixture(scope="module")
def job() -> Job:
    """With no layout, so that all degrees are free."""
    found = next(job for job in export_jobs() if job.name == "qwen2")
    assert len(found.model.modules) == 1
    return replace(found, layouts=())


def iteration_s(job: Job, strategy: str) -> float:
    cost = cost_of(job, None, None)
    plan = BY_NAME[strategy].planner(job, cost, lambda *_: None)
    assert len(plan.ranks) == job.cluster.num_ranks
    return predict(*accept(plan), cost).iteration_s


@pytest.mark.parametrize("strategy", ["fsdp", "hsdp"])
def test_sharded_strategies_take_it(job, strategy):
    assert iteration_s(job, strategy) > 0


def test_encoders_beside_before_or_with_it_make_no_difference_where_there_are_none(job):
    searched = ("megatron-homogeneous", "megatron-islands", "megatron-colocated")
    assert len({iteration_s(job, strategy) for strategy in searched}) == 1
