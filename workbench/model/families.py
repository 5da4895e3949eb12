"""The model families that the papers train: which can be planned, which can run, and why the rest cannot."""

from collections.abc import Collection
from dataclasses import dataclass

from workbench.model.dit import DIT
from workbench.model.hf_encoder import ENCODERS
from workbench.model.hf_llm import LLMS
from workbench.model.zoo import shape_names

_NOT_IN_TRANSFORMERS = "not in transformers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One family.

    Args:
        name: as its papers call it.
        role: "llm", "vision", "audio" or "generator".
        model_type: of the transformers configuration that it is planned from; None: none.
        zoo: a name of the zoo, where there is no configuration.
        reason: why it cannot be planned, or cannot run; empty where it can do both.
    """

    name: str
    role: str
    model_type: str | None = None
    zoo: str | None = None
    reason: str = ""

    @property
    def plans(self) -> bool:
        """Whether its layers are known, so that it can be planned and simulated."""
        return self.model_type in (*LLMS, *ENCODERS, DIT) or self.zoo in shape_names()

    def runs(self, adapters: Collection[str]) -> bool:
        """Whether one of these adapters (by model_type) builds it."""
        return self.model_type in adapters


def _llm(name: str, model_type: str | None, reason: str = "", zoo: str | None = None) -> Family:
    return Family(name=name, role="llm", model_type=model_type, reason=reason, zoo=zoo)


def _vision(name: str, model_type: str | None, reason: str = "", zoo: str | None = None) -> Family:
    return Family(name=name, role="vision", model_type=model_type, reason=reason, zoo=zoo)


def _audio(name: str, model_type: str | None, reason: str = "") -> Family:
    return Family(name=name, role="audio", model_type=model_type, reason=reason)


FAMILIES: tuple[Family, ...] = (
    _llm("Llama 2, Llama 3", "llama"),
    _llm("Llama 4", "llama4_text"),
    _llm("Mistral", "mistral"),
    _llm("Mixtral", "mixtral"),
    _llm("Gemma 1", "gemma"),
    _llm("Gemma 2", "gemma2"),
    _llm("Gemma 3", "gemma3_text"),
    _llm("Qwen2, Qwen2.5", "qwen2"),
    _llm("Qwen3", "qwen3"),
    _llm("Phi", "phi"),
    _llm("Phi-3, Phi-4", "phi3"),
    _llm("InternLM2", None, f"{_NOT_IN_TRANSFORMERS}; its arithmetic is Llama's: give its sizes as llama"),
    _llm("GPT-2", "gpt2"),
    _llm("OPT", "opt"),
    _llm("BERT", None, "predicts masked tokens; the runtime's loss is the next token's", zoo="bert-large"),
    _llm("Llama 3.2 Vision", "mllama_text_model"),
    _vision("CLIP", "clip_vision_model"),
    _vision("DINOv2", "dinov2"),
    _vision("SigLIP", "siglip_vision_model"),
    _vision("EVA-CLIP", None, _NOT_IN_TRANSFORMERS, zoo="eva-clip-g-14"),
    _vision("Pixtral", "pixtral"),
    _vision("Qwen2-VL vision", "qwen2_vl_vision"),
    _vision("Qwen2.5-VL vision", "qwen2_5_vl_vision"),
    _vision("InternViT", "internvl_vision"),
    _vision("Llama 3.2 Vision's tower", "mllama_vision_model"),
    _audio("Whisper", "whisper"),
    _audio("Qwen2-Audio", "qwen2_audio_encoder"),
    _audio("Phi-4-multimodal audio", "phi4_multimodal_audio"),
    Family(name="Diffusion transformer", role="generator", model_type=DIT),
    Family(
        name="Stable Diffusion 2.1 UNet",
        role="generator",
        zoo="sd-2.1-unet",
        reason=f"{_NOT_IN_TRANSFORMERS}; its skips and its prompt would cross every stage boundary",
    ),
)
