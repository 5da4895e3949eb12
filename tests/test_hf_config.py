"""Modules out of configurations: parameters equal to transformers' own, layer lists, refusals."""

import json
from dataclasses import fields

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeForCausalLM

from workbench.model.families.family import EXAMPLE_WIDTH
from workbench.model.families.registry import ARCHITECTURES
from workbench.model.hf_config import canonical_json, modality_of, module_from_config, read_config
from workbench.model.layer import Attention, LayerKind, Matmul, Shard, TokenCount
from workbench.model.model_graph import Module
from workbench.model.projector import Projector
from workbench.model.trainable import Trainable

LLM_WIDTH = 512


def real_parameters(model_class, config) -> int:
    """Parameters of the transformers model, built without memory; tied ones once."""
    with torch.device("meta"):
        model = model_class(config)
    return sum(parameter.numel() for parameter in model.parameters())


def encoder_of(config: dict, modality: str = "vision", **more) -> Module:
    return module_from_config(config, name="encoder", modality=modality, llm_width=LLM_WIDTH, **more)


def projector_parameters(module: Module) -> int:
    return sum(p.num_elements for p in module.layers[-1].parameters() if ".projector" in p.name)


@given(
    heads=st.sampled_from([(4, 4), (4, 2), (6, 3), (8, 1)]),
    head_dim=st.sampled_from([None, 8, 24]),
    ffn=st.integers(1, 70),
    layers=st.integers(1, 3),
    vocab=st.integers(2, 90),
    tied=st.booleans(),
    biases=st.booleans(),
)
def test_any_llama_has_as_many_parameters_as_transformers(heads, head_dim, ffn, layers, vocab, tied, biases):
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=8 * heads[0],
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        head_dim=head_dim,
        tie_word_embeddings=tied,
        attention_bias=biases,
        mlp_bias=biases,
        pad_token_id=None,
        bos_token_id=0,
        eos_token_id=1,
    )
    module = module_from_config(config.to_dict(), name="llm", modality="text")
    assert module.num_parameters == real_parameters(LlamaForCausalLM, config)


def test_qwen3_30b_a3b_has_as_many_parameters_as_its_name_says():
    """Its configuration's own sizes; 3.3 billion of them work on a token."""
    config = {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "vocab_size": 151936,
    }
    module = module_from_config(config, name="llm", modality="text")
    rest = {key: value for key, value in config.items() if key != "model_type"}
    assert module.num_parameters == 30_532_122_624
    assert module.num_parameters == real_parameters(Qwen3MoeForCausalLM, Qwen3MoeConfig(**rest))


def test_layer_lists():
    llm = module_from_config({"model_type": "llama", "num_hidden_layers": 2}, name="llm", modality="text")
    assert [layer.name for layer in llm.layers] == ["embed", "block.0", "block.1", "head"]
    assert {layer.emits for layer in llm.layers} == {TokenCount.IN}
    assert [layer.out_width for layer in llm.layers] == [4096, 4096, 4096, 32000]
    vision = encoder_of({"model_type": "siglip_vision_model", "num_hidden_layers": 1})
    assert [layer.kind for layer in vision.layers] == [
        LayerKind.EMBED,
        LayerKind.BLOCK,
        LayerKind.PROJECTOR,
    ]
    assert [layer.out_width for layer in vision.layers] == [768, 768, LLM_WIDTH]
    assert vision.layers[-1].emits is TokenCount.OUT
    assert vision.layers[-1].operators[0].name == "final_norm"


def test_tied_weights_share_a_name_and_untied_ones_do_not():
    config = {"model_type": "llama", "num_hidden_layers": 1}
    for tied, expected in ((True, {"embed_tokens.weight"}), (False, set())):
        llm = module_from_config(config | {"tie_word_embeddings": tied}, name="llm", modality="text")
        embed, head = ({p.name for p in llm.layers[i].parameters()} for i in (0, -1))
        assert embed & head == expected


def test_whisper_runs_its_first_convolution_before_the_stride():
    stem = encoder_of({"model_type": "whisper", "num_mel_bins": 80, "d_model": 384}, "audio").layers[0]
    conv1, conv2 = (op for op in stem.operators if isinstance(op, Matmul))
    assert (conv1.in_features, conv1.tokens_scale) == (240, 2.0)
    assert (conv2.in_features, conv2.tokens_scale) == (3 * 384, 1.0)


