"""Models with linear attention in most blocks: against transformers, over ranks, priced and refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5

from experiments.doors.whole_sizes import HYBRID, TEXT
from experiments.fidelity.family_memory import EXAMPLES
from runtime.models.choose import adapter_of
from runtime.models.wide_float import KeepsFloat64, in_float64
from runtime.world.pool import Pool
from tests import tiny_models
from tests.language_models import refused
from tests.recurrent_cases import (
    assert_packed,
    assert_priced_by_its_work,
    assert_recomputed_split,
    assert_refused_to_run,
    assert_sharded,
    assert_two_lengths,
    assert_untouched_in_float32,
    texts,
)
from tests.test_adapters import build, relative
from tests.test_adapters_decoders import _plain  # noqa: F401  (a fixture)
from tests.test_expert_plan import moe_plan
from tests.test_parity import assert_same
from tests.test_tensor_parallel import assert_exported_whole
from workbench.cost.delta_rule import CHUNK, delta_rule_bytes, delta_rule_flop
from workbench.export.decoder import decoder_of
from workbench.model.hf_config import module_from_config
from workbench.model.layer import DeltaRule

F64 = torch.float64
NAMES = [name for name in EXAMPLES if name.startswith(("qwen3.5 text", "qwen3-next"))]
IN_TURN = {"layer_types": None, "full_attention_interval": 2}
DENSE: dict[str, Any] = TEXT | HYBRID | IN_TURN | {"model_type": "qwen3_5_text"}
EXPERTS: dict[str, Any] = DENSE | {
    "model_type": "qwen3_5_moe_text",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 28,
    "shared_expert_intermediate_size": 20,
}
RULE = DeltaRule(name="rule", num_heads=4, num_key_heads=2, key_dim=16, value_dim=24, kernel=4)


@pytest.mark.parametrize("name", NAMES)
def test_packed_samples_of_several_chunks_equal_transformers_on_each_alone(name: str) -> None:
    assert_packed(name, 130, 70, 130, 64, 3)


def test_float32_equals_the_untouched_model() -> None:
    config = {"model_type": "qwen3_5_text", **EXAMPLES["qwen3.5 text"][1].config}
    assert_untouched_in_float32(config, 130)


def inputs(num_tokens: int, dtype: torch.dtype = F64) -> dict[str, Tensor]:
    """Of the rule: [1, T, heads, width] queries, keys and values, [1, T, heads] decays and steps."""
    torch.manual_seed(0)
    heads, key_heads = RULE.num_heads, RULE.num_key_heads
    tensors = {
        "query": torch.randn(1, num_tokens, key_heads, RULE.key_dim),
        "key": torch.randn(1, num_tokens, key_heads, RULE.key_dim),
        "value": torch.randn(1, num_tokens, heads, RULE.value_dim),
        "g": -torch.rand(1, num_tokens, heads),
        "beta": torch.rand(1, num_tokens, heads),
        "initial_state": torch.randn(1, heads, RULE.key_dim, RULE.value_dim),
    }
    return {name: tensor.to(dtype).requires_grad_() for name, tensor in tensors.items()}


def test_chunks_equal_the_recurrence_of_the_paper_in_float64() -> None:
    given = inputs(100)
    with KeepsFloat64():
        y, last = qwen3_5.torch_chunk_gated_delta_rule(**given, output_final_state=True)
    query, key = (given[name][0].repeat_interleave(2, 1) for name in ("query", "key"))
    state, outputs = given["initial_state"][0], []
    for q, k, v, g, b in zip(query, key, given["value"][0], given["g"][0], given["beta"][0], strict=True):
        state = state * g.exp()[:, None, None]
        old = torch.einsum("hkv,hk->hv", state, k)
        state = state + torch.einsum("hk,hv->hkv", k, b[:, None] * (v - old))
        outputs.append(torch.einsum("hkv,hk->hv", state, q) * RULE.key_dim**-0.5)
    assert y.dtype == F64
    assert relative(y[0], torch.stack(outputs)) <= 1e-10
    assert relative(last[0], state) <= 1e-10


def test_only_float64_is_kept() -> None:
    with KeepsFloat64():
        assert torch.ones(2, dtype=F64).to(torch.float32).dtype == F64
        assert torch.ones(2, dtype=F64).to(dtype=torch.float32).dtype == F64
        assert torch.ones(2, dtype=F64).float().dtype == F64
        assert torch.ones(2, dtype=torch.bfloat16).to(torch.float32).dtype == torch.float32
        assert torch.ones(2, dtype=torch.int64).float().dtype == torch.float32
    assert in_float64(torch.Tensor.float)(torch.ones(2, dtype=F64)).dtype == F64
    assert torch.ones(2, dtype=F64).float().dtype == torch.float32


def test_flop_are_those_that_torch_counts() -> None:
    """Of products; torch counts neither the solve nor its backward's, which the formula has."""
    num_tokens = 3 * CHUNK
    given = inputs(num_tokens)
    with FlopCounterMode(display=False) as forward:
        y, last = qwen3_5.torch_chunk_gated_delta_rule(**given, output_final_state=True)
    with FlopCounterMode(display=False) as backward:
        (y.sum() + last.sum()).backward()
    rule = delta_rule_flop(RULE, num_tokens)
    solve = num_tokens * RULE.num_heads * (CHUNK - 1) * (RULE.key_dim + RULE.value_dim)
    convolution = 2 * num_tokens * RULE.kernel * RULE.width
    assert forward.get_total_flops() == rule.forward - solve - convolution
    assert backward.get_total_flops() == rule.backward - solve - 2 * convolution
    channels = torch.randn(1, RULE.width, num_tokens + RULE.kernel - 1)
    weight = torch.randn(RULE.width, 1, RULE.kernel)
    with FlopCounterMode(display=False) as counter:
        torch.nn.functional.conv1d(channels, weight, groups=RULE.width)
    assert counter.get_total_flops() == convolution


