"""Where modules lie and with which degrees: from an arrangement to stages, and back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from workbench.cost.model import CostModel
from workbench.job.job import Job
from workbench.plan.plan import Plan, Stage
from workbench.planner.assembly import blocks_cut, disjoint_stages
from workbench.planner.block_cuts import Cuts
from workbench.planner.groupings import llm_of
from workbench.planner.layer_cost import believed_layers_s
from workbench.planner.layout_choice import Degrees, LayoutChoice, Mode, ModuleChoice, degrees_of
from workbench.planner.planner_cost import FROZEN_AWARE
from workbench.schedule.choice import Schedule
from workbench.strategies.encoders_colocated import colocated_stages
from workbench.strategies.megatron_heterogeneous import grid_stages
from workbench.strategies.megatron_homogeneous import first_stage_encoders


class Placement(StrEnum):
    """How modules lie to each other.

    REPLICAS: every module on ranks of its own, one replica of all after the other.
    ISLANDS: every module on ranks of its own, all replicas of one after all of the other.
    TOGETHER: encoders on the same ranks, the LLM on others.
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
    """A placement and degrees of every module, in the model's order.

    Args:
        placement: how modules lie to each other.
        degrees: of every module.
        first_ranks: of islands, by module, the rank with which its pool of devices begins; None: it lies
            behind the one before it. Empty: all do.
    """

    placement: Placement
    degrees: tuple[Degrees, ...]
    first_ranks: tuple[int | None, ...] = ()

    def of(self, module: str) -> Degrees:
        """Of one module."""
        return next(each for each in self.degrees if each.module == module)

    def num_ranks(self, llm: str) -> int:
        """That it takes."""
        own, shared = self.of(llm).num_ranks, [d.num_ranks for d in self.degrees if d.module != llm]
        if self.placement in (Placement.ISLANDS, Placement.REPLICAS):
            return own + sum(shared)
        if self.placement is Placement.TOGETHER:
            return own + max(shared, default=0)
        return own

    def __str__(self) -> str:
        words = (f"{d.module} tp {d.tp} cp {d.cp} pp {d.pp} dp {d.dp} ep {d.ep}" for d in self.degrees)
        pooled = zip(self.degrees, self.first_ranks, strict=False)
        begins = "".join(f"; {d.module} from rank {first}" for d, first in pooled if first is not None)
        return f"{self.placement}: {', '.join(words)}{begins}"


def stages_of(
    job: Job, arrangement: Arrangement, schedule: Schedule, draft: Plan, cost: CostModel
) -> tuple[Stage, ...]:
    """The stages of an arrangement, balanced by the gradients that really run over the draft's microbatches.

    Raises:
        ValueError: degrees that the model or the cluster does not take, or that do not go with the placement.
    """
    check_placement(job, arrangement)
    held = _job_with(job, arrangement, schedule)
    layers_s = believed_layers_s(held, draft, cost, FROZEN_AWARE.layer_s)
    if arrangement.placement is Placement.FIRST_STAGE:
        return _on_first_stage(held, arrangement, layers_s)
    cuts = {
        module: blocks_cut(held, seconds, arrangement.of(module).pp, module)
        for module, seconds in layers_s.items()
    }
    stages = {
        Placement.REPLICAS: disjoint_stages,
        Placement.ISLANDS: grid_stages,
        Placement.TOGETHER: colocated_stages,
        Placement.EVERYWHERE: grid_stages,
    }[arrangement.placement]
    return stages(held, cuts)


