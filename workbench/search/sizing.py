"""How many GPUs a training wants: its steps, hours and dollars on growing clusters of one kind of node."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from workbench.cost.hardware import uniform
from workbench.cost.profile import load_profile
from workbench.job.job import Job
from workbench.job.links import link_of, num_cards
from workbench.search.objectives.money import steps_for
from workbench.units import S_PER_HOUR

MOST_GPUS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What a training may take.

    Args:
        tokens: it is over so many positions of the LLM's sequence, those of images and clips among them.
        deadline_s: None: none.
        budget_dollars: None: none.
    """

    tokens: float
    deadline_s: float | None = None
    budget_dollars: float | None = None

    def __post_init__(self) -> None:
        for name in ("tokens", "deadline_s", "budget_dollars"):
            limit = getattr(self, name)
            if limit is not None and not 0 < limit < math.inf:
                raise ValueError(f"size: want {name} > 0 and finite, got {limit:g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A whole training by the best plan for a number of GPUs.

    Args:
        gpus: that there are.
        steps: optimizer steps.
        record: of the plan, as a search gives it.
        refusal: why there is no plan; then there is no record.
        dollars_per_gpu_hour: None: not said.
    """

    gpus: int
    steps: int
    record: Mapping[str, Any] | None
    refusal: str = ""
    dollars_per_gpu_hour: float | None = None

    @property
    def seconds(self) -> float:
        """Infinite without a plan."""
        return math.inf if self.record is None else self.steps * float(self.record["iteration_s"])

    @property
    def interval_s(self) -> tuple[float, float] | None:
        """Seconds between which the training lies in 80 % of the cases; None where none is known."""
        found = None if self.record is None else self.record["interval_80"]
        return None if found is None else (self.steps * found["low_s"], self.steps * found["high_s"])

    @property
    def dollars(self) -> float | None:
        """For the GPUs that the plan uses; None without a price or a plan."""
        if self.record is None or self.dollars_per_gpu_hour is None:
            return None
        used = int(self.record["ranks"])
        return self.seconds / S_PER_HOUR * used * self.dollars_per_gpu_hour

    def meets(self, goal: Goal) -> bool:
        """Whether it is over in time and within the budget."""
        in_time = goal.deadline_s is None or self.seconds <= goal.deadline_s
        dollars = self.dollars
        is_paid = goal.budget_dollars is None or (dollars is not None and dollars <= goal.budget_dollars)
        return self.record is not None and in_time and is_paid


def num_steps(job: Job, tokens: float) -> int:
    """Optimizer steps until so many tokens of the LLM's sequence are through."""
    return steps_for(tokens, (job.batch,))


def gpu_counts(job: Job, most: int = MOST_GPUS) -> Iterator[int]:
    """One node of the job's, and each time twice as many."""
    count = job.cluster.nodes[0].num_ranks
    while count <= most:
        yield count
        count *= 2


def on_gpus(job: Job, count: int) -> Job:
    """The job on so many GPUs of its kind, on whole nodes or a part of one.

    Raises:
        ValueError: its cluster is not of equal nodes of GPUs, the count makes no whole nodes, or the profile
            lacks the link between nodes that a job of one node does not name.
    """
    node, where = job.cluster.nodes[0], f"size: job {job.name!r}"
    if job.pools or node.num_cores is not None or len(set(job.cluster.nodes)) > 1:
        raise ValueError(f"{where}: want a cluster of one device with nodes and ranks_per_node")
    if count < 1 or (count > node.num_ranks and count % node.num_ranks):
        nearest = max(1, round(count / node.num_ranks)) * node.num_ranks
        raise ValueError(f"{where}: {count} GPUs make no whole nodes of {node.num_ranks}; nearest: {nearest}")
    num_nodes, inter = max(1, count // node.num_ranks), job.cluster.inter
    if len(job.cluster.nodes) == 1 and inter == job.cluster.intra and num_nodes > 1:
        profile = load_profile(job.profile)
        inter = link_of("inter", None, profile)
        node = replace(node, num_cards=num_cards(None, profile, node.num_ranks))
    node = replace(node, num_ranks=min(count, node.num_ranks))
    cluster = uniform(job.cluster.name, node, num_nodes=num_nodes, intra=job.cluster.intra, inter=inter)
    return replace(job, cluster=cluster, max_ranks=None)


def sized(goal: Goal, counts: Iterator[int], train: Callable[[int], Training]) -> tuple[Training, ...]:
    """Trainings on growing clusters, until one meets the deadline or more GPUs help no more.

    More help no more where the fastest plan is not faster than on half as many, and where one that is too
    dear, and in time if there is a deadline, is no cheaper either: memory to spare may make twice as many the
    cheaper ones. Within a budget alone, the last one that is paid for is the fastest.

    Args:
        counts: of GPUs, ascending.
        train: the best training on so many.
    """
    found: list[Training] = []
    for count in counts:
        made = train(count)
        before = next((each for each in reversed(found) if 2 * each.gpus <= count), None)
        found.append(made)
        if made.record is None:
            continue
        if goal.deadline_s is not None and made.meets(goal):
            break
        if before is not None and _helps_no_more(made, before, goal):
            break
    return tuple(found)


def _helps_no_more(made: Training, before: Training, goal: Goal) -> bool:
    """Whether a plan is no faster than one on half as many GPUs, or too dear and no cheaper."""
    if made.seconds >= before.seconds:
        return True
    is_awaited = goal.deadline_s is not None and made.seconds > goal.deadline_s
    if goal.budget_dollars is None or is_awaited or made.dollars is None or before.dollars is None:
        return False
    return goal.budget_dollars < made.dollars >= before.dollars


def answer(goal: Goal, found: tuple[Training, ...]) -> Training | None:
    """The training to choose: the fewest GPUs that meet a deadline, else the fastest; None: none does."""
    good = [each for each in found if each.meets(goal)]
    if not good:
        return None
    if goal.deadline_s is not None:
        return min(good, key=lambda each: each.gpus)
    return min(good, key=lambda each: each.seconds)
