"""Qwen3-Omni's audio encoder: convolutions over chunks of a second, attention over windows of chunks."""

from workbench.data.corpus import ItemTokens, mel_frames
from workbench.model.config_fields import Config, count, heads_of, text, whole
from workbench.model.families.family import EXAMPLE_WIDTH, Encoder, Example, Tower
from workbench.model.layer import Layer, LayerKind, Matmul, Operator, Pointwise
from workbench.model.module_layers import block_layers
from workbench.model.transformer import Norm, residual, vit_block

NUM_CONVOLUTIONS = 3  # of kernel 3 x 3 and stride 2, over mel bins and frames
CHUNK_TOKENS = 13  # of a full chunk; transformers assumes this for every `n_window`


def convolved(length: int) -> int:
    """Number of mel bins or frames that remain of `length` after the convolutions.

    Example:
        >>> convolved(100), convolved(1), convolved(0)
        (13, 1, 0)
    """
    for _ in range(NUM_CONVOLUTIONS):
        length = (length + 1) // 2
    return length


def chunk_frames(config: Config) -> int:
    """Mel frames of a chunk: chunks are convolved separately, and positions restart in each."""
    return 2 * whole(config, "n_window", 50)


def window_frames(config: Config) -> int:
    """Mel frames of an attention window, a whole number of chunks."""
    chunk = chunk_frames(config)
    return whole(config, "n_window_infer", 800) // chunk * chunk


def tokens_of(frames: int, chunk: int) -> int:
    """Number of tokens of a clip with this number of mel frames.

    Source: `_get_feat_extract_output_lengths` of transformers' Qwen3-Omni.
    """
    num_full, left = divmod(frames, chunk)
    return num_full * CHUNK_TOKENS + convolved(left)


def frames_of(tokens: int, chunk: int) -> range:
    """All numbers of mel frames that yield this number of tokens; the inverse of `tokens_of`.

    Example:
        >>> frames_of(15, 100)
        range(109, 117)
    """
    num_full, left = divmod(tokens - 1, CHUNK_TOKENS)
    first, stride = num_full * chunk, 2**NUM_CONVOLUTIONS
    return range(first + left * stride + 1, first + min((left + 1) * stride, chunk) + 1)


def _audio(config: Config) -> Tower:
    """Whisper's blocks with a bias on keys, and a final norm. Its own MLP is the composite's projector."""
    width, num_heads = whole(config, "d_model", 1280), whole(config, "encoder_attention_heads", 20)
    heads_of(config, width=width, num=num_heads)
    block = vit_block(
        width=width,
        num_heads=num_heads,
        ffn=whole(config, "encoder_ffn_dim", 5120),
        activation=text(config, "activation_function", "gelu"),
    )
    layers = (_stem(config, width), *block_layers(block, count(config, "encoder_layers", 32)))
    return Tower(layers=layers, width=width, norm=Norm.LAYER)


def _stem(config: Config, width: int) -> Layer:
    """Three convolutions, each a matmul per output position, then a matmul over a token's bins and channels.

    Differs: every chunk is priced as a full one, as transformers pads the last chunk of a clip.
    """
    bins, frames = whole(config, "num_mel_bins", 128), chunk_frames(config)
    channels, read = whole(config, "downsample_hidden_size", 480), 1
    operators: list[Operator] = []
    for index in range(1, NUM_CONVOLUTIONS + 1):
        bins, frames = (bins + 1) // 2, (frames + 1) // 2
        per_token = bins * frames / CHUNK_TOKENS
        name = f"conv2d{index}"
        operators += [
            Matmul(name=name, in_features=9 * read, out_features=channels, bias=True, tokens_scale=per_token),
            Pointwise(name=f"{name}.gelu", width=channels, num_passes=2, tokens_scale=per_token),
        ]
        read = channels
    operators += [
        Matmul(name="conv_out", in_features=channels * bins, out_features=width, bias=False),
        residual("add_positions", width),
    ]
    return Layer(name="embed", kind=LayerKind.EMBED, operators=tuple(operators), out_width=width)


def _window_tokens(config: Config) -> int:
    return tokens_of(window_frames(config), chunk_frames(config))


def _clip_tokens(config: Config, duration_s: float) -> tuple[ItemTokens, ...]:
    """One item per window, because windows do not attend to each other."""
    chunk, window = chunk_frames(config), window_frames(config)
    num_full, left = divmod(mel_frames(duration_s), window)
    sizes = [tokens_of(frames, chunk) for frames in (*(window,) * num_full, *((left,) if left else ()))]
    return tuple(ItemTokens(size, size) for size in sizes)


def _check_config(config: Config) -> None:
    """Raise ValueError for chunks or windows for which transformers' own count of tokens is wrong."""
    chunk = chunk_frames(config)
    if convolved(chunk) != CHUNK_TOKENS:
        raise ValueError(
            f"n_window must be 49 to 52, of which {CHUNK_TOKENS} tokens are counted, got {chunk // 2}; "
            "nearest: 50"
        )
    if window_frames(config) < chunk:
        said = whole(config, "n_window_infer", 800)
        raise ValueError(f"n_window_infer must hold a chunk of {chunk} frames, got {said}; nearest: {chunk}")
    if whole(config, "max_source_positions", 1500) < CHUNK_TOKENS:
        said = whole(config, "max_source_positions", 1500)
        raise ValueError(
            f"max_source_positions must be >= {CHUNK_TOKENS}, got {said}; nearest: {CHUNK_TOKENS}"
        )


QWEN3_OMNI_AUDIO = Encoder(
    name="Qwen3-Omni audio",
    role="audio",
    model_type="qwen3_omni_moe_audio_encoder",
    examples={
        "qwen3-omni audio": Example(
            config={
                "d_model": EXAMPLE_WIDTH,
                "encoder_layers": 4,
                "encoder_attention_heads": 4,
                "encoder_ffn_dim": 352,
                "num_mel_bins": 80,
                "downsample_hidden_size": 32,
            },
            tokens=(104, 104),
        )
    },
    make=_audio,
    clip_tokens=_clip_tokens,
    longest_item=_window_tokens,
    check_config=_check_config,
)
