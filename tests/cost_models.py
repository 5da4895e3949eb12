"""Layers, work and machines for tests of the cost model."""

import pytest

from workbench.cost.model import CostModel
from workbench.cost.profile import Profile, ideal_profile
from workbench.cost.roofline import RowWork, Work
from workbench.model.layer import Layer, LayerKind, Matmul, Operator
from workbench.model.module_layers import block_layers, lm_head, token_embedding
from workbench.model.transformer import Block, Heads, Mlp, Norm
from workbench.plan.lower import lower
from workbench.plan.plan import Plan
from workbench.timing.price import price
from workbench.timing.stage_seconds import StageSeconds

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


def assert_planners_see_prices(plan: Plan, cost: CostModel) -> None:
    """The seconds of passes that planners see are those of the actions that are simulated."""
    durations_s = {str(action): s for action, s in price(lower(plan), cost).durations_s.items()}
    seconds = StageSeconds(plan, cost)
    for stage in plan.stages:
        passes = seconds.passes(plan, stage)
        for each in plan.microbatches_of[stage.module, stage.replica]:
            kind = seconds.kind_of(each)
            assert passes.forward_s[kind] == pytest.approx(durations_s[f"{stage.id}F{each.index}"])
            if passes.has_backward[kind]:
                assert passes.whole_s[kind] == pytest.approx(durations_s[f"{stage.id}B{each.index}"])
