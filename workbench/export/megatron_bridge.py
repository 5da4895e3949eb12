"""Megatron-Bridge 0.6: a program of its config classes, for a language model alone or with image encoders.

Source: Megatron-Bridge 0.6.2 (Apache-2.0): models/gpt_provider.py, models/megatron_mimo, training/config.py;
megatron-core 0.19.2: TransformerConfig, models/vision/clip_vit_model.py.
"""

from collections.abc import Mapping, Sequence

from workbench.export import expressible
from workbench.export.adapters import (
    adapter_words,
    adapters_cut,
    has_adapters,
    inexpressible_adapters,
    inexpressible_cut,
)
from workbench.export.approximation import Approximation, Change, longest_tokens
from workbench.export.block_recompute import recomputed_alike
from workbench.export.decoder import config_of, decoder_of
from workbench.export.latent import latent_words, latent_yarn_words
from workbench.export.mimo_config import (
    EXCHANGES,
    MIMO_ALTERNATIVES,
    PROGRAM,
    RECOMPUTED,
    SCHEDULES,
    Words,
    common_tables,
    keys_exchanged,
    mimo_changes,
    mimo_tables,
    position_words,
    program_files,
    sequence_whole,
    settings_words,
    tokens_of_item,
    transformer_words,
)
from workbench.export.mimo_limits import encoders_of, inexpressible, lacking
from workbench.export.mimo_programs import ADAPTED_MODULE, LATENT_MODULE, ONE_MODULE, SEVERAL_MODULES
from workbench.export.module_layouts import Placed, RankSharing, placed_llm
from workbench.export.narrow_products import MEGATRON, even_tokens, multiplied_as
from workbench.export.target import Files, Launch, Target
from workbench.export.torchrun import nccl_environment
from workbench.export.trained import Trained
from workbench.job.notations.layout_string import layout_string
from workbench.plan.plan import Plan, Sharding
from workbench.schedule.sharded import ReshardAfter


def _lacks(trained: Trained) -> str | None:
    return lacking(trained, inexpressible_adapters) or expressible.other_optimizer(trained)


def _refuses(plan: Plan) -> str | None:
    allowed = (RankSharing.ALONE, RankSharing.APART)
    return _lacks(plan) or inexpressible(plan, allowed) or inexpressible_cut(plan)


def _changes(plan: Plan) -> Sequence[Change]:
    if len(plan.model.modules) > 1:
        return (*mimo_changes(plan), *sequence_whole(plan, plan.model.llm))
    changes = (
        *expressible.equal_lengths(plan),
        *expressible.wide_optimizer(plan),
        *even_tokens(plan),
        *multiplied_as(plan, MEGATRON),
        *adapters_cut(plan),
        *_sharded(plan),
        *expressible.computed_again(plan, RECOMPUTED),
        *keys_exchanged(plan),
        *expressible.one_of_schedules(plan, SCHEDULES),
    )
    return (*changes, *recomputed_alike(plan, changes))


def _sharded(plan: Plan) -> Sequence[Change]:
    """Its optimizer shards what is trained; frozen weights are whole on every rank."""
    if has_adapters(plan):
        return expressible.sharded_as(plan, Sharding.OPTIMIZER, Sharding.GRADIENTS, Sharding.PARAMETERS)
    return (
        *expressible.sharded_as(plan, Sharding.OPTIMIZER, Sharding.GRADIENTS),
        *expressible.resharded_as(plan, ReshardAfter.STEP, ReshardAfter.PASS, ReshardAfter.BACKWARD),
    )


