"""FLOP of transformers' own models, as PyTorch counts them, are those of modules from their configs."""

from typing import Any

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from tests.plans import disjoint_plan
from workbench.cost.roofline import layer_flop
from workbench.data.sample import Sample, Segment
from workbench.model.hf_config import module_from_config
from workbench.model.layer import LayerKind
from workbench.model.model_graph import ModelGraph, Module, connect
from workbench.model.trainable import Trainable
from workbench.plan.flop import model_flop
from workbench.plan.work import even_work_of

SAMPLES, TOKENS, VOCABULARY, WIDTH = 2, 24, 256, 64
SIZES = {
    "hidden_size": WIDTH,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "bos_token_id": None,
    "eos_token_id": None,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
Tower = tuple[torch.nn.Module, Any, dict[str, torch.Tensor], Segment]

LANGUAGE_MODELS = {
    "Llama": {},
    "Qwen3": {"head_dim": 32},
    "Gemma3Text": {"head_dim": 32, "sliding_window": 512},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen2Moe": EXPERTS | {"shared_expert_intermediate_size": 96},
    "Qwen3Moe": EXPERTS | {"head_dim": 16},
    "DeepseekV3": LATENT,
}
VISION = {
    "hidden_size": WIDTH,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 56,
    "patch_size": 14,
    "attn_implementation": "eager",
}


def language_model(name: str, trainable: Trainable) -> tuple[torch.nn.Module, Module]:
    config = getattr(transformers, f"{name}Config")(**SIZES | LANGUAGE_MODELS[name])
    config._attn_implementation = config._experts_implementation = "eager"  # counted, unlike fused kernels
    model = getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")(config)
    return model.requires_grad_(trainable is Trainable.ALL), made(
        config, name="llm", modality="text", trainable=trainable
    )


def made(config: Any, **arguments: Any) -> Module:
    return module_from_config(config.to_dict() | {"model_type": config.model_type}, **arguments)


@pytest.mark.parametrize("trainable", [Trainable.ALL, Trainable.NONE])
@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_language_models(name: str, trainable: Trainable):
    """Forward, and backward where anything is trained; scores of all pairs, as eager attention has."""
    model, module = language_model(name, trainable)
    with FlopCounterMode(display=False) as counter:
        logits = model(input_ids=torch.zeros(SAMPLES, TOKENS, dtype=torch.long), use_cache=False).logits
        if logits.requires_grad:
            logits.sum().backward()
    batch = [Sample(index, (Segment("text", 0, TOKENS, TOKENS),), "full") for index in range(SAMPLES)]
    plan = disjoint_plan(ModelGraph(name="text", modules=(module,)), batch)
    assert model_flop(plan) == counter.get_total_flops()


def siglip() -> Tower:
    config = transformers.SiglipVisionConfig(**VISION)
    config.vision_use_head = False
    model = transformers.SiglipVisionModel(config)
    return model, config, {"pixel_values": torch.zeros(1, 3, 56, 56)}, Segment("vision", 0, 16, 16)


def clip() -> Tower:
    config = transformers.CLIPVisionConfig(**VISION)
    model = transformers.CLIPVisionModel(config)
    return model, config, {"pixel_values": torch.zeros(1, 3, 56, 56)}, Segment("vision", 0, 17, 16)


def whisper() -> Tower:
    config = transformers.WhisperConfig(
        d_model=WIDTH,
        encoder_layers=3,
        encoder_attention_heads=4,
        encoder_ffn_dim=160,
        max_source_positions=50,
        attn_implementation="eager",
    )
    return (
        WhisperEncoder(config),
        config,
        {"input_features": torch.zeros(1, 80, 100)},
        Segment("audio", 0, 50, 50),
    )


def qwen2_5_vl(rows: int = 16, columns: int = 16) -> Tower:
    """Blocks with attention in windows of 8 x 8 patches, all of them full, and over the whole image."""
    config = Qwen2_5_VLVisionConfig(
        depth=4,
        hidden_size=WIDTH,
        intermediate_size=112,
        num_heads=4,
        fullatt_block_indexes=[1, 3],
        out_hidden_size=WIDTH,
    )
    config._attn_implementation = "eager"
    patches = torch.zeros(rows * columns, 3 * 2 * 14 * 14)
    inputs = {"hidden_states": patches, "grid_thw": torch.tensor([[1, rows, columns]])}
    segment = Segment("vision", 0, rows * columns, rows * columns // 4, grid=(rows, columns))
    return Qwen2_5_VisionTransformerPretrainedModel(config), config, inputs, segment


@pytest.mark.parametrize("build", [siglip, clip, whisper, qwen2_5_vl])
def test_encoders(build):
    """Forward of one item; a projector counts where transformers' tower has one, as Qwen's has its merger."""
    ours, theirs = forwards(build(), has_projector=build is qwen2_5_vl)
    assert ours == theirs


def test_windows_at_the_edge_of_an_image_count_as_full():
    """Of 12 x 20 patches: two windows of 64 patches, three of 32 and one of 16; see `docs/limits.md`."""
    ours, theirs = forwards(qwen2_5_vl(12, 20), has_projector=True)
    pairs = 2 * 64**2 + 3 * 32**2 + 16**2
    assert ours - theirs == 2 * 4 * WIDTH * (12 * 20 * 64 - pairs)


def forwards(tower: Tower, *, has_projector: bool) -> tuple[float, int]:
    """FLOP of an item's forward by its module, and as PyTorch counts them."""
    model, config, inputs, segment = tower
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(**inputs)
    encoder = made(config, name="encoder", modality=segment.modality, llm_width=WIDTH)
    _, llm = language_model("Llama", Trainable.ALL)
    sample = Sample(0, (segment, Segment("text", 0, 3, 3)))
    plan = disjoint_plan(connect("composite", (encoder, llm)), [sample])
    [microbatch] = [each for each in plan.microbatches if each.module == "encoder"]
    layers = [layer for layer in encoder.layers if has_projector or layer.kind is not LayerKind.PROJECTOR]
    work = even_work_of(plan, microbatch)
    return sum(layer_flop(layer, work) for layer in layers), counter.get_total_flops()
