"""From a module of a plan to its adapter: the one place where an architecture's name becomes code."""

from runtime.models.adapter import Adapter, named_refusals
from runtime.models.audio import Qwen2AudioAdapter, WhisperAdapter
from runtime.models.audio_conformer import ConformerAdapter
from runtime.models.cross_attention import CrossDecoderAdapter
from runtime.models.decoder import DecoderAdapter
from runtime.models.decoder_families import DECODERS
from runtime.models.diffusion import DitAdapter
from runtime.models.vision import ClipAdapter, SiglipAdapter
from runtime.models.vision_rotary import PixtralAdapter, Qwen2VisionAdapter, Qwen25VisionAdapter
from runtime.models.vision_scaled import Dinov2Adapter, InternVitAdapter
from runtime.models.vision_tiles import TiledAdapter
from workbench.model.dit import DIT
from workbench.model.mllama import TEXT_MODEL, VISION_MODEL
from workbench.model.model_graph import Module

ENCODERS = {
    "siglip_vision_model": SiglipAdapter,
    "clip_vision_model": ClipAdapter,
    "dinov2": Dinov2Adapter,
    "internvl_vision": InternVitAdapter,
    "pixtral": PixtralAdapter,
    VISION_MODEL: TiledAdapter,
    "qwen2_vl_vision": Qwen2VisionAdapter,
    "qwen2_5_vl_vision": Qwen25VisionAdapter,
    "whisper": WhisperAdapter,
    "qwen2_audio_encoder": Qwen2AudioAdapter,
    "phi4_multimodal_audio": ConformerAdapter,
}
GENERATORS = {DIT: DitAdapter}


def known_architectures() -> tuple[str, ...]:
    """Every `model_type` with an adapter."""
    return tuple(sorted([*DECODERS, *ENCODERS, *GENERATORS]))


def adapter_of(module: Module) -> Adapter:
    """The adapter of a module.

    Raises:
        ValueError: the module names no transformers configuration, an architecture without an
            adapter, a configuration that transformers refuses, or one with another number of
            layers than the plan.
    """
    if module.source is None:
        raise ValueError(
            f"module {module.name!r} has no source: only modules made from a transformers "
            "configuration can run"
        )
    architecture, config = module.source.architecture, module.source.config
    if architecture not in known_architectures():
        known = ", ".join(known_architectures())
        raise ValueError(f"module {module.name!r}: no adapter for {architecture!r}; there are {known}")
    with named_refusals(module.name):
        if architecture in DECODERS:
            made = CrossDecoderAdapter if architecture == TEXT_MODEL else DecoderAdapter
            adapter: Adapter = made(module, architecture, config)
        else:
            adapter = (ENCODERS | GENERATORS)[architecture](module, config, module.source.projector)
    adapter.check_layers()
    return adapter
