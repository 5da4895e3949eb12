"""Composites with an image encoder: Idefics3, Gemma 3, PaliGemma, Mistral 3, GLM-4V and others."""

from math import gcd, isqrt

from workbench.model.composites.composite import (
    PAGE,
    PROJECTOR,
    QWEN3_SMALL,
    SIGLIP_HEAD,
    TILES,
    VISION,
    VISION_TOWER,
    Composite,
    Part,
    Parts,
    check_width,
    joined,
    merging_tower,
    mlp_steps,
    normed_squares,
    part_config,
    text_config,
    typed_config,
    whole_or,
)
from workbench.model.config_fields import Config, flag, number, text, whole
from workbench.model.projector import Merge, Projector, ProjectorStep, Steps
from workbench.model.transformer import Norm

_SIGLIP = "siglip_vision_model"
_TEXT_MODEL = {"model.": "model.text_model.", "lm_head.": "lm_head."}


def _shuffled(config: Config, vision: str) -> Parts:
    """A projector of one matmul without bias over a square of patches."""
    projector = (
        ProjectorStep(merge=whole(config, "scale_factor", 2) ** 2),
        ProjectorStep(linear_out=True, bias=False),
    )
    weights = {"": "model.vision_model.", "projector.1.": "model.connector.modality_projection.proj."}
    vision_part = Part(
        config=part_config(config, "vision_config", vision), projector=projector, weights=weights
    )
    llm = text_config(config, "llama", ties=False)
    return joined(config, {VISION: vision_part}, llm, weights=_TEXT_MODEL, notes=(TILES,))


