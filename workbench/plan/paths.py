"""Which ranks tokens pass on their way from one stage to another: who sends, who hands on, who keeps."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import gcd
from typing import NamedTuple

from workbench.cost.hardware import Cluster
from workbench.plan.instance_cache import cached_on_instance
from workbench.plan.lowered import Route, Slice
from workbench.plan.lru_cache import Identity, LruCache
from workbench.plan.plan import Boundaries, Plan, Stage
from workbench.plan.rank_placement import places, relative_placement

_EACH_SENDS: LruCache[bool] = LruCache(65_536)


class Path(NamedTuple):
    """Where a row goes; `follows`: it broadcasts what the row before it brought."""

    route: Route
    source_rank: int
    destination_ranks: tuple[int, ...]
    follows: bool = False


def cut(
    slices: tuple[Slice, ...], num_tokens: int, num_parts: int
) -> Sequence[tuple[tuple[Slice, ...], int]]:
    """The same tokens in their order, in parts, each with its number of tokens; these differ by one at most.

    Args:
        num_tokens: of all slices together.
    """
    if num_parts == 1:
        return ((slices, num_tokens),)
    starts = list(accumulate((piece.num_tokens for piece in slices), initial=0))
    edges = [num_tokens * part // num_parts for part in range(num_parts + 1)]
    return [(_between(slices, starts, first, end), end - first) for first, end in pairwise(edges)]


def _between(slices: Sequence[Slice], starts: Sequence[int], first_token: int, end: int) -> tuple[Slice, ...]:
    """The tokens [first_token, end) of slices that start there."""
    found = []
    for piece, start in zip(slices, starts, strict=False):
        skipped, stop = max(0, first_token - start), min(piece.num_tokens, end - start)
        if skipped < stop:
            found.append(
                Slice(
                    piece.item,
                    piece.source_start + skipped,
                    piece.destination_start + skipped,
                    stop - skipped,
                )
            )
    return tuple(found)


@cached_on_instance
def ways(
    plan: Plan, source: int | None, destination: int | None, from_place: int, to_place: int | None
) -> tuple[tuple[Path, ...], ...]:
    """The paths of each part of the tokens, which are cut into as many, from one place to another.

    Between unequal grids of two modules, on ranks of their own, each rank of the source sends its part, the
    i-th to the i-th of the destination, which broadcasts it to the rest, where that takes less time than one
    sender. A token still crosses once.

    Where the plan has brokers, one sender sends to the broker, which hands it on to the destination's.
    """
    here, there = plan.stage[source or 0], plan.stage[destination or 0]
    one = _paths(plan, source, destination, from_place, to_place)
    if here.module != there.module and plan.settings.boundaries is Boundaries.BROKERS:
        return (_over(_broker(plan, here, there), one),)
    from_ranks, to_ranks = here.ranks[from_place], _receivers(there, to_place)
    if num_senders(plan.cluster, here, there, from_place, to_place) == 1:
        return (one,)
    return _from_each(from_ranks, to_ranks)


def num_senders(cluster: Cluster, here: Stage, there: Stage, from_place: int, to_place: int | None) -> int:
    """How many ranks of a place send a part each to one of another stage, see `ways`; there are no brokers.

    Complexity: O(ranks), and O(ranks^2) once for each relative placement.
    """
    from_ranks, to_ranks = here.ranks[from_place], _receivers(there, to_place)
    if here.module == there.module or len(from_ranks) in {1, len(to_ranks)} or {*from_ranks} & {*to_ranks}:
        return 1
    key = Identity(cluster), len(from_ranks), relative_placement(cluster, (*from_ranks, *to_ranks))
    each_sends = _EACH_SENDS.get_or(key, lambda: _each_sends(cluster, from_ranks, to_ranks))
    return len(from_ranks) if each_sends else 1


def _each_sends(cluster: Cluster, from_ranks: Sequence[int], to_ranks: Sequence[int]) -> bool:
    """Whether that takes less time than one sender."""
    one, each = (_leader_to_group(from_ranks, to_ranks),), _from_each(from_ranks, to_ranks)
    return _byte_s(cluster, each) < _byte_s(cluster, one)


def _receivers(stage: Stage, place: int | None) -> tuple[int, ...]:
    return stage.flat_ranks if place is None else stage.ranks[place]


def _broker(plan: Plan, here: Stage, there: Stage) -> int | None:
    """The rank that hands on what passes between two stages of modules; None for its own replica's stage.

    There are gcd of the modules' replicas many. Each serves as many consecutive downstream replicas, as
    batches are cut into consecutive intervals, and is the leader of the first one's stage with those layers.

    Source: Z. Zhang et al., "DistTrain", section 6. Differs: on which downstream replica a broker lives, and
    whom it serves, is not printed.
    """
    is_forward = any((e.source, e.target) == (here.module, there.module) for e in plan.model.edges)
    up, down = (here, there) if is_forward else (there, here)
    readers = plan.replicas(down.module)
    served = len(readers) // gcd(len(plan.replicas(up.module)), len(readers))
    index = readers.index(down.replica)
    if index % served == 0:
        return None
    chain = plan.chain[down.module, readers[index - index % served]]
    return next(stage for stage in chain if down.layers[0] < stage.layers[1]).flat_ranks[0]


def _over(broker: int | None, direct: tuple[Path, ...]) -> tuple[Path, ...]:
    """The same paths, where a rank that is none of its ends hands on what travels from one to another."""
    found: list[Path] = []
    for path in direct:
        ends = (path.source_rank, *path.destination_ranks)
        if broker is not None and path.route is Route.P2P and broker not in ends:
            found.append(Path(Route.RELAY, path.source_rank, (broker,)))
            found.append(path._replace(source_rank=broker, follows=True))
        else:
            found.append(path)
    return tuple(found)


def _byte_s(cluster: Cluster, parts: Sequence[Sequence[Path]]) -> float:
    """Seconds a byte of all tokens: of the busiest port that they are sent from, then broadcast from."""
    busy_s: dict[tuple[bool, int, int], float] = {}
    place_of = places(cluster)
    for path in (path for paths in parts for path in paths):
        node, card, _ = place_of[path.source_rank]
        nodes = {node, *(place_of[rank].node for rank in path.destination_ranks)}
        key = path.follows, node, -1 - path.source_rank if len(nodes) == 1 else card
        busy_s[key] = busy_s.get(key, 0.0) + 1 / (len(parts) * cluster.link_of(nodes).bytes_per_s)
    return sum(
        max((busy for (follows, _, _), busy in busy_s.items() if follows is hop), default=0.0)
        for hop in (False, True)
    )


@cached_on_instance
def _paths(
    plan: Plan, source: int | None, destination: int | None, from_place: int, to_place: int | None
) -> tuple[Path, ...]:
    """From a context-parallel place of one stage to one of another stage, or to all of its ranks.

    Between stages of one module each rank sends to the rank at its place in the grid, its tokens alone.
    Where the tensor-parallel degree changes, a context-parallel place sends from its first
    rank to the other's, which broadcasts to the rest of its place.

    Between modules a place sends to each place of the destination the tokens that this one owns. What all
    need, or no place owns, it sends to the destination's leader, which broadcasts it in its whole tp x cp
    group. So a token crosses once, and a gradient is summed where it is used.

    Where the two share ranks, a rank that holds the tokens already keeps them, and the first such
    rank broadcasts to the rest: nothing travels between equal replicas, and fan-in is an all-gather
    forward and a selection backward, fan-out the reverse.

    Source: Karnati et al., "Heterogeneous Parallelism for Multimodal Large Language Model Training",
    sections 3.1 and 3.2. Differs: there the leader gets what only some ranks own, too.
    """
    here, there = plan.stage[source or 0], plan.stage[destination or 0]
    from_ranks, to_ranks = here.ranks[from_place], _receivers(there, to_place)
    if here.module == there.module and to_place is not None and len(from_ranks) == len(to_ranks):
        return tuple(map(_path, from_ranks, to_ranks))
    return _leader_to_group(from_ranks, to_ranks)


def _leader_to_group(from_ranks: Sequence[int], to_ranks: Sequence[int]) -> tuple[Path, ...]:
    """Leader to leader, then broadcast to the others; a rank on both sides keeps its own.

    Tensor-parallel ranks of one place hold the same output.
    """
    leader, *kept_there = [rank for rank in to_ranks if rank in from_ranks] or to_ranks[:1]
    paths = [_path(rank, rank) for rank in kept_there]
    paths.append(_path(leader if leader in from_ranks else from_ranks[0], leader))
    others = tuple(rank for rank in to_ranks if rank != leader and rank not in kept_there)
    if others:
        paths.append(Path(Route.BROADCAST, leader, others, follows=True))
    return tuple(paths)


def _from_each(from_ranks: Sequence[int], to_ranks: Sequence[int]) -> tuple[tuple[Path, ...], ...]:
    """The i-th to the i-th of a group, which broadcasts that part to the others."""
    return tuple(
        _to_group(rank, to_ranks[index % len(to_ranks)], to_ranks) for index, rank in enumerate(from_ranks)
    )


def _to_group(from_rank: int, leader: int, to_ranks: Sequence[int]) -> tuple[Path, ...]:
    """To one of a group, which broadcasts to the others."""
    others = tuple(rank for rank in to_ranks if rank != leader)
    first = _path(from_rank, leader)
    return (first, Path(Route.BROADCAST, leader, others, follows=True)) if others else (first,)


def _path(from_rank: int, to_rank: int) -> Path:
    return Path(Route.LOCAL if from_rank == to_rank else Route.P2P, from_rank, (to_rank,))
