"""Section 2.5, borrowing: bytes copied after one lost node, compared with the best donor and the last node.

Paper:   I. Jang, dissertation, section 2.5, Figure 2.8b: a pipeline below n0 nodes borrows from other
         pipelines; from which one, and which of its nodes, is not stated.
Setup:   GPT-3 2.7b and 6.7b, one-GPU nodes of 40 GB (section 2.7.1), and of 8 GB less for longer
         smallest pipelines; 10 to 30 nodes in a random instantiation with a pipeline of n0 nodes and
         a longer one. In 21 draws each one node of a pipeline of n0 is lost: 84 failures.
Compared: the best donor, by brute force: of every pipeline that can lend, every node, in every place of the
         pipeline that borrows, all others in their order; and the last node of the largest pipeline.
         Copying: every layer in stripes from all nodes that hold it, against whole layers, each from the
         holder that has sent least; bytes of the busiest sender, and of the busiest port either way.
Ours:    `workbench.elastic.reconfigure.survive`: donor and positions with the fewest bytes to copy.
"""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from experiments.harness.outcome import Evidence
from experiments.harness.script import script
from experiments.oobleck.modelled import FAULTS, STATE_BYTES, chain, graph
from experiments.oobleck.systems import MOST_NODES
from workbench.elastic.copies import Copy, busiest_bytes, holders_of
from workbench.elastic.layout import NodeLayout, first_layout, held_layers
from workbench.elastic.node_specification import TemplateSet, plan_templates
from workbench.elastic.reconfigure import StepKind, survive

MODELS = ("GPT-3 2.7b", "GPT-3 6.7b")
LESS_BYTES = (0.0, 8e9)  # of a GPU's memory
DRAWS, FEWEST_NODES, SEED = 21, 10, 0
STATE_OF_COPY = STATE_BYTES * 3 // 4  # weight and two moments; gradients do not travel
GOAL = 1.05