def _gemma3(config: Config) -> Parts:
    """Means over squares of patches, an RMS norm, a matmul without bias."""
    vision = part_config(config, "vision_config", _SIGLIP)
    side = whole(vision, "image_size", 224) // whole(vision, "patch_size", 16)
    tokens = whole(config, "mm_tokens_per_image", 256)
    if isqrt(tokens) ** 2 != tokens or side % isqrt(tokens):
        raise ValueError(
            f"gemma3: mm_tokens_per_image must be a square whose side divides the {side} patches of a row, "
            f"got {tokens}; nearest: {side**2}"
        )
    projector = (
        ProjectorStep(merge=(side // isqrt(tokens)) ** 2, how=Merge.MEAN),
        ProjectorStep(norm=Norm.RMS, eps=number(vision, "layer_norm_eps", 1e-6), offset=1.0),
        ProjectorStep(linear_out=True, bias=False),
    )
    vision_part = Part(
        config=vision,
        projector=projector,
        weights={
            **VISION_TOWER,
            "projector.1.": "model.multi_modal_projector.mm_soft_emb_norm.",
            "projector.2.weight": "model.multi_modal_projector.mm_input_projection_weight",
        },
        transposed=("projector.2.weight",),
    )
    return joined(
        config, {VISION: vision_part}, text_config(config, "gemma3_text", ties=True), dropped=(SIGLIP_HEAD,)
    )


def _paligemma(config: Config) -> Parts:
    vision = part_config(config, "vision_config", _SIGLIP, _PALIGEMMA_VISION)
    vision_part = Part(config=vision, projector=Projector.LINEAR, weights=VISION_TOWER | PROJECTOR)
    llm = text_config(config, "gemma", absent=_PALIGEMMA_TEXT, ties=True)
    llm.pop("use_bidirectional_attention", None)  # transformers adds it; the mask of a sample says where
    note = "the prompt is read in both directions: give a mask for it"
    return joined(config, {VISION: vision_part}, llm, dropped=(SIGLIP_HEAD,), notes=(note,))


_PALIGEMMA_VISION = {
    "hidden_size": 1152,
    "intermediate_size": 4096,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "image_size": 224,
    "patch_size": 14,
    "vision_use_head": False,
}
_PALIGEMMA_TEXT = {
    "hidden_size": 2048,
    "intermediate_size": 16384,
    "num_hidden_layers": 18,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "vocab_size": 257152,
}


def _glm(
    config: Config, llm: str | None, seen: str = "glm4v_vision", widths: tuple[int, int] = (4096, 4096)
) -> Parts:
    """A tower of GLM before a language model of GLM.

    Args:
        llm: model_type of the language model; None: the one that the configuration names.
        seen: model_type of the tower.
        widths: of the tower's features and of the language model, where the configuration does not say.
    """
    inner = part_config(config, "text_config", llm or "glm4v_text")
    kind = llm or str(inner["model_type"])
    if llm is None and kind not in _GLM_TEXTS:
        raise ValueError(
            f"{config['model_type']}: text_config.model_type must be {' or '.join(_GLM_TEXTS)}, got {kind!r}"
        )
    ties = flag(config, "tie_word_embeddings") or (llm is not None and flag(inner, "tie_word_embeddings"))
    vision = typed_config(config, "vision_config", seen)
    check_width(config, {"out_hidden_size": widths[0], **vision}, "out_hidden_size", inner, widths[1])
    return joined(
        config, {VISION: merging_tower(vision)}, {**inner, "model_type": kind, "tie_word_embeddings": ties}
    )


def _mistral3(config: Config) -> Parts:
    """A norm, squares of patches merged back to the encoder's width, an MLP."""
    vision = part_config(config, "vision_config", "pixtral", _PIXTRAL)
    if whole_or(config, "vision_feature_layer", -1) != -1:
        raise ValueError(
            f"mistral3: vision_feature_layer must be -1, got {config['vision_feature_layer']}; nearest: -1"
        )
    llm = text_config(config, "mistral", absent=_MISTRAL_SMALL, ties=True)
    bias = flag(config, "multimodal_projector_bias")
    mlp = mlp_steps(text(config, "projector_hidden_act", "gelu"), bias=bias)
    return _in_squares(config, vision, llm, mlp, names=("vision_tower", "multi_modal_projector"))


def _lighton_ocr(config: Config) -> Parts:
    """Mistral 3's encoder and projector, without biases."""
    vision = part_config(
        config, "vision_config", "pixtral", _PIXTRAL | {"head_dim": 64, "hidden_act": "silu"}
    )
    llm = text_config(config, "qwen3", absent=QWEN3_SMALL, ties=True)
    mlp = mlp_steps("gelu", bias=False)
    return _in_squares(config, vision, llm, mlp, names=("vision_encoder", "vision_projection"))


def _in_squares(config: Config, vision: Config, llm: Config, mlp: Steps, *, names: tuple[str, str]) -> Parts:
    """A projector of a norm, squares of patches merged to the encoder's width, then an MLP.

    Args:
        names: attributes of encoder and projector.
    """
    tower, projector = (f"model.{name}." for name in names)
    vision_part = Part(
        config=vision,
        projector=(
            ProjectorStep(norm=Norm.RMS, eps=number(llm, "rms_norm_eps", _EPS.get(llm["model_type"], 1e-6))),
            ProjectorStep(merge=whole(config, "spatial_merge_size", 2) ** 2, how=Merge.INTERLEAVE),
            ProjectorStep(linear=whole(vision, "hidden_size", 1024), bias=False),
            *mlp,
        ),
        items=PAGE,
        weights={
            "": tower,
            "projector.0.": f"{projector}norm.",
            "projector.2.": f"{projector}patch_merger.merging_layer.",
            "projector.3.": f"{projector}linear_1.",
            "projector.5.": f"{projector}linear_2.",
        },
    )
    return joined(config, {VISION: vision_part}, llm)


def _ovis2(config: Config) -> Parts:
    """Shares of a vocabulary of patches, by a softmax, of which the LLM reads the mean embedding.

    The last rows of the table are for tokens of text that mark an image and its tiles; their shares are 0.
    """
    vision = typed_config(config, "vision_config", "ovis2_vision")
    llm = text_config(config, "qwen2", ties=True)
    if (how := text(vision, "tokenize_function", "softmax")) != "softmax":
        raise ValueError(
            f"ovis2: vision_config.tokenize_function must be softmax, got {how!r}; nearest: softmax"
        )
    stride = whole(vision, "hidden_stride", 1)
    side = whole(vision, "image_size", 224) // whole(vision, "patch_size", 14)
    if side % stride:
        raise ValueError(
            f"ovis2: vision_config.hidden_stride must divide the {side} patches of a row, got {stride}; "
            f"nearest: {gcd(side, stride)}"
        )
    for key, usual, outer in (("hidden_size", 4096, 1536), ("vocab_size", 151936, 151643)):
        width, given = whole(llm, key, usual), whole(config, key, outer)
        if width != given and not (key == "vocab_size" and llm["tie_word_embeddings"]):
            raise ValueError(f"ovis2: {key} must be the LLM's {width}, got {given}; nearest: {width}")
    shares = whole(vision, "vocab_size", 16384)
    own = shares - whole(vision, "num_visual_indicator_tokens", 5)
    if own < 1:
        raise ValueError(
            f"ovis2: vision_config.num_visual_indicator_tokens must be below vocab_size {shares}, got "
            f"{shares - own}"
        )
    merge = (ProjectorStep(merge=stride**2),) if stride > 1 else ()
    first, tower = len(merge), "model.vision_tower."
    vision_part = Part(
        config=vision,
        projector=(
            *merge,
            ProjectorStep(linear=own, bias=False),
            ProjectorStep(norm=Norm.LAYER),
            ProjectorStep(softmax=shares),
            ProjectorStep(linear_out=True, bias=False),
        ),
        weights={
            "": f"{tower}transformer.",
            f"projector.{first}.": f"{tower}head_linear.",
            f"projector.{first + 1}.": f"{tower}head_norm.",
            f"projector.{first + 3}.weight": "model.visual_embeddings_table.weight",
        },
        transposed=(f"projector.{first + 3}.weight",),
    )
    return joined(config, {VISION: vision_part}, llm, notes=(TILES, _MARKED))


_MARKED = (
    "tokens that mark an image and its tiles are text: the LLM's own table embeds them, not the visual one"
)


def _video_llama(config: Config) -> Parts:
    """Images through an MLP; where the processor merges patches, the tower does."""
    vision = part_config(config, "vision_config", "video_llama_3_vision")
    vision_part = Part(
        config=vision,
        projector=Projector.MLP,
        items=PAGE,
        weights={
            "": "model.vision_model.",
            "projector.linear_1.": "model.projector.readout.0.",
            "projector.linear_2.": "model.projector.readout.2.",
        },
    )
    llm = text_config(config, "qwen2")
    ties = flag(config, "tie_word_embeddings") or flag(llm, "tie_word_embeddings")
    return joined(config, {VISION: vision_part}, {**llm, "tie_word_embeddings": ties})


def _kimi(config: Config) -> Parts:
    """A norm of every patch, squares of patches side by side, an MLP as wide as a square."""
    vision = typed_config(config, "vision_config", "kimi_k25_vision")
    width, side = whole(vision, "hidden_size", 1152), whole(vision, "merge_kernel_size", 2)
    normed = whole(config, "projection_hidden_size", 1152)
    if normed != width:
        raise ValueError(
            f"kimi_k25: projection_hidden_size must be the tower's hidden_size {width}, got {normed}; "
            f"nearest: {width}"
        )
    vision_part = Part(
        config=vision,
        projector=normed_squares(width, side, eps=number(config, "projection_layer_norm_eps", 1e-5)),
        items=PAGE,
        weights={
            **VISION_TOWER,
            "projector.0.": "model.mm_projector.pre_norm.",
            "projector.2.": "model.mm_projector.in_proj.",
            "projector.4.": "model.mm_projector.out_proj.",
        },
    )
    return joined(config, {VISION: vision_part}, text_config(config, "deepseek_v3", ties=True))


_PIXTRAL = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 1540,
    "patch_size": 14,
}
_EPS = {"ministral3": 1e-5}  # of norms, where another than usual is the language model's default
_MISTRAL_SMALL = {
    "hidden_size": 5120,
    "intermediate_size": 32768,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 131072,
    "sliding_window": None,
}
_GLM_TEXTS = ("glm4v_text", "glm4v_moe_text")
COMPOSITES = (
    Composite(name="GLM-4.1V", model_type="glm4v", take_apart=lambda config: _glm(config, "glm4v_text")),
    Composite(
        name="GLM-4.5V", model_type="glm4v_moe", take_apart=lambda config: _glm(config, "glm4v_moe_text")
    ),
    Composite(
        name="GLM-OCR",
        model_type="glm_ocr",
        take_apart=lambda config: _glm(config, "glm_ocr_text", "glm_ocr_vision", (1536, 1024)),
    ),
    Composite(name="GLM-4.6V", model_type="glm46v", take_apart=lambda config: _glm(config, None)),
    Composite(name="GLMGA", model_type="glmga", take_apart=lambda config: _glm(config, None)),
    Composite(name="Gemma 3 with images", model_type="gemma3", take_apart=_gemma3),
    Composite(name="PaliGemma", model_type="paligemma", take_apart=_paligemma),
    Composite(
        name="Idefics3",
        model_type="idefics3",
        take_apart=lambda config: _shuffled(config, "idefics3_vision"),
    ),
    Composite(
        name="SmolVLM", model_type="smolvlm", take_apart=lambda config: _shuffled(config, "smolvlm_vision")
    ),
    Composite(name="Mistral 3 with images", model_type="mistral3", take_apart=_mistral3),
    Composite(name="LightOnOCR", model_type="lighton_ocr", take_apart=_lighton_ocr),
    Composite(name="Ovis 2", model_type="ovis2", take_apart=_ovis2),
    Composite(name="VideoLLaMA 3", model_type="video_llama_3", take_apart=_video_llama),
    Composite(name="Kimi K2.5", model_type="kimi_k25", take_apart=_kimi),
)
