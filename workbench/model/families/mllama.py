"""Llama 3.2 Vision ("mllama"): a tower over tiles of an image, which the LLM reads by cross-attention."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from workbench.model.composites.composite import (
    PROJECTOR,
    VISION,
    Composite,
    Part,
    Parts,
    joined,
    part_config,
    text_config,
)
from workbench.model.config_fields import Config, count, flag, heads_of, text, whole
from workbench.model.families.family import (
    EXAMPLE_LLM,
    EXAMPLE_WIDTH,
    Encoder,
    Example,
    LanguageModel,
    Layers,
    Tower,
)
from workbench.model.families.tiles import whole_image
from workbench.model.feature_layers import carrying
from workbench.model.layer import (
    Attention,
    Layer,
    LayerKind,
    Matmul,
    Operator,
    Pointwise,
    TokenCount,
)
from workbench.model.module_layers import block_layers, lm_head, token_embedding, unequal_block_layers
from workbench.model.projector import Projector
from workbench.model.transformer import (
    Block,
    Heads,
    Mlp,
    Norm,
    Placement,
    attention_operators,
    mlp_operators,
    norm,
    vit_block,
)

TEXT_MODEL, VISION_MODEL = "mllama_text_model", "mllama_vision_model"
EXTRA_TOKENS = 8  # rows of the token table after the vocabulary; the first is the image token's
PATCH_MULTIPLE = 8  # tokens of a tile are padded to a multiple of this
TAPS = (3, 7, 15, 23, 30)  # blocks whose outputs the projector also reads
CROSS_LAYERS = (3, 8, 13, 18, 23, 28, 33, 38)
RATIOS = ((1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (2, 2), (3, 1), (4, 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """Sizes of the vision tower.

    Args:
        tiles: that every image has room for; those that it does not fill hold zeros.
        side: patches along a tile.
        taps: blocks of the first transformer whose output the projector reads, ascending.
        ratios: (rows, columns) of tiles that an image may have.
    """

    width: int
    tiles: int
    side: int
    num_local: int
    num_global: int
    taps: tuple[int, ...]
    ratios: tuple[tuple[int, int], ...]

    @property
    def patches(self) -> int:
        """Tokens of a tile that the LLM may read: patches and a class token."""
        return self.side**2 + 1

    @property
    def padded(self) -> int:
        """Tokens of a tile inside the blocks; always more, as no square and one is a multiple of eight."""
        return -(-self.patches // PATCH_MULTIPLE) * PATCH_MULTIPLE

    @property
    def tokens(self) -> int:
        """Tokens of an image inside the blocks."""
        return self.tiles * self.padded

    @property
    def grid(self) -> tuple[int, int]:
        """The default (rows, columns) of an image: most tiles, then the squarest."""
        return max(self.ratios, key=lambda grid: (grid[0] * grid[1], -abs(grid[0] - grid[1])))

    def num_tapped(self, block: int) -> int:
        """Number of tapped outputs that are carried along after that block of the first transformer."""
        return sum(tap <= block for tap in self.taps)


def tiling_of(config: Config) -> Tiling:
    """The tower of a vision configuration.

    Raises:
        ValueError: taps that do not ascend or are not blocks, an output width that does not fit them, or
            ratios with too many tiles.
    """
    kind = config["model_type"]
    taps = tuple(_indices(config, "intermediate_layers_indices") or TAPS)
    ratios = tuple((int(r), int(c)) for r, c in config.get("supported_aspect_ratios") or RATIOS)
    tower = Tiling(
        width=whole(config, "hidden_size", 1280),
        tiles=whole(config, "max_num_tiles", 4),
        side=whole(config, "image_size", 448) // whole(config, "patch_size", 14),
        num_local=count(config, "num_hidden_layers", 32),
        num_global=count(config, "num_global_layers", 8),
        taps=taps,
        ratios=ratios,
    )
    if list(taps) != sorted(set(taps)) or not all(0 <= tap < tower.num_local for tap in taps):
        raise ValueError(
            f"{kind}: intermediate_layers_indices must ascend in 0..{tower.num_local - 1}, got {list(taps)}"
        )
    emitted = tower.width * (1 + len(taps))
    if whole(config, "vision_output_dim", emitted) != emitted:
        raise ValueError(f"{kind}: vision_output_dim must be {emitted}, got {config['vision_output_dim']}")
    if max(rows * columns for rows, columns in ratios) > tower.tiles:
        raise ValueError(f"{kind}: supported_aspect_ratios must have at most {tower.tiles} tiles")
    return tower


def _tower(config: Config) -> Tower:
    """Embedding of tiles, local blocks, gated global blocks.

    Tapped outputs are carried along beside the hidden state; the projector reads them and the last one
    concatenated. Attention counts every pair: padding sees patches and patches see padding, as in the model.
    """
    tower = tiling_of(config)
    num_heads = whole(config, "attention_heads", 16)
    heads_of(config, width=tower.width, num=num_heads)
    block = vit_block(
        width=tower.width,
        num_heads=num_heads,
        ffn=whole(config, "intermediate_size", 5120),
        activation=text(config, "hidden_act", "gelu"),
        bias="",
    )
    plain = block_layers(block, tower.num_local + tower.num_global)
    blocks = []
    for index, layer in enumerate(plain):
        tapped = tower.num_tapped(index)
        is_global = index >= tower.num_local
        operators = _gated(layer.operators, ("attention_residual", "mlp_residual")) if is_global else None
        if index == tower.num_local:
            operators = (*_global_entry(tower), *(operators or ()))
        blocks.append(carrying(replace(layer, operators=operators or layer.operators), tower.width, tapped))
    return Tower(
        layers=(_embed(tower, config), *blocks),
        width=blocks[-1].out_width,
        norm=None,
        projectors=(Projector.LINEAR, Projector.MLP),
        is_read=True,
    )


def _embed(tower: Tiling, config: Config) -> Layer:
    """Patches, tile positions, a class token, positions inside the tile, gates of both positions; a norm."""
    width = tower.width
    pixels = whole(config, "num_channels", 3) * whole(config, "patch_size", 14) ** 2
    patches = Matmul(
        name="patch_embedding",
        in_features=pixels,
        out_features=width,
        tokens_scale=tower.side**2 / tower.padded,
    )
    position_weights = (
        ("embedding", tower.patches * width),
        ("tile_embedding", (len(tower.ratios) + 1) * tower.tiles * tower.patches * width),
        ("gate", 1),
    )
    return Layer(
        name="embed",
        kind=LayerKind.EMBED,
        operators=(
            patches,
            _tile_places("pre_tile_embedding", tower),
            Pointwise(name="class_token", width=width, num_passes=2, weights=(("embedding", width),)),
            Pointwise(name="tile_positions", width=width, num_passes=4, weights=position_weights),
            norm("pre_norm", width, Norm.LAYER),
        ),
        out_width=width,
    )


def _tile_places(name: str, tower: Tiling) -> Pointwise:
    """A gated vector for every tile of every ratio; ratio 0 means no image."""
    table = (len(tower.ratios) + 1) * tower.tiles * tower.width
    return Pointwise(name=name, width=tower.width, num_passes=3, weights=(("embedding", table), ("gate", 1)))


def _global_entry(tower: Tiling) -> tuple[Operator, ...]:
    """The operators between the two transformers."""
    return (norm("post_norm", tower.width, Norm.LAYER), _tile_places("post_tile_embedding", tower))


def _gated(operators: Sequence[Operator], residuals: tuple[str, ...]) -> tuple[Operator, ...]:
    """The operators with gates on what these residual sums add."""
    return tuple(
        replace(op, num_passes=op.num_passes + 1, weights=(("gate", 1),))
        if isinstance(op, Pointwise) and op.name in residuals
        else op
        for op in operators
    )


def _language(config: Config) -> Layers:
    """A Llama in which some blocks attend to an image's tokens instead of the text's.

    Raises:
        ValueError: tied embeddings (the table has rows that the head lacks), or cross-attention
            layers that are not blocks.
    """
    kind, width = config["model_type"], whole(config, "hidden_size", 4096)
    vocab, num = whole(config, "vocab_size", 128256), count(config, "num_hidden_layers", 40)
    if flag(config, "tie_word_embeddings"):
        raise ValueError(f"{kind}: tie_word_embeddings must be false: the table has {EXTRA_TOKENS} rows more")
    num_heads = whole(config, "num_attention_heads", 32)
    without_head_dim = {key: value for key, value in config.items() if key != "head_dim"}
    heads = heads_of(
        without_head_dim, width=width, num=num_heads, num_kv=whole(config, "num_key_value_heads", 8)
    )
    mlp = Mlp(
        width=whole(config, "intermediate_size", 14336),
        gated=True,
        activation=text(config, "hidden_act", "silu"),
    )
    listed = cross_layers(config)
    if not all(0 <= index < num for index in listed):
        raise ValueError(f"{kind}: cross_attention_layers must lie within 0..{num - 1}, got {sorted(listed)}")
    block = Block(width=width, heads=replace(heads, rotary=True), mlp=mlp, norm=Norm.RMS)
    blocks = unequal_block_layers((block,) * num)
    crossed = _cross_operators(width, replace(heads, causal=False, qk_norm=Norm.RMS), mlp)
    return (
        token_embedding(vocab + EXTRA_TOKENS, width),
        *(replace(b, operators=crossed) if i in listed else b for i, b in enumerate(blocks)),
        lm_head(vocab, width, Norm.RMS),
    )


def cross_layers(config: Config) -> frozenset[int]:
    """Indices of the blocks that attend to an image."""
    listed = _indices(config, "cross_attention_layers")
    return frozenset(CROSS_LAYERS if listed is None else listed)


def _indices(config: Config, key: str) -> list[int] | None:
    """A list of layer indices; None where the configuration has none."""
    listed = config.get(key)
    if listed is not None and not (isinstance(listed, list) and all(type(each) is int for each in listed)):
        raise ValueError(f"{config['model_type']}: {key} must be whole numbers, got {listed!r:.80}")
    return listed


def _cross_operators(width: int, heads: Heads, mlp: Mlp) -> tuple[Operator, ...]:
    """A gated block whose keys and values come from an image of the LLM's width."""
    block = Block(width=width, heads=heads, mlp=mlp, norm=Norm.RMS, placement=Placement.PRE)
    q, k, v, q_norm, k_norm, *rest = (_cross(op) for op in attention_operators(width, block.heads))
    attention = (q, q_norm, k, v, k_norm, *rest)  # keys and values share an input that is not the query's
    norms = [norm(name, width, Norm.RMS) for name in ("attention_norm", "mlp_norm")]
    gates = [
        Pointwise(name=f"{part}_residual", width=width, num_passes=4, weights=(("gate", 1),))
        for part in ("attention", "mlp")
    ]
    inner = mlp_operators("mlp", width, mlp)
    operators = (norms[0], *attention, gates[0], norms[1], *inner, gates[1])
    return tuple(
        op if op.tokens is TokenCount.CONTEXT else replace(op, tokens=TokenCount.READERS) for op in operators
    )


