"""Moves of tokens and memory: owners of tokens, travel of keys, recomputation and sharding."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from workbench.plan.plan import KeyExchange, ModuleSettings, Plan, Recompute, Sharding
from workbench.search.joint.choice import Choice, TokenRule
from workbench.search.joint.move import Space
from workbench.search.joint.question import Question


@dataclass(frozen=True, slots=True)
class Distribute:
    """Another rule for who owns tokens."""

    question: ClassVar[Question] = Question.TOKENS
    rule: TokenRule

    def apply(self, space: Space, choice: Choice) -> Choice:
        return replace(choice, tokens=self.rule, token_shards=())


@dataclass(frozen=True, slots=True)
class ExchangeKeys:
    """Another way for queries and keys of a module between context-parallel ranks."""

    question: ClassVar[Question] = Question.TOKENS
    module: str
    way: KeyExchange

    def apply(self, space: Space, choice: Choice) -> Choice:
        return with_settings(choice, replace(choice.settings.of(self.module), key_exchange=self.way))


@dataclass(frozen=True, slots=True)
class Keep:
    """Other memory settings of a module, or of all modules: None."""

    question: ClassVar[Question] = Question.MEMORY
    module: str | None
    recompute: Recompute
    sharding: Sharding
    instances: int
    sequence_parallel: bool

    def apply(self, space: Space, choice: Choice) -> Choice:
        names = [module.name for module in space.job.model.modules] if self.module is None else [self.module]
        for name in names:
            changed = replace(
                choice.settings.of(name),
                recompute=self.recompute,
                sharding=self.sharding,
                instances=self.instances,
                sequence_parallel=self.sequence_parallel,
            )
            choice = with_settings(choice, changed)
        return choice


def shardings(choice: Choice, draft: Plan) -> Iterator[Keep]:
    """Weights or optimizer state of one module sharded among other ranks than now, weights also no longer.

    Weights of modules without tensor parallelism. Between pairs and all ranks there are the powers of two: a
    module is sharded among no more than its memory asks for, since the more there are, the more each gathers.
    """
    for module in draft.model.modules:
        stages = [stage for stage in draft.stages if stage.module == module.name]
        now = choice.settings.of(module.name)
        num, cp = len(draft.replicas(module.name)), stages[0].cp
        counts = instance_counts(num, cp)
        ways = [(Sharding.PARAMETERS, each) for each in counts] if stages[0].tp == 1 else []
        ways += [(Sharding.OPTIMIZER, each) for each in counts]
        for sharding, instances in ways:
            if (sharding, instances) != (now.sharding, now.instances):
                yield Keep(module.name, now.recompute, sharding, instances, now.sequence_parallel)


def instance_counts(replicas: int, cp: int) -> Sequence[int]:
    """Of weights that ranks shard: most instances first, of 2, 4, ... ranks each, and one of all."""
    holders = replicas * cp
    sizes = [2**power for power in range(1, holders.bit_length()) if 2**power < holders]
    counts = [holders // size for size in sizes if holders % size == 0]
    return [count for count in (*counts, 1) if replicas % count == 0 and count < holders]


def with_settings(choice: Choice, changed: ModuleSettings) -> Choice:
    """The choice with one module's settings changed."""
    return replace(choice, settings=choice.settings.with_module(changed))
