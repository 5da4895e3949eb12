"""Qwen3.5 and Qwen3-Next: gated DeltaNet in most blocks, gated attention in the others; also with experts."""

from collections.abc import Mapping
from typing import Any

from workbench.model.config_fields import Config, attention_bias, count, layer_indices, text, whole
from workbench.model.delta_net import DeltaNet, with_delta_net
from workbench.model.experts import Experts
from workbench.model.families.decoder import default_sizes, llama_like
from workbench.model.families.family import EXAMPLE_LLM, Example, LanguageModel, Layers
from workbench.model.families.mixtures import sparse
from workbench.model.families.positions import PARTIAL, check_fixed_positions, rotated_share
from workbench.model.transformer import Mlp, Norm

HEAD = 256  # default width of a head
ROTATED = 0.25  # default share of a head that rotates
LINEAR, FULL = "linear_attention", "full_attention"
_FULL_EVERY = 4  # blocks

_DENSE = default_sizes(248320, 4096, 12288, 32, 16, num_key_value_heads=4, head_dim=HEAD)
_SPARSE = default_sizes(248320, 2048, 512, 40, 16, num_key_value_heads=2, head_dim=HEAD)
_MIXTURE = {"num_experts_per_tok": 8, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
_NEXT = default_sizes(151936, 2048, 5632, 48, 16, num_key_value_heads=2, head_dim=HEAD)


def _hybrid(config: Config, sizes: Mapping[str, Any], *, fused: bool = False) -> Layers:
    """Blocks with gated attention, of which most have linear attention in its place.

    Args:
        sizes: defaults of the configuration.
        fused: as of `DeltaNet`.
    """
    heads = {
        "bias": attention_bias(config),
        "qk_norm": Norm.RMS,
        "rotary_dim": _rotary_dim(config),
        "gated": True,
    }
    embed, *blocks, head = llama_like(config, defaults=sizes, heads=heads, mlp={})
    net = DeltaNet(
        num=whole(config, "linear_num_value_heads", 32),
        num_keys=whole(config, "linear_num_key_heads", 16),
        key_dim=whole(config, "linear_key_head_dim", 128),
        value_dim=whole(config, "linear_value_head_dim", 128),
        kernel=whole(config, "linear_conv_kernel_dim", 4),
        fused=fused,
    )
    kinds = _kinds(config, len(blocks))
    return (
        embed,
        *(
            with_delta_net(block, net) if kind == LINEAR else block
            for block, kind in zip(blocks, kinds, strict=True)
        ),
        head,
    )


def _kinds(config: Config, num_blocks: int) -> tuple[str, ...]:
    """[blocks] the kind of each one's attention.

    Raises:
        ValueError: an unknown kind, or not one for every block.
    """
    every, listed = whole(config, "full_attention_interval", _FULL_EVERY), config.get("layer_types")
    if listed is None:
        return tuple(LINEAR if (index + 1) % every else FULL for index in range(num_blocks))
    is_list = isinstance(listed, list | tuple) and len(listed) == num_blocks
    if not is_list or not all(kind in (LINEAR, FULL) for kind in listed):
        raise ValueError(
            f"{config['model_type']}: layer_types must be {LINEAR} or {FULL} for each of the {num_blocks} "
            f"blocks, got {listed!r:.80}"
        )
    return tuple(listed)


def with_gated_experts(config: Config, layers: Layers, sizes: Mapping[str, int]) -> Layers:
    """The layers with routed experts and a gated shared one; listed blocks, and others, keep their MLP.

    Args:
        sizes: defaults of the configuration's keys of experts.
    """

    def size(key: str) -> int:
        return whole(config, key, sizes[key])

    activation = text(config, "hidden_act", "silu")
    experts = Experts(
        num=count(config, "num_experts", sizes["num_experts"]),
        num_chosen=size("num_experts_per_tok"),
        mlp=Mlp(width=size("moe_intermediate_size"), gated=True, activation=activation, fused=True),
        shared=Mlp(width=size("shared_expert_intermediate_size"), gated=True, activation=activation),
        gates_shared=True,
    )
    step, dense = whole(config, "decoder_sparse_step", 1), layer_indices(config, "mlp_only_layers", ())
    return sparse(layers, experts, lambda block: block not in dense and (block + 1) % step == 0)


def _qwen3_5_moe(config: Config) -> Layers:
    every_block = {**config, "decoder_sparse_step": 1, "mlp_only_layers": []}
    return with_gated_experts(every_block, _hybrid(config, _SPARSE), _MIXTURE | {"num_experts": 256})


def _qwen3_next(config: Config) -> Layers:
    mixture = _MIXTURE | {"num_experts": 512, "num_experts_per_tok": 10}
    return with_gated_experts(config, _hybrid(config, _NEXT, fused=True), mixture)


def _rotary_dim(config: Config) -> int:
    """Channels of a head that rotate."""
    return int(whole(config, "head_dim", HEAD) * rotated_share(config, ROTATED))


def _check(config: Config) -> None:
    """Refuse a part of a head that does not rotate pairs of channels, or that rotary axes do not fill."""
    head, rotated = whole(config, "head_dim", HEAD), _rotary_dim(config)
    if rotated < 2 or rotated % 2 or rotated > head:
        raise ValueError(
            f"{PARTIAL} must make an even number of a head's {head} channels rotate, got "
            f"{rotated_share(config, ROTATED):g}; "
            f"nearest: {min(max(round(rotated / 2), 1) * 2, head // 2 * 2) / head:g}"
        )
    check_fixed_positions({**config, "head_dim": rotated})


_EXAMPLE = EXAMPLE_LLM | {
    "head_dim": 32,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "layer_types": [LINEAR, FULL, LINEAR, FULL],
}
_AXES = {
    "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1], "partial_rotary_factor": ROTATED}
}
GATED_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "shared_expert_intermediate_size": 96,
}
QWEN3_5_TEXT = LanguageModel(
    name="Qwen3.5 text",
    model_type="qwen3_5_text",
    check_config=_check,
    examples={"qwen3.5 text": Example(config=_EXAMPLE | _AXES)},
    make=lambda config: _hybrid(config, _DENSE),
)
QWEN3_5_MOE_TEXT = LanguageModel(
    name="Qwen3.5 text with experts",
    model_type="qwen3_5_moe_text",
    check_config=_check,
    examples={"qwen3.5 text with experts": Example(config=_EXAMPLE | _AXES | GATED_EXPERTS)},
    make=_qwen3_5_moe,
)
QWEN3_NEXT = LanguageModel(
    name="Qwen3-Next",
    model_type="qwen3_next",
    check_config=_check,
    examples={"qwen3-next": Example(config=_EXAMPLE | GATED_EXPERTS | {"mlp_only_layers": [1]})},
    make=_qwen3_next,
)
