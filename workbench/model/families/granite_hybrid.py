"""Granite 4: Mamba-2 or attention, then an MLP or experts beside one, in each block; multipliers."""

from dataclasses import replace
from typing import Any

from workbench.model.config_fields import Config, attention_bias, count, flag, text, whole
from workbench.model.experts import CHOSEN_SOFTMAX, Experts
from workbench.model.families.decoder import default_sizes, llama_like
from workbench.model.families.family import EXAMPLE_LLM, Example, LanguageModel, Layers
from workbench.model.families.mixtures import sparse
from workbench.model.families.nemotron_h import ATTENTION, MAMBA, OF_NAME
from workbench.model.families.positions import check_fixed_positions
from workbench.model.layer import Layer, Operator, Pointwise
from workbench.model.mamba import Mamba, with_mamba
from workbench.model.transformer import Mlp

_SIZES = default_sizes(32000, 4096, 11008, 32, 32)
_AUTO = "auto"  # width of a head that divides what the heads share
_ROPE = "rope"


def _granite(config: Config) -> Layers:
    shared = Mlp(
        width=whole(config, "shared_intermediate_size", 1024),
        gated=True,
        activation=text(config, "hidden_act", "silu"),
        fused=True,
    )
    heads = {
        "bias": attention_bias(config),
        "rotary": config.get("position_embedding_type") == _ROPE,
    }
    plain = llama_like(
        {**config, "intermediate_size": shared.width},
        defaults=_SIZES,
        heads=heads,
        mlp={"fused": True},
        scales_embedding=True,
    )
    embed, *blocks, head = plain
    mamba = _mamba(config, blocks[0].out_width)
    mixed = [
        with_mamba(block, mamba) if kind == MAMBA else block
        for block, kind in zip(blocks, _kinds(config, len(blocks)), strict=True)
    ]
    layers = (embed, *mixed, head)
    if config.get("num_local_experts", 8) != 0:
        layers = sparse(layers, _experts(config, shared))
    embed, *blocks, head = layers
    return (embed, *map(_scaled, blocks), head)


def _kinds(config: Config, num_blocks: int) -> tuple[str, ...]:
    """[blocks] Mamba-2 or attention; by default Mamba-2 everywhere.

    Raises:
        ValueError: an unknown kind, or not one for every block.
    """
    key = "layer_types"
    listed = [MAMBA] * num_blocks if config.get(key) is None else config[key]
    is_list = isinstance(listed, list | tuple) and len(listed) == num_blocks
    kinds = tuple(OF_NAME.get(kind) for kind in listed) if is_list else ()
    if not is_list or not all(kind in (MAMBA, ATTENTION) for kind in kinds):
        raise ValueError(
            f"{config['model_type']}: {key} must be {MAMBA} or {ATTENTION} for each of the {num_blocks} "
            f"blocks, got {listed!r:.80}"
        )
    return tuple(str(kind) for kind in kinds)


def _mamba(config: Config, width: int) -> Mamba:
    """Sizes of its mixers.

    Raises:
        ValueError: heads that do not fill the inner width.
    """
    num, inner = whole(config, "mamba_n_heads", 128), whole(config, "mamba_expand", 2) * width
    dim = inner // num if config.get("mamba_d_head", _AUTO) == _AUTO else whole(config, "mamba_d_head")
    if num * dim != inner:
        raise ValueError(
            f"granitemoehybrid: mamba_n_heads x mamba_d_head must be mamba_expand x hidden_size {inner}, "
            f"got {num} x {dim}"
        )
    return Mamba(
        num=num,
        groups=whole(config, "mamba_n_groups", 1),
        state=whole(config, "mamba_d_state", 256),
        dim=dim,
        kernel=whole(config, "mamba_d_conv", 4),
        chunk=whole(config, "mamba_chunk_size", 256),
        bias=flag(config, "mamba_proj_bias"),
        conv_bias=flag(config, "mamba_conv_bias", default=True),
    )


def _experts(config: Config, shared: Mlp) -> Experts:
    return Experts(
        num=count(config, "num_local_experts", 8),
        num_chosen=whole(config, "num_experts_per_tok", 2),
        mlp=replace(shared, width=whole(config, "intermediate_size", _SIZES["intermediate_size"])),
        shared=shared,
        scores=CHOSEN_SOFTMAX,
    )


def _scaled(block: Layer) -> Layer:
    """The block with a multiplier before each of its sums."""
    operators: list[Operator] = []
    for operator in block.operators:
        start, _, end = operator.name.rpartition("_")
        if end == "residual":
            operators.append(Pointwise(name=f"{start}_scale", width=block.out_width, num_passes=2))
        operators.append(operator)
    return replace(block, operators=tuple(operators))


def _check(config: Config) -> None:
    if config.get("position_embedding_type") == _ROPE:
        check_fixed_positions(config)


_EXAMPLE: dict[str, Any] = EXAMPLE_LLM | {
    "layer_types": [MAMBA, ATTENTION, MAMBA, MAMBA],
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 32,
    "mamba_chunk_size": 32,
    "shared_intermediate_size": 352,
    "embedding_multiplier": 12,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.015625,
    "logits_scaling": 8,
    "num_local_experts": 0,
    "tie_word_embeddings": True,
}
_SPARSE = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 96}
GRANITE_HYBRID = LanguageModel(
    name="Granite 4",
    model_type="granitemoehybrid",
    check_config=_check,
    examples={
        "granite 4": Example(config=_EXAMPLE | {"position_embedding_type": _ROPE}),
        "granite 4 with experts": Example(config=_EXAMPLE | _SPARSE),
    },
    make=_granite,
)
