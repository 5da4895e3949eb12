"""Layouts that are likely to be fast by the step model, as moves from any choice."""

from collections.abc import Collection, Iterator
from dataclasses import replace
from itertools import chain, zip_longest

from workbench.cost.model import CostModel
from workbench.job.job import Job
from workbench.plan.plan import Recompute, Sharding
from workbench.planner.layout_choice import LayoutChoice, Mode, ModuleChoice
from workbench.planner.layout_search import likely_layouts
from workbench.search.joint.arrangement import Arrangement, Degrees, Placement
from workbench.search.joint.layout_moves import Arrange
from workbench.search.joint.proposals import Moves
from workbench.search.joint.question import Question
from workbench.search.joint.setting_moves import Keep

PRICED = 64  # layouts of a mode whose step is worked out
KEPT = 8  # of those, that become candidates
_PLACEMENTS = {
    Mode.HOMOGENEOUS: Placement.FIRST_STAGE,
    Mode.COLOCATED: Placement.EVERYWHERE,
    Mode.APART: Placement.ISLANDS,
}


def seeds(job: Job, cost: CostModel, questions: Collection[Question]) -> Iterator[Moves]:
    """The best layouts of every mode in turn, with their memory settings where these are open.

    The step model does not know single samples, so that several of each mode are worth a candidate.
    """
    if Question.LAYOUT not in questions:
        return
    free = replace(job, layouts=())
    found = (likely_layouts(free, cost, mode, PRICED)[:KEPT] for mode in _PLACEMENTS)
    for held in chain.from_iterable(zip_longest(*found)):
        if held is not None:
            yield _moves(job, held.choice, settings=Question.MEMORY in questions)


def _moves(job: Job, choice: LayoutChoice, *, settings: bool) -> Moves:
    parts = {part.module: part for part in (*choice.encoders, choice.llm)}
    degrees = tuple(
        Degrees(module=p.module, tp=p.tp, cp=p.cp, pp=p.pp, dp=p.dp, ep=p.ep)
        for p in (parts[module.name] for module in job.model.modules)
    )
    arranged = Arrange(Arrangement(placement=_PLACEMENTS[choice.mode], degrees=degrees))
    kept = tuple(_kept(job, part) for part in parts.values()) if settings else ()
    return (*kept, arranged)


def _kept(job: Job, part: ModuleChoice) -> Keep:
    is_sharded = max(part.num_holders, part.num_expert_holders) > part.instances
    return Keep(
        part.module,
        Recompute(part.recompute),
        Sharding.OPTIMIZER if is_sharded else Sharding.NONE,
        part.instances if is_sharded else 1,
        job.settings.of(part.module).sequence_parallel,
    )
