"""A choice in the search over layouts: degrees, recomputation and optimizer instances of every module."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import StrEnum

from workbench.balance.orchestration.expert_degrees import nearest_expert_degree
from workbench.job.module_layout import ModuleLayout, check_degrees
from workbench.plan.plan import ModuleSettings, Plan, Recompute


class Mode(StrEnum):
    """How modules share the ranks.

    HOMOGENEOUS: one grid for all, encoders on the ranks of the LLM's first stage.
    COLOCATED: every module spreads over all ranks under a grid of its own.
    APART: every module on ranks of its own.
    SHARDED: one replica a rank, or a group of context-parallel ones, parameters sharded among all.
    HYBRID: as SHARDED, with several instances of all parameters, each among consecutive ranks.
    """

    HOMOGENEOUS = "homogeneous"
    COLOCATED = "colocated"
    APART = "apart"
    SHARDED = "sharded"
    HYBRID = "hybrid"


@dataclass(frozen=True, slots=True, kw_only=True)
class Degrees:
    """How one module's ranks share its work.

    Args:
        module: its name.
        tp, cp, pp, dp: degrees of tensor, context, pipeline and data parallelism; `pp` blocks of ranks,
            which may have several stages each.
        ep: neighbours, of a stage's ranks, that distribute experts instead of cutting them; 1: none.
        joint_replicas: data-parallel replicas in each of `dp` that run together, see `Stage`.
    """

    module: str
    tp: int = 1
    cp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    joint_replicas: int = 1

    def __post_init__(self) -> None:
        degrees = {"tp": self.tp, "cp": self.cp, "pp": self.pp, "dp": self.dp, "ep": self.ep}
        check_degrees(self.module, **degrees, joint_replicas=self.joint_replicas)
        if self.stage_ranks % self.ep:
            raise ValueError(
                f"layout of {self.module!r}: experts are distributed over a divisor of tp x cp = "
                f"{self.stage_ranks} ranks, got ep {self.ep}; nearest: "
                f"{nearest_expert_degree(self.ep, self.stage_ranks, self.stage_ranks)}"
            )

    @property
    def stage_ranks(self) -> int:
        """Ranks of a stage."""
        return self.joint_replicas * self.tp * self.cp

    @property
    def num_replicas(self) -> int:
        """Data-parallel replicas, each joint one counted by itself."""
        return self.dp * self.joint_replicas

    @property
    def num_ranks(self) -> int:
        """Ranks of the module, where no other shares them."""
        return self.stage_ranks * self.pp * self.dp

    @property
    def layout(self) -> ModuleLayout:
        """The job's notation of the degrees; the rank offset and the cut of layers are left open."""
        return ModuleLayout(
            module=self.module,
            tp=self.tp,
            cp=self.cp,
            pp=self.pp,
            dp=self.dp,
            ep=self.ep,
            joint_replicas=self.joint_replicas,
        )