def test_whisper_keys_have_no_bias_and_encoders_are_not_causal():
    block = encoder_of({"model_type": "whisper"}, "audio").layers[1]
    bias = {op.name: op.bias for op in block.operators if isinstance(op, Matmul)}
    assert (bias["q_proj"], bias["k_proj"], bias["v_proj"], bias["o_proj"]) == (True, False, True, True)
    assert not any(op.causal for op in block.operators if isinstance(op, Attention))


def test_qwen2_5_vl_attends_inside_windows_except_where_listed():
    blocks = encoder_of({"model_type": "qwen2_5_vl_vision", "hidden_size": 1280}).layers[1:-1]
    keys = [op.num_keys for block in blocks for op in block.operators if isinstance(op, Attention)]
    assert [index for index, num in enumerate(keys) if num is None] == [7, 15, 23, 31]
    assert {num for num in keys if num is not None} == {64}


@pytest.mark.parametrize("model_type", ["qwen2_5_vl_vision", "qwen2_5_omni_vision_encoder"])
def test_a_window_of_qwen2_5_vl_holds_whole_squares_of_merged_patches(model_type):
    """28 px are a square; what is left of the window beyond whole squares counts no keys."""
    config = {"model_type": model_type, "hidden_size": 1280, "depth": 1}
    for window_px, num_keys in ((28, 4), (42, 4), (56, 16)):
        block = encoder_of(config | {"window_size": window_px}).layers[1]
        assert [op.num_keys for op in block.operators if isinstance(op, Attention)] == [num_keys]
    with pytest.raises(ValueError, match=r"square of merged patches of 28 px, got 27; nearest: 28"):
        encoder_of(config | {"window_size": 27})


def test_clip_embeds_its_class_token_without_a_patch():
    embed = encoder_of({"model_type": "clip_vision_model", "image_size": 32, "patch_size": 8}).layers[0]
    patches = next(op for op in embed.operators if isinstance(op, Matmul))
    assert 17 * patches.tokens_scale == pytest.approx(16)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "mistral", "gemma", "gemma2", "phi", "phi3", "gpt2"])
def test_tensor_parallel_pairs_of_every_llm_block(kind):
    block = module_from_config({"model_type": kind}, name="llm", modality="text").layers[1]
    shards = [op.shard for op in block.operators if isinstance(op, Matmul)]
    assert Shard.REPLICATED not in shards
    assert shards.count(Shard.ROW) == 2  # attention out, MLP down: one all-reduce each
    assert all(p.shard is not Shard.REPLICATED for p in block.parameters() if len(p.shape) == 2)


def test_projectors():
    config = {"model_type": "siglip_vision_model", "hidden_size": 64, "num_attention_heads": 2}
    linear = encoder_of(config, projector=Projector.LINEAR)
    mlp = encoder_of(config, projector=Projector.MLP)
    assert projector_parameters(linear) == 64 * LLM_WIDTH + LLM_WIDTH
    assert projector_parameters(mlp) == (64 + 1) * LLM_WIDTH + (LLM_WIDTH + 1) * LLM_WIDTH
    assert (linear.source.projector, mlp.source.projector) == ("linear", "mlp")


def test_trainable():
    config = {"model_type": "whisper"}
    flags = {
        trainable: [layer.trainable for layer in encoder_of(config, "audio", trainable=trainable).layers]
        for trainable in Trainable
    }
    assert flags[Trainable.ALL] == [True] * 6
    assert flags[Trainable.PROJECTOR] == [False] * 5 + [True]
    assert flags[Trainable.NONE] == [False] * 6


