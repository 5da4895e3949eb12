"""How a training system runs layers beyond what a machine's tables say: its kernels, its host, its rates."""

import json
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from pathlib import Path

from workbench.bounded_file import MOST_SETTINGS_BYTES, read_bounded
from workbench.cost.autocast import NO_CASTS, Autocast, autocast_kernels, calls_of
from workbench.cost.device_limits import LaunchTimes
from workbench.cost.eager_scores import HEAD_COPIES, eager_scores
from workbench.cost.eager_traffic import EagerOperator, OptimizerKernels, PointwiseKernels
from workbench.cost.flash import FlashKernel
from workbench.cost.products import CastKernels, ProductFormat
from workbench.cost.profile import Profile
from workbench.cost.recurrence import kernels_of_backward, kernels_of_forward
from workbench.cost.traffic import Dropout, LossKernel
from workbench.cost.weight_update import Clipping, InstanceSums, UpdatedWeights
from workbench.frozen_json import FrozenJson, parse_json
from workbench.model.experts import SCORES
from workbench.model.layer import Attention, Matmul, Operator, Pointwise, Recurrence
from workbench.whole_file import write_text

ALIGNED_BYTES = 16  # of a row of a two-byte matrix, below which tensor cores read in smaller pieces
# Fused kernels over stored scores, over those that stream: Korthikanti et al. 2022, Table 4, compute the
# attention of a layer of the 22B model again in 1.3 ms on A100 (8 heads a rank, 4 x 2,048 tokens); its six
# passes of 268 MB would stream in 0.93 ms. Masks are drawn meanwhile; products of narrow heads wait for
# memory.
SCORES_RATE = 0.71
FROM_PROFILE = ("kernel_gap_s", "host_kernel_s", "host_collective_s")  # where an execution says nothing
LAUNCH_S = 4e-6  # of a kernel by the CUDA runtime
DISPATCHED = (*SCORES, "mlp.join", "mlp.combine")  # around a mixture of experts
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
    node, and inside it once to a rank (DeepEP, HybridEP). NEIGHBOURS: once, of a benchmark whose router sends
    tokens to consecutive experts in turn, which few ranks hold."""

    EACH = "each"
    ONCE = "once"
    NEIGHBOURS = "neighbours"


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
    """Rate factor of the attention backward for one head width.

    Args:
        head_dim: head width.
        rate: factor on the rate.
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
    """How a training system runs layers that a profile did not measure as a whole.

    The defaults describe current training systems: fused kernels, FlashAttention, a vocabulary-parallel loss
    and main gradients in float32. Gaps and host times default to the profile's. Rates are factors on the
    profile's rates; 1.0 is the measured rate. Host times are a lower bound of a layer's pass: the host
    launches one kernel after the other and runs ahead of the device while it can.

    Args:
        attention: `fused`: one kernel; `stored`: scores pass through memory; `recomputed`: stored, and
            computed again in the backward.
        flash: generation of the fused kernel; `newest`: the one in the profile's table.
        activations: how memory-bound operators are split over tensor-parallel ranks: not at all, or by
            sequence (Korthikanti et al. 2022, section 4.2.2). Set from the settings of the plan.
        saved_input: with sequence parallelism: a product keeps all gathered tokens (`whole`), or its rank's
            share and gathers again in the backward (`share`).
        instance_sums: when the copies of a sharded optimizer reduce their gradients: at the optimizer step,
            or after each reduce-scatter of gradients (Megatron-Core's
            `num_distributed_optimizer_instances`).
        updated_weights: with a sharded optimizer: weights are all-gathered in equal parts (`gathered`), or
            each owner of whole tensors sends them (`sent`).
        keys: keys of other context-parallel ranks, where a plan leaves it open: all-gathered before the
            attention (`ahead`), or passed on during it (`behind`), a ring leaving a node over one card.
        tokens: when tokens travel to their experts: before them (`ahead`), or during passes of another
            microbatch (`beside`).
        copies: copies of a token with several experts: one to `each` expert (all-to-all over all ranks), or
            `once` to a node and inside it once to a rank (DeepEP, HybridEP); `neighbours`: once, where a
            router stands in that sends tokens to consecutive experts in turn.
        products: operand format of linear layers in blocks; attention, router, embedding and head do not
            change. `fp8` has one scale per tensor, `fp8_delayed` that of earlier steps, `fp8_row` one per row
            for each product anew (torchao), `fp8_block` one per block of 128 (DeepSeek-V3).
        pointwise: norms, rotations and activations are one kernel each (`fused`), or the kernels that
            transformers' modules launch in PyTorch without a compiler (`eager`), dropout and the steps
            over stored scores among them; the numbers of `scores_passes` then do not count.
        autocast: with two-byte activations: weights and residual sums are in float32, and every forward
            casts the weights (`on`, `torch.autocast`), or all have one format (`off`).
        optimizer_kernels: one kernel updates many weights (`fused`), or one for every term of Adam
            (`eager`: `torch.optim.AdamW` unless `fused`).
        clipping: of gradients by their global norm: none (`off`), the norm alone (`norm`: gradients stay
            below the limit, and Megatron-Core then scales none), or norm and scaling (`scaled`).
        lookups: embedding rows are `gathered`, or computed as `products` with one-hot rows.
        gradient_sum: weight gradients of two bytes are accumulated in float32 by the product (`main`), or
            written in the format of the weights (`own`); None: `own` where a plan reduces each microbatch's.
        loss: `parallel`: Megatron's vocabulary-parallel loss; `torch`: float32 logits, log-softmax and
            negative log-likelihood; `fused`: one kernel.
        dropout: `masked`: dropout after attention and MLP and on stored scores, with stored masks.
        launch: kernels are launched one by one (`eager`) or as a CUDA graph (`graph`).
        num_devices: devices that wait for each other in a step; the slowest determines the step time.
        power_limit_w: power limit set on the device; None: the limit at which the profile's rates hold.
        matmul_rate: rate factor of matrix products.
        unaligned_rate: rate factor of a matrix product for each halving of its size alignment below 16
            bytes.
        attention_rate: rate factor of attention, or of the products with scores if these are stored.
        attention_backward_rates: rate factors of the fused attention backward, by head width; 1.0 for
            others. Kernels that keep too much of a wide head in registers spill it to memory.
        scores_passes: with stored scores: times that the score matrix is read or written between the two
            products of a forward. A fused causal softmax reads the lower half and writes all (1.5), dropout
            reads, writes and masks (2.5).
        scores_backward_passes: the same between the four products of a backward: dropout 2.5, softmax 2.
        scores_rate: rate of passes over stored scores, relative to other memory-bound kernels.
        memory_rate: rate factor of memory-bound kernels.
        loss_passes: factor on the bytes that the loss moves over the logits.
        collective_rate: rate factor of collectives inside layers.
        reduction_rate: rate factor of collectives over gradients.
        kernel_gap_s: device seconds between two kernels; None: the profile's.
        overlap_pieces: pieces into which a collective inside a layer and its products are split to overlap;
            1: no overlap.
        sum_pieces: the same for products whose results are reduced, if the collectives run on the device's
            processors and slow down the products.
        host_kernel_s: host seconds per kernel launch; None: the profile's.
        host_collective_s: host seconds per launch of a collective inside a layer; None: the profile's.
        host_rank_s: extra host seconds per kernel and rank, for ranks that wait for each other's hosts.
        host_wait_s: host seconds that a mixture-of-experts pass stalls while token counts are copied to the
            host, which then launches the rest.
        step_rate: rate factor of the optimizer's memory traffic.
        step_start_s: seconds of every optimizer step in addition to its memory traffic.
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
    pointwise: PointwiseKernels = PointwiseKernels.FUSED
    autocast: Autocast = Autocast.OFF
    optimizer_kernels: OptimizerKernels = OptimizerKernels.FUSED
    clipping: Clipping = Clipping.OFF
    lookups: Lookups = Lookups.GATHERED
    gradient_sum: GradientSum | None = None
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

    def attention_backward_factor(self, head_dim: float) -> float:
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
        self, device_s: float, num_kernels: int, num_collectives: int, num_ranks: int, num_compiled: int = 0
    ) -> float:
        """Seconds of a layer's pass: the device's work and gaps, or the host's launches if they take longer.

        `num_ranks` compute the pass together. Each of `num_compiled` further kernels, pieces of cut ones and
        casts, has a gap, and takes the host one launch out of compiled code.
        """
        per_kernel_s = (self.host_kernel_s or 0.0) + (num_ranks - 1) * self.host_rank_s
        host_s = num_kernels * per_kernel_s + num_collectives * (self.host_collective_s or 0.0)
        if host_s:
            host_s += num_compiled * LAUNCH_S
        return max(device_s + (num_kernels + num_compiled) * (self.kernel_gap_s or 0.0), host_s)

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
            if scores := self.eager_scores(operator):
                return 2 + scores.forward.kernels
            return 1 if self.attention is AttentionKernel.FUSED else STORED_KERNELS
        if isinstance(operator, Recurrence):
            return kernels_of_forward(operator)
        if isinstance(operator, Pointwise) and operator.name.startswith(DISPATCHED):
            return DISPATCH_KERNELS
        if calls := self.eager_calls(operator):
            return calls.forward.num_kernels - self.num_casts(operator).forward
        return 2 if isinstance(operator, Matmul) and operator.bias else 1

    def num_backward_kernels(self, operator: Operator, *, is_trained: bool = True) -> int:
        """Kernels of its backward: the forward's, one more for trained weights; scores again if need be."""
        has_trained = is_trained and bool(operator.parameters())
        if isinstance(operator, Attention) and self.attention is not AttentionKernel.FUSED:
            scores = self.eager_scores(operator)
            again = self.num_kernels(operator) if self.attention is AttentionKernel.RECOMPUTED else 0
            return (4 + scores.backward.kernels if scores else STORED_BACKWARD_KERNELS) + again
        if isinstance(operator, Recurrence):
            return kernels_of_backward(operator)
        if calls := self.eager_calls(operator):
            weights = has_trained * calls.weights.num_kernels
            return calls.backward.num_kernels - self.num_casts(operator).backward + weights
        return self.num_kernels(operator) + has_trained

    def num_casts(self, operator: Operator) -> CastKernels:
        """Further kernels of either pass that PyTorch launches by itself: casts, copies of heads."""
        if isinstance(operator, Attention) and (scores := self.eager_scores(operator)):
            return CastKernels(*(calls.casts + HEAD_COPIES.kernels for calls in scores[:2]))
        calls = self.eager_calls(operator)
        return NO_CASTS if self.autocast is Autocast.OFF else autocast_kernels(operator, calls)

    def eager_scores(self, attention: Attention) -> EagerOperator | None:
        """The calls over stored scores; None: passes over them are numbers of the execution."""
        if self.pointwise is PointwiseKernels.FUSED or self.attention is AttentionKernel.FUSED:
            return None
        return eager_scores(attention, self.dropout, self.autocast)

    def eager_calls(self, operator: Operator) -> EagerOperator | None:
        """The calls that stand for a memory-bound operator; None: it is one kernel."""
        if not isinstance(operator, Pointwise):
            return None
        return calls_of(operator, self.pointwise, self.dropout, self.autocast)


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
