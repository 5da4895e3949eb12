"""Janus's tower for understanding images: SigLIP's under other names, of one size."""

from dataclasses import replace

from workbench.model.config_fields import Config, flag, number, whole
from workbench.model.families.family import EXAMPLE_VIT, Encoder, Example, Tower
from workbench.model.families.vit import Vit, tower_of

_TOWER = Vit(width=1024, heads=16, layers=24, patch=16, image_px=384, activation="gelu")


def _janus(config: Config) -> Tower:
    """The MLP's width is a multiple of the tower's; the output's bias is always there."""
    ffn = int(whole(config, "hidden_size", _TOWER.width) * number(config, "mlp_ratio", 4.0))
    bias = "qkvo" if flag(config, "attention_bias", default=True) else "o"
    return tower_of({**config, "intermediate_size": ffn}, replace(_TOWER, bias=bias))


def _check(config: Config) -> None:
    """Raise ValueError for norms of queries and keys, which transformers makes as wide as all heads."""
    if flag(config, "use_qk_norm"):
        raise ValueError(
            f"{config['model_type']}: use_qk_norm must be false: transformers applies norms as wide as all "
            "heads to each head, which fails"
        )


_EXAMPLE = {key: value for key, value in EXAMPLE_VIT.items() if key != "intermediate_size"}
JANUS_VISION = Encoder(
    name="Janus vision",
    role="vision",
    model_type="janus_vision_model",
    examples={"janus vision": Example(config=_EXAMPLE | {"mlp_ratio": 2.75}, tokens=(64, 64))},
    make=_janus,
    check_config=_check,
)
