"""Chains and DAGs of stages as a scheduler sees them."""

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
