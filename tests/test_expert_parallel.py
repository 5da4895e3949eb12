"""Ranks that deal out experts train as one process does, however tokens fall."""

from typing import Any

import pytest
import torch

from runtime.pool import Pool
from tests.test_adapters_llama4 import LLAMA4
from tests.test_expert_plan import MIXTRAL, moe_plan
from tests.test_parity import assert_same
from workbench.plan.plan import ModuleSettings

torch.set_num_threads(1)
FOUR_LLAMA4: dict[str, Any] = LLAMA4 | {"num_local_experts": 4, "num_key_value_heads": 4}


@pytest.mark.parametrize(
    "degrees",
    [
        {"cp": 2, "ep": 2},
        {"tp": 2, "ep": 2},
        {"tp": 2, "cp": 2, "ep": 4},
        {"tp": 2, "cp": 2, "ep": 2, "dp": 2},
        {"cp": 2, "ep": 2, "dp": 2, "pp": 2},
        {"tp": 4, "ep": 2, "pp": 2},
    ],
    ids=str,
)
def test_mixtral(degrees: dict[str, int], pool: Pool) -> None:
    assert_same(moe_plan(**degrees), pool)


@pytest.mark.parametrize("degrees", [{"cp": 2, "ep": 2}, {"tp": 2, "cp": 2, "ep": 4}], ids=str)
def test_llama4(degrees: dict[str, int], pool: Pool) -> None:
    assert_same(moe_plan(**degrees, config=FOUR_LLAMA4), pool)


@pytest.mark.parametrize("config", [MIXTRAL, FOUR_LLAMA4], ids=["mixtral", "llama4"])
def test_tokens_that_are_dealt_out_already(config: dict[str, Any], pool: Pool) -> None:
    """Sequence parallelism: members come with tokens of their own, padding among them."""
    divided = (ModuleSettings(module="llm", sequence_parallel=True),)
    assert_same(moe_plan(tp=2, cp=2, ep=4, config=config, modules=divided), pool)
