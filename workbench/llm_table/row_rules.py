"""Rules between the cells of one row: divisibility and contradictions."""

from workbench.cost.device_names import shipped_device
from workbench.cost.execution import TokenCopies
from workbench.cost.profile import known_profiles
from workbench.llm_table.llm_row import (
    Activation,
    Architecture,
    LlmRow,
    Number,
    Optimizer,
    Recomputed,
    Scaling,
    YesNo,
)
from workbench.llm_table.refusal import check_divides, refuse, want_together, want_zero
from workbench.llm_table.row_pattern_rules import MAMBA, check_pattern
from workbench.model.expert_load import most_load_cv
from workbench.model.lora import Adapted


def check_row(row: LlmRow) -> None:
    """ValueError, `column: rule, got value; nearest valid choice`, for the first broken rule."""
    _check_device(row)
    _check_degrees(row)
    _check_model(row)
    _check_attention(row)
    _check_linear(row)
    check_pattern(row)
    _check_experts(row)
    _check_pipeline(row)
    _check_precision(row)
    _check_recomputation(row)
    _check_sharding(row)


def _check_device(row: LlmRow) -> None:
    if "." not in row.gpu and "/" not in row.gpu:
        try:
            shipped_device(row.gpu, known_profiles())
        except ValueError as error:
            raise ValueError(f"gpu: {error}") from None
    if row.gpus_per_nvlink_domain % row.gpus_per_node:
        nearest = max(1, row.gpus_per_nvlink_domain // row.gpus_per_node) * row.gpus_per_node
        refuse("gpus_per_nvlink_domain", "want whole nodes", row.gpus_per_nvlink_domain, nearest)


def check_repeated(row: LlmRow, *, gpus: int, grad_accum: int, optimizer: Optimizer | None) -> None:
    """ValueError where a cell contradicts what follows from others; 0 and None are unset."""
    if gpus not in (0, row.num_gpus):
        product = f"tp {row.tp} x cp {row.cp} x pp {row.pp} x dp {row.dp}"
        refuse("gpus", f"want {product} = {row.num_gpus}", gpus, row.num_gpus)
    if grad_accum not in (0, row.num_microbatches):
        rule = f"want global_batch / (dp x micro_batch) = {row.num_microbatches}"
        refuse("grad_accum", rule, grad_accum, row.num_microbatches)
    implied = Optimizer.DISTRIBUTED if row.zero_stage else Optimizer.PLAIN
    if optimizer not in (None, implied):
        refuse("optimizer", f"want it to agree with zero_stage {row.zero_stage}", optimizer, implied)


def _check_degrees(row: LlmRow) -> None:
    check_divides("global_batch", row.global_batch, "dp x micro_batch", row.dp * row.micro_batch)
    check_divides("heads", row.heads, "tp", row.tp)
    check_divides("ffn", row.ffn, "tp", row.tp)
    if row.kv_heads % row.tp and row.tp % row.kv_heads:
        check_divides("kv_heads", row.kv_heads, "tp", row.tp)
    check_divides("sequence", row.sequence, "2 x cp" if row.cp > 1 else "cp", 2 * row.cp if row.cp > 1 else 1)
    if row.sequence_parallel is YesNo.YES and row.sequence % row.tp:
        check_divides("sequence", row.sequence, "tp (with sequence_parallel)", row.tp)


def _check_model(row: LlmRow) -> None:
    if row.architecture in (Architecture.DIT, Architecture.MMDIT) and row.activation is not Activation.GELU:
        refuse("activation", f"want gelu with architecture {row.architecture}", row.activation, "gelu")
    check_divides("heads", row.heads, "kv_heads", row.kv_heads)
    of_decoder, is_t5 = ("decoder_layers", "decoder_sequence"), row.architecture is Architecture.T5
    want_together(row, of_decoder, "want it with architecture t5 alone", has=is_t5)
    _check_streams(row)
    for name in ("nope_dim", "v_dim") if row.is_mla else ():
        if not getattr(row, name):
            refuse(name, f"want a width beside kv_lora {row.kv_lora}", 0, row.head_dim)
    if not row.is_mla:
        want_zero(row, ("nope_dim", "rope_dim", "v_dim", "q_lora"), "without kv_lora")
    if row.mtp_layers and (row.architecture is not Architecture.LLAMA or row.lora_rank):
        refuse("mtp_layers", "want 0 with adapters, or without architecture llama", row.mtp_layers, 0)
    if row.lora_modules is not Adapted.ALL and not row.lora_rank:
        refuse("lora_modules", "want all without a lora_rank", row.lora_modules, Adapted.ALL)


def _check_attention(row: LlmRow) -> None:
    """Parts of attention beside its sizes, and the gate of shared experts."""
    if row.full_every and not (row.window or row.linear_key_heads):
        refuse("full_every", "want 0 without a window or linear_key_heads", row.full_every, 0)
    if row.gated_attention is YesNo.YES and (row.is_mla or row.architecture is not Architecture.LLAMA):
        refuse("gated_attention", "want no with MLA, or without architecture llama", "yes", "no")
    is_partial = row.rotary_dim != row.head_dim
    if is_partial and (
        row.is_mla or row.architecture is not Architecture.LLAMA or row.rotary_dim > row.head_dim
    ):
        rule = f"want head_dim {row.head_dim}, or less with architecture llama and without MLA"
        refuse("rotary_dim", rule, row.rotary_dim, row.head_dim)
    if row.shared_expert_gate is YesNo.YES and not (row.experts and row.shared_expert_ffn):
        refuse("shared_expert_gate", "want no without experts and shared_expert_ffn", "yes", "no")


def _check_linear(row: LlmRow) -> None:
    """Linear attention: sizes belong together, and no rank has a part of a sequence."""
    sizes = ("linear_value_heads", "linear_key_dim", "linear_value_dim")
    want_together(row, sizes, "want it with linear_key_heads alone", has=row.linear_key_heads > 0)
    if bool(row.conv_kernel) != (row.linear_key_heads > 0 or MAMBA in row.pattern):
        rule = "want it with linear_key_heads or Mamba-2 alone"
        refuse("conv_kernel", rule, row.conv_kernel, 0 if row.conv_kernel else 4)
    if not row.linear_key_heads:
        return
    if row.architecture is not Architecture.LLAMA:
        refuse("linear_key_heads", "want 0 without architecture llama", row.linear_key_heads, 0)
    want_zero(row, ("window", "lora_rank"), "with linear_key_heads")
    if row.cp > 1:
        refuse("cp", "want 1 with linear_key_heads", row.cp, 1)
    check_divides("linear_value_heads", row.linear_value_heads, "linear_key_heads", row.linear_key_heads)
    check_divides("linear_key_heads", row.linear_key_heads, "tp", row.tp)


def _check_streams(row: LlmRow) -> None:
    if row.architecture is not Architecture.MMDIT:
        want_zero(row, ("single_layers", "text_sequence"), "without architecture mmdit")
        return
    if not row.text_sequence:
        refuse("text_sequence", "want a text beside the patches with architecture mmdit", 0, 1)
    want_zero(row, ("lora_rank", "experts", "window"), "with architecture mmdit")


def _check_experts(row: LlmRow) -> None:
    if not row.experts:
        of_experts = ("topk", "expert_ffn", "shared_expert_ffn", "first_dense_layers", "expert_load_cv")
        want_zero(row, of_experts, "without experts")
        if row.capacity is not None:
            refuse("capacity", "want an empty cell without experts", row.capacity, "an empty cell")
        if row.ep > 1:
            refuse("ep", "want 1 without experts", row.ep, 1)
        return
    if not 1 <= row.topk <= row.experts:
        nearest = min(max(row.topk, 1), row.experts)
        refuse("topk", f"want 1 to experts = {row.experts}", row.topk, nearest)
    if not row.expert_ffn:
        refuse("expert_ffn", "want a width beside experts", row.expert_ffn, row.ffn)
    if row.first_dense_layers > row.layers:
        refuse(
            "first_dense_layers", f"want at most layers = {row.layers}", row.first_dense_layers, row.layers
        )
    _check_load(row)
    check_divides("experts", row.experts, "ep", row.ep)
    ranks = row.dp * row.cp * row.tp
    check_divides("dp x cp x tp", ranks, "ep", row.ep)


def _check_load(row: LlmRow) -> None:
    """Experts have unequal loads only where the row does not say that their loads are equal."""
    cv, most = row.expert_load_cv, most_load_cv(row.experts, row.topk)
    if cv and row.capacity is not None:
        refuse("expert_load_cv", "want 0 with a capacity, up to which experts are padded", cv, 0)
    if cv and row.moe_copies is TokenCopies.NEIGHBOURS:
        refuse("expert_load_cv", "want 0 with moe_copies neighbours, where experts take turns", cv, 0)
    if cv > most:
        rule = f"want at most sqrt(experts / topk - 1) = {most:g}, where all tokens choose the same experts"
        refuse("expert_load_cv", rule, cv, f"{most:g}")


def _check_pipeline(row: LlmRow) -> None:
    num_stages = row.pp * row.virtual_stages
    if row.virtual_stages > 1:
        if row.pp < 2:
            refuse("virtual_stages", "want 1 where pp is 1", row.virtual_stages, 1)
        check_divides("microbatches of a replica", row.num_microbatches, "pp (with virtual_stages)", row.pp)
    num_layers = row.num_blocks + _counted(row)
    if num_stages > num_layers:
        refuse("pp x virtual_stages", f"want at most the {num_layers} layers", num_stages, num_layers)
    if row.stage_blocks:
        _check_stage_blocks(row, num_stages)
    elif _counted(row):
        check_divides("layers with embedding and loss", num_layers, "pp x virtual_stages", num_stages)


def _check_stage_blocks(row: LlmRow, num_stages: int) -> None:
    """The first and the last stage may have no block: they have the embedding and the head."""
    text = "+".join(map(str, row.stage_blocks))
    if _counted(row):
        refuse("stage_blocks", "want an empty cell with embedding_as_layer or loss_as_layer", text, "empty")
    share, more = divmod(row.num_blocks, num_stages)
    nearest = "+".join(str(share + (index < more)) for index in range(num_stages))
    if len(row.stage_blocks) != num_stages:
        rule = f"want pp x virtual_stages = {num_stages} numbers"
        refuse("stage_blocks", rule, f"{len(row.stage_blocks)}: {text}", nearest)
    if sum(row.stage_blocks) != row.num_blocks:
        rule = f"want numbers that add up to {row.num_blocks} blocks"
        refuse("stage_blocks", rule, f"{sum(row.stage_blocks)}: {text}", nearest)
    if not all(row.stage_blocks[1:-1]):
        refuse("stage_blocks", "want a block in every stage between the first and the last", text, nearest)


def _counted(row: LlmRow) -> int:
    """How many of embedding and head count as a block."""
    return (row.embedding_as_layer is YesNo.YES) + (row.loss_as_layer is YesNo.YES)


def _check_precision(row: LlmRow) -> None:
    if row.fp8_scaling is not Scaling.CURRENT and row.precision is not Number.FP8:
        refuse("fp8_scaling", "want current without precision fp8", row.fp8_scaling, Scaling.CURRENT)
    if row.autocast is YesNo.YES and row.precision not in (Number.BF16, Number.FP16):
        refuse("autocast", f"want no with precision {row.precision}", row.autocast, YesNo.NO)


def _check_recomputation(row: LlmRow) -> None:
    if not row.recompute_layers:
        return
    if row.recompute is not Recomputed.FULL:
        refuse("recompute_layers", "want 0 without recompute full", row.recompute_layers, 0)
    most = -(-(row.num_blocks + _counted(row)) // (row.pp * row.virtual_stages))
    if row.recompute_layers >= most:
        rule = f"want fewer than the {most} blocks of a stage, or 0 for all"
        refuse("recompute_layers", rule, row.recompute_layers, 0)


def _check_sharding(row: LlmRow) -> None:
    if row.zero_stage > 3:
        refuse("zero_stage", "want 0 to 3", row.zero_stage, 3)
    if row.zero_stage == 0 and row.sharing_ranks > 1:
        refuse("shard_group", "want 1 where zero_stage is 0", row.shard_group, 1)
    check_divides("dp x cp", row.data_ranks, "shard_group", row.sharing_ranks)
    if row.zero_stage == 3 and row.virtual_stages > 1:
        refuse("virtual_stages", "want 1 where zero_stage is 3", row.virtual_stages, 1)
    if row.zero_stage and row.ep > 1:
        copy = f"shard_group x tp (with zero_stage {row.zero_stage})"
        check_divides(copy, row.sharing_ranks * row.tp, "ep", row.ep)
