"""All model families that the papers train, in the order of listing."""

import difflib
from collections.abc import Mapping

from workbench.model.config_fields import Config
from workbench.model.families.aria import ARIA_TEXT
from workbench.model.families.cohere import COHERE2, COHERE_COMPASS
from workbench.model.families.decoders import (
    GEMMA,
    GEMMA2,
    GEMMA3,
    LLAMA,
    MISTRAL,
    PHI,
    PHI3,
    QWEN2,
    QWEN2_VL_TEXT,
    QWEN3,
    QWEN3_VL_TEXT,
    SEED_OSS,
    SMOLLM3,
)
from workbench.model.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3, GLM4_MOE_LITE
from workbench.model.families.dit import DIT
from workbench.model.families.ernie import ERNIE4_5, ERNIE4_5_MOE
from workbench.model.families.family import Architecture, Family
from workbench.model.families.gemma4 import GEMMA4
from workbench.model.families.gemma4_unified import GEMMA4_FRAMES, GEMMA4_PATCHES
from workbench.model.families.gemma4_vision import GEMMA4_VISION
from workbench.model.families.glm import GLM4, GLM4_MOE, GLM4V_MOE_TEXT, GLM4V_TEXT, GLM_OCR_TEXT
from workbench.model.families.glm_vision import GLM4V_VISION, GLM_OCR_VISION
from workbench.model.families.gpt_oss import GPT_OSS
from workbench.model.families.granite import GRANITE, HYPERCLOVAX
from workbench.model.families.granite_hybrid import GRANITE_HYBRID
from workbench.model.families.hunyuan import HUNYUAN, HUNYUAN_MOE
from workbench.model.families.janus_vision import JANUS_VISION
from workbench.model.families.kimi_vision import KIMI_VISION
from workbench.model.families.lfm2 import LFM2, LFM2_MOE
from workbench.model.families.llama4 import LLAMA4
from workbench.model.families.minicpm_vision import MINICPM_OCR_VISION, MINICPM_VISION
from workbench.model.families.mistral import MINISTRAL3, MISTRAL4
from workbench.model.families.mixtures import MIXTRAL, OLMOE, QWEN3_MOE, QWEN3_OMNI_TEXT, QWEN3_VL_MOE_TEXT
from workbench.model.families.mllama import MLLAMA_TEXT, MLLAMA_VISION
from workbench.model.families.nemotron_h import NEMOTRON_H
from workbench.model.families.norms_after import EXAONE4, OLMO2, OLMO3
from workbench.model.families.paddleocr import PADDLEOCR_TEXT, PADDLEOCR_VISION
from workbench.model.families.parakeet import PARAKEET
from workbench.model.families.phi4_audio import PHI4_AUDIO
from workbench.model.families.plain_mlp import APERTUS, ARCEE, COSMOS_EDGE_TEXT, NEMOTRON, STARCODER2
from workbench.model.families.position_tables import GPT2, OPT
from workbench.model.families.qwen2_moe import QWEN2_MOE
from workbench.model.families.qwen3_omni_audio import QWEN3_OMNI_AUDIO
from workbench.model.families.qwen_hybrid import QWEN3_5_MOE_TEXT, QWEN3_5_TEXT, QWEN3_NEXT
from workbench.model.families.qwen_vision import (
    EXAONE_VISION,
    OMNI_VISION,
    QWEN2_5_VL,
    QWEN2_VL,
    QWEN3_5_VISION,
    QWEN3_OMNI_VISION,
    QWEN3_VL,
)
from workbench.model.families.radio import RADIO
from workbench.model.families.siglip2 import SIGLIP2
from workbench.model.families.sigmoid_mixtures import DOTS1, MINIMAX_M2, SOLAR_OPEN
from workbench.model.families.sparse_attention import DEEPSEEK_V32, GLM_MOE_DSA
from workbench.model.families.video_llama_vision import VIDEO_LLAMA_VISION
from workbench.model.families.vit import (
    AIMV2,
    CLIP,
    DINOV2,
    IDEFICS3_VISION,
    INTERNVIT,
    LLAMA4_VISION,
    OVIS2_VISION,
    PIXTRAL,
    SIGLIP,
)
from workbench.model.families.whisper import (
    GLMASR_ENCODER,
    MOSS_AUDIO,
    OMNI_AUDIO,
    QWEN2_AUDIO,
    VOXTRAL_ENCODER,
    WHISPER,
)
from workbench.model.model_graph import GENERATED
from workbench.model.shape import UNET

_NOT_IN_TRANSFORMERS = "not in transformers"