def degrees_of(plan: Plan, module: str) -> Degrees:
    """Degrees of a module in a plan: those of its first replica, and the number of replicas."""
    replicas = plan.replicas(module)
    chain = plan.chain[module, replicas[0]]
    blocks = len({stage.flat_ranks for stage in chain})
    first = chain[0]
    return Degrees(
        module=module,
        tp=first.tp,
        cp=first.cp,
        pp=blocks,
        dp=len(replicas),
        ep=first.ep,
        joint_replicas=first.joint_replicas,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleChoice(Degrees):
    """The choice for one module of a layout.

    Args:
        recompute: which of its layers are computed again.
        recompute_layers: number of those that are; None: all.
        instances: copies of the sharded state among its data-parallel ranks.
    """

    recompute: Recompute = Recompute.NONE
    recompute_layers: int | None = None
    instances: int = 1

    def __post_init__(self) -> None:
        Degrees.__post_init__(self)
        if self.instances < 1:
            raise ValueError(f"layout of {self.module!r}: instances must be >= 1, got {self.instances}")
        if self.num_holders % self.instances or self.num_expert_holders % self.instances:
            experts = "" if self.ep == 1 else f" and, of experts, {self.num_expert_holders}"
            raise ValueError(
                f"layout of {self.module!r}: optimizer instances must divide dp x cp = {self.num_holders}"
                f"{experts}, got {self.instances}"
            )

    @property
    def degrees(self) -> Degrees:
        """The degrees alone."""
        return Degrees(**{each.name: getattr(self, each.name) for each in fields(Degrees)})

    @property
    def num_holders(self) -> int:
        """Ranks that hold the same weights and shard their optimizer state."""
        return self.num_replicas * self.cp

    @property
    def num_expert_holders(self) -> int:
        """Ranks that hold the same experts; without expert parallelism, `num_holders`."""
        return self.num_holders if self.ep == 1 else self.num_holders * self.tp // self.ep

    @property
    def shards_state(self) -> bool:
        """Whether ranks that hold the same weights shard optimizer state, of experts or of all others."""
        return max(self.num_holders, self.num_expert_holders) > self.instances

    def __str__(self) -> str:
        extra = _RECOMPUTED[self.recompute]
        copies = f" x{self.instances} optimizers" if self.instances > 1 else ""
        experts = f" ep {self.ep}" if self.ep > 1 else ""
        degrees = {"tp": self.tp, "cp": self.cp, "pp": self.pp, "dp": self.num_replicas}
        grid = "".join(f" {name} {degree}" for name, degree in degrees.items() if degree > 1)
        return f"{self.module}{grid}{experts}{extra}{copies}"


_RECOMPUTED = {Recompute.NONE: "", Recompute.BLOCKS: " blocks recomputed", Recompute.FULL: " recomputed"}


def on_tensor_ranks(settings: ModuleSettings, tp: int = 1) -> ModuleChoice:
    """One stage of a module on `tp` ranks, which recomputes what its settings say."""
    return ModuleChoice(
        module=settings.module,
        tp=tp,
        recompute=settings.recompute,
        recompute_layers=settings.recompute_layers,
    )


def recomputations(
    stated: ModuleSettings, modes: Sequence[Recompute]
) -> tuple[tuple[Recompute, int | None], ...]:
    """Modes of recomputation of a module, each with a number of layers: what is stated, or all `modes`."""
    if stated.recompute is Recompute.NONE and not stated.computed_again:
        return tuple((mode, None) for mode in modes)
    return ((stated.recompute, stated.recompute_layers),)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutChoice:
    """A mode, and the choice of every encoder and of the LLM.

    Args:
        offload: whether weights and optimizer state of colocated encoders are on the host while the LLM
            runs.
    """

    mode: Mode
    encoders: tuple[ModuleChoice, ...]
    llm: ModuleChoice
    offload: bool = False

    def __post_init__(self) -> None:
        if self.offload and self.mode is not Mode.COLOCATED:
            raise ValueError(f"a {self.mode} layout has no offload; nearest: {Mode.COLOCATED}")

    @property
    def num_ranks(self) -> int:
        """Ranks that all modules take together."""
        if self.mode is Mode.APART:
            return self.llm.num_ranks + sum(encoder.num_ranks for encoder in self.encoders)
        return self.llm.num_ranks

    def __str__(self) -> str:
        how = f"{self.mode} offloaded" if self.offload else str(self.mode)
        return f"{how}: {', '.join(map(str, (*self.encoders, self.llm)))}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutStep:
    """Seconds and bytes of one optimizer step under a layout.

    Args:
        passes_s: forwards and backwards, including boundary exchanges.
        exchange_s: exposed exchange of gradients and weights between replicas.
        update_s: the optimizer's update.
        boundary_s: the part of `passes_s` that carries features between modules.
        peak_bytes: peak memory of the fullest rank.
        memory_bytes: memory of the smallest rank.
        llm_layers: number of layers of each LLM stage.
    """

    passes_s: float
    exchange_s: float
    update_s: float
    boundary_s: float
    peak_bytes: int
    memory_bytes: int
    llm_layers: tuple[int, ...]

    @property
    def step_s(self) -> float:
        return self.passes_s + self.exchange_s + self.update_s

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.memory_bytes
