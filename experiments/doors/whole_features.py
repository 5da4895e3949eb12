"""Features of images and clips by transformers' own composites, of inputs as their processors make them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from experiments.doors.nemotron_configs import NEMOTRON_CASES
from experiments.doors.whole_sizes import CLIP_S
from runtime.models.patch_grid import blockwise
from runtime.models.vision_gemma4 import as_processed
from runtime.models.vision_minicpm import in_a_row
from runtime.models.vision_siglip2 import flat_patches
from workbench.data.corpus import mel_frames

Items = Sequence[Tensor]  # of one modality, in one tensor where they are alike


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
    hidden = parts.vision_tower(images, output_hidden_states=True).hidden_states
    read = config.vision_feature_layer
    states = torch.cat([hidden[each] for each in ([read] if isinstance(read, int) else read)], dim=-1)
    patch_states = states if config.vision_feature_select_strategy == "full" else states[:, 1:]
    return parts.multi_modal_projector(patch_states).flatten(0, 1)


def pooled(model: Any, images: Tensor, **more: Any) -> Tensor:
    features = model.model.get_image_features(pixel_values=images, **more).pooler_output
    return torch.cat([item_features.reshape(-1, item_features.shape[-1]) for item_features in features])


def pooled_in_sizes(model: Any, images: Tensor) -> Tensor:
    return pooled(model, images, image_sizes=[images.shape[2:]] * len(images))


def seen_in_patches(model: Any, images: Tensor) -> Tensor:
    """Features of LFM2-VL, which reads patches as its processor lays them."""
    flat = flat_patches(images, model.config.vision_config.patch_size)
    grid = torch.tensor([[side // model.config.vision_config.patch_size for side in images.shape[2:]]])
    mask = torch.ones(flat.shape[:2], dtype=torch.long)
    return pooled(model, flat, spatial_shapes=grid.expand(len(images), 2), pixel_attention_mask=mask)


def seen_in_a_row(model: Any, images: Tensor) -> Tensor:
    """Features of MiniCPM, which reads patches side by side, as high as one."""
    row, grids = in_a_row(images, model.config.vision_config.patch_size)
    return pooled(model, row, target_sizes=grids)


def seen_in_blocks(model: Any, images: Tensor) -> Tensor:
    """Features of Cosmos 3 Edge, which reads patches square by square of those that merge."""
    config = model.config.vision_config
    grid = [side // config.patch_size for side in images.shape[2:]]
    flat = [
        blockwise(each.unflatten(0, tuple(grid)), config.spatial_merge_size)
        for each in flat_patches(images, config.patch_size)
    ]
    return pooled(model, torch.cat(flat), image_grid_thw=torch.tensor([[1, *grid]] * len(images)))


def perceived_by_nemotron(model: Any, items: Items) -> Tensor:
    """Of patches row by row, as its processor gives them; or of clips without padding."""
    if items[0].dim() != len(("channel", "row", "column")):
        return torch.cat([model.get_audio_features(clip.t()[None]).pooler_output for clip in items])
    images = items
    model.vision_model.config.torch_dtype = images[0].dtype  # to which it brings pixels
    patches, grids = zip(*(patches_of_kimi(image) for image in images), strict=True)
    grid = torch.cat(grids)[:, 1:]
    return torch.cat(model.get_image_features(torch.cat(patches).flatten(1), grid).pooler_output)


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


def heard_by_music(model: Any, clips: Items) -> Tensor:
    """Features in Music Flamingo of the windows of one clip, which are masked as in Audio Flamingo 3."""
    num_frames = 2 * model.config.audio_config.max_source_positions
    filled = torch.stack([nn.functional.pad(clip, (0, num_frames - clip.shape[1])) for clip in clips])
    is_heard = torch.arange(num_frames) < torch.tensor([clip.shape[1] for clip in clips])[:, None]
    num_tokens = sum(((clip.shape[1] - 1) // 2 + 1) // 2 for clip in clips)
    ids = torch.full((1, num_tokens), model.config.audio_token_id)
    return model.model.get_audio_features(filled, is_heard.long(), ids).pooler_output


def heard_by_asr(model: Any, clips: Items) -> Tensor:
    """Qwen3-ASR's, of the windows of one clip; it wants whole chunks and hides what fills them up."""
    clip = torch.cat(tuple(clips), dim=1)
    chunk = 2 * model.config.audio_config.n_window
    filled = nn.functional.pad(clip, (0, -clip.shape[1] % chunk))
    is_heard = (torch.arange(filled.shape[1]) < clip.shape[1]).long()
    return model.model.get_audio_features(filled[None], is_heard[None]).pooler_output


def heard_by_glm(model: Any, clips: Items) -> Tensor:
    """GLM-ASR's, of the windows of one clip, the last of which ends in silence."""
    windows = torch.stack(list(clips))
    window = windows.shape[2]
    place = torch.arange(len(windows) * window).unflatten(0, (-1, window))
    return model.model.get_audio_features(windows, place < mel_frames(CLIP_S)).pooler_output


def heard_by_moss(model: Any, clips: Items) -> Tensor:
    """MOSS's, of the windows of one clip, the last of which ends in silence."""
    windows = torch.stack(list(clips))
    place = torch.arange(windows.shape[0] * windows.shape[2]).unflatten(0, (-1, windows.shape[2]))
    is_heard = (place < mel_frames(CLIP_S)).long()
    return model.model.get_audio_features(windows, is_heard, is_heard).pooler_output


def seen_by_qwen(model: Any, images: Items) -> Tensor:
    return torch.cat([qwen_features(model.model.visual, image) for image in images])


def seen_by_hyperclovax(model: Any, images: Items) -> Tensor:
    parts = model.model
    return torch.cat([parts.projector(qwen_features(parts.vision_model, image)) for image in images])


