"""The plan: which ranks hold which layers, which items are batched, in which order, who owns which tokens."""

from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from functools import cache, cached_property
from itertools import chain
from typing import Any

from workbench.cost.hardware import Cluster
from workbench.cost.products import ProductFormat
from workbench.data.sample import WHERE_SET, Item, Sample
from workbench.field_kinds import check_kinds
from workbench.headline import Headline
from workbench.model.block_modules import BlockModule
from workbench.model.model_graph import ModelGraph
from workbench.plan.boundaries import Boundaries
from workbench.plan.kernels import Kernels
from workbench.plan.optimizer import Optimizer
from workbench.plan.stage import Stage, StageTables, tables_of
from workbench.schedule.action import Action
from workbench.schedule.sharded import ReshardAfter


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """Items that one replica of a module processes in one pass.

    Args:
        module: module that processes them.
        replica: data-parallel replica.
        index: number of the microbatch within its replica, from 0.
        rows: packed sequences, each a list of items.
    """

    module: str
    replica: int
    index: int
    rows: tuple[tuple[Item, ...], ...]

    @property
    def items(self) -> tuple[Item, ...]:
        return tuple(chain.from_iterable(self.rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The ordered actions of one or more ranks. Ranks with equal actions share one program.

    Args:
        ranks: ranks that run the program.
        actions: actions in issue order.
    """

    ranks: tuple[int, ...]
    actions: tuple[Action, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenShard:
    """How the tokens of one row are divided over context-parallel ranks.

    Args:
        module: module of the microbatch.
        replica: replica of the microbatch.
        microbatch: index of the microbatch.
        row: index of the row in the microbatch.
        block_tokens: tokens per block; the last block may be shorter.
        owners: context-parallel index that owns each block.
    """

    module: str
    replica: int
    microbatch: int
    row: int
    block_tokens: int
    owners: tuple[int, ...]


class Recompute(StrEnum):
    """What backwards compute again: nothing, the blocks between embedding and head, or every layer."""

    NONE = "none"
    BLOCKS = "blocks"
    FULL = "full"


class Sharding(StrEnum):
    NONE = "none"
    OPTIMIZER = "optimizer"
    GRADIENTS = "gradients"
    PARAMETERS = "parameters"


class KeyExchange(StrEnum):
    """How the context-parallel ranks of a module's stages bring queries and keys together."""

    ALL_GATHER = "all-gather"
    RING = "ring"
    ALL_TO_ALL = "all-to-all"


class Precision(StrEnum):
    FLOAT64 = "float64"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"

    @property
    def num_bytes(self) -> int:
        return _NUM_BYTES[self]


_NUM_BYTES = {Precision.FLOAT64: 8, Precision.FLOAT32: 4, Precision.BFLOAT16: 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleSettings:
    """Execution settings of one module.

    Args:
        module: name of the module.
        recompute: layers that the backward recomputes.
        sharding: state that is sharded over data-parallel ranks.
        instances: number of copies of the sharded state.
        key_exchange: how context-parallel ranks exchange keys and values, or heads.
        sequence_parallel: whether tensor-parallel ranks split the tokens outside attention and MLPs.
        computed_again: parts of every block that the backward recomputes, if not the whole block.
        collective_pieces: pieces of a tensor-parallel matmul whose results are all-reduced, so that the
            reduction of one piece overlaps with the matmul of the next.
        reshard_after: how long sharded parameters stay gathered.
        recompute_layers: number of recomputed layers, or of blocks with `recompute: blocks`, spread evenly
            over the module; null: all.
        products: operand format of the linear layers of blocks, without routers; `same`: the precision.
    """

    module: str
    recompute: Recompute = Recompute.NONE
    sharding: Sharding = Sharding.NONE
    instances: int = 1
    key_exchange: KeyExchange = KeyExchange.ALL_GATHER
    sequence_parallel: bool = field(default=False, metadata={WHERE_SET: True})
    computed_again: tuple[BlockModule, ...] = field(default=(), metadata={WHERE_SET: True})
    collective_pieces: int = field(default=1, metadata={WHERE_SET: True})
    reshard_after: ReshardAfter = field(default=ReshardAfter.PASS, metadata={WHERE_SET: True})
    recompute_layers: int | None = field(default=None, metadata={WHERE_SET: True})
    products: ProductFormat = field(default=ProductFormat.SAME, metadata={WHERE_SET: True})

    def __post_init__(self) -> None:
        check_kinds(self, f"module {self.module!r}: ")
        if self.collective_pieces < 1:
            raise ValueError(
                f"module {self.module!r}: want collective_pieces >= 1, got {self.collective_pieces}"
            )
        if self.reshard_after is not ReshardAfter.PASS and not self.shards_parameters:
            raise ValueError(
                f"module {self.module!r}: reshard_after {self.reshard_after.value!r} wants sharding "
                f"{Sharding.PARAMETERS.value!r}, got {self.sharding.value!r}; nearest: "
                f"reshard_after {ReshardAfter.PASS.value!r}"
            )
        if self.recompute_layers is not None:
            self._check_recompute_layers(self.recompute_layers)

    def _check_recompute_layers(self, count: int) -> None:
        if count < 1:
            raise ValueError(f"module {self.module!r}: want recompute_layers >= 1, got {count}; nearest: 1")
        if self.recompute is Recompute.NONE:
            raise ValueError(
                f"module {self.module!r}: recompute_layers {count} wants recompute "
                f"{Recompute.BLOCKS.value!r} or {Recompute.FULL.value!r}, got {self.recompute.value!r}; "
                f"nearest: recompute {Recompute.BLOCKS.value!r}"
            )

    @property
    def shards_parameters(self) -> bool:
        """Whether ranks keep shards of the weights, and gather them for passes."""
        return self.sharding is Sharding.PARAMETERS

    @property
    def is_gathered_once(self) -> bool:
        """Whether sharded weights are gathered, and their gradients reduced, once a step."""
        return self.reshard_after is ReshardAfter.STEP

    def sharded(self, sharding: Sharding, instances: int = 1) -> "ModuleSettings":
        """Return the settings with other sharding; only that of parameters keeps `reshard_after`."""
        keeps = sharding is Sharding.PARAMETERS
        reshard_after = self.reshard_after if keeps else ReshardAfter.PASS
        return replace(self, sharding=sharding, instances=instances, reshard_after=reshard_after)

    def recomputing(self, recompute: Recompute, layers: int | None = None) -> "ModuleSettings":
        """Return the settings with other recomputation, of so many of the layers it may be; None: all.

        Parts of blocks are recomputed only where no whole layers are.
        """
        parts = self.computed_again if recompute is Recompute.NONE else ()
        return replace(self, recompute=recompute, recompute_layers=layers, computed_again=parts)


@cache
def _defaults(module: str) -> ModuleSettings:
    return ModuleSettings(module=module)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Execution settings of the whole plan.

    Args:
        precision: precision of weights, activations and messages.
        kernels: kernels of the layers, which determine the activations kept for the backward.
        modules: settings by module; a module without an entry has the defaults.
        optimizer_precision: precision of the weights that the optimizer updates, of its moments and of
            gradient accumulation. None: `precision`, except for what `kernels` imply about memory.
        boundaries: which ranks send tensors between modules: `direct`, the producer's ranks to the
            consumer's; `brokers`, through some ranks of the downstream module.
        optimizer: rule of the update; `muon` is that of matrices of blocks, with AdamW for all others.
    """

    precision: Precision = Precision.BFLOAT16
    kernels: Kernels = Kernels.FUSED
    modules: tuple[ModuleSettings, ...] = ()
    optimizer_precision: Precision | None = field(default=None, metadata={WHERE_SET: True})
    boundaries: Boundaries = field(default=Boundaries.DIRECT, metadata={WHERE_SET: True})
    optimizer: Optimizer = field(default=Optimizer.ADAMW, metadata={WHERE_SET: True})

    def __post_init__(self) -> None:
        check_kinds(self, "settings: ")
        wide = self.optimizer_precision
        if wide is not None and wide.num_bytes < self.precision.num_bytes:
            raise ValueError(
                f"optimizer_precision must be as wide as precision {self.precision.value!r}, "
                f"got {wide.value!r}; nearest: {self.precision.value!r}"
            )
        for own in self.modules:
            if own.products is not ProductFormat.SAME:
                self._check_narrow(f"module {own.module!r}: products {own.products.value!r}")

    @property
    def narrow_products(self) -> tuple[ProductFormat, ...]:
        """Narrow formats of products of any module, each once."""
        formats = dict.fromkeys(own.products for own in self.modules)
        return tuple(each for each in formats if each is not ProductFormat.SAME)

    def _check_narrow(self, where: str) -> None:
        """Refuse narrow products of what is cast from float32, or whose kept inputs are not known."""
        if self.precision is not Precision.BFLOAT16:
            nearest = Precision.BFLOAT16.value
            raise ValueError(
                f"{where} want precision {nearest!r}, got {self.precision.value!r}; nearest: {nearest!r}"
            )
        if self.kernels is Kernels.EAGER:
            nearest = Kernels.FUSED.value
            raise ValueError(
                f"{where} want kernels {nearest!r}, got {self.kernels.value!r}; nearest: {nearest!r}"
            )

    @property
    def gradient_bytes(self) -> int:
        """Bytes of an element of a gradient while it is added up over ranks."""
        return (self.optimizer_precision or self.precision).num_bytes

    @property
    def shardings(self) -> tuple[tuple[str, Sharding, int], ...]:
        """(module, sharding, instances) of every module with settings of its own."""
        return tuple((own.module, own.sharding, own.instances) for own in self.modules)

    def divides_tokens(self, module: str) -> bool:
        """Whether tensor-parallel ranks of a module split its tokens (sequence parallelism).

        Set for single modules, or for all by Megatron's `kernels`. See `plan/sequence.py`.
        """
        return self.kernels.cuts_sequence or self.of(module).sequence_parallel

    def of(self, module: str) -> ModuleSettings:
        for settings in self.modules:
            if settings.module == module:
                return settings
        return _defaults(module)

    def with_module(self, changed: ModuleSettings) -> "Settings":
        """Replace a module's settings; modules with default settings are left out, the others sorted."""
        others = [settings for settings in self.modules if settings.module != changed.module]
        replacement = [changed] if changed != ModuleSettings(module=changed.module) else []
        return replace(
            self, modules=tuple(sorted((*others, *replacement), key=lambda settings: settings.module))
        )


@dataclass(frozen=True, kw_only=True)  # no slots: the look-up tables below are cached on the instance
class Plan(Headline):
    """One optimizer step of one job. A plan is self-contained: executors need only a profile in addition.

    Args:
        strategy: name of the strategy that made the plan.
        model: the DAG of modules.
        cluster: the ranks and links.
        batch: the samples of the step.
        stages: which ranks hold which layers.
        microbatches: which items are processed together.
        programs: the order of actions on each rank.
        token_shards: which rank owns which tokens, for stages with context-parallel ranks.
        settings: how layers are executed.
        schedule: name of the schedule that ordered the passes, if it is not a registered one.
    """

    strategy: str
    model: ModelGraph
    cluster: Cluster
    batch: tuple[Sample, ...]
    stages: tuple[Stage, ...]
    microbatches: tuple[Microbatch, ...]
    programs: tuple[Program, ...]
    token_shards: tuple[TokenShard, ...] = ()
    settings: Settings = field(default_factory=Settings)
    schedule: str = field(default="", metadata={WHERE_SET: True})

    @property
    def made_by(self) -> str:
        """Strategy and schedule in words, the latter where it is not a registered one."""
        schedule = f", schedule {self.schedule}" if self.schedule else ""
        return f"strategy {self.strategy}{schedule}"

    @property
    def headline(self) -> str:
        """See `Headline`."""
        return (
            f"<Plan of {self.model.name!r}, {self.made_by}: {len(self.stages)} stages on "
            f"{len(self.ranks)} ranks, {len(self.batch)} samples a step>"
        )

    def __getstate__(self) -> dict[str, Any]:
        """Return what is pickled: the plan without what is cached on it."""
        return {field_.name: getattr(self, field_.name) for field_ in fields(self)}

    @cached_property
    def _tables(self) -> StageTables:
        return tables_of(self.stages)

    @cached_property
    def stage(self) -> dict[int, Stage]:
        """Stages by id."""
        return self._tables.stage

    @cached_property
    def stages_on(self) -> dict[int, tuple[Stage, ...]]:
        """Rank -> its stages, in the plan's order."""
        return self._tables.stages_on

    @cached_property
    def sample(self) -> dict[int, Sample]:
        """Samples by id."""
        return {sample.id: sample for sample in self.batch}

    @cached_property
    def chain(self) -> dict[tuple[str, int], tuple[Stage, ...]]:
        """(module, replica) -> its stages in layer order."""
        return self._tables.chain

    @cached_property
    def microbatches_of(self) -> dict[tuple[str, int], tuple[Microbatch, ...]]:
        """(module, replica) -> its microbatches in index order; a replica without items is absent."""
        by_replica: dict[tuple[str, int], list[Microbatch]] = {}
        for microbatch in sorted(self.microbatches, key=lambda m: m.index):
            by_replica.setdefault((microbatch.module, microbatch.replica), []).append(microbatch)
        return {key: tuple(microbatches) for key, microbatches in by_replica.items()}

    @cached_property
    def token_shard(self) -> dict[tuple[str, int, int, int], TokenShard]:
        """(module, replica, microbatch, row) -> owners of its tokens."""
        return {
            (shard.module, shard.replica, shard.microbatch, shard.row): shard for shard in self.token_shards
        }

    @cached_property
    def program(self) -> dict[int, tuple[Action, ...]]:
        """Actions by rank."""
        return {rank: program.actions for program in self.programs for rank in program.ranks}

    @cached_property
    def program_actions(self) -> dict[Action, int]:
        """Every action of every program -> its number, in order of first appearance."""
        actions = dict.fromkeys(chain.from_iterable(program.actions for program in self.programs))
        return dict(zip(actions, range(len(actions)), strict=True))

    def ranks_of(self, action: Action) -> tuple[int, ...]:
        """Return the ranks that do the action: those of its stage; for STEP all."""
        return self.ranks if action.stage is None else self.stage[action.stage].flat_ranks

    def replicas(self, module: str) -> tuple[int, ...]:
        """Return the replicas of a module, ascending; none for one without stages."""
        return self._tables.replicas.get(module, ())

    @property
    def has_joint_replicas(self) -> bool:
        """Whether any stage has several joint replicas."""
        return self._tables.has_joint_replicas

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that take part, ascending."""
        return self._tables.ranks