def _grid_words(plan: Plan, placed: Placed) -> Words:
    """Parallel sizes of a single language model."""
    layout, settings = placed.layout, plan.settings.of(placed.layout.module)
    words: Words = {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": placed.pp,
        "context_parallel_size": layout.cp,
        "sequence_parallel": settings.sequence_parallel and layout.tp > 1,
    }
    if layout.cp > 1:
        words["cp_comm_type"] = EXCHANGES[settings.key_exchange]
    if layout.ep > 1:
        words |= {"expert_model_parallel_size": layout.ep, "expert_tensor_parallel_size": 1}
    if decoder_of(plan.model.llm).num_experts:
        words["moe_token_dispatcher_type"] = "alltoall"
    if placed.pp > 1:
        words["pipeline_model_parallel_layout"] = layout_string(layout.stage_layers)
    if placed.virtual > 1:
        words["virtual_pipeline_model_parallel_size"] = placed.virtual
    return words


def gpt_words(plan: Plan) -> Words:
    """Fields of the provider: the whole model of a plan with one module."""
    module = plan.model.llm
    decoder = decoder_of(module)
    latent = {} if decoder.latent is None else latent_words(decoder) | latent_yarn_words(decoder)
    words = {
        **transformer_words(decoder),
        **settings_words(plan, module.name),
        **_grid_words(plan, placed_llm(plan)),
        **position_words(decoder),
        "share_embeddings_and_output_weights": decoder.is_tied,
        "vocab_size": decoder.vocab,
        "make_vocab_size_divisible_by": 1,
        "seq_length": longest_tokens(plan),
    }
    return words | latent


def _data_words(plan: Plan, special: Mapping[str, int]) -> Words:
    """Fields of `MockMegatronMIMOProvider`; processors and tokenizer are the user's."""
    lengths = {module.name: tokens_of_item(plan, module) for module in encoders_of(plan)}
    return {
        "seq_length": max(longest_tokens(plan), 1 + sum(lengths.values())),
        "processor_paths": dict.fromkeys(lengths, "PROCESSOR"),
        "tokenizer_path": "TOKENIZER",
        "special_token_ids": dict(special),
        "encoder_seq_lengths": lengths,
        "modality_configs": {
            module.name: {"type": "image", "width": side, "height": side}
            for module in encoders_of(plan)
            for side in [config_of(module).get("image_size", 224)]
        },
    }


def tables(plan: Plan) -> Words:
    """Contents of the program's tables, by name."""
    if len(plan.model.modules) == 1:
        adapted = {"lora": adapter_words(plan)} if has_adapters(plan) else {}
        return common_tables(plan) | {"language": gpt_words(plan)} | adapted
    common = mimo_tables(plan)
    return common | {"data": _data_words(plan, common["special"])}


def _files(approximation: Approximation) -> Files:
    plan = approximation.becomes
    return program_files(_program(plan), tables(plan))


def _program(plan: Plan) -> str:
    if len(plan.model.modules) > 1:
        return SEVERAL_MODULES
    if has_adapters(plan):
        return ADAPTED_MODULE
    return ONE_MODULE if decoder_of(plan.model.llm).latent is None else LATENT_MODULE


def _launch(approximation: Approximation) -> Launch:
    frozen = " PRETRAINED in train.py, the checkpoint of the frozen weights, is yours."
    return Launch(
        program=PROGRAM,
        environment=nccl_environment(),
        container="An image with Megatron-Bridge 0.6 and what it requires: megatron-core 0.19, torch, "
        "Transformer Engine, as NVIDIA's NeMo images have it. Processors and tokenizer in DATA are yours."
        + (frozen if has_adapters(approximation.plan) else ""),
        training=f"As it is, `{PROGRAM}` takes 100 steps on random data, and keeps no checkpoint. Its "
        "`container` has all that is yours to change: `dataset`, `train`, `checkpoint`.",
    )


TARGET = Target(
    name="megatron-bridge",
    system="Megatron-Bridge 0.6",
    summary="a training program of Megatron-Bridge's config classes",
    lacks=_lacks,
    refuses=_refuses,
    changes=_changes,
    alternatives=MIMO_ALTERNATIVES,
    files=_files,
    launch=_launch,
)
