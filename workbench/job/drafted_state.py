"""State of a drafted job's modules on a rank, and the degree that distributes experts of large mixtures."""

from dataclasses import dataclass
from math import gcd

from workbench.job.drafted_activations import PRECISION, WIDE
from workbench.memory.layer import state_bytes
from workbench.model.experts import is_of_expert, num_experts
from workbench.model.model_graph import Module
from workbench.model.trained import trained_parameters

WHOLE_STAGES = 32  # of a mixture, on which its experts stay whole: searches distribute them
MOST_STAGES = 16  # of one whose experts are distributed, as DeepSeek-V3 was trained
"""Source: DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 3.2: 16 stages, experts over 64 ranks,
and optimizer state sharded over replicas."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleCut:
    """How a module is cut: its tensor parallelism, its stages, and the replicas that share its experts.

    Where `ep` is above 1, optimizer state is sharded over these replicas, too.
    """

    tp: int
    stages: int
    ep: int = 1


def rank_state_bytes(module: Module, cut: ModuleCut) -> float:
    """State on a rank of an average stage, with `ep` replicas: more of them share optimizer state further."""
    per_parameter = state_bytes(PRECISION.num_bytes, wide_bytes=WIDE.num_bytes)
    trained, weights = module.num_trained, module.num_parameters * per_parameter.weight
    held = weights + trained * (per_parameter.gradient + per_parameter.optimizer / cut.ep)
    if cut.ep > 1:
        num = _num_in_experts(module)
        of_experts = num * (per_parameter.weight + per_parameter.gradient)
        held -= of_experts * (1 - 1 / cut.ep)
    return held / (cut.tp * cut.stages)


def _num_in_experts(module: Module) -> int:
    return sum(
        parameter.num_elements
        for layer in module.layers
        for parameter in trained_parameters(layer)
        if is_of_expert(parameter)
    )


def with_experts_distributed(module: Module, room_bytes: float, gpus: int) -> ModuleCut | None:
    """The smallest degree, a power of two, with which the state of a mixture fits on `MOST_STAGES`.

    Returns:
        None for a module whose state fits on `WHOLE_STAGES` stages, or on none with any degree.

    Complexity: O(layers + log experts).
    """
    counts = {num_experts(layer) for layer in module.layers} - {0}
    whole_bytes = rank_state_bytes(module, ModuleCut(tp=1, stages=1))
    if not counts or whole_bytes <= WHOLE_STAGES * room_bytes:
        return None
    ep = 2
    while gcd(*counts) % ep == 0:
        held = rank_state_bytes(module, ModuleCut(tp=1, stages=1, ep=ep))
        stages = max(1, -(-held // room_bytes))
        if stages <= min(MOST_STAGES, len(module.layers)) and stages * ep <= gpus:
            return ModuleCut(tp=1, stages=int(stages), ep=ep)
        ep *= 2
    return None
