"""The layouts of a drafted job: a tp with which every module's state fits on a few stages."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from workbench.memory.layer import state_bytes
from workbench.model.model_graph import ModelGraph, Module
from workbench.plan.plan import Precision

MOST_STAGES = 8  # of a module, before its layers are divided by tensor parallelism
STATE_SHARE = 0.6  # of a device's memory; the rest is for activations
PRECISION, WIDE = Precision.BFLOAT16, Precision.FLOAT32  # of weights, and of what the optimizer updates


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleCut:
    """How a module is cut: its tensor parallelism, and the stages on which its state fits."""

    tp: int
    stages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftedLayout:
    """The cuts of all modules, by name, and the number of replicas."""

    cuts: Mapping[str, ModuleCut]
    replicas: int

    @property
    def num_stages(self) -> int:
        """Of all modules: the most microbatches that a rank keeps under 1F1B."""
        return sum(cut.stages for cut in self.cuts.values())

    @property
    def notes(self) -> Iterator[str]:
        """Notes on layouts that strategies without tensor parallelism cannot plan."""
        for module, cut in self.cuts.items():
            if cut.tp > 1:
                yield f"{module}: its layout has tp {cut.tp}; fsdp and hsdp plan it with tp 1 or no layout"


def drafted_layout(graph: ModelGraph, *, gpus: int, per_node: int, memory_bytes: int) -> DraftedLayout:
    """Layouts whose tp fits every module's state on a few stages, and the number of replicas.

    Between half and all of the replicas that the GPUs have room for, the number that leaves the fewest GPUs
    idle, then the largest.

    Args:
        memory_bytes: of a GPU.
    """
    room = STATE_SHARE * memory_bytes
    cuts = {module.name: _cut(module, room, per_node) for module in graph.modules}
    most = max(1, gpus // sum(cut.tp * cut.stages for cut in cuts.values()))
    replicas = min(range(most, (most - 1) // 2, -1), key=lambda count: gpus % count)
    return DraftedLayout(cuts=cuts, replicas=replicas)


def _cut(module: Module, room_bytes: float, per_node: int) -> ModuleCut:
    per_parameter = state_bytes(PRECISION.num_bytes, wide_bytes=WIDE.num_bytes)
    state = module.num_parameters * per_parameter.weight + module.num_trained * (
        per_parameter.gradient + per_parameter.optimizer
    )
    tp = 1
    while state / room_bytes > tp * MOST_STAGES and tp < per_node and _divides(2 * tp, module):
        tp *= 2
    stages = min(len(module.layers), max(1, -(-int(state) // int(room_bytes * tp))))
    return ModuleCut(tp=tp, stages=stages)


def _divides(tp: int, module: Module) -> bool:
    return not any(heads % tp for heads in module.kv_heads)
