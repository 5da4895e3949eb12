"""Splits a job's `local` cluster into nodes: equal parts of one machine's processes."""

from dataclasses import replace

from workbench.cost.hardware import uniform
from workbench.job.job import Job


def is_local(job: Job) -> bool:
    """Whether the job's ranks are processes of one machine."""
    return len(job.cluster.nodes) == 1 and job.cluster.nodes[0].num_cores is not None


def num_process_nodes(job: Job, ranks_per_node: int) -> int:
    """The number of whole nodes of `ranks_per_node` ranks in the job's ranks."""
    return (job.max_ranks or job.cluster.num_ranks) // ranks_per_node


def on_process_nodes(job: Job, *, num_nodes: int, ranks_per_node: int) -> Job:
    """The job on a cluster of such nodes, each with its ranks' share of the machine's memory."""
    machine, link = job.cluster.nodes[0], job.cluster.intra
    part_bytes = machine.memory_bytes // machine.num_ranks * ranks_per_node
    node = replace(machine, num_ranks=ranks_per_node, memory_bytes=part_bytes)
    cluster = uniform(job.name, node, num_nodes=num_nodes, intra=link, inter=link)
    return replace(job, cluster=cluster, max_ranks=None)
