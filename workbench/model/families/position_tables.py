"""Language models that look up learned positions in a table: GPT-2 and OPT."""

from dataclasses import replace
from typing import Any

from workbench.model.config_fields import Config, count, flag, heads_of, text, whole
from workbench.model.families.family import EXAMPLE_WIDTH, Example, LanguageModel, Layers
from workbench.model.module_layers import block_layers, learned_positions, lm_head, token_embedding
from workbench.model.shape import Shape
from workbench.model.transformer import Block, Mlp, Norm


def _with_table(
    config: Config, block: Block, vocab: int, num: int, rows: int, name: str = "embed_tokens"
) -> Layers:
    """Embed with `rows` positions, `num` blocks, head; tied embeddings by default."""
    tied = flag(config, "tie_word_embeddings", default=True)
    return (
        token_embedding(vocab, block.width, name=name, more=learned_positions(rows, block.width), tied=tied),
        *block_layers(block, num),
        lm_head(vocab, block.width, Norm.LAYER, tied=tied),
    )


def _gpt2(config: Config) -> Layers:
    width, vocab = whole(config, "n_embd", 768), whole(config, "vocab_size", 50257)
    if flag(config, "add_cross_attention"):
        raise ValueError("gpt2: add_cross_attention must be false")
    heads = heads_of(config, width=width, num=whole(config, "n_head", 12))
    activation = text(config, "activation_function", "gelu_new")
    block = Block(
        width=width,
        heads=replace(heads, bias="qkvo", fused=True),
        mlp=Mlp(width=whole(config, "n_inner", 4 * width), gated=False, activation=activation, bias=True),
        norm=Norm.LAYER,
    )
    rows, num = whole(config, "n_positions", 1024), count(config, "n_layer", 12)
    return _with_table(config, block, vocab, num, rows, name="wte")


def _shaped_gpt(shape: Shape) -> dict[str, Any]:
    """GPT-2 and GPT-3 (dense attention everywhere; GPT-3 alternates it with sparse).

    Differs: GPT-3 XL's printed 24 heads of 128 are not its width; it gets 16 of 128.
    """
    num_heads = (
        shape.heads if shape.heads * shape.head_dim == shape.hidden else shape.hidden // shape.head_dim
    )
    return {
        "model_type": "gpt2",
        "vocab_size": shape.vocab,
        "n_positions": shape.max_seq,
        "n_embd": shape.hidden,
        "n_layer": shape.layers,
        "n_head": num_heads,
        "n_inner": shape.ffn,
    }


GPT2 = LanguageModel(
    name="GPT-2",
    model_type="gpt2",
    examples={
        "gpt2": Example(
            config={
                "n_embd": EXAMPLE_WIDTH,
                "n_inner": 352,
                "n_layer": 4,
                "n_head": 4,
                "vocab_size": 512,
                "n_positions": 256,
            }
        )
    },
    make=_gpt2,
    shapes={"gpt": _shaped_gpt},
    longest_item=lambda config: whole(config, "n_positions", 1024),
    has_longest_item=True,
)


def _opt(config: Config) -> Layers:
    """OPT with norms before attention and MLP; the 350M model, with norms after them, is not supported."""
    width, vocab = whole(config, "hidden_size", 768), whole(config, "vocab_size", 50272)
    _refuse_other_opt(config, width)
    bias = flag(config, "enable_bias", default=True)
    heads = heads_of(config, width=width, num=whole(config, "num_attention_heads", 12))
    activation = text(config, "activation_function", "relu")
    block = Block(
        width=width,
        heads=replace(heads, bias="qkvo" if bias else ""),
        mlp=Mlp(width=whole(config, "ffn_dim", 3072), gated=False, activation=activation, bias=bias),
        norm=Norm.LAYER,
    )
    rows = whole(config, "max_position_embeddings", 2048) + 2  # the first position is row 2
    return _with_table(config, block, vocab, count(config, "num_hidden_layers", 12), rows)


def _refuse_other_opt(config: Config, width: int) -> None:
    supported = {
        "do_layer_norm_before": True,
        "_remove_final_layer_norm": False,
        "layer_norm_elementwise_affine": True,
        "word_embed_proj_dim": width,
    }
    for key, value in supported.items():
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
    has_longest_item=True,
)
