"""What a training system does at the end of a step besides the optimizer's arithmetic."""

from enum import StrEnum


class InstanceSums(StrEnum):
    """Parts of gradients of several copies of a sharded optimizer are added up AT_STEP, or in the lane of the
    gradients' own reduce-scatters, BEHIND_EACH (Megatron-Core, `num_distributed_optimizer_instances`)."""

    AT_STEP = "at_step"
    BEHIND_EACH = "behind_each"


class UpdatedWeights(StrEnum):
    """Of a sharded optimizer: GATHERED as equal parts at once, or SENT by ranks that own whole tensors.

    Owners send one after another, and gradients are summed at one after another (PyTorch's
    ZeroRedundancyOptimizer, InternEvo's HybridZeroOptimizer).
    """

    GATHERED = "gathered"
    SENT = "sent"


class Clipping(StrEnum):
    """Of gradients by their global norm: OFF; NORM, computed in every step, with no gradient scaled; SCALED.

    `torch.nn.utils.clip_grad_norm_` multiplies by min(1, limit / norm) in every step, Megatron-Core only
    where the norm is above the limit.
    """

    OFF = "off"
    NORM = "norm"
    SCALED = "scaled"
