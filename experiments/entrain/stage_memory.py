"""Bytes of many samples on every stage of a module, in proportion to tokens: what bounds a pipeline's order.

What takes the planner an account per plan is a vector here, so that hundreds of batches can be studied. The
proportions are those of the planner's own account of one microbatch.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from experiments.entrain.stage_work import Cuts, even_cuts, tokens_of
from experiments.entrain.workload import job_of
from workbench.data.sample import Sample, Segment
from workbench.memory.stage import Sizes, state_of
from workbench.plan.plan import ModuleSettings, Plan, Recompute, Stage
from workbench.plan.routing import routing_of
from workbench.planner.assembly import draft_plan
from workbench.schedule.action import Action, Pass

Bytes = NDArray[np.float64]
PROBE = ((4096, 512), (2048, 256), (4096, 512), (2048, 256))  # (patches, text tokens) of a microbatch
MERGED = 4
TP = 2


class StageMemory(NamedTuple):
    """Bytes of one module on one rank of each stage.

    Args:
        kept_bytes: [samples, stages] from a forward to the end of its backward.
        working_bytes: [samples, stages] besides, while a pass runs.
        static_bytes: [stages] weights, gradients and optimizer state.
    """

    kept_bytes: Bytes
    working_bytes: Bytes
    static_bytes: Bytes

    def microbatches_bytes(self, microbatches: Sequence[Sequence[int]]) -> tuple[Bytes, Bytes]:
        """[microbatches, stages] kept and working."""
        kept, working = (
            np.array([table[list(places)].sum(axis=0) for places in microbatches])
            for table in (self.kept_bytes, self.working_bytes)
        )
        return kept, working


def stage_memory(
    llm: str, module: str, stages: int | Cuts, samples: Sequence[Sample], recompute: Recompute
) -> StageMemory:
    """Every sample on every stage, so many or cut so."""
    cuts = even_cuts(llm, module, stages) if isinstance(stages, int) else stages
    kept, working, static = _by_token(llm, module, cuts, recompute)
    tokens = tokens_of(samples, module)[:, None]
    return StageMemory(tokens * kept, tokens * working, static)


@cache
def _by_token(llm: str, module: str, cuts: Cuts, recompute: Recompute) -> tuple[Bytes, Bytes, Bytes]:
    """[stages] bytes a token kept and in work, and static ones."""
    plan = _probed(llm, module, cuts, recompute)
    sizes = Sizes(plan, routing_of(plan))
    stages = plan.chain[module, 0]
    (microbatch,) = plan.microbatches_of[module, 0]
    tokens = tokens_of(plan.batch, module).sum()
    each = [sizes.of(stage, microbatch, keeps=True) for stage in stages]
    static = [sum(size for *_, size in state_of(plan, stage.flat_ranks[0])) for stage in stages]
    return (
        np.array([of.kept + of.output for of in each]) / tokens,
        np.array([max(of.forward, of.accumulating) for of in each]) / tokens,
        np.array(static, float),
    )


def _probed(llm: str, module: str, cuts: Cuts, recompute: Recompute) -> Plan:
    """One microbatch on the module's stages and one of the other's, each on ranks of its own."""
    batch = tuple(
        Sample(
            number,
            (Segment("vision", 0, patches, patches // MERGED), Segment("text", 1, text, text)),
        )
        for number, (patches, text) in enumerate(PROBE)
    )
    job = job_of("probe", llm, batch)
    own = ModuleSettings(module=module, recompute=recompute)
    draft = draft_plan(replace(job, settings=replace(job.settings, modules=(own,))), "probe")
    stages: list[Stage] = []
    for each in draft.model.modules:
        for layers in cuts if each.name == module else ((0, len(each.layers)),):
            first = TP * len(stages)
            ranks = (tuple(range(first, first + TP)),)
            stages.append(Stage(id=len(stages), module=each.name, replica=0, layers=layers, ranks=ranks))
    return replace(draft, stages=tuple(stages))


class Held:
    """What the passes of a pipeline hold, by stage."""

    def __init__(
        self, parts: Sequence[tuple[StageMemory, Sequence[Sequence[int]]]], capacity_bytes: float
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self._static: list[float] = []
        self._kept: list[Bytes] = []
        self._working: list[Bytes] = []
        for memory, microbatches in parts:
            kept, working = memory.microbatches_bytes(microbatches)
            self._static += memory.static_bytes.tolist()
            self._kept += list(kept.T)
            self._working += list(working.T)

    def peak_bytes(self, program: Sequence[Action]) -> float:
        """Most that the rank of a program holds; what a split backward leaves counts until its W.

        Complexity: O(actions).
        """
        last = Pass.W if any(action.kind is Pass.W for action in program) else Pass.B
        passes = [
            (action.kind, action.stage, action.microbatch)
            for action in program
            if action.stage is not None and action.microbatch is not None
        ]
        held = sum(self._static[stage] for stage in {stage for _, stage, _ in passes})
        peak = held
        for kind, stage, microbatch in passes:
            kept = float(self._kept[stage][microbatch])
            held += kept * (kind is Pass.F)
            peak = max(peak, held + float(self._working[stage][microbatch]))
            held -= kept * (kind is last)
        return peak

    def fits(self, programs: Sequence[Sequence[Action]]) -> bool:
        """Whether every rank has the memory."""
        return all(self.peak_bytes(program) <= self.capacity_bytes for program in programs)
