"""What every model family holds, by the registries: listed, read, counted, built and accounted alike."""

from collections.abc import Mapping
from itertools import chain, islice
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM
from transformers.configuration_utils import PretrainedConfig
from transformers.models.janus.modeling_janus import JanusVisionModel
from transformers.models.llama4.modeling_llama4 import Llama4VisionModel
from transformers.models.minicpm_ocr.modeling_minicpm_ocr import MiniCPMOcrVisionModel
from transformers.models.minicpmv4_6.modeling_minicpmv4_6 import MiniCPMV4_6VisionModel
from transformers.models.mllama.modeling_mllama import MllamaForCausalLM, MllamaVisionModel
from transformers.models.ovis2.modeling_ovis2 import Ovis2VisionTransformer
from transformers.models.paddleocr_vl.modeling_paddleocr_vl import PaddleOCRVisionTransformer
from transformers.models.phi4_multimodal.modeling_phi4_multimodal import Phi4MultimodalAudioModel
from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni as omni
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel
from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as omni_3
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from experiments.fidelity.family_memory import EXAMPLES, cases_of, module_of
from runtime.data.batches import SyntheticSource, microbatch_data
from runtime.frontend.items import reader_of
from runtime.models.adapter import Adapter
from runtime.models.choose import ADAPTERS, adapter_of
from runtime.models.encoder import EncoderAdapter
from runtime.models.glm import CORRECTION
from runtime.reference import whole_stage
from tests import cross_models, tiny_models
from tests.command_line import accept, workbench
from tests.encoder_cases import CASES as ENCODERS
from tests.encoder_cases import module_of as encoder_of
from tests.encoder_originals import unified_frames, unified_patches
from tests.test_adapters_decoders import CASES as DECODERS
from tests.test_adapters_decoders import INSIDE, NOT_AUTO
from tests.test_adapters_llama4 import LLAMA4
from tests.test_memory_eager import materialised
from workbench.cost.roofline import Grid
from workbench.data.sample import Sample, Segment
from workbench.export import mimo_limits, torchtitan
from workbench.export.registry import BY_NAME
from workbench.memory.eager import eager_kept, shared_bytes
from workbench.memory.setting import Setting
from workbench.model.families.family import Architecture, Encoder, Generator, LanguageModel
from workbench.model.families.registry import ARCHITECTURES, FAMILIES
from workbench.model.frozen import Needs
from workbench.model.hf_config import module_from_config
from workbench.model.model_graph import ModelGraph, Module
from workbench.model.projector import Projector
from workbench.plan.runnable import check_family
from workbench.plan.work import work_of

