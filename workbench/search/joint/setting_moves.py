"""Moves of token assignment and memory: token rules, key exchange, recomputation and sharding."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import ClassVar

from workbench.plan.plan import KeyExchange, ModuleSettings, Plan, Recompute, Sharding
from workbench.schedule.sharded import ReshardAfter
from workbench.search.joint.choice import Choice, TokenRule
from workbench.search.joint.move import Space
from workbench.search.joint.question import Question


@dataclass(frozen=True, slots=True)
class Distribute:
    """Change the rule that assigns tokens to ranks."""

    question: ClassVar[Question] = Question.TOKENS
    rule: TokenRule

    def apply(self, space: Space, choice: Choice) -> Choice:
        return replace(choice, tokens=self.rule, token_shards=())


@dataclass(frozen=True, slots=True)
class ExchangeKeys:
    """Change how a module's queries and keys are exchanged between context-parallel ranks."""

    question: ClassVar[Question] = Question.TOKENS
    module: str
    way: KeyExchange

    def apply(self, space: Space, choice: Choice) -> Choice:
        return with_settings(choice, replace(choice.settings.of(self.module), key_exchange=self.way))


@dataclass(frozen=True, slots=True)
class Keep:
    """Change the memory settings of a module, or with None of all modules.

    Args:
        recompute_layers: number of recomputed layers of the module; None: all, if any.
    """

    question: ClassVar[Question] = Question.MEMORY
    module: str | None
    recompute: Recompute
    sharding: Sharding
    instances: int
    sequence_parallel: bool
    recompute_layers: int | None = None

    def apply(self, space: Space, choice: Choice) -> Choice:
        names = [module.name for module in space.job.model.modules] if self.module is None else [self.module]
        for name in names:
            changed = choice.settings.of(name).sharded(self.sharding, self.instances)
            changed = changed.recomputing(self.recompute, self.recompute_layers)
            choice = with_settings(choice, replace(changed, sequence_parallel=self.sequence_parallel))
        return choice


@dataclass(frozen=True, slots=True)
class Reshard:
    """Change how long a module's sharded weights stay gathered, or with None those of all that shard them."""

    question: ClassVar[Question] = Question.MEMORY
    module: str | None
    after: ReshardAfter

    def apply(self, space: Space, choice: Choice) -> Choice:
        """ValueError for a module whose weights are not sharded."""
        names = [module.name for module in space.job.model.modules] if self.module is None else [self.module]
        for settings in map(choice.settings.of, names):
            if settings.shards_parameters or self.module is not None:
                choice = with_settings(choice, replace(settings, reshard_after=self.after))
        return choice


def keep_of(settings: ModuleSettings) -> Keep:
    """The move to a module's memory settings."""
    return Keep(
        settings.module,
        settings.recompute,
        settings.sharding,
        settings.instances,
        settings.sequence_parallel,
        settings.recompute_layers,
    )


def shardings(choice: Choice, draft: Plan) -> Iterator[Keep]:
    """Shard one module's weights or optimizer state over other numbers of ranks, or stop sharding weights.

    Group sizes are powers of two, and all ranks: a module is sharded no further than memory requires, since
    larger groups gather more.
    """
    for module in draft.model.modules:
        stages = [stage for stage in draft.stages if stage.module == module.name]
        current = choice.settings.of(module.name)
        counts = instance_counts(len(draft.replicas(module.name)), stages[0].num_shares)
        for sharding, instances in product((Sharding.PARAMETERS, Sharding.OPTIMIZER), counts):
            if (sharding, instances) != (current.sharding, current.instances):
                yield replace(keep_of(current), sharding=sharding, instances=instances)


def instance_counts(replicas: int, shares: int) -> Sequence[int]:
    """Numbers of instances of sharded weights, most first: instances of 2, 4, ... ranks, and a single one.

    Args:
        replicas: of the module.
        shares: parts of a microbatch's tokens in each of them, see `Stage`.
    """
    holders = replicas * shares
    sizes = [2**power for power in range(1, holders.bit_length()) if 2**power < holders]
    counts = [holders // size for size in sizes if holders % size == 0]
    return [count for count in (*counts, 1) if replicas % count == 0 and count < holders]


def with_settings(choice: Choice, changed: ModuleSettings) -> Choice:
    """The choice with one module's settings replaced."""
    return replace(choice, settings=choice.settings.with_module(changed))
