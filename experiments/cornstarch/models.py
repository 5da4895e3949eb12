"""The papers' multimodal models: encoders and LLM frozen, projectors trained."""

from collections.abc import Callable, Mapping
from functools import partial

from workbench.model.model_graph import ModelGraph, Module, connect
from workbench.model.projector import Projector
from workbench.model.trainable import Trainable
from workbench.model.zoo_cornstarch import cornstarch_module

Make = Callable[..., Module]


def _family(name: str) -> Mapping[str, Make]:
    sizes = ("small", "medium", "large")
    return {size[0].upper(): partial(cornstarch_module, f"cornstarch-{name}-{size}") for size in sizes}


_LLM = _family("llama")
_QWEN2_VISION, _PHI4_AUDIO = _family("qwen2-vision"), _family("phi4-audio")
_EVA_CLIP, _WHISPER = _family("eva-clip"), _family("whisper")


def llm_family() -> Mapping[str, Make]:
    """Llama by size; both papers print the same layers and widths."""
    return _LLM


def encoder_family(arch: str) -> Mapping[str, Make]:
    """Encoders by size of a family as Table 1 calls it; ValueError for another name."""
    families: dict[str, Mapping[str, Make]] = {
        "Qwen2 Vision": _QWEN2_VISION,
        "Phi4 Audio": _PHI4_AUDIO,
        "EVA-CLIP": _EVA_CLIP,
        "Whisper": _WHISPER,
    }
    if arch not in families:
        raise ValueError(f"no encoder family {arch!r}: the families are {', '.join(families)}")
    return families[arch]


def icml_model(name: str) -> ModelGraph:
    """MLLM-<vision><audio><LLM> of the ICML version, e.g. "SML"."""
    vision, audio, llm = tuple(name)
    text = _LLM[llm](trainable=Trainable.NONE)
    width = _width(text)
    encoders = (
        _QWEN2_VISION[vision](width, trainable=Trainable.PROJECTOR),
        _PHI4_AUDIO[audio](width, trainable=Trainable.PROJECTOR),
    )
    return connect(f"mllm-{name.lower()}", *((encoder, text) for encoder in encoders))


def icml_encoder_chain(name: str) -> ModelGraph:
    """The model with one encoder chain before the LLM, as a schedule sees colocated encoders.

    The vision encoder stands for both; for plans whose durations are given.
    """
    both = icml_model(name)
    vision, llm = both.module("vision"), both.module("llm")
    return connect(f"{both.name}-chain", (vision, llm))


def v1_model(name: str, llm: str) -> ModelGraph:
    """VLM-x, ALM-x or VALM-<vision><audio> of the arXiv version, with linear projectors (section 6.1)."""
    kind, _, sizes = name.partition("-")
    text = _LLM[llm](trainable=Trainable.NONE)
    families = {"VLM": (_EVA_CLIP,), "ALM": (_WHISPER,), "VALM": (_EVA_CLIP, _WHISPER)}[kind]
    encoders = tuple(
        family[size](_width(text), projector=Projector.LINEAR, trainable=Trainable.PROJECTOR)
        for family, size in zip(families, sizes, strict=True)
    )
    return connect(f"{name.lower()}-llm-{llm.lower()}", *((encoder, text) for encoder in encoders))


def _width(llm: Module) -> int:
    return llm.layers[0].out_width
