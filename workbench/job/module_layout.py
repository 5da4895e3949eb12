"""The layout of one module: how many ranks share its work, and how."""

from dataclasses import dataclass, fields

from workbench.field_kinds import check_kinds
from workbench.job.schema import LayoutSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleLayout:
    """The ranks of a module: `dp` replicas of `pp` stages of joint_replicas x cp x tp ranks.

    Args:
        module: its name.
        pp: blocks of ranks that a replica's stages take; None: to be searched.
        tp: tensor-parallel degree.
        cp: context-parallel degree.
        ep: ranks of a stage that distribute experts.
        dp: replicas; None: the job's.
        rank_offset: the module's first rank; None: after the preceding modules.
        stage_layers: number of layers of every stage; empty: the strategy balances them.
        joint_replicas: data-parallel replicas in each of `dp` that run together, see `Stage`.
    """

    module: str
    pp: int | None = None
    tp: int = 1
    cp: int = 1
    ep: int = 1
    dp: int | None = None
    rank_offset: int | None = None
    stage_layers: tuple[int, ...] = ()
    joint_replicas: int = 1

    def __post_init__(self) -> None:
        check_kinds(self, f"layout of {self.module!r}: ")
        check_degrees(
            self.module,
            pp=self.pp,
            tp=self.tp,
            cp=self.cp,
            ep=self.ep,
            dp=self.dp,
            joint_replicas=self.joint_replicas,
        )
        if self.rank_offset is not None and self.rank_offset < 0:
            raise ValueError(f"layout of {self.module!r}: rank_offset must be >= 0, got {self.rank_offset}")
        if any(count < 1 for count in self.stage_layers):
            raise ValueError(
                f"layout of {self.module!r}: every stage wants >= 1 layer, got stage_layers "
                f"{list(self.stage_layers)}"
            )

    @property
    def stage_ranks(self) -> int:
        """Ranks of a stage."""
        return self.joint_replicas * self.cp * self.tp


NOT_IN_FILES = ("module", "joint_replicas")  # the entry's key, and what follows from ep and the replicas
PLACES = tuple(each.name for each in fields(ModuleLayout) if each.name not in NOT_IN_FILES)
"""Keys of a LayoutSpec that are the layout's; the others are settings."""


def check_degrees(module: str, **degrees: int | None) -> None:
    """Raise ValueError for the first degree of a module below 1; None is left open."""
    for name, degree in degrees.items():
        if degree is not None and degree < 1:
            raise ValueError(f"layout of {module!r}: {name} must be >= 1, got {degree}")


def has_layout(spec: LayoutSpec) -> bool:
    """Whether a job file's entry for a module states any key of its layout, and not settings alone."""
    return not spec.model_fields_set.isdisjoint(PLACES)


def layout_from_spec(module: str, spec: LayoutSpec) -> ModuleLayout:
    """The layout in a job file's entry for a module; its other keys are settings."""
    return ModuleLayout(module=module, **spec.model_dump(include=set(PLACES)))
