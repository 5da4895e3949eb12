"""Layers, work and machines for tests of the cost model."""

from workbench.cost.profile import Profile, ideal_profile
from workbench.cost.roofline import RowWork, Work
from workbench.model.layer import Layer, LayerKind, Matmul, Operator
from workbench.model.module_layers import block_layers, lm_head, token_embedding
from workbench.model.transformer import Block, Heads, Mlp, Norm

LLAMA_8B = Block(
    width=4096,
    heads=Heads(num=32, num_kv=8, dim=128, causal=True, rotary=True),
    mlp=Mlp(width=14336, gated=True, activation="silu"),
    norm=Norm.RMS,
)
GPT = Block(
    width=1024,
    heads=Heads(num=16, num_kv=16, dim=64, causal=True, bias="qkvo", fused=True),
    mlp=Mlp(width=4096, gated=False, activation="gelu", bias=True),
    norm=Norm.LAYER,
)
SMALL = Block(
    width=64,
    heads=Heads(num=4, num_kv=4, dim=16, causal=True),
    mlp=Mlp(width=256, gated=False, activation="gelu"),
    norm=Norm.LAYER,
)


def block(shape: Block = LLAMA_8B) -> Layer:
    return block_layers(shape, 1)[0]


def llama_8b_layers() -> tuple[Layer, ...]:
    """Llama-3.1-8B: 32 blocks, untied tables of 128,256 rows."""
    return (token_embedding(128256, 4096), *block_layers(LLAMA_8B, 32), lm_head(128256, 4096, Norm.RMS))


def linear(width: int = 512, *, bias: bool = False) -> Layer:
    return layer(Matmul(name="linear", in_features=width, out_features=width, bias=bias))


def layer(*operators: Operator) -> Layer:
    return Layer(name="layer", kind=LayerKind.BLOCK, operators=operators, out_width=512)


def causal(tokens: int, rows: int = 1) -> Work:
    """Rows of one causal sequence each."""
    return Work((RowWork(tokens, tokens, tokens * (tokens + 1) // 2),) * rows)


def compute_only() -> Profile:
    """1 TFLOP/s everywhere, memory for free."""
    return ideal_profile()
