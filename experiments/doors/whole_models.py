"""transformers' own composites: built, their weights by module, their features and their loss in float64."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.models.auto import modeling_auto

from experiments.doors.whole_configs import CONFIGS
from runtime.data.batches import SyntheticSource, microbatch_data
from runtime.models.mixture import WideRouter
from runtime.models.norm import replace_parts, widen_norms
from runtime.models.vision_rotary import rotated
from workbench.model.composites.composite import LLM, Part, Parts
from workbench.model.hf_config import module_from_config
from workbench.model.item_tokens import clip_tokens, image_tokens, native_tokens
from workbench.model.model_graph import Module
from workbench.plan.plan import Plan

F64 = torch.float64
GEMMA_OFFSET = 1.0
MASKS = {"gemma3": "gemma", "paligemma": "prefix_lm"}  # of samples, where not all of it is causal
TILED = ("llava_next", "llava_onevision")  # put learned tokens between the rows of an image
IMAGE = 90  # the id that stands where an image or a clip does
ID_KEYS = ("image_token_index", "image_token_id", "audio_token_index", "audio_token_id")


def built(config: dict[str, Any]) -> nn.Module:
    """transformers' own model."""
    names = {
        **modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        **modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
        **modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    }
    if config["model_type"] == "qwen2_5_omni":  # its thinker is what is trained
        return built({"model_type": "qwen2_5_omni_thinker", **config["thinker_config"]})
    rest = {key: value for key, value in config.items() if key != "model_type"}
    model: nn.Module = getattr(transformers, names[config["model_type"]])(
        AutoConfig.for_model(config["model_type"], **rest)
    )
    return model


def original(config: dict[str, Any]) -> nn.Module:
    """transformers' own model, without memory."""
    with torch.device("meta"):
        return built(config)


def modules_of(parts: dict[str, Part]) -> dict[str, Module]:
    llm = module_from_config(parts[LLM].config, name=LLM, modality="text")
    made = {LLM: llm}
    for name, part in parts.items():
        if name != LLM:
            made[name] = module_from_config(
                part.config,
                name=name,
                modality=name,
                projector=part.projector,
                feature_layer=part.feature_layer,
                llm_width=llm.layers[0].out_width,
            )
    return made


def owner_of(parts: Parts, weight: str) -> str:
    """The module whose weights begin like that: the longest beginning, or the only encoder's own names."""
    starts = [(start, name) for name, part in parts.modules.items() for start in part.weights.values()]
    return max((len(start), name) for start, name in starts if weight.startswith(start))[1]


