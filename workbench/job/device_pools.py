"""Pools: consecutive ranks of one kind of device, with a profile, a price and the modules they take."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from itertools import product
from pathlib import Path

from workbench.cost.hardware import Cluster, Node
from workbench.cost.model import CostModel
from workbench.cost.profile import Profile, load_profile
from workbench.job.links import link_of, num_cards
from workbench.job.schema import LinkSpec, PoolSpec
from workbench.units import GIB


class Aim(StrEnum):
    """What planners minimise where a job leaves stage counts open: a step's seconds, or its dollars."""

    SECONDS = "seconds"
    DOLLARS = "dollars"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Ranks [first_rank, first_rank + num_ranks) of a cluster.

    Args:
        name: name of the pool.
        first_rank, num_ranks: its range of ranks.
        profile: name or path of its machine's profile.
        device: the kind of its ranks.
        dollars_per_hour: price of one rank; None: not given.
        modules: the modules that may use it; empty: all.
    """

    name: str
    first_rank: int
    num_ranks: int
    profile: str
    device: str
    dollars_per_hour: float | None = None
    modules: tuple[str, ...] = ()

    @property
    def end_rank(self) -> int:
        return self.first_rank + self.num_ranks

    def takes(self, module: str) -> bool:
        """Whether a module may use the pool."""
        return not self.modules or module in self.modules

    def overlaps(self, first: int, end: int) -> bool:
        """Whether any of its ranks is in [first, end)."""
        return first < self.end_rank and self.first_rank < end


def pools_of(
    specs: dict[str, PoolSpec], *, name: str, inter: LinkSpec | None, folder: Path
) -> tuple[Cluster, tuple[Pool, ...]]:
    """The cluster and pools of a job file; what a pool leaves out comes from its profile.

    `inter` is the network card of nodes whose pool names none.

    Raises:
        ValueError: no such profile, or one without a link that is left out; the message names the pool.
    """
    nodes: list[Node] = []
    pools: list[Pool] = []
    for pool_name, spec in specs.items():
        path = folder / spec.profile
        profile_name = str(path) if path.is_file() else spec.profile
        try:
            profile = load_profile(profile_name)
            node = _node(spec, inter, profile)
        except ValueError as error:
            raise ValueError(f"cluster.pools.{pool_name}: {error}") from None
        first_rank = pools[-1].end_rank if pools else 0
        nodes += [node] * spec.nodes
        pools.append(
            Pool(
                name=pool_name,
                first_rank=first_rank,
                num_ranks=spec.nodes * spec.ranks_per_node,
                profile=profile_name,
                device=profile.device,
                dollars_per_hour=spec.dollars_per_hour,
                modules=spec.modules,
            )
        )
    intra, card = nodes[0].link, nodes[0].card
    assert intra is not None, "every node of a pool has a link"
    assert card is not None, "and a card"
    return Cluster(name=name, nodes=tuple(nodes), intra=intra, inter=card), tuple(pools)


def _node(spec: PoolSpec, inter: LinkSpec | None, profile: Profile) -> Node:
    return Node(
        device=profile.device,
        num_ranks=spec.ranks_per_node,
        memory_bytes=profile.memory_bytes if spec.memory_gib is None else round(spec.memory_gib * GIB),
        link=link_of("intra", spec.intra, profile),
        card=link_of("inter", spec.inter or inter, profile),
        num_cards=num_cards(spec.inter or inter, profile, spec.ranks_per_node),
    )


def check_pools(job: str, pools: Sequence[Pool], modules: Sequence[str], num_ranks: int) -> None:
    """Raise ValueError unless the pools cover the cluster's ranks in order and every module has one."""
    ends = [0, *(pool.end_rank for pool in pools)]
    if pools and ([pool.first_rank for pool in pools] != ends[:-1] or ends[-1] != num_ranks):
        raise ValueError(f"job {job!r}: pools must be the ranks 0 to {num_ranks - 1} in order, got {ends}")
    for pool in pools:
        for module in pool.modules:
            if module not in modules:
                raise ValueError(
                    f"job {job!r}: pool {pool.name!r}: no module {module!r}; there are {', '.join(modules)}"
                )
    for module in modules:
        if pools and not any(pool.takes(module) for pool in pools):
            raise ValueError(
                f"job {job!r}: no pool takes module {module!r}; want it under some pool's modules"
            )


def check_profiles(pools: Sequence[Pool], main: str) -> None:
    """Raise ValueError where two profiles are of one device, as a plan knows its machines by their devices.

    Args:
        main: name or path of the job's profile, which is not looked at where there is none.
    """
    names = {f"cluster.pools.{pool.name}": pool.profile for pool in pools}
    with suppress(ValueError):  # a missing profile is refused where it is needed
        load_profile(main)
        names["profile"] = main
    first: dict[str, tuple[str, Profile]] = {}
    for where, name in names.items():
        profile = load_profile(name)
        other, known = first.setdefault(profile.device, (where, profile))
        if known != profile:
            raise ValueError(
                f"{where}: profiles {profile.name!r} here and {known.name!r} of {other} are both of device "
                f"{profile.device!r}; nearest: one profile for both, or another 'device' in the file of one"
            )


def check_taken(pools: Sequence[Pool], module: str, ranks: Sequence[int]) -> None:
    """Raise ValueError where a module is on a rank of a pool that does not take it."""
    for pool in pools:
        if not pool.takes(module) and any(pool.first_rank <= rank < pool.end_rank for rank in ranks):
            takers = ", ".join(other.name for other in pools if other.takes(module))
            raise ValueError(
                f"module {module!r} lies on pool {pool.name!r}, which takes {', '.join(pool.modules)} alone; "
                f"nearest: {takers}"
            )


def placements(pools: Sequence[Pool], modules: Sequence[str]) -> tuple[tuple[Pool, ...], ...]:
    """All assignments of modules to pools that take them, in the order of the pools."""
    return tuple(product(*([pool for pool in pools if pool.takes(module)] for module in modules)))


def pool_cluster(cluster: Cluster, pool: Pool) -> Cluster:
    """A pool as its own cluster."""
    nodes = cluster.nodes[cluster.node_of(pool.first_rank) : cluster.node_of(pool.end_rank - 1) + 1]
    return Cluster(
        name=pool.name,
        nodes=nodes,
        intra=nodes[0].link or cluster.intra,
        inter=nodes[0].card or cluster.inter,
    )


def cost_model(pools: Sequence[Pool], main: Profile) -> CostModel:
    """The cost model of the main profile, with those of the pools' other devices."""
    others = {pool.device: pool.profile for pool in pools if pool.device != main.device}
    return CostModel(
        main, beside={device: CostModel(load_profile(profile)) for device, profile in others.items()}
    )


def dollars_per_hour(pools: Sequence[Pool], ranks: Sequence[int]) -> float | None:
    """Dollars an hour of some ranks together; None where a rank has no price."""
    total = 0.0
    for rank in ranks:
        pool = next((pool for pool in pools if pool.first_rank <= rank < pool.end_rank), None)
        if pool is None or pool.dollars_per_hour is None:
            return None
        total += pool.dollars_per_hour
    return total