def _cross(operator: Operator) -> Operator:
    """The operator with keys and values from the context."""
    if isinstance(operator, Attention):
        return replace(operator, keys=TokenCount.CONTEXT)
    if operator.name in ("k_proj", "v_proj", "k_norm"):
        return replace(operator, tokens=TokenCount.CONTEXT)
    return operator


def _parts(config: Config) -> Parts:
    vision = Part(
        config=part_config(config, "vision_config", VISION_MODEL),
        projector=Projector.LINEAR,
        weights={"": "model.vision_model.", "projector.linear.": PROJECTOR["projector."]},
    )
    return joined(config, {VISION: vision}, text_config(config, TEXT_MODEL))


MLLAMA_TEXT = LanguageModel(
    name="Llama 3.2 Vision",
    model_type=TEXT_MODEL,
    examples={
        "mllama": Example(
            config=EXAMPLE_LLM
            | {
                "cross_attention_layers": [1, 3],
                "pad_token_id": 0,
                "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            }
        )
    },
    make=_language,
    composites=(Composite(name="Llama 3.2 Vision", model_type="mllama", take_apart=_parts),),
)
MLLAMA_VISION = Encoder(
    name="Llama 3.2 Vision's tower",
    role="vision",
    model_type=VISION_MODEL,
    examples={
        "mllama tower": Example(
            config={
                "hidden_size": EXAMPLE_WIDTH,
                "intermediate_size": 352,
                "num_hidden_layers": 3,
                "num_global_layers": 2,
                "attention_heads": 4,
                "image_size": 16,
                "patch_size": 4,
                "max_num_tiles": 4,
                "intermediate_layers_indices": [0, 2],
                "vision_output_dim": 3 * EXAMPLE_WIDTH,
            },
            tokens=(96, 1),
            read_by="mllama",
        )
    },
    make=_tower,
    native_tokens=lambda config: (tiling_of(config).tokens, 1),
    tiles=whole_image,
    shares_tokens=False,
)