def qwen_features(model: nn.Module, image: Tensor) -> Tensor:
    """Patches as Qwen's processor lays them out: merging blocks, then channels, frames and pixels.

    Behind what the tower ends with stands what single blocks give, where they give something.
    """
    rows, columns = image.shape[1] // 4, image.shape[2] // 4
    x = image[None].expand(2, -1, -1, -1).reshape(1, 2, 3, rows // 2, 2, 4, columns // 2, 2, 4)
    flat = x.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(rows * columns, -1)
    seen = model(flat, torch.tensor([[1, rows, columns]]))
    return torch.cat((seen.pooler_output, *getattr(seen, "deepstack_features", ())), dim=1)


def wide_rotation(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return rotated(q, cos, sin), rotated(k, cos, sin)


def read_state(model: Any, images: Tensor) -> Tensor:
    """What LLaVA's kind makes of whole images, before tiles are put together."""
    config, parts = model.config, model.model
    seen = parts.vision_tower(images, output_hidden_states=True).hidden_states[config.vision_feature_layer]
    kept = seen if config.vision_feature_select_strategy == "full" else seen[:, 1:]
    return parts.multi_modal_projector(kept).flatten(0, 1)


def pooled(model: Any, images: Tensor, **more: Any) -> Tensor:
    found = model.model.get_image_features(pixel_values=images, **more).pooler_output
    return torch.cat([each.reshape(-1, each.shape[-1]) for each in found])


def heard(model: Any, clips: Tensor) -> Tensor:
    found = model.model.get_audio_features(clips).pooler_output
    return torch.cat([each.reshape(-1, each.shape[-1]) for each in found])


def heard_whole(model: Any, clips: Tensor, **more: Any) -> Tensor:
    """Qwen2-Audio's, of clips without padding."""
    parts = model.model
    return parts.multi_modal_projector(parts.audio_tower(clips, **more).last_hidden_state).flatten(0, 1)


def seen_by_qwen(model: Any, images: Tensor) -> Tensor:
    return torch.cat([qwen_features(model.model.visual, image) for image in images])


FEATURES: Mapping[str, Callable[[Any, Tensor], Tensor]] = {
    "llava": read_state,
    "llava, mistral, no bias": read_state,
    "llava_next": read_state,
    "llava_onevision": read_state,
    "internvl": pooled,
    "internvl, earlier state": pooled,
    "internvl, experts": pooled,
    "gemma3": pooled,
    "paligemma": pooled,
    "idefics3": lambda model, images: pooled(model, images[None]),
    "smolvlm": lambda model, images: pooled(model, images[None]),
    "mistral3": lambda model, images: pooled(model, images, image_sizes=[images.shape[2:]] * len(images)),
    "lighton_ocr": lambda model, images: pooled(model, images, image_sizes=[images.shape[2:]] * len(images)),
    "deepseek_vl": pooled,
    "qwen2_vl": seen_by_qwen,
    "qwen2_5_vl": seen_by_qwen,
    "qwen3_vl": seen_by_qwen,
    "qwen3_vl_moe": seen_by_qwen,
    "qwen2_audio": heard_whole,
    "audioflamingo3": lambda model, clips: heard_whole(
        model, clips, input_features_mask=torch.ones(len(clips), clips.shape[-1])
    ),
    "voxtral": heard,
}


def whole_model(config: dict[str, Any]) -> Any:
    """transformers' own model in float64; SigLIP has no class token to leave out."""
    strategy = {"vision_feature_select_strategy": "full"} if "siglip" in str(config) else {}
    made: Any = built({**config, **strategy})
    for norm in {type(each) for each in made.modules() if type(each).__name__.endswith("RMSNorm")}:
        widen_norms(made, norm, GEMMA_OFFSET if norm.__name__.startswith("Gemma") else 0.0)
    for router in {type(each) for each in made.modules() if type(each).__name__.endswith("TopKRouter")}:
        replace_parts(made, router, WideRouter)
        made.set_experts_implementation("eager")  # the others know no float64
    return made.to(F64).eval().requires_grad_()


LOSSES = [name for name in FEATURES if name not in TILED]


def tokens_of(module: Module) -> tuple[int, int]:
    if module.modality == "audio":
        (clip,) = clip_tokens(module, 0.2)  # ten frames of 20 ms, the whole window
        return clip
    return native_tokens(module) or image_tokens(module, 16, 24)


def saved(name: str, folder: Path) -> Any:
    """transformers' own model with weights that are not zero, and its checkpoint."""
    config = {**CONFIGS[name], **{key: IMAGE for key in ID_KEYS if key in known_keys(name)}}
    torch.manual_seed(1)
    model = whole_model(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.05)
    model.save_pretrained(folder)
    return model


def known_keys(name: str) -> set[str]:
    return set(whole_model(CONFIGS[name]).config.to_dict())


def said_to(name: str, model: Any, ids: Tensor, raw: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """What a processor says beside the tokens, where the model reads it.

    Positions of three axes as transformers' own rule has them; Gemma 3's types of tokens, 1 of an image;
    PaliGemma's, 0 of the prompt, which here is all that stands before the answer. Its own positions count
    from 1; what a rotation by one more changes is the rounding of tables in float32.
    """
    if name in MASKS:
        is_image, places = ids == IMAGE, torch.arange(len(ids))
        kinds = is_image if name == "gemma3" else places > is_image.nonzero().max()
        return {"token_type_ids": kinds.long()[None], "position_ids": places[None]}
    if not hasattr(model.model, "get_rope_index"):
        return {}
    grids = torch.tensor([[1, *(side // 4 for side in image.shape[1:])] for image in raw])
    places, _ = model.model.get_rope_index(ids[None], (ids == IMAGE).int()[None], image_grid_thw=grids)
    return {"position_ids": places}


def whole_loss(name: str, model: Any, plan: Plan) -> float:
    """Mean over the targets that the plan has, of the whole model's logits."""
    first, last = plan.stages[0], plan.stages[-1]
    source = SyntheticSource(0)
    encoder, *_, llm = plan.microbatches
    raw = microbatch_data(plan, first, encoder, source, dtype=F64).raw
    seen = microbatch_data(plan, plan.stages[1], llm, source, dtype=F64)
    asked = microbatch_data(plan, last, llm, source, dtype=F64)
    assert seen.input_ids is not None
    assert asked.labels is not None
    ids = seen.input_ids.clone()
    ids[ids < 0] = IMAGE
    features = FEATURES[name](model, torch.stack(list(raw)))
    embedded = model.get_input_embeddings()(ids)
    is_feature = seen.input_ids < 0
    embedded = torch.where(is_feature[:, None], 0.0, embedded)
    embedded[is_feature], *deeper = features.split(embedded.shape[1], dim=1)
    said = said_to(name, model, ids, raw)
    if deeper:  # the whole model gives them to its language model by itself, of pixels alone
        said |= {"visual_pos_masks": is_feature[None], "deepstack_visual_embeds": deeper}
        logits = model.lm_head(model.model.language_model(inputs_embeds=embedded[None], **said)[0])[0]
    else:
        logits = model(inputs_embeds=embedded[None], **said).logits[0]
    loss: Tensor = nn.functional.cross_entropy(logits, asked.labels)
    return float(loss.detach())
