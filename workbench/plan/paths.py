"""Which ranks tokens pass between stages: who sends, who relays, who keeps its own."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import gcd
from typing import NamedTuple

from workbench.cost.hardware import Cluster
from workbench.float_sum import float_sum
from workbench.plan.boundaries import Boundaries
from workbench.plan.lowered import Route, Slice
from workbench.plan.lru_cache import Identity, LruCache
from workbench.plan.plan import Plan
from workbench.plan.port import Port, port_of
from workbench.plan.rank_placement import relative_placement
from workbench.plan.stage import Stage

_EACH_SENDS: LruCache[bool] = LruCache(65_536)


class Path(NamedTuple):
    """The route of a row; `follows`: it broadcasts or relays what the row before it delivered."""

    route: Route
    source_rank: int
    destination_ranks: tuple[int, ...]
    follows: bool = False


def cut(
    slices: tuple[Slice, ...], num_tokens: int, num_parts: int
) -> Sequence[tuple[tuple[Slice, ...], int]]:
    """Cut tokens, in their order, into parts of equal size up to one token; return each with its size.

    Args:
        num_tokens: of all slices together.
    """
    if num_parts == 1:
        return ((slices, num_tokens),)
    starts = list(accumulate((piece.num_tokens for piece in slices), initial=0))
    bounds = [num_tokens * part // num_parts for part in range(num_parts + 1)]
    return [(_between(slices, starts, first, end), end - first) for first, end in pairwise(bounds)]


def _between(slices: Sequence[Slice], starts: Sequence[int], first_token: int, end: int) -> tuple[Slice, ...]:
    """Return the tokens [first_token, end) of slices that start there."""
    selected = []
    for piece, start in zip(slices, starts, strict=False):
        skipped, stop = max(0, first_token - start), min(piece.num_tokens, end - start)
        if skipped < stop:
            selected.append(
                Slice(
                    piece.item,
                    piece.source_start + skipped,
                    piece.destination_start + skipped,
                    stop - skipped,
                )
            )
    return tuple(selected)


def part_paths(
    plan: Plan, source: int | None, destination: int | None, from_share: int, to_share: int | None
) -> tuple[tuple[Path, ...], ...]:
    """Return the paths of each part of the tokens from one share to another stage's.

    The tokens are cut into as many parts as are returned. Between unequal grids of two modules on disjoint
    ranks, each rank of the source sends its part, the i-th to the i-th of the destination, which broadcasts
    it to the rest, if that takes less time than one sender. A token still crosses once.

    Where the plan has brokers, one sender sends to the broker, which relays to the destination's ranks.
    """
    sender, receiver = plan.stage[source or 0], plan.stage[destination or 0]
    if sender.module != receiver.module and plan.settings.boundaries is Boundaries.BROKERS:
        paths = _paths(plan, source, destination, from_share, to_share)
        return (_via_broker(_broker(plan, sender, receiver), paths),)
    if num_senders(plan.cluster, sender, receiver, from_share, to_share) == 1:
        return (_paths(plan, source, destination, from_share, to_share),)
    return _each_to_group(sender.ranks[from_share], _ranks_at(receiver, to_share))


def num_senders(
    cluster: Cluster, sender: Stage, receiver: Stage, from_share: int, to_share: int | None
) -> int:
    """Return how many ranks of a share send a part each, see `part_paths`; without brokers.

    Complexity: O(ranks), and O(ranks^2) once for each relative placement.
    """
    from_ranks, to_ranks = sender.ranks[from_share], _ranks_at(receiver, to_share)
    if (
        sender.module == receiver.module
        or len(from_ranks) in {1, len(to_ranks)}
        or {*from_ranks} & {*to_ranks}
    ):
        return 1
    key = Identity(cluster), len(from_ranks), relative_placement(cluster, (*from_ranks, *to_ranks))
    each_sends = _EACH_SENDS.get_or(key, lambda: _each_sends(cluster, from_ranks, to_ranks))
    return len(from_ranks) if each_sends else 1


def _each_sends(cluster: Cluster, from_ranks: Sequence[int], to_ranks: Sequence[int]) -> bool:
    """Whether a sender per rank takes less time than one sender."""
    single, parallel = (_leader_to_group(from_ranks, to_ranks),), _each_to_group(from_ranks, to_ranks)
    return _byte_s(cluster, parallel) < _byte_s(cluster, single)


def _ranks_at(stage: Stage, share: int | None) -> tuple[int, ...]:
    return stage.flat_ranks if share is None else stage.ranks[share]


def _broker(plan: Plan, sender: Stage, receiver: Stage) -> int | None:
    """Return the rank that relays between stages of two modules; None: the receiving replica's own leader.

    There are gcd of the modules' replicas many. Each serves as many consecutive downstream replicas, as
    batches are cut into consecutive intervals, and is the leader of the first one's stage with those layers.

    Source: Z. Zhang et al., "DistTrain", section 6. Differs: on which downstream replica a broker lives, and
    whom it serves, is not printed.
    """
    is_forward = any((e.source, e.target) == (sender.module, receiver.module) for e in plan.model.edges)
    upstream, downstream = (sender, receiver) if is_forward else (receiver, sender)
    readers = plan.replicas(downstream.module)
    num_served = len(readers) // gcd(len(plan.replicas(upstream.module)), len(readers))
    index = readers.index(downstream.replica)
    if index % num_served == 0:
        return None
    chain = plan.chain[downstream.module, readers[index - index % num_served]]
    return next(stage for stage in chain if downstream.layers[0] < stage.layers[1]).flat_ranks[0]


def _via_broker(broker: int | None, direct: tuple[Path, ...]) -> tuple[Path, ...]:
    """Return the paths with a relay through a rank that is none of their ends."""
    paths: list[Path] = []
    for path in direct:
        ends = (path.source_rank, *path.destination_ranks)
        if broker is not None and path.route is Route.P2P and broker not in ends:
            paths.append(Path(Route.RELAY, path.source_rank, (broker,)))
            paths.append(path._replace(source_rank=broker, follows=True))
        else:
            paths.append(path)
    return tuple(paths)


def _byte_s(cluster: Cluster, parts: Sequence[Sequence[Path]]) -> float:
    """Return the seconds per byte of all tokens: the busiest port's sends, then its broadcasts."""
    busy_s: dict[tuple[bool, Port], float] = {}
    for path in (path for paths in parts for path in paths):
        port, link = port_of(cluster, path.source_rank, path.destination_ranks)
        key = path.follows, port
        busy_s[key] = busy_s.get(key, 0.0) + 1 / (len(parts) * link.bytes_per_s)
    return float_sum(
        max((seconds for (follows, _), seconds in busy_s.items() if follows is hop), default=0.0)
        for hop in (False, True)
    )