FAMILIES: tuple[Family, ...] = (
    LLAMA,
    LLAMA4,
    MISTRAL,
    MINISTRAL3,
    MISTRAL4,
    MIXTRAL,
    GEMMA,
    GEMMA2,
    GEMMA3,
    GEMMA4,
    QWEN2,
    QWEN2_MOE,
    QWEN2_VL_TEXT,
    QWEN3,
    QWEN3_MOE,
    QWEN3_VL_TEXT,
    QWEN3_VL_MOE_TEXT,
    QWEN3_OMNI_TEXT,
    QWEN3_NEXT,
    QWEN3_5_TEXT,
    QWEN3_5_MOE_TEXT,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    DEEPSEEK_V32,
    GLM4,
    GLM4_MOE,
    GLM4_MOE_LITE,
    GLM_MOE_DSA,
    GLM4V_TEXT,
    GLM4V_MOE_TEXT,
    GLM_OCR_TEXT,
    PADDLEOCR_TEXT,
    COSMOS_EDGE_TEXT,
    COHERE2,
    COHERE_COMPASS,
    OLMO2,
    OLMO3,
    OLMOE,
    EXAONE4,
    SEED_OSS,
    SMOLLM3,
    GRANITE,
    HYPERCLOVAX,
    ARCEE,
    NEMOTRON,
    STARCODER2,
    APERTUS,
    ERNIE4_5,
    ERNIE4_5_MOE,
    HUNYUAN,
    HUNYUAN_MOE,
    DOTS1,
    SOLAR_OPEN,
    MINIMAX_M2,
    PHI,
    PHI3,
    Family(
        name="InternLM2",
        role="llm",
        reason=f"{_NOT_IN_TRANSFORMERS}; same arithmetic as Llama: use model_type llama with its sizes",
    ),
    GPT2,
    GPT_OSS,
    ARIA_TEXT,
    LFM2,
    LFM2_MOE,
    NEMOTRON_H,
    GRANITE_HYBRID,
    OPT,
    Family(
        name="BERT",
        role="llm",
        zoo="bert-large",
        reason="predicts masked tokens; the runtime supports only next-token loss",
    ),
    MLLAMA_TEXT,
    CLIP,
    DINOV2,
    RADIO,
    SIGLIP,
    SIGLIP2,
    IDEFICS3_VISION,
    MINICPM_VISION,
    MINICPM_OCR_VISION,
    JANUS_VISION,
    AIMV2,
    OVIS2_VISION,
    Family(name="EVA-CLIP", role="vision", zoo="eva-clip-g-14", reason=_NOT_IN_TRANSFORMERS),
    PIXTRAL,
    QWEN2_VL,
    QWEN2_5_VL,
    EXAONE_VISION,
    OMNI_VISION,
    QWEN3_VL,
    QWEN3_OMNI_VISION,
    QWEN3_5_VISION,
    GLM4V_VISION,
    GLM_OCR_VISION,
    KIMI_VISION,
    VIDEO_LLAMA_VISION,
    PADDLEOCR_VISION,
    GEMMA4_VISION,
    GEMMA4_PATCHES,
    INTERNVIT,
    MLLAMA_VISION,
    LLAMA4_VISION,
    WHISPER,
    QWEN2_AUDIO,
    OMNI_AUDIO,
    QWEN3_OMNI_AUDIO,
    VOXTRAL_ENCODER,
    GLMASR_ENCODER,
    MOSS_AUDIO,
    PHI4_AUDIO,
    PARAKEET,
    GEMMA4_FRAMES,
    DIT,
    Family(
        name="Stable Diffusion 2.1 UNet",
        role=GENERATED,
        zoo=UNET,
        reason=f"{_NOT_IN_TRANSFORMERS}; its skip connections and prompt would cross every stage boundary",
    ),
    *(
        Family(name=name, role=GENERATED, zoo=zoo, reason=f"{_NOT_IN_TRANSFORMERS}; planned and priced only")
        for name, zoo in (
            ("DiT-XL/2", "dit-xl-2"),
            ("Stable Diffusion 3 medium", "sd3-medium"),
            ("FLUX.1 schnell", "flux.1-schnell"),
            ("FLUX.1 dev", "flux.1-dev"),
        )
    ),
)

ARCHITECTURES: Mapping[str, Architecture] = {
    family.model_type: family for family in FAMILIES if isinstance(family, Architecture)
}


def architecture_of(config: Config) -> Architecture:
    """The family of a configuration.

    Raises:
        ValueError: an unknown `model_type`; the nearest is named.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        near = difflib.get_close_matches(str(kind), ARCHITECTURES, n=1)
        hint = f" (nearest: {near[0]})" if near else ""
        raise ValueError(f"unknown model_type {kind!r}{hint}; known are {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[str(kind)]
