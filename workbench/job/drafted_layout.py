"""The layouts of a drafted job: a tp with which every module's state fits on a few stages.

What fits decides, and no estimate of seconds, which `search` has. A step has enough microbatches for the
stages (`num_microbatches`), as with few of them ranks wait most of the time.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from workbench.data.sample import Sample
from workbench.job.drafted_activations import Activations, long_activations
from workbench.job.drafted_state import (
    WHOLE_STAGES,
    ModuleCut,
    rank_state_bytes,
    with_experts_distributed,
)
from workbench.model.experts import num_experts
from workbench.model.model_graph import ModelGraph, Module
from workbench.plan.plan import Recompute

LEAST_MICROBATCHES = 8  # of a replica in a step
PER_STAGE = 4  # microbatches of a replica for each stage
MOST_STAGES = 8  # of a module without experts, before its layers are divided by tensor parallelism
STATE_SHARE = 0.6  # of a device's memory; the rest is for activations
_STATE_SHARES = {  # of the LLM's recomputation, the first with which one sample fits; of distributed experts
    Recompute.NONE: STATE_SHARE,
    Recompute.BLOCKS: 0.8,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftedLayout:
    """The cuts of all modules, by name, and the number of replicas.

    Args:
        recompute: which layers of the LLM are computed again.
    """

    cuts: Mapping[str, ModuleCut]
    replicas: int
    recompute: Recompute = Recompute.NONE

    @property
    def num_stages(self) -> int:
        """Of all modules: the most microbatches that a rank keeps under 1F1B."""
        return sum(cut.stages for cut in self.cuts.values())

    @property
    def joined(self) -> int:
        """The replicas that share experts: there is a multiple of them."""
        return max(cut.ep for cut in self.cuts.values())

    @property
    def num_ranks(self) -> int:
        """Of a replica."""
        return sum(cut.tp * cut.stages for cut in self.cuts.values())

    def num_microbatches(self, gpus: int) -> int:
        """The least microbatches of a replica in a step: `PER_STAGE` for each stage on all of its ranks.

        Source: Huang et al. 2019, "GPipe", section 2.3: idle time is negligible from four microbatches a
        stage on.
        """
        stages = self.num_stages * (gpus // self.replicas) // self.num_ranks
        return max(LEAST_MICROBATCHES, PER_STAGE * stages)

    def activation_bytes(self, module: str, one: Activations) -> float:
        """Activations that a rank of a module has under 1F1B, of microbatches of which each has these.

        A stage keeps as many microbatches as there are stages, of its share of its module's layers.
        """
        return one.kept * self.num_stages / self.cuts[module].stages + one.in_work

    @property
    def notes(self) -> Iterator[str]:
        """Notes on layouts that strategies without tensor or expert parallelism cannot plan."""
        for module, cut in self.cuts.items():
            if cut.tp > 1:
                yield f"{module}: its layout has tp {cut.tp}; fsdp and hsdp plan it with tp 1 or no layout"
            if cut.ep > 1:
                yield (
                    f"{module}: its layout has ep {cut.ep}, as whole experts take more than {WHOLE_STAGES} "
                    "stages; without it, searches choose their own"
                )


def drafted_layout(
    graph: ModelGraph, data: Sequence[Sample], *, gpus: int, per_node: int, memory_bytes: int
) -> DraftedLayout:
    """Layouts whose tp fits every module's state on a few stages, and the number of replicas.

    Stages are added until state and activations of microbatches of one sample fit; where they never do, the
    LLM's blocks are computed again. If not even that fits, there are as few stages as state allows, nothing
    is computed again, and `plan` says what is too large. Where experts would take many stages, they are
    distributed over replicas, if that fits.

    Between half and all of the replicas that the GPUs have room for, the number that leaves the fewest GPUs
    idle, then the largest; a multiple of those that share experts.

    Args:
        data: samples, in random order.
        memory_bytes: of a GPU.

    Complexity: O(layers + stages x modules).
    """
    room = STATE_SHARE * memory_bytes
    cuts = {module.name: _cut(module, room, per_node) for module in graph.modules}
    few = DraftedLayout(cuts=cuts, replicas=1)
    whole = (replace(few, recompute=how) for how in _STATE_SHARES)
    tried = chain(_distributed(graph, few, gpus, memory_bytes), whole)
    each = (_with_room(graph, layout, data, gpus, memory_bytes) for layout in tried)
    cut = next((layout for layout in each if layout is not None), few)
    most = max(1, gpus // (cut.num_ranks * cut.joined))
    counts = [count * cut.joined for count in range(most, (most - 1) // 2, -1)]
    return replace(cut, replicas=min(counts, key=lambda count: gpus % count))


def _distributed(
    graph: ModelGraph, few: DraftedLayout, gpus: int, memory_bytes: int
) -> Iterator[DraftedLayout]:
    """The layout with the experts of large mixtures distributed; the state has more room beside less."""
    for how, share in _STATE_SHARES.items():
        each = {
            module.name: with_experts_distributed(module, share * memory_bytes, gpus)
            for module in graph.modules
        }
        cuts = {name: cut for name, cut in each.items() if cut is not None}
        if cuts:
            yield replace(few, cuts={**few.cuts, **cuts}, recompute=how)


def _with_room(
    graph: ModelGraph, few: DraftedLayout, data: Sequence[Sample], gpus: int, memory_bytes: int
) -> DraftedLayout | None:
    """Return the layout with as many more stages as a sample needs, each of the fullest module, or None."""
    held = activations_of(graph, few, data, samples=1)
    layout = few

    def rank_bytes(module: Module) -> float:
        cut = layout.cuts[module.name]
        activations = layout.activation_bytes(module.name, held.get(module.name, Activations(0, 0)))
        return rank_state_bytes(module, cut) + activations

    while rank_bytes(fullest := max(graph.modules, key=rank_bytes)) > memory_bytes:
        cut = layout.cuts[fullest.name]
        more = replace(cut, stages=cut.stages + 1)
        layout = replace(layout, cuts={**layout.cuts, fullest.name: more})
        if more.stages > len(fullest.layers) or layout.num_ranks * layout.joined > gpus:
            return None
    return layout


def activations_of(
    graph: ModelGraph, layout: DraftedLayout, data: Sequence[Sample], samples: int
) -> dict[str, Activations]:
    """Return `long_activations` under a layout."""
    tp = {name: cut.tp for name, cut in layout.cuts.items()}
    return long_activations(graph, tp, data, samples, {graph.llm.name: layout.recompute})


def _cut(module: Module, room_bytes: float, per_node: int) -> ModuleCut:
    """The tp and the stages of a module's state.

    Experts get tensor parallelism only where a stage for every layer is not enough: a layout with tp fixes
    ep, too, and searches that may choose it find much faster plans.
    """
    state = round(rank_state_bytes(module, ModuleCut(tp=1, stages=1)))
    most = len(module.layers) if any(map(num_experts, module.layers)) else MOST_STAGES
    tp = 1
    while state / room_bytes > tp * most and tp < per_node and _divides(2 * tp, module):
        tp *= 2
    stages = min(len(module.layers), max(1, -(-state // int(room_bytes * tp))))
    return ModuleCut(tp=tp, stages=stages)


def _divides(tp: int, module: Module) -> bool:
    return not any(heads % tp for heads in module.kv_heads)
