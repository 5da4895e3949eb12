"""Stages: the ranks that hold a run of layers, and look-up tables over all stages of a plan."""

from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from math import lcm

from workbench.data.sample import WHERE_SET
from workbench.plan.lru_cache import LruCache, value_key


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A contiguous run of layers of one module on a grid of ranks.

    Args:
        id: identifies the stage; actions refer to it.
        module: module whose layers the stage holds.
        replica: data-parallel replica.
        layers: [first, last), indices of the module's layers.
        ranks: ranks of the grid, [joint_replicas x cp][tp].
        ep: expert-parallel ranks, over which the experts of a layer are distributed; 1: every expert is
            sharded by tp like an MLP.
        joint_replicas: data-parallel replicas that run each pass together, because they distribute the
            experts of a layer among the ranks of all of them. Each has rows of a microbatch of its own.
    """

    id: int
    module: str
    replica: int
    layers: tuple[int, int]
    ranks: tuple[tuple[int, ...], ...]  # [joint_replicas x cp][tp]
    ep: int = 1
    joint_replicas: int = field(default=1, metadata={WHERE_SET: True})

    def holding(self, layers: tuple[int, int], number: int) -> "Stage":
        """Return a stage of this replica on these ranks, of that number, with other layers."""
        return Stage(
            id=number,
            module=self.module,
            replica=self.replica,
            layers=layers,
            ranks=self.ranks,
            ep=self.ep,
            joint_replicas=self.joint_replicas,
        )

    @property
    def tp(self) -> int:
        return len(self.ranks[0])

    @property
    def cp(self) -> int:
        return len(self.ranks) // self.joint_replicas

    @property
    def num_shares(self) -> int:
        """Parts of a microbatch's tokens, each on tp ranks: those of all joint replicas."""
        return len(self.ranks)

    @property
    def joint_words(self) -> str:
        """What follows cp and tp where a stage is described: joint replicas and ep, if there are any."""
        joint = f", {self.joint_replicas} joint replicas" if self.joint_replicas > 1 else ""
        return f"{joint}, ep {self.ep}" if self.ep > 1 else joint

    def share_of(self, rank: int) -> int:
        """Number of the share that a rank of the stage has a part in; StopIteration for another rank."""
        return next(index for index, row in enumerate(self.ranks) if rank in row)

    @property
    def context_ranks(self) -> tuple[tuple[int, ...], ...]:
        """Ranks that share the tokens of a sequence, per joint replica and tensor-parallel index."""
        parts = (self.ranks[first : first + self.cp] for first in range(0, self.num_shares, self.cp))
        return tuple(column for part in parts for column in zip(*part, strict=True))

    @property
    def flat_ranks(self) -> tuple[int, ...]:
        """All ranks, tensor-parallel axis innermost; the first is the leader."""
        return self.ranks[0] if len(self.ranks) == 1 else tuple(chain.from_iterable(self.ranks))

    @property
    def expert_ranks(self) -> tuple[tuple[int, ...], ...]:
        """Consecutive ranks that hold all experts together; each group holds a copy of them.

        If ep exceeds the stage's ranks, they include those of the next replicas, which are adjacent.
        """
        flat = self.flat_ranks
        if self.ep > len(flat):
            return (tuple(range(flat[0], flat[0] + self.ep)),)
        return tuple(flat[first : first + self.ep] for first in range(0, len(flat), self.ep))

    @property
    def whole_weights(self) -> tuple[int, ...]:
        """The first ranks that together hold all weights, as whole rows and whole `expert_ranks`."""
        return self.flat_ranks[: lcm(self.tp, self.ep)]


class StageTables:
    """Look-up tables of stages, shared by all plans with equal stages."""

    def __init__(self, stages: tuple[Stage, ...]) -> None:
        self._stages = stages

    @cached_property
    def stage(self) -> dict[int, Stage]:
        return {stage.id: stage for stage in self._stages}

    @cached_property
    def stages_on(self) -> dict[int, tuple[Stage, ...]]:
        by_rank: dict[int, list[Stage]] = {}
        for stage in self._stages:
            for rank in stage.flat_ranks:
                by_rank.setdefault(rank, []).append(stage)
        return {rank: tuple(stages) for rank, stages in by_rank.items()}

    @cached_property
    def has_joint_replicas(self) -> bool:
        return any(stage.joint_replicas > 1 for stage in self._stages)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted(self.stages_on))

    @cached_property
    def chain(self) -> dict[tuple[str, int], tuple[Stage, ...]]:
        chains: dict[tuple[str, int], list[Stage]] = {}
        for stage in sorted(self._stages, key=lambda stage: (stage.layers, stage.id)):
            chains.setdefault((stage.module, stage.replica), []).append(stage)
        return {key: tuple(stages) for key, stages in chains.items()}

    @cached_property
    def replicas(self) -> dict[str, tuple[int, ...]]:
        by_module: dict[str, list[int]] = {}
        for module, replica in sorted(self.chain):
            by_module.setdefault(module, []).append(replica)
        return {module: tuple(replicas) for module, replicas in by_module.items()}


_TABLES: LruCache[StageTables] = LruCache(64)  # a layout of 10,000 ranks takes some megabytes


def tables_of(stages: tuple[Stage, ...]) -> StageTables:
    """Return the tables of these stages; equal ones share them."""
    return _TABLES.get_or(value_key(stages), lambda: StageTables(stages))