def test_source_is_the_configuration_in_canonical_form():
    one = {"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 2}
    other = dict(reversed(one.items()))
    first, second = (module_from_config(c, name="llm", modality="text") for c in (one, other))
    assert first == second
    assert json.loads(first.source.config) == one
    assert first.source.architecture == "llama"
    assert first.source.config == canonical_json(one)


def test_the_vision_half_of_a_composite_configuration():
    nested = {"hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1}
    composite = {"model_type": "clip", "text_config": {}, "vision_config": nested}
    assert encoder_of(composite).source.architecture == "clip_vision_model"
    old = {"model_type": "qwen2_vl", "vision_config": {"depth": 1, "embed_dim": 80, "num_heads": 2}}
    assert encoder_of(old).source.architecture == "qwen2_vl_vision"


def test_modality_of():
    kinds = ("llama", "whisper", "clip_vision_model")
    assert [modality_of({"model_type": kind}) for kind in kinds] == ["text", "audio", "vision"]


def test_read_config(tmp_path):
    file = tmp_path / "config.json"
    file.write_text('{"model_type": "llama"}')
    assert read_config(file) == read_config(tmp_path) == {"model_type": "llama"}
    file.write_text('{"model_type": ')
    with pytest.raises(ValueError, match=r"not JSON, line 1"):
        read_config(file)
    file.write_text("[]")
    with pytest.raises(ValueError, match="want a JSON object, got list"):
        read_config(file)
    with pytest.raises(ValueError, match="no such file"):
        read_config(tmp_path / "absent.json")


@pytest.mark.parametrize(
    ("config", "more", "message"),
    [
        ({"model_type": "lama"}, {}, r"unknown model_type 'lama' \(nearest: llama\); known are llama, "),
        ({}, {}, "unknown model_type None"),
        ({"model_type": "llama"}, {"projector": Projector.MLP}, "has no projector, got 'mlp'"),
        ({"model_type": "llama", "hidden_size": 0}, {}, "hidden_size must be a whole number >= 1, got 0"),
        (
            {"model_type": "llama", "hidden_size": "64"},
            {},
            "hidden_size must be a whole number >= 1, got '64'",
        ),
        ({"model_type": "llama", "hidden_size": 65}, {}, "hidden width 65 must divide by 32 heads"),
        ({"model_type": "llama", "num_key_value_heads": 5}, {}, "got 32 heads, 5 kv_heads"),
        (
            {"model_type": "qwen2_5_vl_vision", "fullatt_block_indexes": "7"},
            {"modality": "vision", "llm_width": 64},
            "fullatt_block_indexes must list whole numbers >= 0, got '7'",
        ),
        (
            {"model_type": "qwen3_moe", "mlp_only_layers": 3},
            {},
            "mlp_only_layers must list whole numbers >= 0, got 3",
        ),
        ({"model_type": "qwen3_moe", "num_experts": 5000}, {}, "num_experts must be at most 4096, got 5000"),
        ({"model_type": "llama", "hidden_act": 3}, {}, "hidden_act must be text, got 3"),
        (
            {"model_type": "llama", "tie_word_embeddings": "false"},
            {},
            "llama: tie_word_embeddings must be true or false, got 'false'",
        ),
        ({"model_type": "qwen3", "attention_bias": 1}, {}, "attention_bias must be true or false, got 1"),
        (
            {"model_type": "dinov2", "use_swiglu_ffn": "no"},
            {"modality": "vision", "llm_width": 64},
            "use_swiglu_ffn must be true or false, got 'no'",
        ),
        ({"model_type": "llama"}, {"trainable": Trainable.PROJECTOR}, "needs a projector layer"),
        (
            {"model_type": "qwen2_vl_vision"},
            {"modality": "vision", "llm_width": 64, "projector": Projector.MLP},
            "projector must be 'merger', got 'mlp'",
        ),
        (
            {"model_type": "whisper"},
            {"modality": "audio", "llm_width": 64, "projector": Projector.MERGER},
            "projector must be 'linear' or 'mlp', got 'merger'",
        ),
    ],
)
def test_refusals(config, more, message):
    arguments = {"name": "m", "modality": "text"} | more
    with pytest.raises(ValueError, match=message):
        module_from_config(config, **arguments)


def truth_values(config) -> set[str]:
    """Names of a configuration's own yes or no: what transformers checks as such."""
    return {each.name for each in fields(type(config)) if each.type is bool}


def layers_or_refusal(config, modality):
    try:
        return module_from_config(config, name="m", modality=modality, llm_width=EXAMPLE_WIDTH).layers
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("kind", [kind for kind in ARCHITECTURES if kind in CONFIG_MAPPING])
def test_what_is_no_truth_value_to_transformers_is_none_to_a_plan(kind):
    """A word in place of each yes or no: either nothing of the plan follows from it, or it is refused."""
    example = next(iter(ARCHITECTURES[kind].examples.values())).config | {"model_type": kind}
    plain = layers_or_refusal(example, ARCHITECTURES[kind].modality)
    for key in truth_values(CONFIG_MAPPING[kind]()):
        with pytest.raises(Exception, match=key):
            CONFIG_MAPPING[kind](**{key: "false"})
        said = layers_or_refusal(example | {key: "false"}, ARCHITECTURES[kind].modality)
        assert said == plain or f"{key} must be " in str(said)
