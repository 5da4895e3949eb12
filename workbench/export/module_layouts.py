"""How a plan lays out each module, inferred from its stages and expressed as a job's layouts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import groupby

from workbench.job.module_layout import ModuleLayout
from workbench.model.model_graph import Module
from workbench.plan.plan import Plan, Sharding
from workbench.plan.stage import Stage
from workbench.schedule.action import Action, Pass
from workbench.schedule.choice import Schedule, ScheduleKind, usual
from workbench.schedule.spec import StagePlacement


class RankSharing(StrEnum):
    """How the modules of a plan share ranks."""

    ALONE = "one module"
    APART = "every module on ranks of its own"
    SHARED = "all modules on the same ranks"
    MIXED = "modules that share some of their ranks"


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """The layout of one module of a plan.

    Args:
        layout: degrees, first rank, and the layers of every stage; counts each joint replica by itself, as
            job files and other systems do.
        virtual: stages on each of its blocks of ranks.
        ranks: all of them, ascending.
        blocks: [pp] indices of the chain's stages on each block of ranks, of the first replica.
    """

    layout: ModuleLayout
    virtual: int
    ranks: tuple[int, ...]
    blocks: tuple[tuple[int, ...], ...]

    @property
    def pp(self) -> int:
        return len(self.blocks)

    @property
    def dp(self) -> int:
        return self.layout.dp or 1


def placed_modules(plan: Plan) -> dict[str, Placed]:
    """Every module's layout, in the model's order.

    Raises:
        ValueError: replicas that are cut or placed differently, or that share items, which no layouts
            describe; the message is the part of the plan alone.

    Complexity: O(stages + items).
    """
    _check_items(plan)
    return {module.name: _placed(plan, module) for module in plan.model.modules}


def placed_llm(plan: Plan) -> Placed:
    """The language model's layout; ValueError as `placed_modules`."""
    return placed_modules(plan)[plan.model.llm.name]


def rank_sharing_of(plan: Plan) -> RankSharing:
    """Whether modules share ranks; ValueError as `placed_modules`."""
    ranks = [set(each.ranks) for each in placed_modules(plan).values()]
    if len(ranks) == 1:
        return RankSharing.ALONE
    if all(each == ranks[0] for each in ranks):
        return RankSharing.SHARED
    apart = sum(map(len, ranks)) == len(set[int]().union(*ranks))
    return RankSharing.APART if apart else RankSharing.MIXED


def _placed(plan: Plan, module: Module) -> Placed:
    replicas = [_merged(plan, plan.chain[module.name, replica]) for replica in plan.replicas(module.name)]
    shapes = {tuple((s.layers, s.joint_replicas, s.cp, s.tp, s.ep) for s in chain) for chain in replicas}
    if len(shapes) > 1:
        raise ValueError(f"replicas of {module.name!r} that are cut differently")
    blocks = {_blocks(chain) for chain in replicas}
    chain = replicas[0]
    if len(blocks) > 1 or len({(s.cp, s.tp, s.ep) for s in chain}) > 1:
        raise ValueError(f"stages of {module.name!r} with different degrees")
    [rank_blocks] = blocks
    if len({len(block) for block in rank_blocks}) > 1:
        raise ValueError(f"ranks of {module.name!r} with different numbers of stages")
    _check_expert_ranks(chain[0])
    ranks = sorted({rank for each in replicas for stage in each for rank in stage.flat_ranks})
    layout = ModuleLayout(
        module=module.name,
        pp=len(rank_blocks),
        tp=chain[0].tp,
        cp=chain[0].cp,
        ep=chain[0].ep,
        dp=len(replicas) * chain[0].joint_replicas,
        rank_offset=ranks[0],
        stage_layers=tuple(stage.layers[1] - stage.layers[0] for stage in chain),
    )
    return Placed(layout=layout, virtual=len(rank_blocks[0]), ranks=tuple(ranks), blocks=rank_blocks)


