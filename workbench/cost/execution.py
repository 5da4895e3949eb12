"""How a training system runs layers beyond what a machine's tables say: its kernels, its host, its rates."""

import json
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from pathlib import Path

from workbench.bounded_file import MOST_SETTINGS_BYTES, read_bounded
from workbench.frozen_json import FrozenJson, parse_json
from workbench.model.layer import Attention, Matmul, Operator
from workbench.whole_file import write_text

ALIGNED_BYTES = 16  # of a row of a two-byte matrix, below which tensor cores read in smaller pieces
STORED_KERNELS = 4  # of an attention with stored scores: product, softmax, dropout, product


class AttentionKernel(StrEnum):
    """FUSED: one kernel. STORED: scores pass through memory. RECOMPUTED: that, and again backward."""

    FUSED = "fused"
    STORED = "stored"
    RECOMPUTED = "recomputed"


class ActivationCut(StrEnum):
    """Outside matmuls and attention: every tensor-parallel rank works on all tokens, or on its share."""

    WHOLE = "whole"
    SEQUENCE = "sequence"


class KeyTravel(StrEnum):
    """Keys of context parallelism: gathered AHEAD of an attention, or passed on BEHIND it, block by block."""

    AHEAD = "ahead"
    BEHIND = "behind"


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """Everything at its default leaves a profile's times as they are.

    Rates are factors on the profile's, 1.0 as measured. Host seconds bound a layer's pass from
    below: the host launches one kernel after the other and runs ahead of the device while it can.

    Args:
        attention: how attention is computed.
        activations: what sequence parallelism cuts (Korthikanti et al. 2022, section 4.2.2).
        keys: when keys of other context-parallel ranks travel, where a plan does not say.
        matmul_rate: of matrix products.
        unaligned_rate: factor on a product's rate for each halving of the alignment of its sizes
            below 16 bytes.
        attention_rate: of attention, or of the products with scores where these are stored.
        scores_passes: times the score matrix is read or written in a forward, where stored.
        memory_rate: of memory-bound kernels.
        loss_passes: factor on the bytes of the loss over the logits.
        collective_rate: of the collectives inside a layer.
        reduction_rate: of collectives over gradients.
        kernel_gap_s: device seconds between a kernel and the next.
        overlap_pieces: into which a collective inside a layer and its products are cut, so that one runs
            beside the other; 1: products wait for their collectives. See `overlap`.
        host_kernel_s: host seconds to launch a kernel.
        host_collective_s: host seconds to launch a collective inside a layer.
        host_rank_s: host seconds a kernel and rank: ranks that wait for one another's hosts.
        step_rate: of the optimizer's memory traffic.
        step_start_s: seconds every optimizer step takes besides its bytes.
    """

    attention: AttentionKernel = AttentionKernel.FUSED
    activations: ActivationCut = ActivationCut.WHOLE
    keys: KeyTravel = KeyTravel.AHEAD
    matmul_rate: float = 1.0
    unaligned_rate: float = 1.0
    attention_rate: float = 1.0
    scores_passes: float = 6.0
    memory_rate: float = 1.0
    loss_passes: float = 1.0
    collective_rate: float = 1.0
    reduction_rate: float = 1.0
    kernel_gap_s: float = 0.0
    host_kernel_s: float = 0.0
    host_collective_s: float = 0.0
    host_rank_s: float = 0.0
    step_rate: float = 1.0
    step_start_s: float = 0.0
    overlap_pieces: int = 1

    def __post_init__(self) -> None:
        for name in NUMBERS:
            value = getattr(self, name)
            if value < 0 or (name.endswith("_rate") and value == 0) or value == float("inf"):
                least = "> 0" if name.endswith("_rate") else ">= 0"
                raise ValueError(f"execution: {name} must be {least} and finite, got {value}")

        if self.overlap_pieces < 1:
            raise ValueError(f"execution: overlap_pieces must be >= 1, got {self.overlap_pieces}; nearest: 1")

    def matmul_factor(self, *sizes: float, element_bytes: int) -> float:
        """On the rate of a product of these sizes: `unaligned_rate` to the power of the missing halvings."""
        missing = 0
        for size in sizes:
            row_bytes, halvings = int(size) * element_bytes, 0
            while row_bytes % (ALIGNED_BYTES >> halvings):
                halvings += 1
            missing = max(missing, halvings)
        return self.matmul_rate * self.unaligned_rate**missing

    def pass_s(self, device_s: float, num_kernels: int, num_collectives: int, num_ranks: int) -> float:
        """Seconds of a layer's pass: the device's work and gaps, or the host's launches if they take longer.

        `num_ranks` compute the pass together.
        """
        per_kernel_s = self.host_kernel_s + (num_ranks - 1) * self.host_rank_s
        host_s = num_kernels * per_kernel_s + num_collectives * self.host_collective_s
        return max(device_s + num_kernels * self.kernel_gap_s, host_s)

    def num_kernels(self, operator: Operator) -> int:
        """Kernels of an operator's forward; a biased matmul adds its bias in a second one."""
        if isinstance(operator, Attention):
            return 1 if self.attention is AttentionKernel.FUSED else STORED_KERNELS
        return 2 if isinstance(operator, Matmul) and operator.bias else 1


NUMBERS = tuple(field.name for field in fields(Execution) if field.name.endswith(("_rate", "_passes", "_s")))
_JSON = FrozenJson()


def load_execution(path: Path) -> Execution:
    """An execution out of a JSON file of its fields; ValueError names the first wrong one."""
    try:
        data = parse_json(read_bounded(path, MOST_SETTINGS_BYTES), "execution")
        execution = _JSON.decode(Execution, data, "execution")
    except ValueError as error:
        raise ValueError(f"{path}: {error}; fields: {', '.join(asdict(Execution()))}") from None
    assert isinstance(execution, Execution)
    return execution


def write_execution(execution: Execution, path: Path) -> None:
    """Write it as JSON; the file appears whole or not at all."""
    write_text(json.dumps(_JSON.encode(execution), indent=1) + "\n", path)
