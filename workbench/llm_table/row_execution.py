"""How a row's layers are computed: its kernels, its cuts, and the rate of its products."""

from dataclasses import replace

from workbench.cost.execution import ActivationCut, AttentionKernel, Execution, InstanceSums
from workbench.llm_table.llm_row import LlmRow, Number, Scores, YesNo

TENSOR_PIECES = 4  # of a product beside its collective: Transformer Engine's default number of splits
PEAK_RATIO = {Number.FP8: 2.0, Number.MXFP8: 2.0, Number.NVFP4: 4.0}  # of tensor cores, on data sheets


def execution_of(row: LlmRow, base: Execution) -> Execution:
    """The base with what the row says."""
    return replace(
        base,
        attention=AttentionKernel.STORED if row.attention is Scores.STORED else AttentionKernel.FUSED,
        activations=ActivationCut.SEQUENCE if row.sequence_parallel is YesNo.YES else ActivationCut.WHOLE,
        instance_sums=InstanceSums.BEHIND_EACH,
        updated_weights=row.updated_weights,
        overlap_pieces=TENSOR_PIECES if row.tp_overlap is YesNo.YES else base.overlap_pieces,
        matmul_rate=base.matmul_rate * PEAK_RATIO.get(row.precision, 1.0),
    )


def doubts(row: LlmRow) -> frozenset[str]:
    """What the row asks for that no rate of the machine was measured in."""
    found = set()
    if row.precision is Number.FP16:
        found.add("fp16: rates of bf16")
    if row.precision in PEAK_RATIO:
        found.add(f"{row.precision}: products at the ratio of peaks to bf16, {PEAK_RATIO[row.precision]:g}")
    if row.moe_overlap is YesNo.YES:
        found.add("moe_overlap: exchanges hidden behind the layer's own compute")
    return frozenset(found)
