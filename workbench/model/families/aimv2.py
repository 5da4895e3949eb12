"""AIMv2's vision towers: images of one size under learned positions, or of any size under waves."""

from dataclasses import replace

from workbench.model.config_fields import Config, count, heads_of, text, whole
from workbench.model.families.family import EXAMPLE_VIT, Encoder, Example, Tower
from workbench.model.module_layers import block_layers, patch_embedding
from workbench.model.transformer import Block, Mlp, Norm


def _aimv2(config: Config) -> Tower:
    """Without the pooling head: every patch goes on to the projector."""
    width = whole(config, "hidden_size", 1024)
    num_heads = whole(config, "num_attention_heads", 8)
    heads = heads_of({"model_type": config["model_type"]}, width=width, num=num_heads, causal=False)
    block = Block(
        width=width,
        heads=replace(heads, bias="qkvo" if config.get("qkv_bias") else ""),
        mlp=Mlp(
            width=whole(config, "intermediate_size", 2816),
            gated=True,
            activation=text(config, "hidden_act", "silu"),
            bias=bool(config.get("mlp_bias")),
        ),
        norm=Norm.RMS,
    )
    patch = whole(config, "patch_size", 14)
    num_patches = (whole(config, "image_size", 224) // patch) ** 2
    embed = patch_embedding(
        patch_elements=whole(config, "num_channels", 3) * patch**2,
        width=width,
        bias=True,
        num_patches=None if config.get("is_native") else num_patches,
        pre_norm=Norm.RMS,
    )
    layers = (embed, *block_layers(block, count(config, "num_hidden_layers", 24)))
    return Tower(layers=layers, width=width, norm=Norm.RMS)


AIMV2 = Encoder(
    name="AIMv2",
    role="vision",
    model_type="aimv2_vision_model",
    make=_aimv2,
    takes_native_only=lambda config: not config.get("is_native"),
    examples={
        "aimv2": Example(config=EXAMPLE_VIT, tokens=(64, 64)),
        "aimv2, native": Example(config=EXAMPLE_VIT | {"is_native": True, "qkv_bias": True}, tokens=(48, 48)),
    },
)