def test_a_rule_is_priced_by_its_work_and_not_below_its_bound() -> None:
    layer = module_from_config({"model_type": "qwen3_5_text"}, name="llm", modality="text").layers[1]
    assert_priced_by_its_work(layer, delta_rule_bytes)


@pytest.mark.parametrize("degrees", [{"tp": 2, "pp": 2}, {"dp": 2, "pp": 2}, {"tp": 2, "dp": 2}], ids=str)
def test_ranks_train_as_one_process(degrees: dict[str, int], pool: Pool) -> None:
    """Samples of two chunks, of two lengths in each microbatch."""
    plan = moe_plan(**degrees, config=DENSE, tokens=70)
    assert_same(plan, pool)


@pytest.mark.parametrize(
    "degrees", [{"tp": 2, "ep": 2}, {"dp": 2, "ep": 1, "pp": 2}, {"tp": 2, "ep": 2, "pp": 2}], ids=str
)
def test_experts_behind_linear_attention(degrees: dict[str, int], pool: Pool) -> None:
    assert_same(moe_plan(**degrees, config=EXPERTS), pool)


def test_an_export_of_cut_weights_is_whole(tmp_path: Path, pool: Pool) -> None:
    assert_exported_whole(moe_plan(tp=2, ep=2, config=EXPERTS), tmp_path / "out", pool)


def test_recomputed_split_and_sequence_parallel(pool: Pool) -> None:
    assert_recomputed_split(EXPERTS, pool)


def test_sequence_parallel_samples_of_two_lengths(pool: Pool) -> None:
    assert_two_lengths(DENSE, pool)


def test_sharded_parameters_train_as_one_process(pool: Pool) -> None:
    assert_sharded(DENSE, (5, 70, 6, 7), pool)


def test_what_cannot_run_is_refused_in_one_line() -> None:
    three = {"linear_num_key_heads": 3, "linear_num_value_heads": 6}
    assert_refused_to_run(DENSE, three, "linear attention")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"layer_types": ["full_attention"]},
            "layer_types must be linear_attention or full_attention for each",
        ),
        (
            {"layer_types": ["sliding_attention"] * 3},
            "layer_types must be linear_attention or full_attention",
        ),
        ({"layer_types": 3}, "layer_types must be linear_attention or full_attention .* got 3"),
        ({"linear_num_value_heads": 5}, "divide over 2 heads of keys, got 5; nearest: 4"),
    ],
)
def test_configurations_that_cannot_be_are_refused(change: dict[str, Any], message: str) -> None:
    refused(message, lambda: tiny_models.llm(DENSE | change))


def test_exports_to_megatron_refuse_both_kinds_of_attention() -> None:
    for kind, words in (("linear_attention", "with linear attention"), ("full_attention", "with gates")):
        module = tiny_models.llm(DENSE | {"layer_types": [kind] * 3})
        refused(words, lambda module=module: decoder_of(module))  # type: ignore[misc]


def test_axes_fill_the_part_of_a_head_that_rotates() -> None:
    rope = HYBRID["rope_parameters"] | {"mrope_section": [2, 2, 2]}
    module = tiny_models.llm(DENSE | {"rope_parameters": rope})
    refused("mrope_section must add up to 3, half a head's width, got", lambda: adapter_of(module))
    odd = tiny_models.llm(
        DENSE | {"rope_parameters": HYBRID["rope_parameters"] | {"partial_rotary_factor": 0.3}}
    )
    refused("an even number of a head's 12 channels rotate, got 0.3; nearest: 0.333", lambda: adapter_of(odd))


def test_weights_begin_as_in_transformers() -> None:
    ours, _, _ = build(tiny_models.llm(DENSE), torch.float32, *texts(5))
    weights = dict(ours.named_weights())
    start = "model.layers.0.linear_attn"
    assert weights["model.layers.0.input_layernorm.weight"].count_nonzero() == 0
    assert (weights[f"{start}.norm.weight"] == 1).all()
    assert (weights[f"{start}.dt_bias"] == 1).all()
    decays = weights[f"{start}.A_log"].exp()
    assert ((decays >= 0.01) & (decays <= 16)).all()
    assert len(decays.unique()) == len(decays)
