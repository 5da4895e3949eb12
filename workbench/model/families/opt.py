"""OPT."""

from dataclasses import replace

from workbench.model.config_fields import Config, count, heads_of, text, whole
from workbench.model.families.family import EXAMPLE_WIDTH, Example, LanguageModel, Layers
from workbench.model.module_layers import block_layers, learned_positions, lm_head, token_embedding
from workbench.model.transformer import Block, Mlp, Norm


def _opt(config: Config) -> Layers:
    """With norms before attention and MLP: the 350M model, which has them behind, is not known."""
    width, vocab = whole(config, "hidden_size", 768), whole(config, "vocab_size", 50272)
    _refuse_other_opt(config, width)
    bias = bool(config.get("enable_bias", True))
    heads = heads_of(config, width=width, num=whole(config, "num_attention_heads", 12))
    activation = text(config, "activation_function", "relu")
    block = Block(
        width=width,
        heads=replace(heads, bias="qkvo" if bias else ""),
        mlp=Mlp(width=whole(config, "ffn_dim", 3072), gated=False, activation=activation, bias=bias),
        norm=Norm.LAYER,
    )
    tied = bool(config.get("tie_word_embeddings", True))
    rows = whole(config, "max_position_embeddings", 2048) + 2  # the first position is row 2
    return (
        token_embedding(vocab, width, more=learned_positions(rows, width), tied=tied),
        *block_layers(block, count(config, "num_hidden_layers", 12)),
        lm_head(vocab, width, Norm.LAYER, tied=tied),
    )


def _refuse_other_opt(config: Config, width: int) -> None:
    wanted = {
        "do_layer_norm_before": True,
        "_remove_final_layer_norm": False,
        "layer_norm_elementwise_affine": True,
        "word_embed_proj_dim": width,
    }
    for key, value in wanted.items():
        given = config.get(key)
        if given is not None and given != value:
            raise ValueError(f"opt: {key} must be {value}, got {given!r}")


OPT = LanguageModel(
    name="OPT",
    model_type="opt",
    examples={
        "opt": Example(
            config={
                "hidden_size": EXAMPLE_WIDTH,
                "word_embed_proj_dim": EXAMPLE_WIDTH,
                "ffn_dim": 352,
                "num_hidden_layers": 4,
                "num_attention_heads": 4,
                "vocab_size": 512,
                "max_position_embeddings": 256,
            }
        )
    },
    make=_opt,
    longest_item=lambda config: whole(config, "max_position_embeddings", 2048),
)
