"""How a row's layers are executed: kernels, cuts, and the format of products."""

from dataclasses import replace
from typing import Any

from workbench.cost.autocast import Autocast
from workbench.cost.execution import (
    AttentionKernel,
    Execution,
    GradientSum,
    Launch,
    TokenTravel,
)
from workbench.cost.flash import FlashKernel
from workbench.cost.traffic import Dropout
from workbench.cost.weight_update import InstanceSums
from workbench.llm_table.llm_row import GradientNumber, LlmRow, Number, Recorded, Scores, YesNo

DROPOUT_PASSES = 2.5  # over stored scores, each way: see `Execution.scores_passes`
TENSOR_PIECES = 4  # of a product that overlaps its collective: Transformer Engine's default number of splits
GENERATIONS = {Scores.FLASH1: FlashKernel.FLASH1, Scores.FLASH2: FlashKernel.FLASH2}


def execution_of(row: LlmRow, base: Execution) -> Execution:
    """The base execution with the row's settings.

    Without dropout, passes over stored scores are those of the softmax alone; gradients in float32 are
    accumulated by the products that compute them. With a capacity all sizes are known in advance, so that
    no host waits for counts of tokens (Megatron-Core, `MoEAlltoAllTokenDispatcher.preprocess` with
    `drop_and_pad`).
    """
    fitted: dict[str, Any] = dict(row.fitted)
    if row.capacity is not None:
        fitted["host_wait_s"] = 0.0
    is_stored, sums_wide = row.attention is Scores.STORED, row.grad_precision is GradientNumber.FP32
    is_masked = row.dropout is YesNo.YES
    fewer_passes = DROPOUT_PASSES if is_stored and not is_masked else 0.0
    return replace(
        base,
        attention=AttentionKernel.STORED if is_stored else AttentionKernel.FUSED,
        flash=GENERATIONS.get(row.attention, base.flash),
        dropout=Dropout.MASKED if is_masked else base.dropout,
        scores_passes=max(0.0, base.scores_passes - fewer_passes),
        scores_backward_passes=max(0.0, base.scores_backward_passes - fewer_passes),
        gradient_sum=GradientSum.MAIN if sums_wide else GradientSum.OWN,
        instance_sums=InstanceSums.BEHIND_EACH,
        updated_weights=row.updated_weights,
        tokens=TokenTravel.BESIDE if row.moe_overlap is YesNo.YES else base.tokens,
        copies=row.moe_copies,
        pointwise=row.pointwise,
        autocast=Autocast.ON if row.autocast is YesNo.YES else Autocast.OFF,
        optimizer_kernels=row.optimizer_kernels,
        clipping=row.clipping,
        lookups=row.lookups,
        launch=Launch.GRAPH if row.cuda_graphs is Recorded.ALL else base.launch,
        overlap_pieces=TENSOR_PIECES if row.tp_overlap is YesNo.YES else base.overlap_pieces,
        num_devices=row.num_gpus,
        **fitted,
    )


def doubts(row: LlmRow) -> frozenset[str]:
    """Unmeasured costs that the row requires; of narrow products the price reports them."""
    unmeasured = set()
    if row.precision is Number.FP16:
        unmeasured.add("fp16: rates of bf16")
    if row.moe_overlap is YesNo.YES:
        unmeasured.add("moe_overlap: exchanges hidden behind the layer's own compute")
    return frozenset(unmeasured)
