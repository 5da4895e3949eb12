"""The modules of a plan as megatron-core's configurations, for systems that build them with its MIMO classes.

Source: megatron-core 0.19.2 (Apache-2.0): TransformerConfig, models/mimo, models/vision/clip_vit_model.py.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pprint import pformat
from typing import Any

from workbench.export import expressible
from workbench.export.approximation import (
    Alternative,
    Change,
    in_settings,
    longest_tokens,
    with_layouts,
)
from workbench.export.block_recompute import recomputed_alike, recomputed_blocks
from workbench.export.decoder import Decoder, config_of, decoder_of
from workbench.export.mimo_limits import PROJECTORS, TOWERS, encoders_of
from workbench.export.module_layouts import placed_llm, placed_modules
from workbench.export.narrow_products import MEGATRON, even_tokens, megatron_words, multiplied_as
from workbench.export.scaled_positions import YARN, scaling_kind, yarn_words
from workbench.export.target import Files
from workbench.job.job import Job
from workbench.job.module_layout import ModuleLayout
from workbench.job.notations.bridge import PARALLELISMS, write_parallelisms
from workbench.model.block_modules import BlockModule
from workbench.model.experts import CLAMPED
from workbench.model.layer import Attention, LayerKind, Matmul
from workbench.model.model_graph import Module
from workbench.plan.plan import KeyExchange, ModuleSettings, Plan, Precision, Recompute, Sharding
from workbench.planner.plan_layouts import microbatch_samples
from workbench.schedule.choice import ScheduleKind

PROGRAM = "train.py"
LANGUAGE = "language"  # what megatron-core calls the language model
WIDTH = 100  # of lines
SCHEDULES = (ScheduleKind.ONE_F_ONE_B, ScheduleKind.INTERLEAVED)
Words = dict[str, Any]
_ACTIVATIONS = {CLAMPED: "quick_gelu"}
_TOWER_ACTIVATIONS = {"clip_vision_model": "quick_gelu", "siglip_vision_model": "gelu_pytorch_tanh"}

RECOMPUTED = {
    BlockModule.CORE_ATTN: "core_attn",
    BlockModule.NORM: "layernorm",
    BlockModule.MLP: "mlp",
    BlockModule.MOE: "moe",
    BlockModule.MOE_ACT: "moe_act",
    BlockModule.MLA_UP_PROJ: "mla_up_proj",
}
EXCHANGES = {
    KeyExchange.ALL_GATHER: "all_gather",
    KeyExchange.RING: "p2p",
    KeyExchange.ALL_TO_ALL: "a2a",
}


def mimo_changes(plan: Plan) -> Sequence[Change]:
    """Changes to a plan of several modules for grids per module."""
    changes = (
        *expressible.equal_lengths(plan),
        *expressible.wide_optimizer(plan),
        *even_tokens(plan),
        *multiplied_as(plan, MEGATRON),
        *expressible.sharded_alike(plan),
        *expressible.sharded_as(plan, Sharding.OPTIMIZER, Sharding.GRADIENTS, Sharding.PARAMETERS),
        *expressible.computed_again(plan, RECOMPUTED),
        *keys_exchanged(plan),
        *(change for module in encoders_of(plan) for change in sequence_whole(plan, module)),
        *expressible.one_of_schedules(plan, (ScheduleKind.ONE_F_ONE_B,)),
        *_equal_cuts(plan),
    )
    return (*changes, *recomputed_alike(plan, changes))


def keys_exchanged(plan: Plan) -> Sequence[Change]:
    """Exchange keys as Transformer Engine can for this attention."""
    llm = plan.model.llm
    settings, possible = plan.settings.of(llm.name), _exchanges(decoder_of(llm))
    if placed_llm(plan).layout.cp == 1 or settings.key_exchange in possible:
        return ()

    def changed(settings: ModuleSettings) -> ModuleSettings:
        is_llm = settings.module == llm.name
        return replace(settings, key_exchange=possible[0]) if is_llm else settings

    return in_settings(f"keys exchanged by {settings.key_exchange}", f"by {possible[0]}", changed)


def _exchanges(decoder: Decoder) -> tuple[KeyExchange, ...]:
    """Source: TransformerEngine 2.9.0 (Apache-2.0): attention/dot_product_attention/context_parallel.py."""
    latent = decoder.latent
    if decoder.has_sinks:
        return (KeyExchange.ALL_TO_ALL,)
    if latent is not None and latent.nope_dim + latent.rope_dim != latent.value_dim:
        return (KeyExchange.RING,)
    return tuple(KeyExchange) if decoder.window is None else (KeyExchange.ALL_GATHER, KeyExchange.ALL_TO_ALL)


def _equal_cuts(plan: Plan) -> Sequence[Change]:
    """Stages with equally many blocks; the first and last also have the embedding and the head."""
    llm = plan.model.llm
    placed = placed_llm(plan)
    equal = equal_stage_layers(len(llm.layers), placed.pp)
    if placed.pp == 1 or placed.layout.stage_layers == equal:
        return ()

    def cut(layout: ModuleLayout) -> ModuleLayout:
        return replace(layout, stage_layers=equal) if layout.module == llm.name else layout

    has = f"stages of {llm.name!r} of {', '.join(map(str, placed.layout.stage_layers))} layers"
    gets = "stages with equally many blocks"
    return (Change(has=has, gets=gets, make=lambda job: with_layouts(job, cut)),)


def equal_stage_layers(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Layers of stages with equally many blocks; embedding and head count one each."""
    if num_stages == 1:
        return (num_layers,)
    blocks = (num_layers - 2) // num_stages
    return (blocks + 1, *(blocks for _ in range(num_stages - 2)), blocks + 1)