def patches_of_kimi(image: Tensor) -> tuple[Tensor, Tensor]:
    """[patches, 3, 4, 4] of an image row by row, and its grid, as Kimi's processor gives them."""
    rows, columns = image.shape[1] // 4, image.shape[2] // 4
    x = image.reshape(3, rows, 4, columns, 4).permute(1, 3, 0, 2, 4)
    return x.flatten(0, 1), torch.tensor([[1, rows, columns]])


def seen_by_kimi(model: Any, images: Items) -> Tensor:
    seen = (model.model.get_image_features(*patches_of_kimi(image)).pooler_output for image in images)
    return torch.cat([features for (features,) in seen])


def patches_of_video_llama(image: Tensor, merge: int) -> tuple[Tensor, ...]:
    """Numbers of patches, those of a square after each other, their grid, and the side of a square."""
    rows, columns = image.shape[1] // 4, image.shape[2] // 4
    x = image.reshape(3, rows // merge, merge, 4, columns // merge, merge, 4)
    flat = x.permute(1, 4, 2, 5, 0, 3, 6).reshape(rows * columns, -1)
    return flat, torch.tensor([[1, rows, columns]]), torch.tensor([merge])


def seen_by_video_llama(model: Any, images: Items) -> Tensor:
    merge = getattr(model.config.vision_config, "spatial_merge_size", 1)
    cut = [patches_of_video_llama(image, merge) for image in images]
    seen = (model.model.get_image_features(*each).pooler_output for each in cut)
    return torch.cat([features for (features,) in seen])


def seen_by_gemma4(model: Any, images: Items) -> Tensor:
    cut = [as_processed(image, model.config.vision_config.patch_size) for image in images]
    seen = (model.model.get_image_features(*each).pooler_output for each in cut)
    return torch.cat([features for (features,) in seen])


def perceived_by_unified(model: Any, items: Items) -> Tensor:
    """Of patches as its processor merges them, or of clips in runs of samples."""
    if items[0].dim() != len(("channel", "row", "column")):
        return torch.cat([model.model.get_audio_features(clip.mT[None]).pooler_output[0] for clip in items])
    cut = [as_processed(image, model.config.vision_config.model_patch_size) for image in items]
    return torch.cat([model.model.get_image_features(*each).pooler_output[0] for each in cut])


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


FEATURES: Mapping[str, Callable[[Any, Any], Tensor]] = {
    "llava": read_state,
    "llava, mistral, no bias": read_state,
    "llava, several states": read_state,
    "vipllava": pooled,
    "llava_next": read_state,
    "llava_next_video": read_state,
    "llava_next_video, convolution": read_state,
    "video_llava": pooled,
    "llava_onevision": read_state,
    "internvl": pooled,
    "internvl, earlier state": pooled,
    "internvl, experts": pooled,
    "qianfan_ocr": pooled,
    "qianfan_ocr, earlier state": pooled,
    "gemma3": pooled,
    "gemma4": seen_by_gemma4,
    "gemma4, experts": seen_by_gemma4,
    "gemma4_unified": perceived_by_unified,
    "gemma4_unified, sound": perceived_by_unified,
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
    "cosmos3_edge": seen_in_blocks,
    "cosmos3_edge, biases": seen_in_blocks,
    **dict.fromkeys(
        ("minicpm_ocr", "minicpm_ocr, merged twice", "minicpmv4_6", "minicpmv4_6, last block"), seen_in_a_row
    ),
    **dict.fromkeys(NEMOTRON_CASES, perceived_by_nemotron),
    "deepseek_vl": pooled,
    "ovis2": pooled,
    "ovis2, squares": pooled,
    "janus": pooled,
    "janus, untied": pooled,
    "qwen2_vl": seen_by_qwen,
    "qwen2_5_vl": seen_by_qwen,
    "qwen3_vl": seen_by_qwen,
    "cosmos3_omni": seen_by_qwen,
    "cohere_compass": seen_by_qwen,
    "qwen3_vl_moe": seen_by_qwen,
    "qwen3_5": seen_by_qwen,
    "qwen3_5_moe": seen_by_qwen,
    "exaone4_5": seen_by_qwen,
    "hyperclovax_vision_v2": seen_by_hyperclovax,
    "glm4v": seen_by_qwen,
    "glm4v, tied": seen_by_qwen,
    "glm4v_moe": seen_by_qwen,
    "glm_ocr": seen_by_qwen,
    "glm_ocr, no bias": seen_by_qwen,
    "glm46v": seen_by_qwen,
    "glmga": seen_by_qwen,
    "glm46v, experts": seen_by_qwen,
    "video_llama_3": seen_by_video_llama,
    "video_llama_3, squares": seen_by_video_llama,
    "paddleocr_vl": seen_by_kimi,
    "paddleocr_vl, biases": seen_by_kimi,
    "kimi_k25": seen_by_kimi,
    "kimi_k25, tied": seen_by_kimi,
    "qwen2_audio": heard_whole,
    "audioflamingo3": heard_by_flamingo,
    "musicflamingo": heard_by_music,
    "musicflamingo, fast": heard_by_music,
    "voxtral": heard,
    "glmasr": heard_by_glm,
    "glmasr, grouped": heard_by_glm,
    "moss_transcribe_diarize": heard_by_moss,
    "qwen3_asr": heard_by_asr,
    "qwen2_5_omni_thinker": perceived_by_omni,
    "qwen3_omni_moe_thinker": perceived_by_omni,
    "llama4": seen_by_llama,
}


def perceived(name: str, model: Any, items: Items) -> Tensor:
    """The whole model's features of items of one modality."""
    alike = len({item.shape for item in items}) == 1
    return FEATURES[name](model, torch.stack(list(items)) if alike else items)