# Encoders that transformers builds inside larger models alone, and a decoder beside its tower.
PARTS = {
    **NOT_AUTO,
    "gemma4_unified_audio": unified_frames,
    "gemma4_unified_vision": unified_patches,
    "janus_vision_model": JanusVisionModel,
    "llama4_vision_model": Llama4VisionModel,
    "minicpm_ocr_vision": MiniCPMOcrVisionModel,
    "minicpmv4_6_vision": MiniCPMV4_6VisionModel,
    "mllama_text_model": MllamaForCausalLM,
    "mllama_vision_model": MllamaVisionModel,
    "ovis2_vision": Ovis2VisionTransformer,
    "paddleocr_vl_vision": PaddleOCRVisionTransformer,
    "phi4_multimodal_audio": Phi4MultimodalAudioModel,
    "qwen2_5_omni_audio_encoder": omni.Qwen2_5OmniAudioEncoder,
    "qwen2_5_omni_vision_encoder": omni.Qwen2_5OmniVisionEncoder,
    "qwen3_omni_moe_audio_encoder": omni_3.Qwen3OmniMoeAudioEncoder,
    "qwen3_omni_moe_vision_encoder": omni_3.Qwen3OmniMoeVisionEncoder,
    "qwen2_5_vl_vision": Qwen2_5_VisionTransformerPretrainedModel,
    "qwen2_vl_vision": Qwen2VisionTransformerPretrainedModel,
    "whisper": WhisperEncoder,
}
STATED = {  # what is refused where it is absent
    "gemma4_text": {"hidden_size_per_layer_input": 0},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}
    },
}
FEATURES_WIDTH = {
    "qwen3_vl_vision": 3584,
    "qwen3_omni_moe_vision_encoder": 3584,
    "glm4v_vision": 4096,
    "glm_ocr_vision": 1536,
}  # what its blocks give, and so an LLM behind it has
ONE_MASK = ("mllama tower",)  # its blocks keep the one mask that the whole stage has; held by its runs
TEXT_SAMPLE = Sample(0, (Segment("text", 0, 5, 5),))
FULL_SIZES = (
    *("mistral4", "minimax_m2", "solar_open", "ernie4_5_moe", "olmoe", "dots1", "hunyuan_v1_moe"),
    *("ministral3", "smollm3", "ernie4_5", "starcoder2", "apertus", "granite", "olmo2", "olmo3"),
    *("exaone4", "seed_oss", "arcee", "nemotron", "hunyuan_v1_dense", "aria_text", "cohere2", "lfm2"),
)
LEFT_OPEN: dict[str, dict[str, object]] = {  # by transformers' defaults
    "dots1": {"n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 2},
    "nemotron": {"num_key_value_heads": 8},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 8},
}
FROM_TRANSFORMERS = [
    name
    for name, (family, _) in EXAMPLES.items()
    if not isinstance(family, Generator) and family.model_type not in INSIDE
]
MODULES: dict[str, Module] = {
    **{f"{name}, example": module_of(name) for name in EXAMPLES},
    **{name: tiny_models.llm(config) for name, config in (DECODERS | tiny_models.DECODERS).items()},
    "llama4": tiny_models.llm(LLAMA4),
    "llama, biases": tiny_models.llm(tiny_models.LLAMA | {"attention_bias": True, "mlp_bias": True}),
    "phi, norms of queries and keys": tiny_models.llm(tiny_models.DECODERS["phi"] | {"qk_layernorm": True}),
    **{name: encoder_of(case) for name, case in ENCODERS.items()},
    "siglip": tiny_models.encoder(tiny_models.SIGLIP, "vision"),
    "clip": tiny_models.encoder(tiny_models.CLIP, "vision"),
    "clip, linear": tiny_models.encoder(tiny_models.CLIP, "vision", projector=Projector.LINEAR),
    "whisper": tiny_models.encoder(tiny_models.WHISPER, "audio"),
    "mllama, three crossings": cross_models.language(),
}


def config_class_of(adapter: Adapter, kind: str) -> type[PretrainedConfig]:
    """transformers' own; Qwen2-Audio's adapter reads its configuration as Whisper's."""
    known = chain((type(adapter.config),), AutoModel._model_mapping)
    return next(each for each in known if each.model_type == kind)


def original(adapter: Adapter, family: Architecture, config: Mapping[str, Any]) -> nn.Module:
    """transformers' own model, without memory."""
    read = config_class_of(adapter, family.model_type).from_dict(dict(config))
    with torch.device("meta"):
        if family.model_type in PARTS:
            return PARTS[family.model_type](read)
        auto = AutoModelForCausalLM if isinstance(family, LanguageModel) else AutoModel
        return auto.from_config(read)


def test_every_architecture_is_listed_once_and_has_an_example() -> None:
    listed = [family.model_type for family in FAMILIES if family.model_type is not None]
    assert sorted(listed) == sorted(ARCHITECTURES)
    assert set(ADAPTERS) <= set(listed)
    assert all(family.examples for family in ARCHITECTURES.values())


def test_what_cannot_run_has_a_reason_and_nothing_else_has() -> None:
    for family in FAMILIES:
        works = family.plans and family.runs(ADAPTERS)
        assert works == (not family.reason), family.name


def test_the_command_lists_them() -> None:
    listed = accept("models")
    assert "planned, not run" not in listed.stdout
    assert all(family.name in listed.output for family in FAMILIES)
    record = workbench("models", "--json")
    assert '"EVA-CLIP"' in record.output
    assert '"not in transformers"' in record.output


def test_every_family_is_held_against_transformers() -> None:
    towers = (tiny_models.SIGLIP, tiny_models.SIGLIP2, tiny_models.CLIP, tiny_models.WHISPER)
    configs = (*towers, cross_models.VISION)
    more = (*tiny_models.DECODERS.values(), cross_models.LANGUAGE, LLAMA4, *DECODERS.values())
    tested = {case.config["model_type"] for case in ENCODERS.values()}
    runs = {kind for kind, family in ARCHITECTURES.items() if family.runs(ADAPTERS)}
    assert tested | {config["model_type"] for config in (*configs, *more)} == runs - {"dit", *INSIDE}


