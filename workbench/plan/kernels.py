"""Which kernels a training system computes layers with: a plan setting that decides memory."""

from enum import StrEnum


class Kernels(StrEnum):
    """What computes a layer, which decides what is kept for its backward.

    FUSED: one kernel per norm, activation and attention, each keeping what its formula needs:
    training systems on GPUs. EAGER: unmodified transformers modules, one PyTorch operator
    after the other, each keeping what autograd asks of it: this workbench's runtime.
    MEGATRON: FUSED with dropout and float32 gradients, outputs of stages freed once sent;
    SCORES: attention stores its scores; SEQUENCE: sequence parallelism.
    """

    FUSED = "fused"
    EAGER = "eager"
    MEGATRON = "megatron"
    MEGATRON_SCORES = "megatron-scores"
    MEGATRON_SEQUENCE = "megatron-sequence"
    MEGATRON_SEQUENCE_SCORES = "megatron-sequence-scores"

    @property
    def is_megatron(self) -> bool:
        return self.startswith("megatron")

    @property
    def stores_scores(self) -> bool:
        return self in (Kernels.MEGATRON_SCORES, Kernels.MEGATRON_SEQUENCE_SCORES)

    @property
    def cuts_sequence(self) -> bool:
        return self in (Kernels.MEGATRON_SEQUENCE, Kernels.MEGATRON_SEQUENCE_SCORES)
