"""How a training system runs layers beyond what a machine's tables say: its kernels, its host, its rates."""

import json
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from pathlib import Path

from workbench.bounded_file import MOST_SETTINGS_BYTES, read_bounded
from workbench.cost.device_limits import LaunchTimes
from workbench.cost.flash import FlashKernel
from workbench.cost.products import ProductFormat
from workbench.cost.profile import Profile
from workbench.cost.traffic import Dropout, LossKernel
from workbench.frozen_json import FrozenJson, parse_json
from workbench.model.layer import Attention, Matmul, Operator, Pointwise
from workbench.whole_file import write_text

ALIGNED_BYTES = 16  # of a row of a two-byte matrix, below which tensor cores read in smaller pieces
# Fused kernels over stored scores, over those that stream: Korthikanti et al. 2022, Table 4, compute the
# attention of a layer of the 22B model again in 1.3 ms on A100 (8 heads a rank, 4 x 2,048 tokens); its six
# passes of 268 MB would stream in 0.93 ms. Masks are drawn meanwhile; products of narrow heads wait for
# memory.
SCORES_RATE = 0.71
FROM_PROFILE = ("kernel_gap_s", "host_kernel_s", "host_collective_s")  # where an execution says nothing
LAUNCH_S = 4e-6  # of a kernel by the CUDA runtime
DISPATCHED = ("mlp.router_softmax", "mlp.join", "mlp.combine")  # around a mixture of experts
DISPATCH_KERNELS = 4  # at each: choices, counts, masks, losses; order, permutation, chunks
STORED_KERNELS = 4  # of an attention with stored scores: product, softmax, dropout, product
STORED_BACKWARD_KERNELS = 6  # two products for each of these, softmax and dropout


class AttentionKernel(StrEnum):
    """FUSED: one kernel. STORED: scores pass through memory. RECOMPUTED: that, and again backward."""

    FUSED = "fused"
    STORED = "stored"
    RECOMPUTED = "recomputed"


class ActivationCut(StrEnum):
    """Outside matmuls and attention: every tensor-parallel rank works on all tokens, or on its share."""

    WHOLE = "whole"
    SEQUENCE = "sequence"


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


class SavedInput(StrEnum):
    """Of products whose tokens are gathered: kept WHOLE, or as a rank's SHARE and gathered again backward.

    SHARE, with what runs beside what: Korthikanti et al. 2022, section 4.2.2, and Megatron-LM's
    `LinearWithGradAccumulationAndAsyncCommunication`. The gather runs beside the product for the input's
    gradient, the scatter of that gradient beside the product for the weights'.
    """

    WHOLE = "whole"
    SHARE = "share"


class KeyTravel(StrEnum):
    """Keys of context parallelism: gathered AHEAD of an attention, or passed on BEHIND it, block by block.

    AHEAD: in both passes, and gradients are added up in float32 (`runtime.parallel.context.gathered`).
    BEHIND: gradients travel as wide as keys (Transformer Engine, `AttnFuncWithCPAndKVP2P`).
    """

    AHEAD = "ahead"
    BEHIND = "behind"


class TokenTravel(StrEnum):
    """Tokens travel to experts AHEAD of them, or BESIDE another microbatch's passes."""

    AHEAD = "ahead"
    BESIDE = "beside"


class TokenCopies(StrEnum):
    """Of a token with several experts: one for EACH of them (an all-to-all over all ranks), or ONCE to a
    node, and inside it once to a rank (DeepEP, HybridEP)."""

    EACH = "each"
    ONCE = "once"


class Lookups(StrEnum):
    """Rows of a table are GATHERED, or come out of PRODUCTS with a row of ones and zeros a token."""

    GATHERED = "gathered"
    PRODUCTS = "products"


class GradientSum(StrEnum):
    """Weight gradients: MAIN, added into float32 by the product; OWN, written in the weights' format."""

    MAIN = "main"
    OWN = "own"