def _paths(
    plan: Plan, source: int | None, destination: int | None, from_share: int, to_share: int | None
) -> tuple[Path, ...]:
    """Return the paths from a share of a stage to one of another stage, or to all its ranks.

    Between stages of one module each rank sends its own tokens to the rank at its position in the grid. Where
    the tensor-parallel degree changes, the first rank of a share sends to the other's first
    rank, which broadcasts to the rest of its index.

    Between modules a share sends to each index of the destination the tokens that this one
    owns. What all need, or no index owns, it sends to the destination's leader, which broadcasts it in its
    whole tp x cp group. So a token crosses once, and a gradient is summed where it is used.

    Where the two share ranks, a rank that holds the tokens already keeps them, and the first such rank
    broadcasts to the rest: nothing travels between equal replicas, and fan-in is an all-gather forward and a
    selection backward, fan-out the reverse.

    Source: Karnati et al., "Heterogeneous Parallelism for Multimodal Large Language Model Training",
    sections 3.1 and 3.2. Differs: there the leader gets what only some ranks own, too.
    """
    sender, receiver = plan.stage[source or 0], plan.stage[destination or 0]
    from_ranks, to_ranks = sender.ranks[from_share], _ranks_at(receiver, to_share)
    if sender.module == receiver.module and to_share is not None and len(from_ranks) == len(to_ranks):
        return tuple(map(_path, from_ranks, to_ranks))
    return _leader_to_group(from_ranks, to_ranks)


def _leader_to_group(from_ranks: Sequence[int], to_ranks: Sequence[int]) -> tuple[Path, ...]:
    """Return leader to leader, then a broadcast to the others; a rank on both sides keeps its own tokens.

    Tensor-parallel ranks of one share hold the same output.
    """
    leader, *keeping = [rank for rank in to_ranks if rank in from_ranks] or to_ranks[:1]
    paths = [_path(rank, rank) for rank in keeping]
    paths.append(_path(leader if leader in from_ranks else from_ranks[0], leader))
    others = tuple(rank for rank in to_ranks if rank != leader and rank not in keeping)
    if others:
        paths.append(Path(Route.BROADCAST, leader, others, follows=True))
    return tuple(paths)


def _each_to_group(from_ranks: Sequence[int], to_ranks: Sequence[int]) -> tuple[tuple[Path, ...], ...]:
    """Return the i-th rank's part to the i-th of a group, which broadcasts it to the others."""
    return tuple(
        _to_group(rank, to_ranks[index % len(to_ranks)], to_ranks) for index, rank in enumerate(from_ranks)
    )


def _to_group(from_rank: int, leader: int, to_ranks: Sequence[int]) -> tuple[Path, ...]:
    """Return the path to one rank of a group, and its broadcast to the others."""
    others = tuple(rank for rank in to_ranks if rank != leader)
    first = _path(from_rank, leader)
    return (first, Path(Route.BROADCAST, leader, others, follows=True)) if others else (first,)


def _path(from_rank: int, to_rank: int) -> Path:
    return Path(Route.LOCAL if from_rank == to_rank else Route.P2P, from_rank, (to_rank,))
