"""Encoders colocated: all encoders cut into the same number of stages on the same ranks, then the LLM.

Source: Cornstarch v1 section 2.2, Figures 1c and 2b (Megatron-LM's VLM pipeline), and the
baseline of section 6.1; the ICML version's Table 2 uses the frozen-aware form.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from workbench.cost.model import CostModel
from workbench.graph.model_graph import TEXT
from workbench.job import Job
from workbench.plan.build import with_programs
from workbench.plan.lowered import Lowered
from workbench.plan.plan import Plan, Stage
from workbench.strategies.assembly import (
    Cuts,
    bottleneck_s,
    check_ranks,
    cut,
    draft_plan,
    grid,
    layout_of,
    num_microbatches,
)
from workbench.strategies.belief import FROZEN_AWARE, FROZEN_UNAWARE, Belief
from workbench.strategies.layer_cost import believed_layers_s
from workbench.strategies.stage_counts import Progress, fastest_counts, silent

ENCODERS = "encoders"  # the stage count that all encoders share


def plan(job: Job, cost: CostModel, progress: Progress = silent) -> Plan:
    """The papers' baseline: stages balanced by forward time, as if everything were trainable."""
    return _plan(job, cost, "encoders-colocated", FROZEN_UNAWARE, progress)


def plan_frozen_aware(job: Job, cost: CostModel, progress: Progress = silent) -> Plan:
    """Colocated encoders, stages balanced by forward plus backward (ICML section 5.3)."""
    return _plan(job, cost, "encoders-colocated-frozen-aware", FROZEN_AWARE, progress)


def _plan(job: Job, cost: CostModel, name: str, belief: Belief, progress: Progress) -> Plan:
    _check_layouts(job)
    draft = draft_plan(job, name)
    layers_s = believed_layers_s(job, draft, cost, belief.layer_s)
    ranks_per_stage = {}
    for module in job.model.modules:
        layout = layout_of(job, module.name)
        ranks_per_stage[ENCODERS if module.modality != TEXT else module.name] = layout.tp * layout.cp
    return fastest_counts(job, ranks_per_stage, _Candidates(job, draft, cost, belief, layers_s), progress)


@dataclass(frozen=True, slots=True)
class _Candidates:
    job: Job
    draft: Plan
    cost: CostModel
    belief: Belief
    layers_s: Mapping[str, tuple[float, ...]]

    def bound_s(self, counts: Mapping[str, int]) -> float:
        """The slowest stage over all its microbatches; stages on shared ranks are not added up."""
        return max(
            bottleneck_s(self.layers_s[module], cuts) * num_microbatches(self.draft, module)
            for module, cuts in self._cuts(counts).items()
        )

    def plan(self, counts: Mapping[str, int]) -> Plan:
        return with_programs(replace(self.draft, stages=_stages(self.job, self._cuts(counts))))

    def believed_s(self, lowered: Lowered) -> float:
        return self.belief.plan_s(lowered, self.cost)

    def _cuts(self, counts: Mapping[str, int]) -> dict[str, Cuts]:
        return {m: cut(self.layers_s[m], counts.get(m, counts.get(ENCODERS, 1)), m) for m in self.layers_s}


def _stages(job: Job, cuts: Mapping[str, Cuts]) -> tuple[Stage, ...]:
    """The k-th stages of all encoders on one block of ranks, then the LLM's stages."""
    stages: list[Stage] = []
    first_rank = 0
    for replica in range(job.replicas):
        base = first_rank
        for module in job.model.modules:
            layout = layout_of(job, module.name)
            rank = base if module.modality != TEXT else first_rank
            for layers in cuts[module.name]:
                stages.append(
                    Stage(
                        id=len(stages),
                        module=module.name,
                        replica=replica,
                        layers=layers,
                        ranks=grid(rank, layout),
                    )
                )
                rank += layout.tp * layout.cp
            first_rank = max(first_rank, rank)
    check_ranks(job, first_rank)
    return tuple(stages)


def _check_layouts(job: Job) -> None:
    """Colocated encoders share ranks, so they share pp, tp and cp."""
    layouts = [layout_of(job, m.name) for m in job.model.modules if m.modality != TEXT]
    shapes = {(layout.pp, layout.tp, layout.cp) for layout in layouts}
    if len(shapes) > 1:
        raise ValueError(
            "encoders-colocated: all encoders must have the same pp, tp and cp, got "
            + ", ".join(f"{x.module}: pp {x.pp}, tp {x.tp}, cp {x.cp}" for x in layouts)
        )
