"""Maps a module of a plan to its adapter: the only place where an architecture's name becomes code."""

from collections.abc import Callable, Mapping
from functools import partial

from runtime.models.adapter import Adapter
from runtime.models.aimv2 import Aimv2Adapter, Ovis2Adapter
from runtime.models.audio import Qwen2AudioAdapter, VoxtralAdapter, WhisperAdapter
from runtime.models.audio_conformer import ConformerAdapter
from runtime.models.audio_glm import GlmAsrAdapter
from runtime.models.audio_moss import MossAdapter
from runtime.models.audio_parakeet import ParakeetAdapter
from runtime.models.decoder import DecoderAdapter
from runtime.models.decoder_families import DECODERS
from runtime.models.diffusion import DitAdapter
from runtime.models.mllama import CrossDecoderAdapter, TiledAdapter
from runtime.models.omni import OmniAudioAdapter, OmniVisionAdapter
from runtime.models.qwen3_omni import Qwen3OmniAudioAdapter, Qwen3OmniVisionAdapter
from runtime.models.refusals import named_refusals
from runtime.models.vision import ClipAdapter, Idefics3Adapter, SiglipAdapter
from runtime.models.vision_exaone import ExaoneVisionAdapter
from runtime.models.vision_gemma4 import Gemma4VisionAdapter
from runtime.models.vision_glm import GlmOcrVisionAdapter, GlmVisionAdapter
from runtime.models.vision_janus import JanusAdapter
from runtime.models.vision_kimi import KimiVisionAdapter
from runtime.models.vision_llama4 import Llama4VisionAdapter
from runtime.models.vision_minicpm import MiniCpmAdapter, MiniCpmOcrAdapter
from runtime.models.vision_paddleocr import PaddleOcrAdapter
from runtime.models.vision_radio import RadioAdapter
from runtime.models.vision_rotary import PixtralAdapter, Qwen2VisionAdapter, Qwen25VisionAdapter
from runtime.models.vision_scaled import Dinov2Adapter, InternVitAdapter
from runtime.models.vision_siglip2 import Siglip2Adapter
from runtime.models.vision_stacked import Qwen3VisionAdapter, Qwen35VisionAdapter
from runtime.models.vision_video_llama import VideoLlamaAdapter
from runtime.models.without_blocks import LargePatchAdapter, SampleAdapter
from workbench.model.model_graph import Module
from workbench.plan.runnable import check_family

ADAPTERS: Mapping[str, Callable[[Module], Adapter]] = {
    **{kind: partial(DecoderAdapter, family=family) for kind, family in DECODERS.items()},
    "mllama_text_model": CrossDecoderAdapter,
    "siglip_vision_model": SiglipAdapter,
    "siglip2_vision_model": Siglip2Adapter,
    "idefics3_vision": Idefics3Adapter,
    "minicpmv4_6_vision": MiniCpmAdapter,
    "minicpm_ocr_vision": MiniCpmOcrAdapter,
    "janus_vision_model": JanusAdapter,
    "clip_vision_model": ClipAdapter,
    "dinov2": Dinov2Adapter,
    "radio": RadioAdapter,
    "aimv2_vision_model": Aimv2Adapter,
    "ovis2_vision": Ovis2Adapter,
    "internvl_vision": InternVitAdapter,
    "pixtral": PixtralAdapter,
    "llama4_vision_model": Llama4VisionAdapter,
    "mllama_vision_model": TiledAdapter,
    "qwen2_vl_vision": Qwen2VisionAdapter,
    "qwen2_5_vl_vision": Qwen25VisionAdapter,
    "exaone4_5_vision": ExaoneVisionAdapter,
    "qwen3_vl_vision": Qwen3VisionAdapter,
    "qwen3_5_vision": Qwen35VisionAdapter,
    "qwen2_5_omni_vision_encoder": OmniVisionAdapter,
    "glm4v_vision": GlmVisionAdapter,
    "glm_ocr_vision": GlmOcrVisionAdapter,
    "kimi_k25_vision": KimiVisionAdapter,
    "video_llama_3_vision": VideoLlamaAdapter,
    "paddleocr_vl_vision": PaddleOcrAdapter,
    "gemma4_vision": Gemma4VisionAdapter,
    "gemma4_unified_vision": LargePatchAdapter,
    "gemma4_unified_audio": SampleAdapter,
    "whisper": WhisperAdapter,
    "voxtral_encoder": VoxtralAdapter,
    "glmasr_encoder": GlmAsrAdapter,
    "moss_transcribe_diarize_audio": MossAdapter,
    "qwen2_audio_encoder": Qwen2AudioAdapter,
    "qwen2_5_omni_audio_encoder": OmniAudioAdapter,
    "qwen3_omni_moe_vision_encoder": Qwen3OmniVisionAdapter,
    "qwen3_omni_moe_audio_encoder": Qwen3OmniAudioAdapter,
    "phi4_multimodal_audio": ConformerAdapter,
    "parakeet_encoder": ParakeetAdapter,
    "dit": DitAdapter,
}


def adapter_of(module: Module) -> Adapter:
    """The adapter of a module.

    Raises:
        ValueError: the module names no transformers configuration, an architecture without an
            adapter, a configuration that transformers refuses, or one with another number of
            layers than the plan.
    """
    check_family(module)
    assert module.source is not None, "checked"
    architecture = module.source.architecture
    if architecture not in ADAPTERS:
        known = ", ".join(sorted(ADAPTERS))
        raise ValueError(f"module {module.name!r}: no adapter for {architecture!r}; there are {known}")
    with named_refusals(module.name):
        adapter = ADAPTERS[architecture](module)
    adapter.check_layers()
    return adapter
