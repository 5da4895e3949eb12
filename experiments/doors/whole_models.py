"""transformers' own composites: built, their weights by module, their features and their loss in float64."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.models.auto import modeling_auto

from experiments.doors.detours import OWN_PARTS
from experiments.doors.whole_configs import CONFIGS
from experiments.doors.whole_features import FEATURES, Items, perceived
from experiments.doors.whole_sizes import CLIP_S
from runtime.data.batches import SyntheticSource, microbatch_data
from runtime.models.glm import CORRECTION
from runtime.models.norm import replace_parts, widen_norms
from workbench.data.corpus import Tiled
from workbench.data.sample import Sample, Segment
from workbench.masks.patterns import CAUSAL
from workbench.model.composites.composite import AUDIO, LLM, VISION, Part, Parts
from workbench.model.hf_config import module_from_config
from workbench.model.item_tokens import clip_tokens, image_tokens, native_tokens
from workbench.model.model_graph import TEXT, Module
from workbench.plan.plan import Plan

F64 = torch.float64
OFFSET = 1.0  # of norms' weights, by the start of their classes' names
ADDS_ONE = ("GemmaRMS", "Gemma2", "Gemma3", "Qwen3_5")
MASKS = {
    "gemma3": "gemma",
    "gemma4": "gemma4",
    "gemma4_unified": "gemma",
    "paligemma": "prefix_lm",
}  # of samples, where not all of it is causal
TILED = ("llava_next", "llava_onevision")  # put learned tokens between the rows of an image
# Named otherwise, fused or permuted in written files.
RENAMED = ("cosmos3_omni", "kimi_k25", "nemotron_h_omni", "qianfan_ocr")
# Ends of names of buffers in checkpoints.
CONSTANTS = (CORRECTION, "layer_scalar", "std_bias", "std_scale", "running_mean", "running_var")
IMAGE, SOUND = 90, 91  # the ids that stand where an image or a clip does
LONG_CLIP_S, IN_SECONDS = 2.34, ("qwen3_omni_moe_audio_encoder",)  # the same where windows are whole seconds
ID_KEYS = ("image_token_index", "image_token_id", "audio_token_index", "audio_token_id")


def built(config: dict[str, Any]) -> nn.Module:
    """transformers' own model."""
    names = {
        **modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        **modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
        **modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        "qwen2_5_omni": "Qwen2_5OmniForConditionalGeneration",
        "qwen3_omni_moe": "Qwen3OmniMoeForConditionalGeneration",
    }
    fields = {key: value for key, value in config.items() if key != "model_type"}
    model: nn.Module = getattr(transformers, names[config["model_type"]])(
        AutoConfig.for_model(config["model_type"], **fields)
    )
    return model


def original(config: dict[str, Any]) -> nn.Module:
    """transformers' own model, on the meta device."""
    with torch.device("meta"):
        return built(config)


def modules_of(parts: dict[str, Part]) -> dict[str, Module]:
    llm = module_from_config(parts[LLM].config, name=LLM, modality="text")
    modules = {LLM: llm}
    for name, part in parts.items():
        if name != LLM:
            modules[name] = module_from_config(
                part.config,
                name=name,
                modality=name,
                projector=part.projector,
                feature_layer=part.feature_layer,
                llm_width=llm.layers[0].out_width,
            )
    return modules


def owner_of(parts: Parts, weight: str) -> str:
    """The module of a weight: by the longest matching prefix, or the only encoder by its own names."""
    starts = [(start, name) for name, part in parts.modules.items() for start in part.weights.values()]
    return max((len(start), name) for start, name in starts if weight.startswith(start))[1]


def whole_model(config: dict[str, Any]) -> Any:
    """transformers' own model in float64."""
    built_model: Any = built(config)
    for norm in _classes(built_model, "RMSNorm"):
        widen_norms(built_model, norm, OFFSET if norm.__name__.startswith(ADDS_ONE) else 0.0)
    for ending, own_part in OWN_PARTS:
        for part in _classes(built_model, ending):
            replace_parts(built_model, part, own_part)
    if hasattr(built_model, "set_experts_implementation"):
        built_model.set_experts_implementation("eager")  # the others know no float64
    built_model.double().eval().requires_grad_()  # complex angles stay complex
    for buffer in _constants(built_model):
        buffer.data = buffer.float()
    return built_model


def _classes(model: nn.Module, ending: str) -> set[type[nn.Module]]:
    """Classes of a model's modules whose names end so."""
    return {type(module) for module in model.modules() if type(module).__name__.endswith(ending)}


def _constants(model: nn.Module) -> list[Tensor]:
    """What GLM's routers and Gemma 4 have beside weights, which ours keep in float32."""
    return [buffer for name, buffer in model.named_buffers() if name.endswith(CONSTANTS)]


LOSSES = [name for name in FEATURES if not name.startswith(TILED)]


def segments_of(module: Module) -> tuple[Segment, ...]:
    """An image, or the windows of one clip."""
    if module.modality == AUDIO:
        assert module.source is not None, "made from a configuration"
        seconds = LONG_CLIP_S if module.source.architecture in IN_SECONDS else CLIP_S
        sizes: Sequence[tuple[int, int]] = clip_tokens(module, seconds)
    else:
        size = native_tokens(module) or image_tokens(module, 16, 24)
        assert not isinstance(size, Tiled), "its tiles have one size"
        sizes = (size,)
    return tuple(Segment(module.modality, k, *tokens) for k, tokens in enumerate(sizes))


