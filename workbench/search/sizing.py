"""How many GPUs a training needs: steps, hours and dollars on clusters of 1, 2, 4, ... equal nodes."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from workbench.cost.hardware import uniform
from workbench.cost.profile import load_profile
from workbench.job.job import Job
from workbench.job.links import link_of, num_cards
from workbench.planner.layout_space import divisors
from workbench.search.objectives.money import steps_for
from workbench.units import S_PER_HOUR

MOST_GPUS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """Limits of a training.

    Args:
        tokens: positions of the LLM's sequence to train on, those of images and clips included; None:
            `samples` are given.
        samples: to train on.
        deadline_s: None: no deadline.
        budget_dollars: None: no budget.
    """

    tokens: float | None = None
    samples: int | None = None
    deadline_s: float | None = None
    budget_dollars: float | None = None

    def __post_init__(self) -> None:
        if (self.tokens is None) == (self.samples is None):
            raise ValueError("size: want one of --tokens and --samples")
        for name in ("tokens", "samples", "deadline_s", "budget_dollars"):
            limit = getattr(self, name)
            if limit is not None and not 0 < limit < math.inf:
                raise ValueError(f"size: want {name} > 0 and finite, got {limit:g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A whole training with the best plan for a number of GPUs.

    Args:
        gpus: available GPUs, of which the plan may leave some idle.
        steps: optimizer steps.
        record: the plan's record, as a search returns it; None without a plan.
        refusal: why there is no plan.
        dollars_per_gpu_hour: None where the job states no prices.
    """

    gpus: int
    steps: int
    record: Mapping[str, Any] | None
    refusal: str = ""
    dollars_per_gpu_hour: float | None = None

    @property
    def seconds(self) -> float:
        """Duration; infinite without a plan."""
        return math.inf if self.record is None else self.steps * float(self.record["iteration_s"])

    @property
    def interval_s(self) -> tuple[float, float] | None:
        """The 80 % prediction interval of the duration; None where it is unknown."""
        interval = None if self.record is None else self.record["interval_80"]
        return None if interval is None else (self.steps * interval["low_s"], self.steps * interval["high_s"])

    @property
    def dollars(self) -> float | None:
        """Price of the GPUs that the plan uses; None without a price or a plan."""
        if self.record is None or self.dollars_per_gpu_hour is None:
            return None
        used = int(self.record["ranks"])
        return self.seconds / S_PER_HOUR * used * self.dollars_per_gpu_hour

    def meets(self, goal: Goal) -> bool:
        """Whether it has a plan that ends before the deadline and within the budget."""
        in_time = goal.deadline_s is None or self.seconds <= goal.deadline_s
        dollars = self.dollars
        is_paid = goal.budget_dollars is None or (dollars is not None and dollars <= goal.budget_dollars)
        return self.record is not None and in_time and is_paid


def num_steps(job: Job, goal: Goal) -> int:
    """Optimizer steps until the goal's samples, or tokens of the LLM's sequence, are consumed."""
    if goal.samples is not None:
        return math.ceil(goal.samples / len(job.batch))
    assert goal.tokens is not None
    return steps_for(goal.tokens, (job.batch,))


def gpu_counts(job: Job, most: int = MOST_GPUS) -> Iterator[int]:
    """The GPUs of one node, then twice as many each time, up to `most`."""
    count = job.cluster.nodes[0].num_ranks
    while count <= most:
        yield count
        count *= 2


def on_gpus(job: Job, count: int) -> Job:
    """The job on `count` GPUs of the same kind, on whole nodes or on part of one.

    Replicas keep their number of GPUs as far as the batch has samples for them; a job whose layouts state a
    dp keeps its replicas.

    Raises:
        ValueError: the cluster does not consist of equal GPU nodes, `count` is no multiple of a node, or the
            profile lacks the inter-node link that a job of one node does not state.
    """
    node, prefix = job.cluster.nodes[0], f"size: job {job.name!r}"
    if job.pools or node.num_cores is not None or len(set(job.cluster.nodes)) > 1:
        raise ValueError(f"{prefix}: want a cluster of one device with nodes and ranks_per_node")
    if count < 1 or (count > node.num_ranks and count % node.num_ranks):
        nearest = max(1, round(count / node.num_ranks)) * node.num_ranks
        raise ValueError(
            f"{prefix}: {count} GPUs make no whole nodes of {node.num_ranks}; nearest: {nearest}"
        )
    num_nodes, inter = max(1, count // node.num_ranks), job.cluster.inter
    if len(job.cluster.nodes) == 1 and inter == job.cluster.intra and num_nodes > 1:
        profile = load_profile(job.profile)
        inter = link_of("inter", None, profile)
        node = replace(node, num_cards=num_cards(None, profile, node.num_ranks))
    node = replace(node, num_ranks=min(count, node.num_ranks))
    cluster = uniform(job.cluster.name, node, num_nodes=num_nodes, intra=job.cluster.intra, inter=inter)
    return replace(job, cluster=cluster, max_ranks=None, replicas=_replicas(job, count))


def _replicas(job: Job, count: int) -> int:
    """The most replicas that are no smaller than the job's and share the batch equally; at least one."""
    if any(layout.dp is not None for layout in job.layouts):
        return job.replicas
    most = max(1, job.replicas * count // job.usable_ranks)
    return max(each for each in divisors(len(job.batch)) if each <= most)


def sized(goal: Goal, counts: Iterator[int], train: Callable[[int], Training]) -> tuple[Training, ...]:
    """Trainings on growing clusters, until one meets the deadline or more GPUs stop helping.

    More GPUs stop helping when the plan is no faster than the one on half as many, or when it exceeds the
    budget, is in time for any deadline, and is no cheaper either: until then, the additional memory may make
    the larger cluster the cheaper one. With a budget alone, the last training within it is the fastest.

    Args:
        counts: numbers of GPUs, ascending.
        train: returns the best training on so many GPUs.
    """
    trainings: list[Training] = []
    for count in counts:
        training = train(count)
        before = next((earlier for earlier in reversed(trainings) if 2 * earlier.gpus <= count), None)
        trainings.append(training)
        if training.record is None:
            continue
        if goal.deadline_s is not None and training.meets(goal):
            break
        if before is not None and _stops_helping(training, before, goal):
            break
    return tuple(trainings)


def _stops_helping(training: Training, before: Training, goal: Goal) -> bool:
    """Whether a plan is no faster than on half as many GPUs, or over budget and no cheaper."""
    if training.seconds >= before.seconds:
        return True
    misses_deadline = goal.deadline_s is not None and training.seconds > goal.deadline_s
    if goal.budget_dollars is None or misses_deadline or training.dollars is None or before.dollars is None:
        return False
    return goal.budget_dollars < training.dollars >= before.dollars


def answer(goal: Goal, trainings: tuple[Training, ...]) -> Training | None:
    """The training to choose: the fewest GPUs that meet a deadline, else the fastest; None if none does."""
    meeting = [each for each in trainings if each.meets(goal)]
    if not meeting:
        return None
    if goal.deadline_s is not None:
        return min(meeting, key=lambda each: each.gpus)
    return min(meeting, key=lambda each: each.seconds)
