"""Moves of tokens and memory: owners of tokens, travel of keys, recomputation and sharding."""

from dataclasses import dataclass, replace
from typing import ClassVar

from workbench.plan.plan import KeyExchange, ModuleSettings, Recompute, Sharding
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


def with_settings(choice: Choice, changed: ModuleSettings) -> Choice:
    """The choice with one module's settings changed."""
    return replace(choice, settings=choice.settings.with_module(changed))