def sample_of(name: str, modules: Mapping[str, Module]) -> Sample:
    """A sample: five tokens of text before each encoder's items, and nine after all."""
    encoders = [module for module_name, module in modules.items() if module_name != LLM]
    parts: list[Segment] = []
    for k, encoder in enumerate(encoders):
        parts += [Segment(TEXT, k, 5, 5), *segments_of(encoder)]
    parts.append(Segment(TEXT, len(encoders), 9, 9))
    return Sample(0, tuple(parts), mask=MASKS.get(name, CAUSAL))


def saved(name: str, folder: Path) -> Any:
    """transformers' own model with nonzero weights, and its checkpoint."""
    ids = {key: SOUND if AUDIO in key else IMAGE for key in ID_KEYS if key in known_keys(name)}
    config = {**CONFIGS[name], **ids}
    torch.manual_seed(1)
    model = whole_model(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.05)
        for buffer in _constants(model):
            buffer.add_(torch.randn_like(buffer), alpha=0.2)
    model.save_pretrained(folder, save_original_format=not name.startswith(RENAMED))
    return model


def known_keys(name: str) -> set[str]:
    return set(whole_model(CONFIGS[name]).config.to_dict())


def processor_outputs(
    name: str, model: Any, ids: Tensor, sample: Sample, raw: Mapping[str, Items]
) -> dict[str, Tensor]:
    """A processor's outputs besides tokens, where the model reads them.

    Positions of three axes by transformers' own rule; Gemma's token types, 1 for images; PaliGemma's,
    0 for the prompt, which here is everything before the answer. Its own positions count from 1; the rotation
    by one more only changes the rounding of tables in float32.
    """
    if name in MASKS:
        is_image, positions = ids == IMAGE, torch.arange(len(ids))
        kinds = positions > is_image.nonzero().max() if name == "paligemma" else is_image
        key = "mm_token_type_ids" if name.startswith("gemma4") else "token_type_ids"
        return {key: kinds.long()[None], "position_ids": positions[None]}
    if VISION not in raw or not hasattr(getattr(model, "model", None), "get_rope_index"):
        return {}
    grids = torch.tensor([[1, *(side // 4 for side in image.shape[1:])] for image in raw[VISION]])
    if AUDIO in raw:
        frames = torch.tensor([sum(window.shape[1] for window in raw[AUDIO])])
        marked = marked_ids(model.config, sample)[None]
        is_token = torch.ones_like(marked)
        positions, _ = model.get_rope_index(marked, grids, attention_mask=is_token, audio_seqlens=frames)
        return {"position_ids": positions}
    positions, _ = model.model.get_rope_index(ids[None], (ids == IMAGE).int()[None], image_grid_thw=grids)
    return {"position_ids": positions}


def marked_ids(config: Any, sample: Sample) -> Tensor:
    """[T] tokens of images and clips, each after a start token; text is zeros."""
    starts = {VISION: config.vision_start_token_id, AUDIO: config.audio_start_token_id}
    ids: list[int] = []
    for segment in sample.segments:
        if segment.modality in starts and segment.k == 0:
            ids[-1] = starts[segment.modality]
        token = {VISION: IMAGE, AUDIO: SOUND}.get(segment.modality, 0)
        ids += [token] * segment.tokens_out
    return torch.tensor(ids)


def whole_loss(name: str, model: Any, plan: Plan) -> float:
    """The whole model's loss: the mean over the plan's targets."""
    return float(whole_loss_tensor(name, model, plan).detach())


def whole_loss_tensor(name: str, model: Any, plan: Plan) -> Tensor:
    """As `whole_loss`, with its graph."""
    source = SyntheticSource(0)
    first = {stage.module: stage for stage in reversed(plan.stages)}
    raw: dict[str, Items] = {}
    for module, stage in first.items():
        own_microbatches = [microbatch for microbatch in plan.microbatches if microbatch.module == module]
        raw[module] = [
            item
            for microbatch in own_microbatches
            for item in microbatch_data(plan, stage, microbatch, source, dtype=F64).raw
        ]
    del raw[LLM]
    llm, (sample,) = plan.microbatches[-1], plan.batch
    llm_input = microbatch_data(plan, first[LLM], llm, source, dtype=F64)
    last_input = microbatch_data(plan, plan.stages[-1], llm, source, dtype=F64)
    assert llm_input.input_ids is not None
    assert last_input.labels is not None
    ids = llm_input.input_ids.clone()
    ids[ids < 0] = IMAGE
    features = [perceived(name, model, raw[part.name]) for part in plan.model.modules[:-1]]
    embedded = model.get_input_embeddings()(ids)
    is_feature, width = llm_input.input_ids < 0, embedded.shape[1]
    embedded = torch.where(is_feature[:, None], 0.0, embedded)
    embedded[is_feature] = torch.cat([each[:, :width] for each in features])
    more_inputs = processor_outputs(name, model, ids, sample, raw)
    stacked = features[0][:, width:]
    if stacked.numel():  # the whole model gives them to its language model by itself, of pixels alone
        is_image = is_feature & (is_feature.cumsum(0) <= len(stacked))
        deeper = {"visual_pos_masks": is_image[None], "deepstack_visual_embeds": stacked.split(width, dim=1)}
        llm_model = model.model.language_model
        scale = getattr(model, "logit_scale", None) or 1.0
        states = llm_model(inputs_embeds=embedded[None], **more_inputs, **deeper)[0]
        logits = scale * model.lm_head(states)[0]
    else:
        logits = model(inputs_embeds=embedded[None], **more_inputs).logits[0]
    loss: Tensor = nn.functional.cross_entropy(logits, last_input.labels)
    return loss
