"""Hypothesis strategies: random small models, batches, plans and schedule problems."""

from dataclasses import replace
from itertools import pairwise

from hypothesis import strategies as st

from tests.plans import chain_module, finish, sample
from workbench.data.sample import Sample, Segment
from workbench.model.model_graph import ModelGraph, connect
from workbench.plan.plan import Plan
from workbench.plan.stage import Stage
from workbench.schedule.graph_aware import Consumer, ScheduleNode

MODALITIES = {"vision": "image", "audio": "sound", "depth": "points"}


@st.composite
def model_graphs(draw) -> ModelGraph:
    """Encoders that all feed one LLM; every layer frozen or trainable at random."""
    flags = st.lists(st.booleans(), min_size=1, max_size=4)
    names = list(MODALITIES)[: draw(st.integers(1, 3))]
    encoders = [chain_module(name, MODALITIES[name], draw(flags)) for name in names]
    llm = chain_module("llm", "text", draw(flags))
    return connect("+".join([*names, "llm"]), *((encoder, llm) for encoder in encoders))


@st.composite
def samples(draw, index: int = 0, *, max_items: int = 2) -> Sample:
    """Text with none to `max_items` segments of every modality, of random sizes."""
    segments = list(sample(index, images=0, sounds=0, text=draw(st.integers(1, 6))).segments)
    for modality in MODALITIES.values():
        for k in range(draw(st.integers(0, max_items))):
            tokens_out = draw(st.integers(1, 4))
            segments.insert(1, Segment(modality, k, tokens_out * draw(st.integers(1, 3)), tokens_out))
    return Sample(index, tuple(segments))


@st.composite
def batches(draw, *, multiple_of: int = 1, max_samples: int = 6) -> tuple[Sample, ...]:
    """Samples with ids 0..n-1, n a multiple of `multiple_of`."""
    size = multiple_of * draw(st.integers(1, max(1, max_samples // multiple_of)))
    return tuple(draw(samples(index)) for index in range(size))


@st.composite
def cuts(draw, num_layers: int, max_stages: int = 4) -> tuple[tuple[int, int], ...]:
    """A chain of layers cut into stages at random places."""
    inner = (
        draw(st.sets(st.integers(1, num_layers - 1), max_size=max_stages - 1)) if num_layers > 1 else set()
    )
    ends = [0, *sorted(inner), num_layers]
    return tuple(pairwise(ends))


@st.composite
def plans(draw, *, max_tp: int = 2, max_replicas: int = 2) -> Plan:
    """Any model and batch under any stage cuts; tensor parallel modules; ranks disjoint, or all encoders
    of equal stage counts and degrees on the same ranks."""
    model = draw(model_graphs())
    replicas = draw(st.integers(1, max_replicas))
    batch = draw(batches(multiple_of=replicas))
    degree = {module.name: draw(st.integers(1, max_tp)) for module in model.modules}
    cut = {module.name: draw(cuts(len(module.layers))) for module in model.modules}
    stages: list[Stage] = []
    next_rank = 0
    for replica in range(replicas):
        for module in model.modules:
            for layers in cut[module.name]:
                ranks = tuple(range(next_rank, next_rank + degree[module.name]))
                next_rank += len(ranks)
                stages.append(
                    Stage(id=len(stages), module=module.name, replica=replica, layers=layers, ranks=(ranks,))
                )
    encoders = [module.name for module in model.modules if module.modality != "text"]
    alike = len({(len(cut[name]), degree[name]) for name in encoders}) == 1
    if alike and len(encoders) > 1 and draw(st.booleans()):
        stages = _colocated(stages, encoders)
    return finish(model, batch, stages, replicas=replicas)


def _colocated(stages: list[Stage], encoders: list[str]) -> list[Stage]:
    """The k-th stages of all encoders of a replica on the ranks of the first encoder's k-th stage."""
    homes = {
        (stage.replica, position): stage.ranks
        for replica in {stage.replica for stage in stages}
        for position, stage in enumerate(s for s in stages if (s.replica, s.module) == (replica, encoders[0]))
    }
    seen: dict[tuple[int, str], int] = {}
    moved = []
    for stage in stages:
        if stage.module not in encoders:
            moved.append(stage)
            continue
        position = seen.get((stage.replica, stage.module), 0)
        seen[stage.replica, stage.module] = position + 1
        moved.append(replace(stage, ranks=homes[stage.replica, position]))
    used = sorted({rank for stage in moved for rank in stage.flat_ranks})
    number = {rank: index for index, rank in enumerate(used)}  # no holes among the ranks
    return [replace(s, ranks=tuple(tuple(number[r] for r in row) for row in s.ranks)) for s in moved]


@st.composite
def schedule_problems(draw) -> tuple[list[ScheduleNode], list[tuple[int, ...]]]:
    """Random DAGs of stages with unequal microbatches, random needs, sinks and shared ranks.

    A stage's microbatch has a backward when any of its readers' that reads it has one, or, at
    random, where it has a loss of its own; stages may be frozen altogether.
    """
    num_stages = draw(st.integers(1, 6))
    counts = [draw(st.integers(0, 5)) for _ in range(num_stages)]
    nodes: list[ScheduleNode] = []
    for stage in range(num_stages - 1, -1, -1):  # readers first
        later = {node.stage: node for node in nodes}
        readers = draw(st.sets(st.sampled_from(sorted(later)), max_size=3)) if later else set()
        consumers = tuple(
            Consumer(reader, tuple(_needs(draw, counts[stage]) for _ in range(counts[reader])))
            for reader in sorted(readers)
        )
        nodes.append(
            ScheduleNode(stage, counts[stage], _backward(draw, counts[stage], consumers, later), consumers)
        )
    nodes = draw(st.permutations(nodes))
    stages = draw(st.permutations(range(num_stages)))
    ends = [0, *sorted(draw(st.sets(st.integers(1, num_stages), max_size=num_stages))), num_stages]
    groups = [tuple(stages[a:b]) for a, b in pairwise(ends) if a < b]
    return list(nodes), groups


def _needs(draw, num_own: int) -> tuple[int, ...]:
    if num_own == 0:
        return ()
    return tuple(sorted(draw(st.sets(st.integers(0, num_own - 1), max_size=3))))


def _backward(draw, num_own: int, consumers: tuple[Consumer, ...], later: dict[int, ScheduleNode]):
    if draw(st.integers(0, 3)) == 0:
        return (False,) * num_own
    asked = {
        own
        for consumer in consumers
        for index, read in enumerate(consumer.needs)
        for own in read
        if later[consumer.stage].backward[index]
    }
    has_loss = not consumers or draw(st.booleans())
    return tuple(own in asked or (has_loss and draw(st.booleans())) for own in range(num_own))
