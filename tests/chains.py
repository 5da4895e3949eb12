"""Chains and DAGs of stages as a scheduler sees them."""

from collections.abc import Sequence

from tests.plans import chain_module, finish
from workbench.cost.hardware import Link
from workbench.data.sample import Sample, Segment
from workbench.model.model_graph import connect
from workbench.plan.plan import Plan, Settings
from workbench.plan.stage import Stage
from workbench.schedule.choice import Schedule, rank_block
from workbench.schedule.graph_aware import Consumer, ScheduleNode


def one_to_one(num_microbatches):
    return tuple((index,) for index in range(num_microbatches))


def each_reads(num_own, num_reader):
    """Consecutive own microbatches in equal shares."""
    share = num_own // num_reader
    return tuple(tuple(range(index * share, (index + 1) * share)) for index in range(num_reader))


def node(stage, num_microbatches, *consumers, backward=True):
    return ScheduleNode(
        stage,
        num_microbatches,
        (backward,) * num_microbatches,
        tuple(Consumer(reader, needs) for reader, needs in consumers),
    )


def chain(num_stages, num_microbatches):
    needs = one_to_one(num_microbatches)
    return [
        node(stage, num_microbatches, *([(stage + 1, needs)] if stage + 1 < num_stages else []))
        for stage in range(num_stages)
    ]


def alone(nodes):
    return [(n.stage,) for n in nodes]


def groups_of(schedule, num_stages):
    """The blocks of ranks that a chain's stages lie on, each with its stages in forward order."""
    groups = {}
    for stage in range(num_stages):
        groups.setdefault(rank_block(schedule, stage, num_stages), []).append(stage)
    return [tuple(groups[block]) for block in sorted(groups)]


FREE = Link(name="free", bytes_per_s=1e30, latency_s=0.0)


def chain_plan(
    schedule: Schedule,
    num_ranks: int,
    num_microbatches: int,
    *,
    trained: Sequence[bool] | None = None,
    dp: int = 1,
    num_tokens: int = 1,
    link: Link = FREE,
) -> Plan:
    """One layer per stage, trainable unless said otherwise, and one sample per microbatch."""
    num_stages = num_ranks * schedule.virtual_stages
    return finish(
        connect("chain", (chain_module("llm", "text", trained or [True] * num_stages),)),
        [Sample(i, (Segment("text", 0, num_tokens, num_tokens),)) for i in range(num_microbatches * dp)],
        [
            Stage(
                id=replica * num_stages + stage,
                module="llm",
                replica=replica,
                layers=(stage, stage + 1),
                ranks=((replica * num_ranks + rank_block(schedule, stage, num_stages),),),
            )
            for replica in range(dp)
            for stage in range(num_stages)
        ],
        replicas=dp,
        link=link,
        settings=Settings(),
        schedule=schedule,
    )
