"""transformers' own composites: built, their weights by module, their features and their loss in float64."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.models.auto import modeling_auto

from experiments.doors.detours import OWN_ROUTERS
from experiments.doors.whole_configs import CONFIGS
from runtime.data.batches import SyntheticSource, microbatch_data
from runtime.models.glm import CORRECTION
from runtime.models.norm import replace_parts, widen_norms
from runtime.models.vision_gemma4 import as_processed
from runtime.models.vision_siglip2 import flat_patches
from workbench.data.corpus import Tiled
from workbench.data.sample import Sample, Segment
from workbench.masks.patterns import CAUSAL
from workbench.model.composites.composite import AUDIO, LLM, VISION, Part, Parts
from workbench.model.hf_config import module_from_config
from workbench.model.item_tokens import clip_tokens, image_tokens, native_tokens
from workbench.model.model_graph import TEXT, Module
from workbench.plan.plan import Plan

Items = Sequence[Tensor]  # of one modality, in one tensor where they are alike
F64 = torch.float64
OFFSET = 1.0  # of norms' weights, by the start of their classes' names
ADDS_ONE = ("GemmaRMS", "Gemma2", "Gemma3", "Qwen3_5")
MASKS = {
    "gemma3": "gemma",
    "gemma4": "gemma4",
    "paligemma": "prefix_lm",
}  # of samples, where not all of it is causal
TILED = ("llava_next", "llava_onevision")  # put learned tokens between the rows of an image
RENAMED = "kimi_k25"  # what transformers names otherwise in the files it writes, fuses and permutes
CONSTANTS = (CORRECTION, "layer_scalar", "std_bias", "std_scale")  # ends of names of buffers in checkpoints
IMAGE, SOUND = 90, 91  # the ids that stand where an image or a clip does
CLIP_S = 0.34  # a window and a part of one
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


def qwen_features(model: nn.Module, image: Tensor) -> Tensor:
    """Features of patches in the layout of Qwen's processor: merged blocks, channels, frames, pixels.

    The tower's output is followed by the outputs of single blocks, where there are any.
    """
    rows, columns = image.shape[1] // 4, image.shape[2] // 4
    x = image[None].expand(2, -1, -1, -1).reshape(1, 2, 3, rows // 2, 2, 4, columns // 2, 2, 4)
    flat = x.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(rows * columns, -1)
    outputs = model(flat, torch.tensor([[1, rows, columns]]))
    return torch.cat((outputs.pooler_output, *getattr(outputs, "deepstack_features", ())), dim=1)


def read_state(model: Any, images: Tensor) -> Tensor:
    """Features of whole images in LLaVA's models, before tiles are joined."""
    config, parts = model.config, model.model
    states = parts.vision_tower(images, output_hidden_states=True).hidden_states[config.vision_feature_layer]
    patch_states = states if config.vision_feature_select_strategy == "full" else states[:, 1:]
    return parts.multi_modal_projector(patch_states).flatten(0, 1)


def pooled(model: Any, images: Tensor, **more: Any) -> Tensor:
    features = model.model.get_image_features(pixel_values=images, **more).pooler_output
    return torch.cat([item_features.reshape(-1, item_features.shape[-1]) for item_features in features])


