"""The weights of a layer that expert-parallel ranks distribute, besides those cut by tensor parallelism."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from torch import Tensor

from runtime.models.adapter import StageLayer
from runtime.models.choose import adapter_of
from runtime.models.mixture import EXPERTS
from runtime.parallel.tensor.cuts import Cut, Cuts, cuts_of
from runtime.parallel.tensor.group import TensorGroup
from workbench.plan.plan import Plan
from workbench.plan.stage import Stage

Part = Callable[[Tensor], Tensor]  # of a whole weight


@dataclass(frozen=True, slots=True)
class WeightParts:
    """How the ranks of a stage share the weights of one layer.

    Args:
        tensor: cuts by tensor parallelism.
        experts: local name of experts' weights -> their cut by expert parallelism.
    """

    tensor: Cuts = field(default_factory=Cuts)
    experts: dict[str, Cut] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StagePosition:
    """A rank's position in a stage: among its tensor-parallel and among its expert-parallel ranks."""

    member: int
    tp: int
    expert_member: int
    ep: int

    def own(self, local: str, parts: WeightParts, whole: Tensor) -> Tensor:
        """This rank's part of a weight, or all of it if it is not cut."""
        if local in parts.experts:
            return parts.experts[local].own(whole, self.expert_member, self.ep)
        if local in parts.tensor.cut:
            return parts.tensor.cut[local].own(whole, self.member, self.tp)
        return whole


def position_in(stage: Stage, tensor: TensorGroup | None, experts: TensorGroup | None) -> StagePosition:
    """The position of a rank in the groups with which it shares the stage's weights.

    Raises:
        ValueError: a group of another degree than the stage's.
    """
    for group, degree, name in ((tensor, stage.tp, "tp"), (experts, stage.ep, "ep")):
        size = 1 if group is None else group.size
        if degree != size:
            raise ValueError(
                f"stage {stage.id}: {size} ranks share its weights, want {name} = {size}, got {name} {degree}"
            )
    member, index = (0 if group is None else group.member for group in (tensor, experts))
    return StagePosition(member=member, tp=stage.tp, expert_member=index, ep=stage.ep)


def position_of(stage: Stage, rank: int) -> StagePosition:
    """The position of a rank of the stage's grid."""
    flat = stage.flat_ranks.index(rank)
    return StagePosition(member=flat % stage.tp, tp=stage.tp, expert_member=flat % stage.ep, ep=stage.ep)


def parts_of(layer: StageLayer, *, tp: int, ep: int) -> WeightParts:
    """How tp x cp ranks, ep of which distribute experts, share a layer as its adapter builds it.

    Raises:
        ValueError: as `cuts_of`.
    """
    cuts = Cuts() if tp == 1 else cuts_of(layer, tp)
    if ep == 1:
        return WeightParts(cuts)
    names = tuple(layer.mixtures())
    experts = {name: cut for mixture in names for name, cut in _expert_cuts(layer, mixture)}
    kept = {name: cut for name, cut in cuts.cut.items() if name not in experts}
    partial_names = tuple(name for name in cuts.partial if name not in experts)
    skipped = (*names, *(f"{name}.{EXPERTS}" for name in names))
    return WeightParts(replace(cuts, cut=kept, partial=partial_names, experts=skipped), experts)


def _expert_cuts(layer: StageLayer, mixture: str) -> Sequence[tuple[str, Cut]]:
    experts = layer.get_submodule(f"{mixture}.{EXPERTS}")
    return [
        (f"{mixture}.{EXPERTS}.{own}", Cut(0, (weight.shape[0],)))
        for own, weight in experts.named_parameters(recurse=False)
    ]


def held_parts(plan: Plan, rank: int) -> dict[tuple[str, str], Part]:
    """(module, Hugging Face name) -> function from a whole weight to the rank's part; uncut ones are absent.

    Raises:
        ValueError: a stage that its tensor-parallel ranks cannot share.

    Complexity: O(weights of the rank), with layers built on the meta device.
    """
    parts_by_name: dict[tuple[str, str], Part] = {}
    for stage in plan.stages_on.get(rank, ()):
        if stage.tp == stage.ep == 1:
            continue
        in_grid = position_of(stage, rank)
        adapter = adapter_of(plan.model.module(stage.module))
        for index in range(*stage.layers):
            layer = adapter.build(index)
            parts = parts_of(layer, tp=stage.tp, ep=stage.ep)
            for local in (*parts.tensor.cut, *parts.experts):
                name = layer.hugging_face_name(local)
                name = adapter.aliases.get(name, name)
                parts_by_name[stage.module, name] = partial(in_grid.own, local, parts)
    return parts_by_name
