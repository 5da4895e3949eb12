"""Lowered plans written down in a test: programs as text, rows one by one."""

from collections.abc import Sequence

from tests.random_lowered import MODEL
from workbench.cost.hardware import Cluster, Link, Node
from workbench.data.sample import Sample, Segment
from workbench.plan.lowered import Direction, GradientGroup, Lowered, Route, Transfer, Weights
from workbench.plan.plan import Plan, Program
from workbench.plan.stage import Stage
from workbench.schedule.action import Action, Pass, parse_action

FAST = Link(name="fast", bytes_per_s=1e30, latency_s=0.0)


def parse(text: str) -> tuple[Action, ...]:
    return tuple(parse_action(word) for word in text.split())


def one_node(num_ranks: int, *, num_cores: int | None = None, link: Link = FAST) -> Cluster:
    node = Node(device="any", num_ranks=num_ranks, memory_bytes=1, num_cores=num_cores)
    return Cluster(name="any", nodes=(node,), intra=link, inter=link)


def row(number: int, producer: str, consumer: str, ranks: Sequence[int], **changes) -> Transfer:
    """A row from ranks[0] to ranks[1:]."""
    producer, consumer = parse_action(producer), parse_action(consumer)
    defaults = {
        "edge": "m",
        "direction": Direction.FORWARD if producer.kind is Pass.F else Direction.BACKWARD,
        "route": Route.P2P,
        "slices": (),
        "num_tokens": 1,
        "width": 1,
        "num_bytes": 1,
    }
    return Transfer(
        row=number,
        producer=producer,
        consumer=consumer,
        source_rank=ranks[0],
        destination_ranks=tuple(ranks[1:]),
        **(defaults | changes),
    )


def lowered(
    programs: dict[tuple[int, ...], str],
    rows: Sequence[Transfer] = (),
    *,
    stages: dict[int, tuple[int, ...]] | None = None,
    cluster: Cluster | None = None,
    groups: Sequence[GradientGroup] = (),
    reductions: dict[str, tuple[int, ...]] | None = None,
) -> Lowered:
    """Programs by ranks; by default stage s is on rank s alone."""
    ranks = [rank for members in programs for rank in members]
    if stages is None:
        stages = {rank: (rank,) for rank in ranks}
    inputs: dict[Action, tuple[int, ...]] = {}
    outputs: dict[Action, tuple[int, ...]] = {}
    for transfer in rows:
        inputs[transfer.consumer] = (*inputs.get(transfer.consumer, ()), transfer.row)
        outputs[transfer.producer] = (*outputs.get(transfer.producer, ()), transfer.row)
    plan = Plan(
        strategy="by hand",
        model=MODEL,
        cluster=cluster or one_node(max(ranks) + 1),
        batch=(Sample(0, (Segment("text", 0, 1, 1),)),),
        stages=tuple(
            Stage(id=stage, module="m", replica=stage, layers=(0, 1), ranks=(members,))
            for stage, members in stages.items()
        ),
        microbatches=(),
        programs=tuple(
            Program(ranks=members, actions=parse(actions)) for members, actions in programs.items()
        ),
    )
    return Lowered(
        plan=plan,
        transfers=tuple(rows),
        inputs=inputs,
        outputs=outputs,
        groups=tuple(groups),
        reductions={parse_action(action): indices for action, indices in (reductions or {}).items()},
    )


def group(index: int, ranks: tuple[int, ...], num_elements: int) -> GradientGroup:
    return GradientGroup(index=index, ranks=ranks, weights=(Weights("m", index),), num_elements=num_elements)
