"""Llama 4's vision tower: a ViT of one image size with a class token behind the patches."""

from dataclasses import replace

from workbench.model.config_fields import Config, heads_of, text, whole
from workbench.model.families.family import EXAMPLE_VIT, Encoder, Example, Tower
from workbench.model.module_layers import block_layers, patch_embedding
from workbench.model.projector import Projector
from workbench.model.transformer import Norm, vit_block


def _llama4(config: Config) -> Tower:
    """Its final norm is over the class token too, which is dropped behind it."""
    width, num_heads = whole(config, "hidden_size", 768), whole(config, "num_attention_heads", 16)
    heads_of(config, width=width, num=num_heads)
    block = vit_block(
        width=width,
        num_heads=num_heads,
        ffn=whole(config, "intermediate_size", 5632),
        activation=text(config, "hidden_act", "gelu"),
    )
    block = replace(block, heads=replace(block.heads, rotary=True))
    patch = whole(config, "patch_size", 14)
    embed = patch_embedding(
        patch_elements=whole(config, "num_channels", 3) * patch**2,
        width=width,
        bias=False,
        num_patches=(whole(config, "image_size", 448) // patch) ** 2,
        has_class_token=True,
        pre_norm=Norm.LAYER,
    )
    return Tower(
        layers=(embed, *block_layers(block, whole(config, "num_hidden_layers", 34))),
        width=width,
        norm=Norm.LAYER,
        projectors=(Projector.LINEAR, Projector.MLP),
    )


LLAMA4_VISION = Encoder(
    name="Llama 4's tower",
    role="vision",
    model_type="llama4_vision_model",
    examples={"llama4 vision": Example(config=EXAMPLE_VIT, tokens=(65, 64))},
    aliases=("llama4",),
    reason="the runtime has no blocks with rotary positions behind learned ones",
    make=_llama4,
)