def sequence_whole(plan: Plan, module: Module) -> Sequence[Change]:
    """Disable sequence parallelism of a module for a system without it."""
    tp = placed_modules(plan)[module.name].layout.tp
    if tp == 1 or not plan.settings.of(module.name).sequence_parallel:
        return ()

    def whole(settings: ModuleSettings) -> ModuleSettings:
        return replace(settings, sequence_parallel=False) if settings.module == module.name else settings

    return in_settings(f"sequence parallelism of {module.name!r}", "its sequence whole on every rank", whole)


def transformer_words(decoder: Decoder) -> Words:
    """Fields of megatron-core's `TransformerConfig` except the activation, which is a function."""
    words: Words = {
        "num_layers": decoder.num_blocks,
        "hidden_size": decoder.width,
        "ffn_hidden_size": decoder.ffn,
        "num_attention_heads": decoder.num_heads,
        "num_query_groups": decoder.num_kv_heads,
        "kv_channels": decoder.head_dim,
        "normalization": "RMSNorm" if decoder.is_rms else "LayerNorm",
        "gated_linear_unit": decoder.is_gated,
        "add_bias_linear": decoder.mlp_bias,
        "add_qkv_bias": decoder.qkv_bias,
        "qk_layernorm": decoder.qk_norm,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }
    if decoder.eps is not None:
        words["layernorm_epsilon"] = decoder.eps
    if decoder.window is not None:
        words["window_size"] = (decoder.window - 1, 0)  # tokens before a query's own
        if not all(decoder.slides):
            words["window_attn_skip_freq"] = [int(slides) for slides in decoder.slides]
    if decoder.has_sinks:
        words["softmax_type"] = "learnable"
    if decoder.activation == CLAMPED:
        limit = decoder.source.get("swiglu_limit", 7.0)  # the default of a configuration
        words |= {"glu_linear_offset": 1.0, "activation_func_clamp_value": float(limit)}
    if decoder.num_experts:
        words |= {
            "num_moe_experts": decoder.num_experts,
            "moe_router_topk": decoder.experts_per_token,
            "moe_ffn_hidden_size": decoder.ffn,
            "moe_grouped_gemm": True,
        }
        if not decoder.sums_to_one:
            words["moe_router_pre_softmax"] = True
        if decoder.mlp_bias:
            words["bias_dropout_fusion"] = False  # which experts do not have
    return words


def settings_words(plan: Plan, module: str) -> Words:
    """Number formats and recomputation of one module, as fields of `TransformerConfig`."""
    settings = plan.settings.of(module)
    words: Words = {"bf16": plan.settings.precision is Precision.BFLOAT16, **megatron_words(settings)}
    if settings.recompute is not Recompute.NONE:
        some = settings.recompute_layers is not None
        return words | {
            "recompute_granularity": "full",
            "recompute_method": "block" if some else "uniform",
            "recompute_num_layers": recomputed_blocks(plan, plan.model.module(module)) if some else 1,
        }
    if settings.computed_again:
        parts = [RECOMPUTED[part] for part in settings.computed_again]
        return words | {"recompute_granularity": "selective", "recompute_modules": parts}
    return words


def position_words(decoder: Decoder) -> Words:
    """Fields of `GPTModel` for positions."""
    words: Words = {"position_embedding_type": "rope" if decoder.is_rotary else "learned_absolute"}
    if decoder.is_rotary:
        words["rotary_base"] = round(decoder.rope_base)
    if not decoder.rope_scaling or decoder.latent is not None:
        return words
    if scaling_kind(decoder) == YARN:
        return words | yarn_words(decoder)
    return words | {"rope_scaling": True, "rope_scaling_factor": float(decoder.rope_scaling["factor"])}


def parallelism_words(plan: Plan) -> Words:
    """Module -> fields of `ModuleParallelismConfig`, in the order of the model."""
    layouts = [replace(each.layout, stage_layers=()) for each in placed_modules(plan).values()]
    parallelisms = write_parallelisms(layouts)[PARALLELISMS]
    llm = plan.model.llm.name
    return {LANGUAGE if name == llm else name: words for name, words in parallelisms.items()}