def _merged(plan: Plan, chain: tuple[Stage, ...]) -> tuple[Stage, ...]:
    """The chain; with sharded parameters, units on the same ranks are merged into one stage."""
    if plan.settings.of(chain[0].module).sharding is not Sharding.PARAMETERS:
        return chain
    runs = [tuple(run) for _, run in groupby(chain, key=lambda stage: stage.ranks)]
    return tuple(replace(run[0], layers=(run[0].layers[0], run[-1].layers[1])) for run in runs)


def _check_expert_ranks(stage: Stage) -> None:
    """Check that experts are distributed inside data-parallel replicas, or over whole ones."""
    num_ranks = stage.tp * stage.cp
    if max(stage.ep, num_ranks) % min(stage.ep, num_ranks):
        raise ValueError(f"ep {stage.ep} of {stage.module!r} over parts of replicas of {num_ranks} ranks")


def _blocks(chain: tuple[Stage, ...]) -> tuple[tuple[int, ...], ...]:
    """Indices in the chain by block of ranks, blocks in the order of their first stages."""
    indices_by_ranks: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    for index, stage in enumerate(chain):
        indices_by_ranks.setdefault(stage.ranks, []).append(index)
    return tuple(map(tuple, indices_by_ranks.values()))


def _check_items(plan: Plan) -> None:
    """Check that every item is in one replica."""
    for module in plan.model.modules:
        items = [item for m in plan.microbatches if m.module == module.name for item in m.items]
        if len(set(items)) < len(items):
            raise ValueError(f"copies of {module.name!r} that all compute the same items")


def schedule_like(plan: Plan) -> Schedule:
    """The first schedule with the properties of the language model's programs, with its usual parameters.

    Split backwards with one stage per rank map to ZB-H1, in a V to ZB-V: their order is the plan's own.

    Raises:
        ValueError: as `placed_modules`.

    Complexity: O(actions).
    """
    placed = placed_modules(plan)
    llm = placed[plan.model.llm.name]
    splits = any(action.kind is Pass.I for action in plan.program_actions)
    several = llm.virtual > 1
    is_folded = llm.virtual == 2 and llm.pp > 1 and llm.blocks[0] == (0, 2 * llm.pp - 1)
    is_vee = several and (splits or is_folded)
    layout = StagePlacement.VEE if is_vee else StagePlacement.ROUND
    kinds = [
        kind
        for kind in ScheduleKind
        if kind.spec.layout is layout
        and (kind.usual_virtual_stages > 1) is several
        and (is_vee or kind.splits_backward is splits)
    ]
    if not several and not splits:
        in_phases = _in_phases(plan)
        forwards_first = not in_phases and llm.pp > 1 and _forwards_first([p.actions for p in plan.programs])
        kinds = [
            kind
            for kind in kinds
            if kind.spec.shares_ranks_in_part is in_phases and _is_forwards_first(kind) is forwards_first
        ]
    kind = kinds[0]
    return Schedule(kind=kind, virtual_stages=llm.virtual) if kind.spec.takes_more_stages else usual(kind)


def _is_forwards_first(kind: ScheduleKind) -> bool:
    return _forwards_first(kind.spec.chain((0, 1), 2, 2))


def _forwards_first(programs: Sequence[Sequence[Action]]) -> bool:
    """Whether every rank with several microbatches does all its forwards, then all its backwards."""
    several = [kinds for kinds in map(_passes, programs) if kinds.count(Pass.F) > 1]
    return bool(several) and all(kinds == sorted(kinds, key=lambda k: k is not Pass.F) for kinds in several)


def _passes(actions: Sequence[Action]) -> list[Pass]:
    return [action.kind for action in actions if action.kind in (Pass.F, Pass.B, Pass.I)]


def _in_phases(plan: Plan) -> bool:
    """Whether ranks hold several modules that are cut over several ranks or differently, as in phases."""
    placed = placed_modules(plan)
    shares = any(len({stage.module for stage in stages}) > 1 for stages in plan.stages_on.values())
    grids = {(each.layout.tp, each.layout.cp, each.pp, each.dp) for each in placed.values()}
    return shares and (len(grids) > 1 or any(each.pp > 1 for each in placed.values()))
