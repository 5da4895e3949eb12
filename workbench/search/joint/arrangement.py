"""Arrangements: placement and parallelism degrees of all modules, converted to stages and back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum

from workbench.cost.model import CostModel
from workbench.job.job import Job
from workbench.plan.plan import Plan
from workbench.plan.stage import Stage
from workbench.planner.assembly import blocks_cut, disjoint_stages
from workbench.planner.layer_cost import believed_layers_s
from workbench.planner.layout_choice import Degrees, LayoutChoice, Mode, ModuleChoice, degrees_of
from workbench.planner.planner_cost import FROZEN_AWARE
from workbench.schedule.choice import Schedule
from workbench.strategies.encoders_colocated import colocated_stages
from workbench.strategies.megatron_heterogeneous import grid_stages
from workbench.strategies.megatron_homogeneous import first_stage_encoders


class Placement(StrEnum):
    """Where modules are placed relative to each other.

    REPLICAS: each module on ranks of its own, one replica of the whole model after another.
    ISLANDS: each module on ranks of its own, all replicas of one module after all of the previous one.
    TOGETHER: all encoders on the same ranks, the LLM on others.
    FIRST_STAGE: encoders on the ranks of the LLM's first stage.
    EVERYWHERE: every module on all ranks.
    """

    REPLICAS = "replicas apart"
    ISLANDS = "islands"
    TOGETHER = "encoders together"
    FIRST_STAGE = "encoders on the first stage"
    EVERYWHERE = "all on all ranks"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """A placement and the degrees of every module, in the model's order.

    Args:
        placement: where modules are placed relative to each other.
        degrees: of every module.
        first_ranks: for islands, by module, the first rank of its device pool; None: it follows the module
            before it. Empty: all of them do.
    """

    placement: Placement
    degrees: tuple[Degrees, ...]
    first_ranks: tuple[int | None, ...] = ()

    def of(self, module: str) -> Degrees:
        """Degrees of one module."""
        return next(each for each in self.degrees if each.module == module)

    def num_ranks(self, llm: str) -> int:
        """Number of ranks that it occupies."""
        llm_ranks, encoder_ranks = (
            self.of(llm).num_ranks,
            [d.num_ranks for d in self.degrees if d.module != llm],
        )
        if self.placement in (Placement.ISLANDS, Placement.REPLICAS):
            return llm_ranks + sum(encoder_ranks)
        if self.placement is Placement.TOGETHER:
            return llm_ranks + max(encoder_ranks, default=0)
        return llm_ranks

    def __str__(self) -> str:
        texts = (
            f"{d.module} tp {d.tp} cp {d.cp} pp {d.pp} dp {d.dp * d.joint_replicas} ep {d.ep}"
            for d in self.degrees
        )
        pooled = zip(self.degrees, self.first_ranks, strict=False)
        offsets = "".join(f"; {d.module} from rank {first}" for d, first in pooled if first is not None)
        return f"{self.placement}: {', '.join(texts)}{offsets}"


def stages_of(
    job: Job, arrangement: Arrangement, schedule: Schedule, draft: Plan, cost: CostModel
) -> tuple[Stage, ...]:
    """Stages of an arrangement, balanced by the gradients that the draft's microbatches actually need.

    Raises:
        ValueError: degrees that the model, the cluster or the placement does not support.
    """
    check_placement(job, arrangement)
    arranged = _job_with(job, arrangement, schedule)
    layers_s = believed_layers_s(arranged, draft, cost, FROZEN_AWARE.layer_s)
    if arrangement.placement is Placement.FIRST_STAGE:
        return _on_first_stage(arranged, arrangement, layers_s)
    cuts = {
        module: blocks_cut(arranged, seconds, arrangement.of(module).pp, module)
        for module, seconds in layers_s.items()
    }
    stages = {
        Placement.REPLICAS: disjoint_stages,
        Placement.ISLANDS: grid_stages,
        Placement.TOGETHER: colocated_stages,
        Placement.EVERYWHERE: grid_stages,
    }[arrangement.placement]
    return stages(arranged, cuts)


def arrangement_of(
    job: Job, stages: tuple[Stage, ...], schedule: Schedule, draft: Plan, cost: CostModel
) -> Arrangement | None:
    """The arrangement whose stages are on the same ranks as `stages`; None if no placement describes them.

    Complexity: that of `stages_of` for every placement.
    """
    plan = replace(draft, stages=stages)
    degrees = tuple(degrees_of(plan, module.name) for module in job.model.modules)
    arrangements = [Arrangement(placement=placement, degrees=degrees) for placement in Placement]
    if job.pools:
        first_ranks = _first_ranks(plan, degrees)
        arrangements.append(
            Arrangement(placement=Placement.ISLANDS, degrees=degrees, first_ranks=first_ranks)
        )
    for arrangement in arrangements:
        try:
            candidate = stages_of(job, arrangement, schedule, draft, cost)
        except ValueError:  # the placement does not support these degrees
            continue
        if _positions(candidate) == _positions(stages):
            return arrangement
    return None


def _first_ranks(plan: Plan, degrees: Sequence[Degrees]) -> tuple[int | None, ...]:
    """First rank of every module that does not directly follow the one before it; None for the others."""
    first_ranks: list[int | None] = []
    end = 0
    for each in degrees:
        ranks = [r for stage in plan.stages if stage.module == each.module for r in stage.flat_ranks]
        first_ranks.append(None if min(ranks) == end else min(ranks))
        end = max(ranks) + 1
    return tuple(first_ranks)


def _positions(stages: tuple[Stage, ...]) -> list[tuple[str, int, tuple[tuple[int, ...], ...]]]:
    """Sorted positions of stages; pieces of a stage on the same ranks share one."""
    return sorted({(stage.module, stage.replica, stage.ranks) for stage in stages})


def _job_with(job: Job, arrangement: Arrangement, schedule: Schedule) -> Job:
    offset = 0 if arrangement.placement is Placement.EVERYWHERE else None
    offsets = arrangement.first_ranks or (offset,) * len(arrangement.degrees)
    layouts = tuple(
        replace(each.layout, rank_offset=first)
        for each, first in zip(arrangement.degrees, offsets, strict=True)
    )
    llm = arrangement.of(job.model.llm.name)
    return replace(
        job, layouts=layouts, replicas=llm.dp, joint_replicas=llm.joint_replicas, schedule=schedule
    )


def check_placement(job: Job, arrangement: Arrangement) -> None:
    """Check that a placement supports the degrees.

    Raises:
        ValueError: REPLICAS with unequal dp, TOGETHER with unequal encoder grids or a dp other than the
            LLM's, FIRST_STAGE with an encoder grid other than the LLM's, EVERYWHERE with unequal rank counts,
            or pools for other placements than ISLANDS or used twice.
    """
    placement, llm = arrangement.placement, arrangement.of(job.model.llm.name)
    encoders = [each for each in arrangement.degrees if each.module != llm.module]
    together = {(each.joint_replicas, each.tp, each.cp, each.pp, each.dp) for each in encoders}
    wrong, first_ranks = "", [first for first in arrangement.first_ranks if first is not None]
    if first_ranks and (placement is not Placement.ISLANDS or len(set(first_ranks)) < len(first_ranks)):
        wrong = "pools of their own for islands alone"
    if placement is Placement.REPLICAS and len({each.dp for each in arrangement.degrees}) > 1:
        wrong = "as many replicas of every module"
    if placement is Placement.TOGETHER and (len(together) > 1 or {e.dp for e in encoders} - {llm.dp}):
        wrong = "the same tp, cp and pp of every encoder, and the LLM's dp"
    if placement is Placement.FIRST_STAGE and together - {(llm.joint_replicas, llm.tp, llm.cp, 1, llm.dp)}:
        wrong = "encoders of one stage on the LLM's grid"
    if placement is Placement.EVERYWHERE and len({each.num_ranks for each in arrangement.degrees}) > 1:
        wrong = "as many ranks for every module"
    if wrong:
        raise ValueError(f"{placement}: want {wrong}, got {arrangement}")


def _on_first_stage(
    job: Job, arrangement: Arrangement, layers_s: Mapping[str, tuple[float, ...]]
) -> tuple[Stage, ...]:
    choices = {
        degrees.module: ModuleChoice(**{each.name: getattr(degrees, each.name) for each in fields(Degrees)})
        for degrees in arrangement.degrees
    }
    llm = choices.pop(job.model.llm.name)
    choice = LayoutChoice(mode=Mode.HOMOGENEOUS, encoders=tuple(choices.values()), llm=llm)
    return first_stage_encoders(job, choice, layers_s)
