"""Parts of a cluster to start a search on besides the whole, for objectives that count ranks or nodes."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from workbench.cost.hardware import Node
from workbench.cost.model import CostModel
from workbench.job.device_pools import Pool
from workbench.job.job import Job
from workbench.job.other_layouts import with_layouts
from workbench.memory.checkpoint_bytes import checkpoint_bytes
from workbench.plan.plan import Plan
from workbench.planner.layout_space import divisors
from workbench.search.joint.bounds import lower_bound_s
from workbench.search.joint.evaluate import Judge
from workbench.search.joint.objective_bounds import over_batches
from workbench.search.objectives.goodput import Goodput
from workbench.search.objectives.money import DollarsPerSample, TrainingDollars
from workbench.search.objectives.plan_judge import PlanJudge, rank_seconds

MOST_PARTS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A subset of a cluster's ranks, as a job of its own.

    Args:
        name: of the part.
        job: on these ranks alone, with layouts open.
        ranks: in the whole cluster, ascending: rank r of the part's job is `ranks[r]`.
        whole: the job on all ranks.
    """

    name: str
    job: Job
    ranks: tuple[int, ...]
    whole: Job

    @property
    def is_prefix(self) -> bool:
        """Whether every rank has the same number in the part and in the whole."""
        return self.ranks[-1] == len(self.ranks) - 1

    def moved(self, plan: Plan) -> Plan:
        """Convert a plan of the part to one of the whole cluster, whose other ranks are idle."""
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
    """Parts of the cluster to start on; none if the objective counts neither ranks nor nodes.

    For dollars and rank-seconds: divisors of one node's ranks, then divisors of the number of nodes, fewest
    ranks first; with device pools, every combination of such counts, 0 included. Parts with less memory
    than weights and optimizer state need are left out, and those that a lower bound shows to miss the
    deadline. For goodput: all nodes but 1, 2, 4, ... spares, down to half.

    Complexity: that of `lower_bound_s` for each part if there is a deadline.
    """
    if not isinstance(judge, PlanJudge):
        return ()
    measure = judge.measure
    if isinstance(measure, Goodput):
        parts = [_first(job, count) for count in _counts_with_spares(job)]
    elif measure is rank_seconds or isinstance(measure, DollarsPerSample | TrainingDollars):
        candidates = (
            _of_pools(job) if job.pools else (_first(job, count) for count in _counts(job.cluster.nodes))
        )
        parts = sorted(candidates, key=lambda part: len(part.ranks))
    else:
        return ()
    least_bytes = checkpoint_bytes(job.model, job.settings)
    fitting = (p for p in parts if len(p.ranks) < job.usable_ranks and _memory_bytes(p) >= least_bytes)
    return tuple(part for part in fitting if _may_meet_deadline(part, cost, judge))[:MOST_PARTS]


def _counts_with_spares(job: Job) -> Iterator[int]:
    """Ranks in use when 1, 2, 4, ... nodes are spares."""
    nodes, spare = len(job.cluster.nodes), 1
    while 2 * spare <= nodes:
        yield sum(node.num_ranks for node in job.cluster.nodes[:-spare])
        spare *= 2


def _first(job: Job, count: int) -> Part:
    part = replace(with_layouts(job, ()), max_ranks=count)
    return Part(name=f"on {count}", job=part, ranks=tuple(range(count)), whole=job)


def _counts(nodes: Sequence[Node]) -> list[int]:
    """Divisors of the first node's ranks, and the ranks of as many nodes as divide their number."""
    inside, whole = divisors(nodes[0].num_ranks), divisors(len(nodes))
    return [*inside, *(sum(node.num_ranks for node in nodes[:count]) for count in whole[1:])]


def _of_pools(job: Job) -> Iterator[Part]:
    """Parts with some ranks of some pools, among which every module has one that takes it."""
    if job.max_ranks is not None:
        return
    nodes = [_nodes_of(job, pool) for pool in job.pools]
    for counts in product(*([0, *_counts(pool_nodes)] for pool_nodes in nodes)):
        used = [pool for pool, count in zip(job.pools, counts, strict=True) if count]
        if all(any(pool.takes(module.name) for pool in used) for module in job.model.modules):
            yield _pooled(
                job, [_cut(pool_nodes, count) for pool_nodes, count in zip(nodes, counts, strict=True)]
            )


def _nodes_of(job: Job, pool: Pool) -> list[Node]:
    cluster = job.cluster
    return [cluster.nodes[n] for n in sorted({*map(cluster.node_of, range(pool.first_rank, pool.end_rank))})]


def _cut(nodes: Sequence[Node], count: int) -> list[Node]:
    """The first `count` ranks of some nodes; a node that is cut keeps the cards of its remaining ranks."""
    kept: list[Node] = []
    for node in nodes:
        num_ranks = min(node.num_ranks, count - sum(other.num_ranks for other in kept))
        if num_ranks > 0:
            cards = max(1, node.num_cards * num_ranks // node.num_ranks)
            kept.append(replace(node, num_ranks=num_ranks, num_cards=cards))
    return kept


def _pooled(job: Job, nodes_of_pools: Sequence[Sequence[Node]]) -> Part:
    pools: list[Pool] = []
    ranks: list[int] = []
    for pool, nodes in zip(job.pools, nodes_of_pools, strict=True):
        count = sum(node.num_ranks for node in nodes)
        if count:
            pools.append(replace(pool, first_rank=len(ranks), num_ranks=count))
            ranks += range(pool.first_rank, pool.first_rank + count)
    cluster = replace(job.cluster, nodes=tuple(node for nodes in nodes_of_pools for node in nodes))
    part = replace(with_layouts(job, ()), cluster=cluster, pools=tuple(pools))
    names = " and ".join(f"{pool.num_ranks} {pool.name}" for pool in pools)
    return Part(name=f"on {names}", job=part, ranks=tuple(ranks), whole=job)


def _memory_bytes(part: Part) -> int:
    """Total memory of its ranks; ranks that share cores share their node's."""
    cluster = part.whole.cluster
    ranks_per_node = Counter(map(cluster.node_of, part.ranks))
    nodes = ((cluster.nodes[index], count) for index, count in ranks_per_node.items())
    return sum(node.memory_bytes * (count if node.num_cores is None else 1) for node, count in nodes)


def _may_meet_deadline(part: Part, cost: CostModel, judge: PlanJudge) -> bool:
    measure = judge.measure
    if not isinstance(measure, TrainingDollars) or measure.deadline_s is None:
        return True
    least_s = over_batches(judge, lower_bound_s)(part.job, cost, None)
    return measure.num_steps * least_s <= measure.deadline_s