def seen_in_patches(model: Any, images: Tensor) -> Tensor:
    """Features of LFM2-VL, which reads patches as its processor lays them."""
    flat = flat_patches(images, model.config.vision_config.patch_size)
    grid = torch.tensor([[side // model.config.vision_config.patch_size for side in images.shape[2:]]])
    mask = torch.ones(flat.shape[:2], dtype=torch.long)
    return pooled(model, flat, spatial_shapes=grid.expand(len(images), 2), pixel_attention_mask=mask)


def heard(model: Any, clips: Tensor) -> Tensor:
    features = model.model.get_audio_features(clips).pooler_output
    return torch.cat([item_features.reshape(-1, item_features.shape[-1]) for item_features in features])


def heard_whole(model: Any, clips: Tensor, **more: Any) -> Tensor:
    """Features of clips without padding in Qwen2-Audio."""
    parts = model.model
    return parts.multi_modal_projector(parts.audio_tower(clips, **more).last_hidden_state).flatten(0, 1)


def heard_by_flamingo(model: Any, clips: Items) -> Tensor:
    """Features in Audio Flamingo 3, which pads windows and masks the padding."""
    num_frames = 2 * model.config.audio_config.max_source_positions
    features = []
    for clip in clips:
        filled = nn.functional.pad(clip, (0, num_frames - clip.shape[1]))
        is_heard = torch.arange(num_frames) < clip.shape[1]
        num_tokens = ((clip.shape[1] - 1) // 2 + 1) // 2
        features.append(
            heard_whole(model, filled[None], input_features_mask=is_heard[None].long())[:num_tokens]
        )
    return torch.cat(features)


def heard_by_asr(model: Any, clips: Items) -> Tensor:
    """Qwen3-ASR's, of the windows of one clip; it wants whole chunks and hides what fills them up."""
    clip = torch.cat(tuple(clips), dim=1)
    chunk = 2 * model.config.audio_config.n_window
    filled = nn.functional.pad(clip, (0, -clip.shape[1] % chunk))
    is_heard = (torch.arange(filled.shape[1]) < clip.shape[1]).long()
    return model.model.get_audio_features(filled[None], is_heard[None]).pooler_output


def seen_by_qwen(model: Any, images: Items) -> Tensor:
    return torch.cat([qwen_features(model.model.visual, image) for image in images])


def patches_of_kimi(image: Tensor) -> tuple[Tensor, Tensor]:
    """[patches, 3, 4, 4] of an image row by row, and its grid, as Kimi's processor gives them."""
    rows, columns = image.shape[1] // 4, image.shape[2] // 4
    x = image.reshape(3, rows, 4, columns, 4).permute(1, 3, 0, 2, 4)
    return x.flatten(0, 1), torch.tensor([[1, rows, columns]])


def seen_by_kimi(model: Any, images: Items) -> Tensor:
    seen = (model.model.get_image_features(*patches_of_kimi(image)).pooler_output for image in images)
    return torch.cat([features for (features,) in seen])


def seen_by_gemma4(model: Any, images: Items) -> Tensor:
    cut = [as_processed(image, model.config.vision_config.patch_size) for image in images]
    seen = (model.model.get_image_features(*each).pooler_output for each in cut)
    return torch.cat([features for (features,) in seen])


def seen_by_llama(model: Any, images: Tensor) -> Tensor:
    features: Tensor = model.multi_modal_projector(model.vision_model(images).last_hidden_state)
    return features.flatten(0, 1)


def perceived_by_omni(model: Any, items: Items) -> Tensor:
    """Features of images, or of the windows of one clip, in Qwen2.5-Omni."""
    if items[0].dim() == len(("channel", "row", "column")):
        return seen_by_qwen(model, items)
    clip = torch.cat(tuple(items), dim=1)
    mask = torch.ones(1, clip.shape[1], dtype=torch.long)
    return model.model.get_audio_features(clip[None], feature_attention_mask=mask).last_hidden_state


def pooled_in_sizes(model: Any, images: Tensor) -> Tensor:
    return pooled(model, images, image_sizes=[images.shape[2:]] * len(images))


FEATURES: Mapping[str, Callable[[Any, Any], Tensor]] = {
    "llava": read_state,
    "llava, mistral, no bias": read_state,
    "llava_next": read_state,
    "llava_onevision": read_state,
    "internvl": pooled,
    "internvl, earlier state": pooled,
    "internvl, experts": pooled,
    "gemma3": pooled,
    "gemma4": seen_by_gemma4,
    "gemma4, experts": seen_by_gemma4,
    "paligemma": pooled,
    "idefics3": lambda model, images: pooled(model, images[None]),
    "smolvlm": lambda model, images: pooled(model, images[None]),
    **dict.fromkeys(("mistral3", "mistral3, ministral 3", "mistral3, mistral small 4"), pooled_in_sizes),
    "lighton_ocr": pooled_in_sizes,
    "aya_vision": pooled,
    "aya_vision, earlier state": pooled,
    "cohere2_vision": pooled,
    "lfm2_vl": seen_in_patches,
    "lfm2_vl, plain": seen_in_patches,
    "deepseek_vl": pooled,
    "qwen2_vl": seen_by_qwen,
    "qwen2_5_vl": seen_by_qwen,
    "qwen3_vl": seen_by_qwen,
    "qwen3_vl_moe": seen_by_qwen,
    "qwen3_5": seen_by_qwen,
    "qwen3_5_moe": seen_by_qwen,
    "glm4v": seen_by_qwen,
    "glm4v, tied": seen_by_qwen,
    "glm4v_moe": seen_by_qwen,
    "glm46v": seen_by_qwen,
    "glm46v, experts": seen_by_qwen,
    "kimi_k25": seen_by_kimi,
    "kimi_k25, tied": seen_by_kimi,
    "qwen2_audio": heard_whole,
    "audioflamingo3": heard_by_flamingo,
    "voxtral": heard,
    "qwen3_asr": heard_by_asr,
    "qwen2_5_omni_thinker": perceived_by_omni,
    "qwen3_omni_moe_thinker": perceived_by_omni,
    "llama4": seen_by_llama,
}


def perceived(name: str, model: Any, items: Items) -> Tensor:
    """The whole model's features of items of one modality."""
    alike = len({item.shape for item in items}) == 1
    return FEATURES[name](model, torch.stack(list(items)) if alike else items)


def whole_model(config: dict[str, Any]) -> Any:
    """transformers' own model in float64."""
    built_model: Any = built(config)
    for norm in _classes(built_model, "RMSNorm"):
        widen_norms(built_model, norm, OFFSET if norm.__name__.startswith(ADDS_ONE) else 0.0)
    for ending, own_router in OWN_ROUTERS:
        for router in _classes(built_model, ending):
            replace_parts(built_model, router, own_router)
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


LOSSES = [name for name in FEATURES if name not in TILED]


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
        key = "mm_token_type_ids" if name == "gemma4" else "token_type_ids"
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
        logits = model.lm_head(llm_model(inputs_embeds=embedded[None], **more_inputs, **deeper)[0])[0]
    else:
        logits = model(inputs_embeds=embedded[None], **more_inputs).logits[0]
    loss: Tensor = nn.functional.cross_entropy(logits, last_input.labels)
    return loss
