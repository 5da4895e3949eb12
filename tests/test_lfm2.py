"""LFM2: short convolutions over ranks, sizes, refusals."""

from typing import Any

import pytest
from transformers import Lfm2Config

from runtime.world.pool import Pool
from tests import tiny_models
from tests.language_models import num_weights
from tests.plans import finish
from tests.test_expert_plan import moe_plan
from tests.test_parity import assert_same
from workbench.data.sample import Sample, Segment
from workbench.model.model_graph import TEXT, ModelGraph
from workbench.model.short_conv import SHORT_CONV
from workbench.plan.plan import ModuleSettings, Recompute, Sharding
from workbench.plan.runnable import check_runnable
from workbench.plan.stage import Stage

TINY: dict[str, Any] = tiny_models.LLAMA | {
    "model_type": "lfm2",
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "layer_types": ["conv", "full_attention", "conv"],
    "block_multiple_of": 8,
    "conv_bias": True,
    "tie_word_embeddings": True,
}


@pytest.mark.parametrize(
    ("degrees", "settings"),
    [
        ({"tp": 2, "pp": 2}, ModuleSettings(module="llm", recompute=Recompute.FULL)),
        ({"tp": 2, "dp": 2}, ModuleSettings(module="llm", sequence_parallel=True)),
        ({"dp": 2}, ModuleSettings(module="llm", sharding=Sharding.PARAMETERS)),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_layouts_train_as_one_process(degrees: dict[str, int], settings: ModuleSettings, pool: Pool) -> None:
    """With biases and tied embeddings."""
    assert_same(moe_plan(**degrees, config=TINY, modules=(settings,)), pool)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"block_ff_dim": 100},
        {"block_auto_adjust_ff_dim": False},
        {"block_ffn_dim_multiplier": 1.5, "layer_types": None, "full_attn_idxs": [2]},
        {"tie_embedding": False},
        {"conv_bias": False, "conv_L_cache": 5},
    ],
    ids=str,
)
def test_weights_are_counted_as_transformers_builds_them(change: dict[str, Any]) -> None:
    config = TINY | change
    module = tiny_models.llm(config)
    assert module.num_parameters == num_weights(config)
    kinds = [kind == "conv" for kind in Lfm2Config.from_dict(config).layer_types]
    blocks = module.layers[1:-1]
    assert [any(op.name == SHORT_CONV for op in block.operators) for block in blocks] == kinds


def test_other_kinds_of_layers_are_refused() -> None:
    with pytest.raises(
        ValueError, match="layer_types must be conv or full_attention for each of the 3 blocks"
    ):
        tiny_models.llm(TINY | {"layer_types": ["conv", "full_attention"]})


def test_ranks_do_not_share_its_tokens() -> None:
    with pytest.raises(ValueError, match="reads neighbouring tokens, on one rank; want cp 1, got 2"):
        check_runnable(moe_plan(cp=2, config=TINY))


def test_masks_are_refused() -> None:
    llm = tiny_models.llm(TINY)
    stage = Stage(id=0, module="llm", replica=0, layers=(0, len(llm.layers)), ranks=((0,),))
    batch = (Sample(0, (Segment(TEXT, 0, 5, 5),), mask="document"),)
    plan = finish(ModelGraph(name="text", modules=(llm,), edges=()), batch, [stage])
    with pytest.raises(
        ValueError, match="short convolution runs over whole samples, under no mask; want causal"
    ):
        check_runnable(plan)
