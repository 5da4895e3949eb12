"""The link of a collective among regularly spaced ranks: inside a node, or over the nodes' cards."""

from workbench.cost.hardware import Cluster, Link


def group_link(cluster: Cluster, *, num_ranks: int, stride: int) -> Link:
    """What a ring of ranks 0, stride, 2 x stride, ... runs over.

    Inside a node its own link. Across nodes every rank of a node that is in the group brings its
    network card: a node's k members exchange with the next node over k cards at once, never faster
    than the node's own link.

    Differs: nodes are taken to be as large as the first, and groups to start at a node's border.

    Args:
        cluster: the machines.
        num_ranks: of the group.
        stride: from one rank to the next.
    """
    if num_ranks < 1 or stride < 1:
        raise ValueError(f"group of ranks: want num_ranks and stride >= 1, got {num_ranks} and {stride}")
    per_node = cluster.nodes[0].num_ranks
    if (num_ranks - 1) * stride < per_node:
        return cluster.intra
    members = min(num_ranks, max(1, per_node // stride))
    bytes_per_s = min(cluster.intra.bytes_per_s, members * cluster.inter.bytes_per_s)
    if bytes_per_s == cluster.inter.bytes_per_s:
        return cluster.inter
    name = f"{members} x {cluster.inter.name}"
    return Link(name=name, bytes_per_s=bytes_per_s, latency_s=cluster.inter.latency_s)
