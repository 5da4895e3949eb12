"""The models of Cornstarch's two tables of sizes, three per family.

Sources: Cornstarch, arXiv v1, Table 1 (Llama 3.1, EVA-CLIP, Whisper) and the ICML version,
Table 1 (Llama-3, Qwen2 Vision, Phi4 Audio). They print layers, width and a rounded number of
parameters; heads and the MLP's width come from the published models of the family. Where that
does not give the printed number, `differs` says so. Encoders are counted without their
projector, Qwen2 Vision with its merger.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workbench.model.hf_config import module_from_config
from workbench.model.model_graph import TEXT, Module
from workbench.model.projector import Projector
from workbench.model.shape import Shape
from workbench.model.trainable import Trainable, with_trainable
from workbench.model.zoo import eva_clip, from_shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """One size of a family.

    Args:
        modality: modality of its module.
        model: a name of shapes.csv, a shape, or a configuration.
        differs: how it differs from the printed table.
        has_merger: whether it ends with its own projector.
    """

    modality: str
    model: str | Shape | Mapping[str, Any]
    differs: str = ""
    has_merger: bool = False


def cornstarch_module(
    name: str,
    llm_width: int | None = None,
    *,
    module: str | None = None,
    projector: Projector | None = None,
    trainable: Trainable = Trainable.ALL,
) -> Module:
    """The module of one size.

    Args:
        name: a name in `SIZES`.
        llm_width: hidden width of the LLM; required for encoders.
        module: its name; default "llm" or the modality.
        projector: of an encoder; default MLP, for Qwen2 Vision its own merger.
        trainable: which part of it is trained.

    Raises:
        ValueError: a projector for one that has its own, and as `from_shape`.
    """
    size = SIZES[name]
    module_name = module or ("llm" if size.modality == TEXT else size.modality)
    if size.has_merger and projector is not None:
        raise ValueError(f"module {module_name!r}: {name} has its own projector; leave out 'projector'")
    if isinstance(size.model, str):
        return from_shape(
            size.model, module=module_name, llm_width=llm_width, projector=projector, trainable=trainable
        )
    if isinstance(size.model, Shape):
        layers = eva_clip(size.model, projector, llm_width)
        return with_trainable(Module(name=module_name, modality=size.modality, layers=layers), trainable)
    return module_from_config(
        size.model,
        name=module_name,
        modality=size.modality,
        trainable=trainable,
        projector=projector,
        llm_width=llm_width,
    )


def _qwen2_vision(num: int, width: int) -> dict[str, Any]:
    """Heads of 80 as in the published model."""
    return {
        "model_type": "qwen2_vl_vision",
        "depth": num,
        "embed_dim": width,
        "num_heads": width // 80,
        "mlp_ratio": 4,
        "patch_size": 14,
    }


def _phi4_audio(num: int, width: int, num_heads: int) -> dict[str, Any]:
    return {
        "model_type": "phi4_multimodal_audio",
        "hidden_size": width,
        "intermediate_size": 1536,
        "num_blocks": num,
        "num_attention_heads": num_heads,
        "ext_pw_out_channel": width,
        "depthwise_separable_out_channel": width,
    }


def _whisper(num: int, width: int) -> Size:
    """Whisper's MLP ratio of 4 and heads of 64."""
    config = {
        "model_type": "whisper",
        "d_model": width,
        "encoder_layers": num,
        "encoder_attention_heads": width // 64,
        "encoder_ffn_dim": 4 * width,
        "num_mel_bins": 128,
        "max_source_positions": 1500,
    }
    return Size(modality="audio", model=config)


def _eva_clip(name: str, num: int, width: int, *, differs: str) -> Size:
    """The vision tower of a whole model, at the family's MLP ratio of 5."""
    shape = Shape(
        name=name,
        role="vision",
        layers=num,
        hidden=width,
        heads=width // 128,
        kv_heads=width // 128,
        head_dim=128,
        ffn=5 * width,
        vocab=0,
        max_seq=0,
        patch_px=14,
        image_px=224,
        merge=1,
    )
    return Size(modality="vision", model=shape, differs=differs)


_LLAMA_32B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 5120,
    "intermediate_size": 27648,
    "num_hidden_layers": 64,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}

SIZES: Mapping[str, Size] = {
    "cornstarch-llama-small": Size(modality=TEXT, model="llama-3.2-1b"),
    "cornstarch-llama-medium": Size(modality=TEXT, model="llama-3.1-8b"),
    "cornstarch-llama-large": Size(
        modality=TEXT,
        model=_LLAMA_32B,
        differs="There is no such Llama. The family's MLP ratio of 3.5 gives 23B, which is not the printed "
        "32B. The MLP width of 27,648 is that of Qwen2.5 32B, which has the printed layers and width; with "
        "40 heads, 8 key-value heads and Llama's vocabulary it gives 32.5B.",
    ),
    "cornstarch-qwen2-vision-small": Size(
        modality="vision",
        model=_qwen2_vision(32, 1280),
        differs="0.63B without the merger, 0.67B with it; printed 0.6B. The medium and large sizes agree "
        "with the table only when the merger counts, this one only when it does not.",
        has_merger=True,
    ),
    "cornstarch-qwen2-vision-medium": Size(modality="vision", model=_qwen2_vision(48, 2560), has_merger=True),
    "cornstarch-qwen2-vision-large": Size(modality="vision", model=_qwen2_vision(64, 3840), has_merger=True),
    "cornstarch-phi4-audio-small": Size(
        modality="audio",
        model=_phi4_audio(24, 1024, 16),
        differs="It has 0.44B, 0.45B with a projector to a 2048-wide LLM; its report gives 0.46B with "
        "projector. Only rounding up gives the printed 0.5B.",
    ),
    "cornstarch-phi4-audio-medium": Size(modality="audio", model=_phi4_audio(32, 3072, 48)),
    "cornstarch-phi4-audio-large": Size(
        modality="audio",
        model=_phi4_audio(48, 5120, 80),
        differs="The MLP keeps the small model's width of 1,536, which the table does not state. At the "
        "family's ratio of 1.5 this would be 21B instead of 12.4B, and the medium size 5.1B instead of 3.4B; "
        "with 1,536 and convolutions as wide as the residual stream both agree with the table.",
    ),
    "cornstarch-eva-clip-small": Size(modality="vision", model="eva-clip-g-14"),
    "cornstarch-eva-clip-medium": _eva_clip(
        "eva-clip-8b", 32, 4096, differs="The tower has 7.5B; the printed 8B count its text tower too."
    ),
    "cornstarch-eva-clip-large": _eva_clip(
        "eva-clip-18b", 48, 5120, differs="The tower has 17.6B; the printed 18B count its text tower too."
    ),
    "cornstarch-whisper-small": _whisper(32, 1920),
    "cornstarch-whisper-medium": _whisper(40, 3840),
    "cornstarch-whisper-large": _whisper(48, 5120),
}