Pipelines = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """Bytes that the busiest node sends, and that the busiest port sends or receives."""

    sent: int
    busiest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Bytes copied after one lost node, by rule."""

    ours: int
    best_donor: int
    last_of_largest: int
    striped: Ports
    whole_layers: Ports

    @property
    def ratio(self) -> float:
        return self.ours / self.best_donor

    @property
    def last_ratio(self) -> float:
        return self.last_of_largest / self.best_donor


def failures() -> Iterator[Failure]:
    """Yield the failures of all random layouts."""
    rng = random.Random(SEED)
    for model in MODELS:
        layer_bytes = [
            layer.num_parameters * STATE_OF_COPY for module in graph(model).modules for layer in module.layers
        ]
        for fewer_bytes in LESS_BYTES:
            layer_chain = chain(model).chain
            smaller = replace(layer_chain, capacity_bytes=layer_chain.capacity_bytes - fewer_bytes)
            planned = plan_templates(smaller, 1, MOST_NODES, FAULTS)
            for _ in range(DRAWS):
                before, lost = _drawn(planned, rng)
                yield _failure(planned, before, lost, layer_bytes)


def _drawn(planned: TemplateSet, rng: random.Random) -> tuple[NodeLayout, str]:
    """A random layout in which the pipeline of a lost node must borrow, and can."""
    specification = planned.specification
    while True:
        sizes = [specification.smallest]
        while sum(sizes) < FEWEST_NODES or (rng.random() < 0.6 and len(sizes) < FEWEST_NODES):
            sizes.append(rng.randint(specification.smallest, 3 * specification.smallest))
        rng.shuffle(sizes)
        if len(sizes) > specification.num_faults and sum(sizes) <= MOST_NODES and len(set(sizes)) > 1:
            break
    before = first_layout([f"node{k}" for k in range(sum(sizes))], sizes)
    short = [nodes for nodes in before.pipelines if len(nodes) == specification.smallest]
    return before, rng.choice(rng.choice(short))


def _failure(planned: TemplateSet, before: NodeLayout, lost: str, layer_bytes: Sequence[int]) -> Failure:
    after = survive(planned, before, [lost], layer_bytes)
    assert any(step.kind is StepKind.BORROW for step in after.steps)
    return Failure(
        ours=sum(copy.num_bytes for copy in after.copies),
        best_donor=min(
            copied_bytes(planned, before, pipelines, layer_bytes)
            for pipelines in borrowings(planned, before, lost)
        ),
        last_of_largest=copied_bytes(planned, before, last_of_largest(before, lost), layer_bytes),
        striped=_ports(after.copies),
        whole_layers=_ports(whole_layers(after.copies, holders_of(planned, before, {lost}))),
    )


def _ports(copies: Sequence[Copy]) -> Ports:
    sent: Counter[str] = Counter()
    for copy in copies:
        sent[copy.source] += copy.num_bytes
    return Ports(sent=max(sent.values()), busiest=busiest_bytes(copies))


def whole_layers(copies: Sequence[Copy], holders: Sequence[Sequence[str]]) -> list[Copy]:
    """Copies of whole layers, largest first, each from the holder that has sent least."""
    size: Counter[tuple[int, str]] = Counter()
    for copy in copies:
        size[copy.layer, copy.destination] += copy.num_bytes
    sent: Counter[str] = Counter()
    copied = []
    for (layer, destination), num_bytes in size.most_common():
        source = min(holders[layer], key=lambda node: sent[node])
        sent[source] += num_bytes
        copied.append(
            Copy(layer=layer, source=source, destination=destination, first_byte=0, num_bytes=num_bytes)
        )
    return copied


def copied_bytes(
    planned: TemplateSet, before: NodeLayout, pipelines: Pipelines, layer_bytes: Sequence[int]
) -> int:
    """Bytes to copy where these nodes take these positions."""
    had = held_layers(planned, before)
    return sum(
        layer_bytes[layer]
        for node, layers in held_layers(planned, NodeLayout(pipelines=pipelines)).items()
        for layer in layers
        if layer not in had[node]
    )


def borrowings(planned: TemplateSet, before: NodeLayout, lost: str) -> Iterator[Pipelines]:
    """Yield every way to borrow one node; all others keep their order."""
    survivors = [tuple(node for node in nodes if node != lost) for nodes in before.pipelines]
    broken = next(index for index, nodes in enumerate(before.pipelines) if lost in nodes)
    for donor, nodes in enumerate(survivors):
        if len(nodes) > planned.specification.smallest:
            for lent in nodes:
                for index in range(len(survivors[broken]) + 1):
                    after = list(survivors)
                    after[donor] = tuple(node for node in nodes if node != lent)
                    after[broken] = (*survivors[broken][:index], lent, *survivors[broken][index:])
                    yield tuple(after)


def last_of_largest(before: NodeLayout, lost: str) -> Pipelines:
    """The last node of the largest pipeline, the later of equal ones, at the end of the one that lost."""
    survivors = [tuple(node for node in nodes if node != lost) for nodes in before.pipelines]
    broken = next(index for index, nodes in enumerate(before.pipelines) if lost in nodes)
    donor = max(range(len(survivors)), key=lambda index: (len(survivors[index]), index))
    survivors[broken] = (*survivors[broken], survivors[donor][-1])
    survivors[donor] = survivors[donor][:-1]
    return tuple(survivors)


@script()
def run() -> Evidence:
    """Evidence of the ratios over all draws, and the goal."""
    evidence, draws = Evidence(), list(failures())
    ours, last = [failure.ratio for failure in draws], [failure.last_ratio for failure in draws]
    evidence.ours = {
        "rule/over_best_donor/mean": fmean(ours),
        "rule/over_best_donor/most": max(ours),
        "rule/last_of_largest_over_best_donor/mean": fmean(last),
        "rule/last_of_largest_over_best_donor/most": max(last),
        "rule/last_of_largest_is_dearer": sum(ratio > 1 for ratio in last),
        "rule/busiest_sender_striped_over_whole_layers/mean": fmean(
            failure.striped.sent / failure.whole_layers.sent for failure in draws
        ),
        "rule/busiest_port_striped_over_whole_layers/mean": fmean(
            failure.striped.busiest / failure.whole_layers.busiest for failure in draws
        ),
        "rule/bytes/mean": fmean(failure.ours for failure in draws),
        "rule/best_donor_bytes/mean": fmean(failure.best_donor for failure in draws),
    }
    evidence.claim(
        f"over {len(draws)} lost nodes the bytes copied are at most {GOAL} of the best donor's in the mean "
        f"({fmean(ours):.3f}; {fmean(last):.2f} with the last node of the largest pipeline);",
        fmean(ours) <= GOAL,
    )
    evidence.claim(
        f"no single failure copies more than its best donor makes necessary ({max(ours):.3f} at most);",
        max(ours) <= 1,
    )
    evidence.claim(
        "the busiest port never moves more where layers are striped than where they come whole;",
        all(failure.striped.busiest <= failure.whole_layers.busiest for failure in draws),
    )
    return evidence
