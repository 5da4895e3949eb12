"""Columns of a table of language models: names, meaning, defaults, and how a row is read."""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from workbench.cost.eager_traffic import OptimizerKernels, PointwiseKernels
from workbench.cost.execution import Lookups, TokenCopies
from workbench.cost.weight_update import Clipping, UpdatedWeights
from workbench.llm_table.cells import (
    Column,
    Values,
    always,
    count_column,
    flag_column,
    read_cell,
    real_column,
    text_column,
)
from workbench.llm_table.frameworks import check_framework, filled, fitted_numbers, fitted_off
from workbench.llm_table.llm_row import (
    DataOverlap,
    GradientNumber,
    LlmRow,
    Number,
    Optimizer,
    Recomputed,
    Recorded,
    Scaling,
    Scores,
    YesNo,
)
from workbench.llm_table.model_columns import MODEL_COLUMNS
from workbench.llm_table.row_rules import check_repeated, check_row

NOTES = ("model", "note", "source")
NOTE_PREFIXES = ("x_", "measured_")


def _dropout(row: Values) -> YesNo:
    """Systems that store scores mostly date from when models were trained with dropout."""
    return YesNo.YES if row["attention"] is Scores.STORED else YesNo.NO


def _replicas(row: Values) -> int:
    """GPUs divided by the other degrees."""
    return max(1, int(row["gpus"]) // int(row["tp"] * row["cp"] * row["pp"]))


def _grad_precision(row: Values) -> GradientNumber:
    return GradientNumber.FP16 if row["precision"] is Number.FP16 else GradientNumber.FP32


COLUMNS = (
    text_column("framework", "training system; its defaults fill blank cells, and its fitted numbers apply"),
    text_column("release", "version of the framework, numbers separated by points"),
    *MODEL_COLUMNS,
    count_column("tp", "tensor-parallel ranks"),
    count_column("cp", "context-parallel ranks"),
    count_column("pp", "pipeline stages"),
    count_column("virtual_stages", "stages per rank (interleaved 1F1B)"),
    Column(
        "stage_blocks",
        "blocks of every stage in pipeline order, joined by +, such as 6+7+7+4",
        always(()),
        shown="as equal as possible",
    ),
    flag_column("embedding_as_layer", "the embedding counts as a block when stages are balanced"),
    flag_column("loss_as_layer", "the head counts as a block when stages are balanced"),
    count_column("ep", "expert-parallel ranks"),
    Column("gpus", "GPUs of the run: tp x cp x pp x dp", always(0), shown="that product"),
    Column("dp", "data-parallel replicas", _replicas, shown="gpus / (tp x cp x pp), else 1"),
    flag_column("sequence_parallel", "sequence parallelism: norms and residuals are split over tp"),
    count_column("micro_batch", "samples per microbatch"),
    Column(
        "grad_accum",
        "microbatches per replica: global_batch / (dp x micro_batch)",
        always(0),
        shown="that quotient",
    ),
    Column(
        "recompute",
        "none, selective (core_attn), full (whole blocks), or modules joined by +",
        always((Recomputed.NONE, ())),
        shown="none",
    ),
    count_column(
        "recompute_layers",
        "with recompute full: recomputed blocks of every stage (Megatron's block method); 0: all of them",
        0,
        least=0,
    ),
    Column(
        "attention",
        "FlashAttention (flash) or stored scores (stored)",
        always(Scores.FLASH),
        Scores,
        shown="flash",
    ),
    Column("dropout", "yes: dropout, with stored masks", _dropout, YesNo, shown="yes with stored scores"),
    Column(
        "keeps_results",
        "yes: experts' results are kept, as their shares multiply them; no: shares multiply activations",
        always(YesNo.YES),
        YesNo,
        shown="yes",
    ),
    Column(
        "precision",
        "bf16, fp16, fp32, fp8 (see `fp8_scaling`), mxfp8 or nvfp4",
        always(Number.BF16),
        Number,
        shown="bf16",
    ),
    Column(
        "fp8_scaling",
        "scales of fp8: one per tensor, from itself (current) or from earlier steps (delayed); one per row, "
        "for each product anew (row, torchao); or one per block of 128 (block, DeepSeek-V3)",
        always(Scaling.CURRENT),
        Scaling,
        shown="current",
    ),
    Column(
        "grad_precision",
        "precision of gradient accumulation and reduction: bf16, fp16 or fp32",
        _grad_precision,
        GradientNumber,
        shown="fp16 with fp16, else fp32",
    ),
    Column("optimizer", "plain or distributed Adam", always(None), Optimizer, shown="by zero_stage"),
    Column(
        "zero_stage",
        "sharded over dp x cp: 0 nothing, 1 optimizer, 2 also gradients, 3 also weights (FSDP)",
        lambda row: int(row["optimizer"] is Optimizer.DISTRIBUTED),
        shown="0, distributed: 1",
        least=0,
    ),
    Column(
        "shard_group",
        "ranks that shard one copy of the state (HSDP, ZeRO in groups)",
        always(0),
        shown="dp x cp",
    ),
    flag_column("tp_overlap", "tensor-parallel collectives overlap with their matrix products, in pieces"),
    Column(
        "dp_overlap",
        "no, grads (gradients with the backward) or both (also updated weights with the forward)",
        always(DataOverlap.NO),
        DataOverlap,
        shown="no",
    ),
    Column(
        "updated_weights",
        "ZeRO-1 and -2: all-gathered in equal parts (gathered), or sent per tensor by its owner (sent)",
        always(UpdatedWeights.GATHERED),
        UpdatedWeights,
        shown="gathered",
    ),
    Column(
        "pointwise",
        "norms, rotations, activations: one kernel each (fused), or transformers' modules in PyTorch "
        "(eager), with dropout and steps over stored scores",
        always(PointwiseKernels.FUSED),
        PointwiseKernels,
        shown="fused",
    ),
    flag_column("autocast", "weights stay in float32 and every forward casts them (`torch.autocast`)"),
    Column(
        "optimizer_kernels",
        "one kernel for many weights (fused), or one for every term of `torch.optim.AdamW` (eager)",
        always(OptimizerKernels.FUSED),
        OptimizerKernels,
        shown="fused",
    ),
    Column(
        "clipping",
        "gradients clipped by their global norm: off, the norm alone (norm), or norm and scaling (scaled)",
        always(Clipping.OFF),
        Clipping,
        shown="off",
    ),
    Column(
        "lookups",
        "embedding lookups: gathered, or products with one-hot rows",
        always(Lookups.GATHERED),
        Lookups,
        shown="gathered",
    ),
    Column(
        "moe_copies",
        "token copies: one to each expert; once per node and rank (DeepEP, HybridEP); or neighbours: once, "
        "with a router that sends tokens to consecutive experts in turn",
        always(TokenCopies.EACH),
        TokenCopies,
        shown="each",
    ),
    Column(
        "cuda_graphs",
        "none, router (router and attention kernels) or all (whole iterations); selects fitted numbers",
        always(Recorded.NONE),
        Recorded,
        shown="none",
    ),
    real_column(
        "capacity",
        "expert capacity factor: tokens beyond it are dropped, experts are padded up to it",
        shown="none are dropped",
    ),
    flag_column("moe_overlap", "expert all-to-all overlaps with another microbatch's passes"),
    Column("gpu", "profile: name of a shipped one, or file", always("A100-80GB"), shown="A100-80GB"),
    count_column("gpus_per_node", "GPUs per node", 8),
    Column(
        "gpus_per_nvlink_domain",
        "GPUs joined by one NVLink domain, across nodes",
        lambda row: row["gpus_per_node"],
        shown="gpus_per_node",
    ),
    real_column("intra_gbytes_per_s", "GB/s per rank inside a node"),
    real_column("intra_latency_us", "latency inside a node", least=0),
    real_column("inter_gbytes_per_s", "GB/s per node to other nodes, over all its NICs"),
    real_column("inter_latency_us", "latency between nodes", least=0),
)
NAMES = tuple(column.name for column in COLUMNS)
REPEATED = ("gpus", "grad_accum", "optimizer")  # say again what other columns say
SHARES = ("products", "attention", "memory_bound", "in_layers", "launches", "data", "optimizer", "idle")
OUTPUTS = (
    *("predicted_s", "predicted_low_s", "predicted_high_s"),
    *("tokens_per_s_per_gpu", "mfu", "predicted_bytes", "fits", "spare_bytes"),
    *(f"share_{name}" for name in SHARES),
    *("unmeasured", "error"),
)

ALIASES = {
    "seq_len": "sequence",
    "sequence_length": "sequence",
    "seq_length": "sequence",
    "seq": "sequence",
    "seqlen": "sequence",
    "max_seq_len": "sequence",
    "n_gpus": "gpus",
    "num_gpus": "gpus",
    "num_devices": "gpus",
    "world_size": "gpus",
    **{f"{degree}_size": degree for degree in ("tp", "cp", "pp", "ep", "dp")},
    **{
        f"{words}_{size}": degree
        for words, degree in (
            ("tensor", "tp"),
            ("context", "cp"),
            ("pipeline", "pp"),
            ("expert", "ep"),
            ("data", "dp"),
        )
        for size in ("parallel", "parallel_size", "model_parallel_size")
    },
    "vp": "virtual_stages",
    "vpp": "virtual_stages",
    "hidden_size": "hidden",
    "num_layers": "layers",
    "num_hidden_layers": "layers",
    "n_layers": "layers",
    "num_heads": "heads",
    "num_attention_heads": "heads",
    "n_heads": "heads",
    "num_kv_heads": "kv_heads",
    "num_key_value_heads": "kv_heads",
    "ffn_hidden_size": "ffn",
    "intermediate_size": "ffn",
    "vocab_size": "vocab",
    "tied_embeddings": "tied",
    "gbs": "global_batch",
    "global_batch_size": "global_batch",
    "mbs": "micro_batch",
    "micro_batch_size": "micro_batch",
    "num_experts": "experts",
    "top_k": "topk",
    "moe_topk": "topk",
    "moe_ffn": "expert_ffn",
    "load_cv": "expert_load_cv",
    "cv_load": "expert_load_cv",
    "moe_load_cv": "expert_load_cv",
    "zero": "zero_stage",
    "zero1_group": "shard_group",
    "reduce_dtype": "grad_precision",
    "grad_reduce_precision": "grad_precision",
    "window_size": "window",
    "mtp_num_layers": "mtp_layers",
    "ga": "grad_accum",
    "gradient_accumulation_steps": "grad_accum",
}
INSTEAD = {
    "fsdp": "zero_stage",
    "hsdp": "shard_group",
    "sharding": "zero_stage",
    "moe": "experts",
    **dict.fromkeys(("max_vio", "maxvio", "max_violation", "load_imbalance"), "expert_load_cv"),
    "device": "gpu",
    "devices": "gpus",
    "gpu_name": "gpu",
    "gpu_type": "gpu",
    "accelerator": "gpu",
    "hardware": "gpu",
    "num_nodes": "gpus",
    "nodes": "gpus",
    "batch_size": "global_batch",
    "batch": "global_batch",
    "dtype": "precision",
    "activation_checkpointing": "recompute",
    "step_time": "measured_step_time",
    "iteration_time": "measured_iteration_time",
    "throughput": "measured_throughput",
}
"""Columns to name for headings that mean another quantity, or several, and are not read as synonyms."""


def describe_columns() -> str:
    """One line per column: name, meaning, default."""
    width = max(map(len, NAMES))
    return "\n".join(
        f"{c.name:<{width}}  {c.about}" + ("; required" if c.default is None else f"; default {c.shown}")
        for c in COLUMNS
    )


def is_note(name: str) -> bool:
    """Whether a column is passed through without being read."""
    return name in NOTES or name.startswith(NOTE_PREFIXES)


def check_header(header: Sequence[str]) -> None:
    """ValueError for a heading that is missing, unknown, repeated (under one name or two), or an output's."""
    columns = [ALIASES.get(name, name) for name in header]
    for name, column in zip(header, columns, strict=True):
        if columns.count(column) > 1:
            spellings = [other for other, same in zip(header, columns, strict=True) if same == column]
            note = "" if len(set(spellings)) == 1 else f" (as {', '.join(spellings)})"
            raise ValueError(f"column {column!r} stands {len(spellings)} times{note}; want each once")
        if name in OUTPUTS:
            raise ValueError(f"column {name!r} is one that the prediction adds; rename it")
        if column not in NAMES and not is_note(name):
            nearest = (
                INSTEAD.get(name.lower())
                or get_close_matches(name.lower(), (*NAMES, *ALIASES), n=1, cutoff=0.0).pop()
            )
            raise ValueError(f"unknown column {name!r}: want {nearest!r}, or x_{name} for a note")
    for required in COLUMNS:
        if required.default is None and required.name not in columns:
            raise ValueError(f"no column {required.name!r} ({required.about}); it has: {', '.join(header)}")


def read_row(cells: Mapping[str, str]) -> LlmRow:
    """Parse a row; an absent or empty cell takes the column's default.

    Raises:
        ValueError: `column: rule, got value; nearest valid choice`.
    """
    texts = {ALIASES.get(name, name): (text or "").strip() for name, text in cells.items()}
    if texts.get("framework"):
        check_framework(texts["framework"])
        texts = filled(texts)
    values: dict[str, Any] = {}
    for column in COLUMNS:
        text = texts.get(column.name, "")
        if text:
            values[column.name] = read_cell(column, text)
        elif column.default is not None:
            values[column.name] = column.default(values)
        else:
            raise ValueError(f"{column.name}: required ({column.about}), the cell is empty")
    repeated = {name: values.pop(name) for name in REPEATED}
    kind, modules = values.pop("recompute")
    row = LlmRow(
        **values,
        recompute=kind,
        recompute_modules=modules,
        fitted=tuple(sorted(fitted_numbers(texts).items())),
        fitted_off=fitted_off(texts),
    )
    check_row(row)
    check_repeated(row, **repeated)
    return row