@pytest.mark.parametrize("name", FROM_TRANSFORMERS)
def test_weights_are_those_of_transformers(name: str) -> None:
    """Names and shapes, the projector and what is not used aside; as many as the planner counts."""
    module = module_of(name)
    adapter, (family, example) = adapter_of(module), EXAMPLES[name]
    ours = {key: shape for key, shape in adapter.shapes().items() if not key.startswith("projector.")}
    built = original(adapter, family, example.config).named_parameters()
    weights = [(key, weight) for key, weight in built if not key.endswith(CORRECTION)]
    used = {key: tuple(weight.shape) for key, weight in weights if not key.startswith(adapter.ignored)}
    assert ours == used
    assert sum(torch.Size(shape).numel() for shape in adapter.shapes().values()) == module.num_parameters


@pytest.mark.parametrize("kind", FULL_SIZES)
def test_full_sizes_are_counted_as_transformers_builds_them(kind: str) -> None:
    """Of transformers' defaults, the published model's of most."""
    config = {"model_type": kind, **LEFT_OPEN.get(kind, {})}
    module = module_from_config(config, name="llm", modality="text")
    weights = original(adapter_of(module), ARCHITECTURES[kind], config).named_parameters()
    counted = sum(weight.numel() for key, weight in weights if not key.endswith(CORRECTION))
    assert module.num_parameters == counted


@pytest.mark.parametrize("name", list(MODULES))
def test_layers_hold_what_the_plan_says(name: str) -> None:
    module = MODULES[name]
    adapter = adapter_of(module)
    for index, layer in enumerate(module.layers):
        built = adapter.build(index)
        assert sum(each.numel() for each in built.parameters()) == layer.num_parameters, layer.name
        assert all(each.is_meta for each in built.parameters())
        assert not any(each.is_meta for each in built.buffers())


@pytest.mark.parametrize("name", [name for name in EXAMPLES if isinstance(EXAMPLES[name][0], Encoder)])
def test_items_of_users_are_as_large_as_those_of_plans(name: str) -> None:
    module, (_, example) = module_of(name), EXAMPLES[name]
    adapter = adapter_of(module)
    shape = adapter.raw_shape(Segment(module.modality, 0, *example.tokens))
    if isinstance(adapter, EncoderAdapter):
        assert len(shape) == adapter.item_dims
        assert adapter.item_size(shape)[:2] == example.tokens
    else:
        with pytest.raises(
            ValueError, match="there is no rule for the items of MllamaVisionModel; a job file can"
        ):
            reader_of(MllamaVisionModel(adapter.config), adapter)


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name not in ONE_MASK])
def test_a_blocks_account_is_what_autograd_saves(name: str) -> None:
    """Within 2 % of one item's."""
    torch.manual_seed(0)
    module = module_of(name)
    batch = (Sample(0, (Segment(module.modality, 0, *EXAMPLES[name][1].tokens),)),)
    plan = tiny_models.plan_of(ModelGraph(name="alone", modules=(module,)), batch)
    data = microbatch_data(
        plan, whole_stage(module), plan.microbatches[0], SyntheticSource(1), dtype=torch.float32
    )
    adapter = adapter_of(module)
    index = adapter.raw_layer + 1
    block = materialised(adapter.build(index), torch.float32, trained=True)
    weights = {weight.untyped_storage().data_ptr() for weight in block.parameters()}
    hidden_TD = torch.randn(sum(data.tokens_in), module.layers[index - 1].out_width, requires_grad=True)
    held: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    context = adapter.context(data, torch.device("cpu"), torch.float32)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        y_TD = block(hidden_TD, {}, context)
    saved = sum(size for position, size in held.items() if position not in weights)
    work, needs = work_of(plan, plan.microbatches[0]), Needs(input_grad=True, weight_grad=True)
    setting = Setting(work, Grid(), 4, is_gathered=False, lengths=data.tokens_in)
    layer = module.layers[index]
    accounted = eager_kept(layer, needs, setting).num_bytes + shared_bytes(layer, needs, setting)
    assert y_TD.requires_grad
    assert accounted == pytest.approx(saved, rel=0.02)