def arrangement_of(
    job: Job, stages: tuple[Stage, ...], schedule: Schedule, draft: Plan, cost: CostModel
) -> Arrangement | None:
    """The arrangement whose stages lie on the same ranks; None where no placement says it.

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
            found = stages_of(job, arrangement, schedule, draft, cost)
        except ValueError:  # a placement that is not for these degrees
            continue
        if _places(found) == _places(stages):
            return arrangement
    return None


def _first_ranks(plan: Plan, degrees: Sequence[Degrees]) -> tuple[int | None, ...]:
    """Where modules begin that do not lie behind the one before them."""
    found: list[int | None] = []
    end = 0
    for each in degrees:
        ranks = [r for stage in plan.stages if stage.module == each.module for r in stage.flat_ranks]
        found.append(None if min(ranks) == end else min(ranks))
        end = max(ranks) + 1
    return tuple(found)


def _places(stages: tuple[Stage, ...]) -> list[tuple[str, int, tuple[tuple[int, ...], ...]]]:
    """In no order but their own; pieces of a stage on the same ranks are at one place."""
    return sorted({(stage.module, stage.replica, stage.ranks) for stage in stages})


def _job_with(job: Job, arrangement: Arrangement, schedule: Schedule) -> Job:
    offset = 0 if arrangement.placement is Placement.EVERYWHERE else None
    offsets = arrangement.first_ranks or (offset,) * len(arrangement.degrees)
    layouts = tuple(
        replace(each.layout, rank_offset=first)
        for each, first in zip(arrangement.degrees, offsets, strict=True)
    )
    replicas = arrangement.of(llm_of(job)).dp
    return replace(job, layouts=layouts, replicas=replicas, schedule=schedule)


def check_placement(job: Job, arrangement: Arrangement) -> None:
    """Whether degrees go with a placement.

    Raises:
        ValueError: replicas side by side that are not equally many, encoders together with unequal grids,
            encoders on the LLM's first stage with another grid than its own, modules on all ranks that
            take unequally many, or two that begin with the same pool.
    """
    placement, llm = arrangement.placement, arrangement.of(llm_of(job))
    encoders = [each for each in arrangement.degrees if each.module != llm.module]
    together = {(each.tp, each.cp, each.pp, each.dp) for each in encoders}
    wrong, begins = "", [first for first in arrangement.first_ranks if first is not None]
    if begins and (placement is not Placement.ISLANDS or len(set(begins)) < len(begins)):
        wrong = "pools of their own for islands alone"
    if placement is Placement.REPLICAS and len({each.dp for each in arrangement.degrees}) > 1:
        wrong = "as many replicas of every module"
    if placement is Placement.TOGETHER and (len(together) > 1 or {e.dp for e in encoders} - {llm.dp}):
        wrong = "the same tp, cp and pp of every encoder, and the LLM's dp"
    if placement is Placement.FIRST_STAGE and together - {(llm.tp, llm.cp, 1, llm.dp)}:
        wrong = "encoders of one stage on the LLM's grid"
    if placement is Placement.EVERYWHERE and len({each.num_ranks for each in arrangement.degrees}) > 1:
        wrong = "as many ranks for every module"
    if wrong:
        raise ValueError(f"{placement}: want {wrong}, got {arrangement}")


def _on_first_stage(
    job: Job, arrangement: Arrangement, layers_s: Mapping[str, tuple[float, ...]]
) -> tuple[Stage, ...]:
    """The LLM's stages make up for the encoders' time on the first of them."""
    name = llm_of(job)
    llm = arrangement.of(name)
    encoders = [each for each in arrangement.degrees if each.module != name]
    first, *rest = layers_s[name]
    ahead_s = sum(sum(layers_s[encoder.module]) for encoder in encoders)
    cuts: dict[str, Cuts] = {each.module: ((0, len(layers_s[each.module])),) for each in encoders}
    cuts[name] = blocks_cut(job, (first + ahead_s, *rest), llm.pp, name)
    parts = {
        d.module: ModuleChoice(module=d.module, tp=d.tp, cp=d.cp, pp=d.pp, dp=d.dp, ep=d.ep)
        for d in arrangement.degrees
    }
    choice = LayoutChoice(
        mode=Mode.HOMOGENEOUS, encoders=tuple(parts[e.module] for e in encoders), llm=parts[name]
    )
    return first_stage_encoders(job, choice, cuts)