class Launch(StrEnum):
    """Kernels launched one by one by the host (EAGER), or replayed as recorded once (GRAPH)."""

    EAGER = "eager"
    GRAPH = "graph"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadRate:
    """Factor on the rate of attention's backward for heads of one width.

    Args:
        head_dim: the width.
        rate: the factor.
    """

    head_dim: int
    rate: float

    def __post_init__(self) -> None:
        if self.head_dim < 1 or not 0 < self.rate < float("inf"):
            raise ValueError(
                f"want a head width >= 1 and a rate > 0 and finite, got {self.head_dim} and {self.rate}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """How layers run where a profile did not measure them whole.

    The defaults are what training systems of today do: fused kernels (see `traffic`), flash attention, a
    vocabulary-parallel loss and main gradients in float32; gaps and host times are the profile's. Rates
    are factors on the profile's, 1.0 as measured. Host seconds bound a layer's pass from below: the host
    launches one kernel after the other and runs ahead of the device while it can.

    Args:
        attention: how attention is computed.
        flash: generation of the fused kernel.
        activations: what sequence parallelism cuts (Korthikanti et al. 2022, section 4.2.2): set where the
            layers of a plan are priced, as its settings say (`plan/sequence.py`).
        saved_input: what products keep of gathered tokens, where activations are cut by sequence.
        instance_sums: when copies of a sharded optimizer add up their gradients.
        updated_weights: how they reach the ranks of a copy.
        keys: when keys of other context-parallel ranks travel, where a plan does not say.
        tokens: when tokens travel between the ranks that distribute experts.
        copies: how often a token travels there.
        products: format of the operands of products in blocks' linear layers; attention, router, embedding
            and head stay.
        lookups: how rows of embedding tables are read.
        gradient_sum: how weight gradients of two bytes are added up over microbatches.
        loss: how the loss goes over its logits.
        dropout: whether masks are drawn and kept.
        launch: how kernels are launched.
        num_devices: that wait for one another in a step; the slowest sets the pace.
        power_limit_w: set for the device; None: the one its rates hold for.
        matmul_rate: of matrix products.
        unaligned_rate: factor on a product's rate for each halving of the alignment of its sizes
            below 16 bytes.
        attention_rate: of attention, or of the products with scores where these are stored.
        attention_backward_rates: of the backward of fused attention, by head width; 1.0 for widths that are
            not named. Kernels that keep too much of a wide head in registers spill it to memory.
        scores_passes: times the score matrix is read or written between the two products of a forward,
            where stored. A fused causal softmax reads the lower half and writes all (1.5 passes), dropout
            reads, writes and masks (2.5).
        scores_backward_passes: the same between the four products of a backward: dropout 2.5, softmax 2.
        scores_rate: of passes over stored scores, over other memory-bound kernels.
        memory_rate: of memory-bound kernels.
        loss_passes: factor on the bytes of the loss over the logits.
        collective_rate: of the collectives inside a layer.
        reduction_rate: of collectives over gradients.
        kernel_gap_s: device seconds between a kernel and the next; None: the profile's.
        overlap_pieces: into which a collective inside a layer and its products are cut, so that one runs
            beside the other; 1: products wait for their collectives. See `overlap`.
        sum_pieces: the same of products whose results ranks add up, alone, by collectives that run on the
            device's processors and slow products beside them.
        host_kernel_s: host seconds to launch a kernel; None: the profile's.
        host_collective_s: host seconds to launch a collective inside a layer; None: the profile's.
        host_rank_s: host seconds a kernel and rank: ranks that wait for one another's hosts.
        host_wait_s: host seconds that a pass of a mixture of experts stands still: counts of tokens come to
            the host, which only then launches what follows.
        step_rate: of the optimizer's memory traffic.
        step_start_s: seconds every optimizer step takes besides its bytes.
    """

    attention: AttentionKernel = AttentionKernel.FUSED
    flash: FlashKernel = FlashKernel.NEWEST
    activations: ActivationCut = ActivationCut.WHOLE
    saved_input: SavedInput = SavedInput.SHARE
    instance_sums: InstanceSums = InstanceSums.AT_STEP
    updated_weights: UpdatedWeights = UpdatedWeights.GATHERED
    keys: KeyTravel = KeyTravel.AHEAD
    tokens: TokenTravel = TokenTravel.AHEAD
    copies: TokenCopies = TokenCopies.EACH
    products: ProductFormat = ProductFormat.SAME
    lookups: Lookups = Lookups.GATHERED
    gradient_sum: GradientSum = GradientSum.MAIN
    loss: LossKernel = LossKernel.PARALLEL
    dropout: Dropout = Dropout.NONE
    launch: Launch = Launch.EAGER
    num_devices: int = 1
    power_limit_w: float | None = None
    matmul_rate: float = 1.0
    unaligned_rate: float = 1.0
    attention_rate: float = 1.0
    attention_backward_rates: tuple[HeadRate, ...] = ()
    scores_passes: float = 4.0
    scores_backward_passes: float = 4.5
    scores_rate: float = SCORES_RATE
    memory_rate: float = 1.0
    loss_passes: float = 1.0
    collective_rate: float = 1.0
    reduction_rate: float = 1.0
    kernel_gap_s: float | None = None
    host_kernel_s: float | None = None
    host_collective_s: float | None = None
    host_rank_s: float = 0.0
    host_wait_s: float = 0.0
    step_rate: float = 1.0
    step_start_s: float = 0.0
    overlap_pieces: int = 1
    sum_pieces: int = 1

    def __post_init__(self) -> None:
        for name in NUMBERS:
            value = getattr(self, name)
            if value is None:
                continue
            if value < 0 or (name.endswith("_rate") and value == 0) or value == float("inf"):
                least = "> 0" if name.endswith("_rate") else ">= 0"
                raise ValueError(f"execution: {name} must be {least} and finite, got {value}")

        if self.power_limit_w is not None and not 0 < self.power_limit_w < float("inf"):
            raise ValueError(f"execution: power_limit_w must be > 0 and finite, got {self.power_limit_w}")
        for name in ("overlap_pieces", "sum_pieces", "num_devices"):
            if getattr(self, name) < 1:
                raise ValueError(f"execution: {name} must be >= 1, got {getattr(self, name)}; nearest: 1")

    def attention_backward_factor(self, head_dim: int) -> float:
        """On the rate of the backward of fused attention with heads of that width."""
        rates = (each.rate for each in self.attention_backward_rates if each.head_dim == head_dim)
        return next(rates, 1.0)

    def matmul_factor(self, *sizes: float, element_bytes: int) -> float:
        """On the rate of a product of these sizes: `unaligned_rate` to the power of the missing halvings."""
        bits = ALIGNED_BYTES  # of all sizes in bytes: the lowest is what all are aligned to
        for size in sizes:
            bits |= int(size) * element_bytes
        missing = (ALIGNED_BYTES // (bits & -bits)).bit_length() - 1
        return self.matmul_rate * self.unaligned_rate**missing

    def pass_s(
        self, device_s: float, num_kernels: int, num_collectives: int, num_ranks: int, num_pieces: int = 0
    ) -> float:
        """Seconds of a layer's pass: the device's work and gaps, or the host's launches if they take longer.

        `num_ranks` compute the pass together. Each of `num_pieces`, into which kernels are cut besides, has
        a gap, and takes the host one launch out of compiled code.
        """
        per_kernel_s = (self.host_kernel_s or 0.0) + (num_ranks - 1) * self.host_rank_s
        host_s = num_kernels * per_kernel_s + num_collectives * (self.host_collective_s or 0.0)
        if host_s:
            host_s += num_pieces * LAUNCH_S
        return max(device_s + (num_kernels + num_pieces) * (self.kernel_gap_s or 0.0), host_s)

    @property
    def cuts_sequence(self) -> bool:
        """Whether memory-bound operators on whole rows work on a share of the tokens."""
        return self.activations is ActivationCut.SEQUENCE

    def on(self, profile: Profile) -> "Execution":
        """With the profile's gaps and host times where it says none of its own."""
        times = profile.launch or LaunchTimes()
        if self.launch is Launch.GRAPH:
            times = LaunchTimes(kernel_gap_s=times.graph_gap_s)
        profile_times = {name: getattr(times, name) for name in FROM_PROFILE if getattr(self, name) is None}
        return replace(self, **profile_times)

    def num_kernels(self, operator: Operator) -> int:
        """Kernels of an operator's forward; a biased matmul adds its bias in a second one."""
        if isinstance(operator, Attention):
            return 1 if self.attention is AttentionKernel.FUSED else STORED_KERNELS
        if isinstance(operator, Pointwise) and operator.name.startswith(DISPATCHED):
            return DISPATCH_KERNELS
        return 2 if isinstance(operator, Matmul) and operator.bias else 1

    def num_backward_kernels(self, operator: Operator) -> int:
        """Kernels of its backward: the forward's, and one more for weights; scores again if need be."""
        if isinstance(operator, Attention) and self.attention is not AttentionKernel.FUSED:
            again = STORED_KERNELS if self.attention is AttentionKernel.RECOMPUTED else 0
            return STORED_BACKWARD_KERNELS + again
        return self.num_kernels(operator) + bool(operator.parameters())


NUMBERS = tuple(field.name for field in fields(Execution) if field.name.endswith(("_rate", "_passes", "_s")))
_JSON = FrozenJson()


def load_execution(path: Path) -> Execution:
    """An execution out of a JSON file of its fields.

    Raises:
        ValueError: names the first wrong one; tokens that tensor-parallel ranks split, which the plan says.
    """
    text = read_bounded(path, MOST_SETTINGS_BYTES)
    try:
        data = parse_json(text, "execution")
        execution = _JSON.decode(Execution, data, "execution")
    except ValueError as error:
        raise ValueError(f"{path}: {error}; fields: {', '.join(asdict(Execution()))}") from None
    assert isinstance(execution, Execution)
    if execution.activations is ActivationCut.SEQUENCE:
        raise ValueError(
            f"{path}: activations: 'sequence' is for the plan to say; set sequence_parallel "
            "in a job's layouts or in a table's column, and 'whole' here"
        )
    return execution


def write_execution(execution: Execution, path: Path) -> None:
    """Write it as JSON; the file appears whole or not at all."""
    write_text(json.dumps(_JSON.encode(execution), indent=1) + "\n", path)
