"""What eager layers keep for their backward: the account against what autograd saves."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from runtime.models.adapter import MicrobatchData, StageLayer
from runtime.models.attention_mask import AttentionMask
from runtime.models.choose import adapter_of
from workbench.cost.roofline import Grid, RowWork, Work
from workbench.data.sample import Item, Sample, Segment
from workbench.masks.patterns import sample_bitfield
from workbench.memory.eager import eager_kept, shared_bytes
from workbench.memory.setting import Setting
from workbench.model.frozen import Needs
from workbench.model.hf_config import module_from_config
from workbench.model.model_graph import Module
from workbench.model.projector import Projector, ProjectorStep
from workbench.model.trainable import Trainable
from workbench.model.transformer import Norm

WIDTH = 64
DECODER = {
    "hidden_size": WIDTH,
    "intermediate_size": 160,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "tie_word_embeddings": False,
}
VIT = {
    "hidden_size": WIDTH,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 4,
}
WHISPER = {
    "model_type": "whisper",
    "d_model": WIDTH,
    "encoder_layers": 1,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 256,
    "num_mel_bins": 20,
    "max_source_positions": 64,
}
SLIDING = DECODER | {"head_dim": 16, "sliding_window": 50, "pad_token_id": 0, "query_pre_attn_scalar": 16}
HYBRID = DECODER | {
    "model_type": "qwen3_5_text",
    "head_dim": 16,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]},
}
SCANNED = DECODER | {
    "model_type": "nemotron_h",
    "head_dim": 16,
    "mamba_num_heads": 4,
    "mamba_head_dim": 24,
    "n_groups": 2,
    "ssm_state_size": 16,
    "chunk_size": 32,
}
GATED_EXPERTS = {
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "shared_expert_intermediate_size": 80,
}
LATENT = {
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "q_lora_rank": 40,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 12,
    "n_routed_experts": 3,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "first_k_dense_replace": 0,
}
CONFIGS = {
    "llama": DECODER | {"model_type": "llama"},
    "qwen2": DECODER | {"model_type": "qwen2"},
    "mistral": DECODER | {"model_type": "mistral"},
    "gemma": DECODER | {"model_type": "gemma", "head_dim": 16},
    "phi3": DECODER | {"model_type": "phi3", "pad_token_id": 0},
    "phi": DECODER | {"model_type": "phi", "num_key_value_heads": 4, "hidden_act": "gelu_new"},
    "siglip": VIT | {"model_type": "siglip_vision_model"},
    "clip": VIT | {"model_type": "clip_vision_model"},
    "whisper": WHISPER,
    "ovis2": VIT | {"model_type": "ovis2_vision"},
}
# Families of other shapes: windows, caps, norms, experts, scales.
MORE = {
    "mistral, window": DECODER | {"model_type": "mistral", "sliding_window": 50},
    "qwen3": DECODER | {"model_type": "qwen3", "head_dim": 16},
    "gemma2": SLIDING | {"model_type": "gemma2"},
    "gemma3": SLIDING | {"model_type": "gemma3_text", "sliding_window_pattern": 2},
    "gemma4": SLIDING
    | {"model_type": "gemma4_text", "head_dim": 16, "global_head_dim": 16, "hidden_size_per_layer_input": 0},
    "gemma4, keys as values": SLIDING
    | {
        "model_type": "gemma4_text",
        "global_head_dim": 32,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": True,
        "num_experts": 3,
        "top_k_experts": 2,
        "moe_intermediate_size": 96,
    },
    "mixtral": DECODER | {"model_type": "mixtral", "num_local_experts": 3, "num_experts_per_tok": 2},
    "qwen3_moe": DECODER
    | {
        "model_type": "qwen3_moe",
        "head_dim": 16,
        "num_experts": 3,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 96,
    },
    "llama4": DECODER
    | {
        "model_type": "llama4_text",
        "head_dim": 16,
        "intermediate_size_mlp": 160,
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
        "interleave_moe_layer_step": 1,
    },
    "qwen3.5, linear": HYBRID | {"layer_types": ["linear_attention"]},
    "qwen3.5, as many keys": HYBRID | {"layer_types": ["linear_attention"], "linear_num_key_heads": 4},
    "qwen3.5, full": HYBRID | {"layer_types": ["full_attention"]},
    "qwen3.5, experts": HYBRID
    | GATED_EXPERTS
    | {"model_type": "qwen3_5_moe_text", "layer_types": ["full_attention"]},
    "qwen3-next": HYBRID
    | GATED_EXPERTS
    | {"model_type": "qwen3_next", "layer_types": ["linear_attention"], "rope_parameters": None},
    "nemotron-h, scan": SCANNED | {"hybrid_override_pattern": "M"},
    "nemotron-h, as many groups": SCANNED | {"hybrid_override_pattern": "M", "n_groups": 4},
    "nemotron-h, attention": SCANNED | {"hybrid_override_pattern": "*"},
    "nemotron-h, MLP": SCANNED | {"hybrid_override_pattern": "-"},
    "nemotron-h, latent experts": SCANNED
    | GATED_EXPERTS
    | {
        "hybrid_override_pattern": "E",
        "n_routed_experts": 3,
        "moe_shared_expert_intermediate_size": 80,
        "moe_latent_size": 40,
    },
    "granite 4, experts": DECODER
    | {
        "model_type": "granitemoehybrid",
        "layer_types": ["mamba"],
        "mamba_n_heads": 8,
        "mamba_d_state": 16,
        "mamba_chunk_size": 32,
        "num_local_experts": 3,
        "shared_intermediate_size": 80,
    },
    "glm4": DECODER | {"model_type": "glm4", "head_dim": 16, "pad_token_id": 0},
    "gpt_oss": DECODER
    | {
        "model_type": "gpt_oss",
        "head_dim": 16,
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
        "sliding_window": 24,
        "pad_token_id": 0,
    },
    "glm4_moe": DECODER
    | {
        "model_type": "glm4_moe",
        "head_dim": 16,
        "n_routed_experts": 3,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 96,
        "first_k_dense_replace": 0,
    },
    "deepseek_v3": DECODER | LATENT,
    "deepseek_v2": DECODER | LATENT | {"model_type": "deepseek_v2"},
    "deepseek_v3, wide values": DECODER | LATENT | {"q_lora_rank": None, "v_head_dim": 16},
    "mistral4": DECODER
    | LATENT
    | {
        "model_type": "mistral4",
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 4,
            "llama_4_scaling_beta": 0.1,
        },
        "max_position_embeddings": 128,
    },
    "minimax_m2": DECODER
    | {
        "model_type": "minimax_m2",
        "head_dim": 16,
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
        "rotary_dim": 8,
    },
    "olmo2": DECODER | {"model_type": "olmo2", "pad_token_id": 0},
    "apertus": DECODER | {"model_type": "apertus", "pad_token_id": 0, "hidden_act": "xielu"},
    "arcee": DECODER | {"model_type": "arcee", "hidden_act": "relu2"},
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": WIDTH,
        "n_inner": 160,
        "n_layer": 1,
        "n_head": 4,
        "vocab_size": 97,
        "n_positions": 64,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
    "opt": {
        "model_type": "opt",
        "hidden_size": WIDTH,
        "word_embed_proj_dim": WIDTH,
        "ffn_dim": 160,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "vocab_size": 97,
        "max_position_embeddings": 64,
    },
    "dinov2": VIT | {"model_type": "dinov2", "mlp_ratio": 3},
}
ENCODERS = ("siglip", "clip", "whisper", "dinov2", "ovis2")
SHARES = ({"linear": 250}, {"norm": Norm.LAYER}, {"softmax": 255}, {"linear_out": True})
STEPS = {"ovis2": tuple(ProjectorStep(**step) for step in SHARES)}
CLASS_TOKEN = ("clip", "dinov2")
EMBED, BLOCK, LAST = 0, 1, 2
NEEDS = {
    "frozen, through": Needs(True, False),
    "trained, first": Needs(False, True),
    "trained, through": Needs(True, True),
}
LENGTHS = {"equal": (64, 64, 64), "unequal": (64, 48)}


def module_of(name: str) -> Module:
    config = (CONFIGS | MORE)[name]
    if name in ENCODERS:
        modality = "audio" if name == "whisper" else "image"
        return module_from_config(
            config,
            name=name,
            modality=modality,
            trainable=Trainable.ALL,
            projector=STEPS.get(name, Projector.MLP),
            llm_width=96,
        )
    return module_from_config(config, name=name, modality="text", trainable=Trainable.ALL)


def items_of(name: str, lengths: tuple[int, ...]) -> MicrobatchData:
    """Items of those lengths, with what the first and last layer of the module reads."""
    raw: tuple[Tensor, ...] = ()
    tokens_in = lengths
    if name == "whisper":
        raw = tuple(torch.randn(20, 2 * length) for length in lengths)
    elif name in ENCODERS:
        raw = tuple(torch.randn(3, 4 * 8, 4 * length // 8) for length in lengths)
        tokens_in = tuple(length + (name in CLASS_TOKEN) for length in lengths)
    tokens = torch.randint(1, 97, (sum(lengths),))
    return MicrobatchData(
        items=tuple(Item(index, 0) for index in range(len(lengths))),
        tokens_in=tokens_in,
        tokens_out=lengths,
        raw=raw,
        input_ids=tokens,
        labels=tokens,
    )


def materialised(layer: StageLayer, dtype: torch.dtype, *, trained: bool) -> StageLayer:
    for name, empty in list(layer.named_parameters()):
        owner, _, attribute = name.rpartition(".")
        value = torch.nn.Parameter((0.02 * torch.randn(empty.shape)).to(dtype), requires_grad=trained)
        setattr(layer.get_submodule(owner), attribute, value)
    return layer.eval()


def masked(data: MicrobatchData, lengths: tuple[int, ...], mask: str) -> MicrobatchData:
    samples = [Sample(i, (Segment("text", 0, n, n),), mask) for i, n in enumerate(lengths)]
    fields = sample_bitfield([samples])
    return replace(data, attention=AttentionMask(fields, fields, torch.device("cpu")))


def saved_bytes(
    name: str,
    index: int,
    needs: Needs,
    lengths: tuple[int, ...],
    dtype: torch.dtype,
    mask: str | None = None,
) -> int:
    """Bytes of the storages that autograd saves in the forward of a real layer, weights aside."""
    torch.manual_seed(0)
    adapter, data = adapter_of(module_of(name)), items_of(name, lengths)
    if mask is not None:
        data = masked(data, lengths, mask)
    layer = materialised(adapter.build(index), dtype, trained=needs.weight_grad)
    weights = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}
    data = replace(data, raw=tuple(raw.to(dtype) for raw in data.raw))
    hidden = torch.randn(sum(data.tokens_in), WIDTH, dtype=dtype, requires_grad=needs.input_grad)
    held: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            held[tensor.untyped_storage().data_ptr()] = tensor.detach()
        return tensor.detach()

    context = adapter.context(data, torch.device("cpu"), dtype)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        layer(None if index == EMBED else hidden, {}, context)
    return sum(tensor.untyped_storage().nbytes() for tensor in held.values())


def accounted_bytes(
    name: str,
    index: int,
    needs: Needs,
    lengths: tuple[int, ...],
    size: int = 4,
    masked_tokens: int = 0,
) -> int:
    data = items_of(name, lengths)
    work = Work((RowWork(sum(data.tokens_in), sum(data.tokens_out), sum(n * n for n in data.tokens_in)),))
    is_gathered, inside = len(set(lengths)) > 1, tuple(sorted(data.tokens_in))
    setting = Setting(work, Grid(), size, is_gathered, lengths=inside, masked_tokens=masked_tokens)
    layer = module_of(name).layers[index]
    return eager_kept(layer, needs, setting).num_bytes + shared_bytes(layer, needs, setting)


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("needs", NEEDS.values(), ids=NEEDS)
@pytest.mark.parametrize("index", [BLOCK, LAST])
@pytest.mark.parametrize("name", CONFIGS)
def test_account_is_what_autograd_saves(name: str, index: int, needs: Needs, lengths: tuple[int, ...]):
    """Blocks, projectors and heads: never less, and within 2 %."""
    saved = saved_bytes(name, index, needs, lengths, torch.float32)
    accounted = accounted_bytes(name, index, needs, lengths)
    assert saved <= accounted <= 1.02 * saved


@pytest.mark.parametrize("needs", ["frozen, through", "trained, through"])
@pytest.mark.parametrize("name", MORE)
def test_account_of_blocks_of_other_shapes(name: str, needs: str):
    """Items of two lengths, one beyond the window where there is one."""
    saved = saved_bytes(name, BLOCK, NEEDS[needs], LENGTHS["unequal"], torch.float32)
    accounted = accounted_bytes(name, BLOCK, NEEDS[needs], LENGTHS["unequal"])
    assert saved <= accounted <= 1.02 * saved


@pytest.mark.parametrize("name", ["llama", "siglip", "clip", "whisper"])
def test_account_of_first_layers(name: str):
    """Trained: pixels, frames or indices. Frozen with nothing upstream: nothing."""
    needs = NEEDS["trained, first"]
    saved = saved_bytes(name, EMBED, needs, LENGTHS["equal"], torch.float32)
    accounted = accounted_bytes(name, EMBED, needs, LENGTHS["equal"])
    # Indices of two tables at most, 8 bytes each, on top.
    assert saved <= accounted <= 1.02 * saved + 16 * 3 * 65
    assert accounted_bytes(name, EMBED, Needs(False, False), LENGTHS["equal"]) == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "siglip",
        "whisper",
        "glm4",
        "glm4_moe",
        "deepseek_v2",
        "deepseek_v3",
        "mistral4",
        "minimax_m2",
    ],
)
def test_account_in_other_precisions(name: str, dtype: torch.dtype):
    for needs in NEEDS.values():
        for index in (BLOCK, LAST):
            saved = saved_bytes(name, index, needs, LENGTHS["equal"], dtype)
            accounted = accounted_bytes(name, index, needs, LENGTHS["equal"], dtype.itemsize)
            assert saved <= accounted <= 1.02 * saved
