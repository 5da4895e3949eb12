"""CLIP's and SigLIP's vision towers: images of one size."""

from dataclasses import dataclass
from typing import Any

from workbench.model.config_fields import Config, count, heads_of, text, whole
from workbench.model.families.family import EXAMPLE_VIT, Encoder, Example, Tower
from workbench.model.module_layers import block_layers, patch_embedding
from workbench.model.shape import Shape
from workbench.model.transformer import Norm, vit_block


@dataclass(frozen=True, slots=True, kw_only=True)
class _Vit:
    """What tells CLIP's and SigLIP's towers apart."""

    patch: int
    pre_norm: Norm | None
    final_norm: Norm | None
    class_token: bool
    activation: str


def _fixed_size_vit(config: Config, kind: _Vit) -> Tower:
    width = whole(config, "hidden_size", 768)
    num_heads = whole(config, "num_attention_heads", 12)
    heads_of(config, width=width, num=num_heads)
    block = vit_block(
        width=width,
        num_heads=num_heads,
        ffn=whole(config, "intermediate_size", 3072),
        activation=text(config, "hidden_act", kind.activation),
    )
    patch = whole(config, "patch_size", kind.patch)
    embed = patch_embedding(
        patch_elements=whole(config, "num_channels", 3) * patch**2,
        width=width,
        bias=not kind.class_token,
        num_patches=(whole(config, "image_size", 224) // patch) ** 2,
        has_class_token=kind.class_token,
        pre_norm=kind.pre_norm,
    )
    layers = (embed, *block_layers(block, count(config, "num_hidden_layers", 12)))
    return Tower(layers=layers, width=width, norm=kind.final_norm)


def siglip(config: Config) -> Tower:
    """Without the pooling head: every patch goes on to the projector."""
    tower = _Vit(
        patch=16, pre_norm=None, final_norm=Norm.LAYER, class_token=False, activation="gelu_pytorch_tanh"
    )
    return _fixed_size_vit(config, tower)


def _idefics3(config: Config) -> Tower:
    """SigLIP's tower under other defaults, without its pooling head."""
    sizes = {"hidden_size": 1152, "num_attention_heads": 16, "patch_size": 32}
    given = {key: value for key, value in config.items() if value is not None}
    return siglip({**sizes, **given})


def _clip(config: Config) -> Tower:
    """The last block's patches go to the projector; the final norm is the class token's alone."""
    tower = _Vit(patch=32, pre_norm=Norm.LAYER, final_norm=None, class_token=True, activation="quick_gelu")
    return _fixed_size_vit(config, tower)


def _shaped_clip(shape: Shape) -> dict[str, Any]:
    activation = "quick_gelu" if shape.name.startswith("clip-vit-l") else "gelu"
    return _shaped(shape) | {"model_type": "clip_vision_model", "hidden_act": activation}


def shaped_siglip(shape: Shape) -> dict[str, Any]:
    """A row of the zoo as SigLIP's configuration."""
    return _shaped(shape) | {"model_type": "siglip_vision_model", "vision_use_head": False}


def _shaped(shape: Shape) -> dict[str, Any]:
    return {
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "image_size": shape.image_px,
        "patch_size": shape.patch_px,
    }


CLIP = Encoder(
    name="CLIP",
    role="vision",
    model_type="clip_vision_model",
    examples={"clip": Example(config=EXAMPLE_VIT, tokens=(65, 64))},
    make=_clip,
    shapes={"clip": _shaped_clip, "vit": _shaped_clip},
)
SIGLIP = Encoder(
    name="SigLIP",
    role="vision",
    model_type="siglip_vision_model",
    examples={"siglip": Example(config=EXAMPLE_VIT, tokens=(64, 64))},
    make=siglip,
    shapes={"siglip": shaped_siglip},
)
IDEFICS3_VISION = Encoder(
    name="Idefics3 vision, SmolVLM vision",
    role="vision",
    model_type="idefics3_vision",
    aliases=("smolvlm_vision",),
    examples={"idefics3": Example(config=EXAMPLE_VIT, tokens=(64, 64))},
    make=_idefics3,
)
