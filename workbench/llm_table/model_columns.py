"""Columns that describe a row's model and its samples: architecture, sizes, what of it is trained."""

from collections.abc import Callable
from typing import Any

from workbench.llm_table.cells import (
    Column,
    Values,
    always,
    count_column,
    flag_column,
    real_column,
    text_column,
)
from workbench.llm_table.llm_row import PLAIN, Activation, Architecture, YesNo
from workbench.llm_table.refusal import check_divides, refuse
from workbench.llm_table.row_pattern_rules import MAMBA
from workbench.model.lora import Adapted

TEXT_TOKENS = 154  # of Stable Diffusion 3: 77 of CLIP and 77 of T5


def _ffn(row: Values) -> int:
    """4 x hidden; for a gated MLP of about as many weights, 8/3 x hidden rounded up to a multiple of 256."""
    if row["architecture"] in PLAIN:
        return int(4 * row["hidden"])
    return -(-8 * int(row["hidden"]) // 3 // 256) * 256


def _head_dim(row: Values) -> int:
    check_divides("hidden", row["hidden"], "heads", row["heads"])
    return int(row["hidden"] // row["heads"])


def _gated(row: Values) -> YesNo:
    return YesNo.NO if row["architecture"] in PLAIN else YesNo.YES


def _activation(row: Values) -> Activation:
    """Blocks of one mixer, whose MLPs have no gate, square a ReLU (Nemotron-H)."""
    if row["pattern"] and row["gated_mlp"] is YesNo.NO:
        return Activation.RELU2
    return Activation.SILU if row["architecture"] is Architecture.LLAMA else Activation.GELU


def _only_t5(count: Callable[[Values], Any]) -> Callable[[Values], Any]:
    return lambda row: count(row) if row["architecture"] is Architecture.T5 else 0


def _linear(size: int) -> Callable[[Values], int]:
    return lambda row: size if row["linear_key_heads"] else 0


def _mamba(size: Callable[[Values], int]) -> Callable[[Values], int]:
    return lambda row: size(row) if MAMBA in row["pattern"] else 0


def _mamba_heads(row: Values) -> int:
    """Heads twice as wide together as the model; ValueError for heads without a width."""
    if not row["mamba_head_dim"]:
        refuse("mamba_head_dim", "want it with M in the pattern alone", 0, 64)
    return int(2 * row["hidden"] // row["mamba_head_dim"])


MODEL_COLUMNS = (
    Column("hidden", "hidden width"),
    Column("layers", "transformer blocks; for an encoder-decoder, of the encoder"),
    Column("heads", "query heads"),
    Column(
        "sequence",
        "tokens per sample; for an encoder-decoder, of the encoder; for vit and dits, patches",
    ),
    Column("global_batch", "samples per iteration"),
    Column(
        "architecture",
        "gpt, llama, vit, t5, dit or mmdit",
        always(Architecture.GPT),
        Architecture,
        shown="gpt",
    ),
    Column("kv_heads", "key and value heads", lambda row: row["heads"], shown="heads"),
    Column("head_dim", "width of a head", _head_dim, shown="hidden / heads"),
    Column("ffn", "inner width of the MLP", _ffn, shown="gpt, vit, dits: 4 x hidden, others: 8/3 x hidden"),
    Column("gated_mlp", "yes: gated MLP", _gated, YesNo, shown="gpt, vit, dits: no, others: yes"),
    flag_column("qk_norm", "norms on queries and keys of each head"),
    count_column("vocab", "vocabulary size; for a vit, classes", 50257),
    count_column("vocab_multiple", "the vocabulary is padded to a multiple of this x tp", 128),
    flag_column("tied", "embedding and head share one weight", YesNo.YES),
    count_column("window", "sliding window in tokens, itself included; 0: no window", 0, least=0),
    count_column(
        "full_every",
        "with a window or linear attention: every n-th block has full attention; 0: none",
        0,
        least=0,
    ),
    count_column(
        "linear_key_heads",
        "gated DeltaNet: query and key heads of blocks with linear attention; 0: none",
        0,
        least=0,
    ),
    Column(
        "linear_value_heads",
        "gated DeltaNet: value heads",
        lambda row: row["linear_key_heads"],
        shown="linear_key_heads",
        least=0,
    ),
    Column("linear_key_dim", "gated DeltaNet: width of a key head", _linear(128), shown="128", least=0),
    Column(
        "linear_value_dim",
        "gated DeltaNet: width of a value head",
        lambda row: row["linear_key_dim"],
        shown="linear_key_dim",
        least=0,
    ),
    text_column("pattern", "blocks of one mixer, a letter each: M Mamba-2, * attention, - MLP, E experts"),
    Column(
        "activation",
        "of the MLP: gelu, gelu_new (GPT-2's in transformers), silu or relu2",
        _activation,
        Activation,
        shown="llama: silu, or relu2 with `pattern` and no gate; others: gelu",
    ),
    Column("mamba_head_dim", "Mamba-2: width of a head", _mamba(lambda _: 64), shown="64", least=0),
    Column(
        "mamba_heads", "Mamba-2: heads", _mamba(_mamba_heads), shown="2 x hidden / mamba_head_dim", least=0
    ),
    Column(
        "mamba_groups",
        "Mamba-2: groups of heads with keys of their own",
        _mamba(lambda _: 8),
        shown="8",
        least=0,
    ),
    Column("mamba_state", "Mamba-2: width of a head's keys", _mamba(lambda _: 128), shown="128", least=0),
    Column("mamba_chunk", "Mamba-2: tokens of a chunk", _mamba(lambda _: 128), shown="128", least=0),
    Column(
        "conv_kernel",
        "gated DeltaNet, Mamba-2: tokens that the convolution sees",
        lambda row: 4 if row["linear_key_heads"] or MAMBA in row["pattern"] else 0,
        shown="4",
        least=0,
    ),
    flag_column("gated_attention", "a gate of each number multiplies the output of full attention"),
    Column("rotary_dim", "rotated numbers of a head", lambda row: row["head_dim"], shown="head_dim"),
    count_column("q_lora", "MLA: latent width of queries; 0: direct projection", 0, least=0),
    count_column("kv_lora", "MLA: latent width of keys and values; 0: no MLA", 0, least=0),
    count_column("nope_dim", "MLA: head width without rotary positions", 0, least=0),
    count_column("rope_dim", "MLA: head width with rotary positions", 0, least=0),
    count_column("v_dim", "MLA: head width of values", 0, least=0),
    count_column("experts", "experts per block; 0: a dense MLP", 0, least=0),
    count_column("topk", "experts per token", 0, least=0),
    Column(
        "expert_ffn",
        "inner width of an expert",
        lambda row: row["ffn"] if row["experts"] else 0,
        shown="ffn",
        least=0,
    ),
    count_column("shared_expert_ffn", "inner width of the shared experts; 0: none", 0, least=0),
    flag_column("shared_expert_gate", "a gate of each token multiplies the output of the shared experts"),
    real_column(
        "expert_load_cv",
        "coefficient of variation of the experts' shares of rows in the long run; 0: random choices alone",
        0.0,
        shown="0",
        least=0,
    ),
    count_column("first_dense_layers", "blocks at the start with a dense MLP", 0, least=0),
    Column(
        "decoder_layers",
        "t5: decoder blocks",
        _only_t5(lambda row: row["layers"]),
        shown="t5: layers",
        least=0,
    ),
    Column(
        "decoder_sequence",
        "t5: decoder tokens",
        _only_t5(lambda row: row["sequence"]),
        shown="t5: sequence",
        least=0,
    ),
    count_column(
        "single_layers", "mmdit: single-stream blocks after the double-stream ones (Flux)", 0, least=0
    ),
    Column(
        "text_sequence",
        "mmdit: text tokens in addition to the patches",
        lambda row: TEXT_TOKENS if row["architecture"] is Architecture.MMDIT else 0,
        shown=f"mmdit: {TEXT_TOKENS}",
        least=0,
    ),
    count_column(
        "mtp_layers",
        "multi-token prediction: modules on the last stage, each with a block and a loss of its own",
        0,
        least=0,
    ),
    count_column("patch", "vit, dit: patch side in pixels", 16),
    count_column("lora_rank", "LoRA rank, everything else is frozen; 0: everything is trained", 0, least=0),
    Column(
        "lora_modules",
        "matrix products with adapters: all, attention, qkv or mlp",
        always(Adapted.ALL),
        Adapted,
        shown="all",
    ),
)
