"""Pixtral's vision tower."""

from dataclasses import replace
from math import ceil

from workbench.data.corpus import ItemTokens
from workbench.model.config_fields import Config, count, heads_of, text, whole
from workbench.model.families.family import EXAMPLE_VIT, Encoder, Example, Tower
from workbench.model.module_layers import block_layers, patch_embedding
from workbench.model.transformer import Block, Mlp, Norm


def _pixtral(config: Config) -> Tower:
    """Images of any size under rotary positions; a norm behind the patches and none at the end."""
    width = whole(config, "hidden_size", 1024)
    num_heads = whole(config, "num_attention_heads", 16)
    heads = heads_of({"model_type": config["model_type"]}, width=width, num=num_heads, causal=False)
    activation = text(config, "hidden_act", "gelu")
    block = Block(
        width=width,
        heads=replace(heads, rotary=True),
        mlp=Mlp(width=whole(config, "intermediate_size", 4096), gated=True, activation=activation),
        norm=Norm.RMS,
    )
    patch = whole(config, "patch_size", 16)
    elements = whole(config, "num_channels", 3) * patch**2
    embed = patch_embedding(patch_elements=elements, width=width, bias=False, pre_norm=Norm.RMS)
    layers = (embed, *block_layers(block, count(config, "num_hidden_layers", 24)))
    return Tower(layers=layers, width=width, norm=None)


def _image_tokens(config: Config, height_px: int, width_px: int) -> ItemTokens:
    """Patches of the image; one larger than `image_size` is scaled down to it first."""
    patch, longest = whole(config, "patch_size", 16), whole(config, "image_size", 1024)
    shrunk = max(1.0, height_px / longest, width_px / longest)
    rows, columns = (max(1, ceil(side / shrunk / patch)) for side in (height_px, width_px))
    return ItemTokens(rows * columns, rows * columns)


PIXTRAL = Encoder(
    name="Pixtral",
    role="vision",
    model_type="pixtral",
    examples={"pixtral": Example(config=EXAMPLE_VIT | {"hidden_act": "silu"}, tokens=(64, 64))},
    make=_pixtral,
    image_tokens=_image_tokens,
    shares_tokens=False,
)
