"""Figure 2.2: how many nodes may fail at once, in the worst case and in general.

Paper:   I. Jang, dissertation, section 2.3.2, Figure 2.2 and the text beside it: three pipelines of four
         stages go on after any two node failures, and may go on after eight.
Setup:   one node a stage, f = 2. Every set of nodes, 4,094 of them, fails at once.
Differs: the figure does not say on how few nodes a pipeline fits. Ours continues only with (f + 1) n0 nodes:
         with n0 = 1 the four that eight failures leave are enough, with n0 = 2 six are the most that fail.
Ours:    `workbench.elastic.reconfigure`, where every node left must work and get all layers that it lacks:
         ten seconds on one CPU core.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from math import comb

from experiments.harness.outcome import Evidence, PaperNumber
from experiments.harness.printed import claim_value
from experiments.harness.script import script
from experiments.oobleck.coverage import is_valid, templates_from
from workbench.elastic.layout import first_layout
from workbench.elastic.node_specification import NodeSpecification, TemplateSet
from workbench.elastic.reconfigure import CannotContinueError, survive

NUM_PIPELINES, NUM_STAGES = 3, 4


def outlived(num_pipelines: int, num_stages: int, smallest: int) -> list[int]:
    """[n - 1] numbers of sets of 1 .. n - 1 nodes whose simultaneous loss the pipelines survive.

    There are n = pipelines x stages nodes.

    Raises:
        AssertionError: a reconfiguration that leaves a node idle or without its layers.
    """
    nodes = [f"node{number}" for number in range(num_pipelines * num_stages)]
    specification = NodeSpecification(
        num_nodes=len(nodes), num_faults=num_pipelines - 1, smallest=smallest, most=num_stages
    )
    templates = templates_from(smallest)
    planned = TemplateSet(
        specification=specification, templates=tuple(templates[size] for size in specification.sizes)
    )
    layout = first_layout(nodes, [num_stages] * num_pipelines)
    layer_bytes = [1] * planned.templates[0].num_layers
    counts: Counter[int] = Counter()
    for size in range(1, len(nodes)):
        for lost in combinations(nodes, size):
            try:
                after = survive(planned, layout, lost, layer_bytes)
            except CannotContinueError:
                continue
            assert is_valid(planned, layout, set(lost), after), lost
            counts[size] += 1
    return [counts[size] for size in range(1, len(nodes))]


def with_a_replica_left(num_pipelines: int, num_stages: int) -> list[int]:
    """[n - 1] numbers of sets of nodes that leave a replica of every stage: ((1 + x)^p - x^p)^s."""
    of_stage = [comb(num_pipelines, lost) for lost in range(num_pipelines)] + [0]
    counts = [1]
    for _ in range(num_stages):
        longer = [0] * (len(counts) + num_pipelines)
        for before, count in enumerate(counts):
            for lost, more in enumerate(of_stage):
                longer[before + lost] += count * more
        counts = longer
    return counts[1 : num_pipelines * num_stages]


def worst_and_most(counts: Sequence[int], num_nodes: int) -> tuple[int, int]:
    """The largest numbers of nodes of which every set may fail, and of which some set may."""
    sizes = range(1, num_nodes)
    any_set = [size for size in sizes if counts[size - 1] == comb(num_nodes, size)]
    some_set = [size for size in sizes if counts[size - 1]]
    return max(any_set, default=0), max(some_set, default=0)


@script()
def run() -> Evidence:
    """Evidence of the two printed numbers, every size of set, and the effect of a larger n0."""
    evidence = Evidence()
    num_nodes = NUM_PIPELINES * NUM_STAGES
    counts = outlived(NUM_PIPELINES, NUM_STAGES, 1)
    worst, most = worst_and_most(counts, num_nodes)
    for key, ours in (("worst", worst), ("general", most)):
        claim = f"ob_fig22_{key}"
        number = PaperNumber(f"modelled/{key}", claim_value(claim), "nodes", "section 2.3.2", 0.0)
        evidence.add(number, ours)
    for size, count in enumerate(counts, start=1):
        evidence.ours[f"modelled/outlived/{size}"] = count / comb(num_nodes, size)
    evidence.claim(
        f"of every number of lost nodes, as many sets are outlived as leave a replica of every stage "
        f"({sum(counts)} of {2**num_nodes - 2});",
        counts == with_a_replica_left(NUM_PIPELINES, NUM_STAGES),
    )
    evidence.claim(
        "for 2 to 4 pipelines of 2 and 3 stages any f nodes may fail, and at most as many as leave a replica "
        "of every stage and a node for each of f + 1 pipelines;",
        all(
            worst_and_most(outlived(replicas, stages, 1), replicas * stages)
            == (replicas - 1, replicas * stages - max(replicas, stages))
            for replicas in (2, 3, 4)
            for stages in (2, 3)
        ),
    )
    evidence.ours["modelled/general_of_two_node_pipelines"] = worst_and_most(
        outlived(NUM_PIPELINES, NUM_STAGES, 2), num_nodes
    )[1]
    return evidence