def encoder_words(plan: Plan, module: Module) -> Words:
    """Tables of a tower and its projector."""
    assert module.source is not None, "its architecture was looked at"
    config = config_of(module)
    block = next(layer for layer in module.layers if layer.kind is LayerKind.BLOCK)
    heads = next(op for op in block.operators if isinstance(op, Attention))
    down = next(op for op in block.operators if isinstance(op, Matmul) and op.name == "mlp.down")
    is_clip = module.source.architecture == "clip_vision_model"
    width = plan.model.llm.layers[0].out_width
    return {
        "config": {
            "num_layers": sum(layer.kind is LayerKind.BLOCK for layer in module.layers),
            "hidden_size": block.out_width,
            "ffn_hidden_size": down.in_features,
            "num_attention_heads": heads.num_heads,
            "kv_channels": heads.head_dim,
            "normalization": "LayerNorm",
            "add_bias_linear": True,
            "add_qkv_bias": True,
            "attention_dropout": 0.0,
            "hidden_dropout": 0.0,
            **settings_words(plan, module.name),
        },
        "activation": config.get("hidden_act", _TOWER_ACTIVATIONS[module.source.architecture]),
        "tower": {
            "patch_dim": config.get("patch_size", 16),
            "img_h": config.get("image_size", 224),
            "img_w": config.get("image_size", 224),
            "model_subtype": TOWERS[module.source.architecture],
            "add_class_token": is_clip,
            "class_token_len": int(is_clip),
        },
        "projector": {
            "num_layers": 1,
            "hidden_size": width,
            "ffn_hidden_size": width,
            "num_attention_heads": 1,
        },
        "projector_type": PROJECTORS[module.source.projector or ""],
    }


def _freeze_words(plan: Plan) -> Words:
    def is_frozen(module: Module, kinds: set[LayerKind]) -> bool:
        return not any(layer.trainable for layer in module.layers if layer.kind in kinds)

    body = {LayerKind.EMBED, LayerKind.BLOCK, LayerKind.HEAD}
    return {
        "freeze_language_model": is_frozen(plan.model.llm, body),
        "freeze_modality_encoders": {m.name: is_frozen(m, body) for m in encoders_of(plan)},
        "freeze_modality_projections": {
            m.name: is_frozen(m, {LayerKind.PROJECTOR}) for m in encoders_of(plan)
        },
    }


def tokens_of_item(plan: Plan, module: Module) -> int:
    """Output tokens of an encoder's longest item."""
    items = (segment for sample in plan.batch for segment in sample.of(module.modality))
    return max((segment.tokens_out for segment in items), default=1)


def common_tables(plan: Plan) -> Words:
    """Tables of every program."""
    module = plan.model.llm
    decoder, placed = decoder_of(module), placed_llm(plan)
    return {
        "train": {
            "train_iters": 100,
            "micro_batch_size": microbatch_samples(plan) * (1 if len(plan.model.modules) == 1 else placed.dp),
            "global_batch_size": len(plan.batch),
        },
        "vocab": decoder.vocab,
        "is_bf16": plan.settings.precision is Precision.BFLOAT16,
        "is_sharded": plan.settings.of(module.name).sharding is not Sharding.NONE,
        "ddp": _ddp_words(plan.settings.of(module.name)),
        "activation": _ACTIVATIONS.get(decoder.activation, decoder.activation.removesuffix("_tanh")),
    }


def _ddp_words(settings: ModuleSettings) -> Words:
    """Fields of `DistributedDataParallelConfig`."""
    words: Words = {"use_distributed_optimizer": settings.sharding is not Sharding.NONE}
    beside_passes: Words = {"overlap_grad_reduce": True, "overlap_param_gather": True}
    return words | (beside_passes if settings.is_gathered_once else {})


def mimo_tables(plan: Plan) -> Words:
    """Tables of a program with several modules."""
    module = plan.model.llm
    decoder = decoder_of(module)
    return common_tables(plan) | {
        "language": transformer_words(decoder) | settings_words(plan, module.name),
        "positions": position_words(decoder)
        | {
            "max_sequence_length": max(longest_tokens(plan), decoder.most_positions or 0),
            "share_embeddings_and_output_weights": decoder.is_tied,
        },
        "parallelisms": parallelism_words(plan),
        "encoders": {each.name: encoder_words(plan, each) for each in encoders_of(plan)},
        "special": {each.name: decoder.vocab - 1 - index for index, each in enumerate(encoders_of(plan))},
        "freeze": _freeze_words(plan),
    }


def program_files(program: str, tables: Words) -> Files:
    """A program with its tables inserted, and the tables alone."""
    shown = {
        name: value if isinstance(value, str) else pformat(value, width=WIDTH, sort_dicts=False)
        for name, value in tables.items()
    }
    return {PROGRAM: program.format(**shown), "tables.json": json.dumps(tables, indent=2) + "\n"}


def _whole_encoders(job: Job) -> Job:
    return replace(job, layouts=tuple(ModuleLayout(module=m.name, pp=1) for m in job.model.encoders))


MIMO_ALTERNATIVES = (
    Alternative(words="strategy megatron-islands", strategy="megatron-islands"),
    Alternative(
        words="strategy megatron-heterogeneous with every encoder on one rank",
        strategy="megatron-heterogeneous",
        job=_whole_encoders,
    ),
)
"""Uncut towers beside a language model that is cut."""
