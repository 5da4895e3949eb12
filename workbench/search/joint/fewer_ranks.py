"""Parts of a cluster that a search starts on besides the whole, where what is best counts ranks or nodes."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from workbench.cost.hardware import Node
from workbench.cost.model import CostModel
from workbench.job.device_pools import Pool
from workbench.job.job import Job
from workbench.plan.plan import Plan
from workbench.planner.layout_space import divisors
from workbench.search.joint.bounds import lower_bound_s
from workbench.search.joint.evaluate import Judge
from workbench.search.joint.objective_bounds import over_batches
from workbench.search.objectives.goodput import Goodput, checkpoint_bytes
from workbench.search.objectives.money import DollarsPerSample, TrainingDollars
from workbench.search.objectives.plan_judge import PlanJudge, rank_seconds

MOST_PARTS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Some ranks of a job's cluster, as a job of its own.

    Args:
        name: of the part.
        job: on these ranks alone, layouts open.
        ranks: of the whole, ascending: what the part's job calls rank r is `ranks[r]`.
        whole: the job on all ranks.
    """

    name: str
    job: Job
    ranks: tuple[int, ...]
    whole: Job

    @property
    def is_front(self) -> bool:
        """Whether ranks have the same numbers in both."""
        return self.ranks[-1] == len(self.ranks) - 1

    def moved(self, plan: Plan) -> Plan:
        """A plan of the part as one of the whole, whose other ranks are idle."""
        stages = tuple(
            replace(stage, ranks=tuple(tuple(self.ranks[rank] for rank in row) for row in stage.ranks))
            for stage in plan.stages
        )
        programs = tuple(
            replace(program, ranks=tuple(self.ranks[rank] for rank in program.ranks))
            for program in plan.programs
        )
        return replace(plan, cluster=self.whole.cluster, stages=stages, programs=programs)


def fewer_ranks(job: Job, cost: CostModel, judge: Judge) -> tuple[Part, ...]:
    """Where to start besides all ranks; none where what is best counts neither ranks nor nodes.

    Dollars and seconds of ranks: the fewest ranks first, of one node as many as divide it, or as many whole
    nodes as divide those that there are; of every pool of devices likewise, or none. Left out is what has
    less memory than weights and optimizer state take, and what a bound says is too slow for a deadline.
    Goodput: all nodes but 1, 2, 4, ... of them, which are then spare, down to half.

    Complexity: that of `lower_bound_s` for each where there is a deadline.
    """
    if not isinstance(judge, PlanJudge):
        return ()
    measure = judge.measure
    if isinstance(measure, Goodput):
        found = [_first(job, count) for count in _spared(job)]
    elif measure is rank_seconds or isinstance(measure, DollarsPerSample | TrainingDollars):
        every = _of_pools(job) if job.pools else (_first(job, count) for count in _counts(job.cluster.nodes))
        found = sorted(every, key=lambda part: len(part.ranks))
    else:
        return ()
    least_bytes = checkpoint_bytes(job)[1]
    fitting = (p for p in found if len(p.ranks) < job.usable_ranks and _memory_bytes(p) >= least_bytes)
    return tuple(part for part in fitting if _may_be_in_time(part, cost, judge))[:MOST_PARTS]


def _spared(job: Job) -> Iterator[int]:
    """Ranks of the nodes that are used."""
    nodes, spare = len(job.cluster.nodes), 1
    while 2 * spare <= nodes:
        yield sum(node.num_ranks for node in job.cluster.nodes[:-spare])
        spare *= 2


def _first(job: Job, count: int) -> Part:
    part = replace(job, layouts=(), max_ranks=count)
    return Part(name=f"on {count}", job=part, ranks=tuple(range(count)), whole=job)


def _counts(nodes: Sequence[Node]) -> list[int]:
    """Ranks of the first node that divide it, and of as many nodes as divide them."""
    inside, whole = divisors(nodes[0].num_ranks), divisors(len(nodes))
    return [*inside, *(sum(node.num_ranks for node in nodes[:count]) for count in whole[1:])]


def _of_pools(job: Job) -> Iterator[Part]:
    """Some ranks of every pool or of some pools, where each module has one that takes it."""
    if job.max_ranks is not None:
        return
    nodes = [_nodes_of(job, pool) for pool in job.pools]
    for counts in product(*([0, *_counts(held)] for held in nodes)):
        used = [pool for pool, count in zip(job.pools, counts, strict=True) if count]
        if all(any(pool.takes(module.name) for pool in used) for module in job.model.modules):
            yield _pooled(job, [_cut(held, count) for held, count in zip(nodes, counts, strict=True)])


def _nodes_of(job: Job, pool: Pool) -> list[Node]:
    cluster = job.cluster
    return [cluster.nodes[n] for n in sorted({*map(cluster.node_of, range(pool.first_rank, pool.end_rank))})]


def _cut(nodes: Sequence[Node], count: int) -> list[Node]:
    """The first so many ranks of some nodes; a node that is cut keeps the cards of the ranks that stay."""
    found: list[Node] = []
    for node in nodes:
        own = min(node.num_ranks, count - sum(each.num_ranks for each in found))
        if own > 0:
            cards = max(1, node.num_cards * own // node.num_ranks)
            found.append(replace(node, num_ranks=own, num_cards=cards))
    return found


def _pooled(job: Job, kept: Sequence[Sequence[Node]]) -> Part:
    pools: list[Pool] = []
    ranks: list[int] = []
    for pool, nodes in zip(job.pools, kept, strict=True):
        count = sum(node.num_ranks for node in nodes)
        if count:
            pools.append(replace(pool, first_rank=len(ranks), num_ranks=count))
            ranks += range(pool.first_rank, pool.first_rank + count)
    cluster = replace(job.cluster, nodes=tuple(node for nodes in kept for node in nodes))
    part = replace(job, layouts=(), cluster=cluster, pools=tuple(pools))
    words = " and ".join(f"{pool.num_ranks} {pool.name}" for pool in pools)
    return Part(name=f"on {words}", job=part, ranks=tuple(ranks), whole=job)


def _memory_bytes(part: Part) -> int:
    """Of its ranks together; of ranks that share cores, their nodes'."""
    cluster = part.whole.cluster
    on = Counter(map(cluster.node_of, part.ranks))
    nodes = ((cluster.nodes[index], count) for index, count in on.items())
    return sum(node.memory_bytes * (count if node.num_cores is None else 1) for node, count in nodes)


def _may_be_in_time(part: Part, cost: CostModel, judge: PlanJudge) -> bool:
    measure = judge.measure
    if not isinstance(measure, TrainingDollars) or measure.deadline_s is None:
        return True
    least_s = over_batches(judge, lower_bound_s)(part.job, cost, None)
    return measure.num_steps * least_s <= measure.deadline_s
