"""Section 2.4.1.1 and appendix A: whatever fails, the templates use all nodes that are left.

Paper:   I. Jang, dissertation, appendix A.1 and A.2, Theorems 1 and 2.
Setup:   every N up to 64, every n0 and every f that N allows (8,104 jobs); in each, random nodes fail, one
         to eight at a time, until training stops.
Claims:  after each failure all nodes left are in pipelines of n0 to N - f n0 nodes, f + 1 or more, with every
         missing layer copied from a survivor; or fewer than (f + 1) n0 nodes are left, or more than f failed
         at once and took the last copy of a layer with them, and either is reported.
Ours:    `workbench.elastic`, one sequence a job: about half a minute on one CPU core.
"""

import random
from collections import Counter

from experiments.harness.outcome import Evidence
from experiments.harness.script import script
from workbench.elastic.chain import LayerChain
from workbench.elastic.exact_mapping import exact_templates
from workbench.elastic.layout import NodeLayout, first_layout, held_layers
from workbench.elastic.node_specification import NodeSpecification, TemplateSet
from workbench.elastic.reconfigure import CannotContinueError, Reconfiguration, survive
from workbench.elastic.template import Template

MOST_NODES, MOST_AT_ONCE, SEED = 64, 8, 0


def templates_from(smallest: int) -> dict[int, Template]:
    """Templates of one-GPU nodes of a model that fits on `smallest` nodes and not on fewer."""
    per_node = -(-MOST_NODES // smallest)
    layers = smallest * per_node
    chain = LayerChain(
        widths=(1,), time_s=((1.0,),) * layers, held_bytes=((1,),) * layers, capacity_bytes=per_node
    )
    return exact_templates(chain, 1, range(smallest, MOST_NODES + 1))


def is_valid(planned: TemplateSet, before: NodeLayout, lost: set[str], after: Reconfiguration) -> bool:
    """Whether all survivors work in pipelines with templates, and hold or receive all their layers."""
    specification = planned.specification
    survivors = set(before.nodes) - lost
    working = set(after.layout.nodes)
    had, needs = held_layers(planned, before), held_layers(planned, after.layout)
    got = {(copy.destination, copy.layer) for copy in after.copies}
    sources = all(copy.source in survivors and copy.layer in had[copy.source] for copy in after.copies)
    complete = all(
        layer in had[node] or (node, layer) in got for node, layers in needs.items() for layer in layers
    )
    sizes = all(size in specification.sizes for size in after.layout.sizes)
    enough = len(after.layout.pipelines) > specification.num_faults
    return working == survivors and sources and complete and sizes and enough


def run_down(planned: TemplateSet, rng: random.Random) -> str:
    """Fail nodes until training stops; returns how it ended."""
    specification = planned.specification
    replicas = rng.choice(
        [
            count
            for count in range(
                specification.num_faults + 1, specification.num_nodes // specification.smallest + 1
            )
            if specification.num_nodes <= count * specification.largest
        ]
    )
    sizes = [specification.smallest] * replicas
    for _ in range(specification.num_nodes - sum(sizes)):
        sizes[rng.choice([k for k, size in enumerate(sizes) if size < specification.largest])] += 1
    layout = first_layout([f"node{k}" for k in range(specification.num_nodes)], sizes)
    layer_bytes = [1] * planned.templates[0].num_layers
    while True:
        nodes = layout.nodes
        lost = set(rng.sample(nodes, min(len(nodes), rng.randint(1, MOST_AT_ONCE))))
        try:
            after = survive(planned, layout, sorted(lost), layer_bytes)
        except CannotContinueError:
            if len(nodes) - len(lost) < specification.threshold:
                return "too few nodes"
            return "last copy lost" if len(lost) > specification.num_faults else "WRONG REFUSAL"
        if not is_valid(planned, layout, lost, after):
            return "INVALID"
        layout = after.layout


@script()
def run() -> Evidence:
    """Evidence over all jobs of up to 64 nodes."""
    evidence, rng = Evidence(), random.Random(SEED)
    ends: Counter[str] = Counter()
    for smallest in range(1, MOST_NODES + 1):
        job_templates = templates_from(smallest)
        for num_nodes in range(smallest, MOST_NODES + 1):
            for faults in range(num_nodes // smallest):
                specification = NodeSpecification(num_nodes=num_nodes, num_faults=faults, smallest=smallest)
                templates = tuple(job_templates[size] for size in specification.sizes)
                ends[run_down(TemplateSet(specification=specification, templates=templates), rng)] += 1
    evidence.ours = {f"rule/ended/{end.replace(' ', '_')}": count for end, count in sorted(ends.items())}
    evidence.claim(
        f"every one of {sum(ends.values())} jobs stays valid until it says why it stops "
        f"({', '.join(f'{count} {end}' for end, count in sorted(ends.items()))});",
        set(ends) <= {"too few nodes", "last copy lost"},
    )
    return evidence