@pytest.mark.parametrize(
    "kind",
    [
        kind
        for kind, family in ARCHITECTURES.items()
        if not isinstance(family, Generator) and family.runs(ADAPTERS)
    ],
)
def test_absent_keys_mean_what_transformers_takes_them_for(kind: str) -> None:
    family = ARCHITECTURES[kind]

    def layers(config: dict[str, object]) -> object:
        width = FEATURES_WIDTH.get(kind, 512)
        module = module_from_config(config, name="m", modality=family.modality, llm_width=width)
        return module.layers

    adapter, stated = adapter_of(module_of(next(iter(family.examples)))), STATED.get(kind, {})
    assert layers({"model_type": kind, **stated}) == layers(
        config_class_of(adapter, kind)(**stated).to_dict()
    )


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        (
            "exaone4",
            {"sliding_window": None},
            "layer_types must be given to run where sliding_window is null",
        ),
        ("qwen2_moe", {"use_sliding_window": True}, "use_sliding_window must be false to run, got true"),
        ("glm4_moe_lite", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "must be 1, .* got 0.5"),
        ("glm4_moe_lite", {"mlp_layer_types": ["sparse", "dense"] * 2}, "mlp_layer_types must be dense of"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv must be null, got 8.0; nearest: null"),
        ("dots1", {"n_shared_experts": None}, "n_shared_experts must be given to run; nearest: 2"),
        ("solar_open", {"n_group": 4}, "n_group must divide 4 experts into groups of 2 or more, got 4"),
        ("hunyuan_v1_dense", {"head_dim": None}, "head_dim must be given to run; nearest: 32"),
        ("hunyuan_v1_moe", {"rope_parameters": {"rope_type": "dynamic"}}, "rope type 'dynamic' depends on"),
        ("ministral3", {"rope_parameters": {"rope_type": "default"}}, "llama_4_scaling_beta must be given"),
        ("mistral4", {"num_key_value_heads": 2}, "num_key_value_heads must be num_attention_heads 4"),
    ],
)
def test_configurations_that_cannot_run_are_refused(kind: str, change: dict[str, Any], words: str) -> None:
    example = next(iter(ARCHITECTURES[kind].examples.values())).config
    with pytest.raises(ValueError, match=words) as info:
        check_family(tiny_models.llm({"model_type": kind, **example, **change}))
    assert "\n" not in str(info.value)


@pytest.mark.parametrize(
    ("target", "compared"), [("megatron", mimo_limits.FAMILIES), ("torchtitan", torchtitan.FAMILIES)]
)
def test_exports_refuse_language_models_that_were_not_compared(
    target: str, compared: tuple[str, ...]
) -> None:
    for name, (family, _) in EXAMPLES.items():
        if isinstance(family, LanguageModel) and family.model_type not in compared:
            for _, plan in islice(cases_of(name), 1):
                words = BY_NAME[target].refuses(plan)
                assert words, name
                assert "\n" not in words


def test_a_part_of_every_head_that_is_rotated_is_refused() -> None:
    """On the commit before, torchtitan was told of whole heads."""
    phi = EXAMPLES["phi3"][1].config
    for share, refused in ((0.5, True), (1.0, False)):
        module = tiny_models.llm({"model_type": "phi3", **phi, "partial_rotary_factor": share})
        plan = tiny_models.plan_of(ModelGraph(name="text", modules=(module,)), (TEXT_SAMPLE,))
        words = BY_NAME["torchtitan"].refuses(plan)
        assert bool(words and "rotated in part" in words) == refused


@pytest.mark.parametrize(
    "kind", [kind for kind, family in ARCHITECTURES.items() if isinstance(family, Encoder)]
)
def test_every_encoder_refuses_in_the_same_words(kind: str) -> None:
    for modality, width, message in (
        ("text", 64, f"{kind} is an encoder: modality must not be 'text'"),
        ("vision", None, "an encoder needs llm_width, the width its projector ends with"),
    ):
        with pytest.raises(ValueError, match=message):
            module_from_config({"model_type": kind}, name="m", modality=modality, llm_width=width)


@pytest.mark.parametrize(
    "kind", [kind for kind, family in ARCHITECTURES.items() if isinstance(family, LanguageModel)]
)
def test_every_language_model_refuses_in_the_same_words(kind: str) -> None:
    with pytest.raises(
        ValueError, match=f"{kind} is a language model: modality must be 'text', got 'vision'"
    ):
        module_from_config({"model_type": kind}, name="m", modality="vision")
