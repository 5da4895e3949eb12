"""Nemotron-H planned: sizes of published models, the scan's price and memory, refusals."""

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import NemotronHConfig
from transformers.models.nemotron_h import modeling_nemotron_h as modeling

from runtime.models.choose import adapter_of
from tests import tiny_models
from tests.language_models import num_weights, refused
from tests.recurrent_cases import assert_priced_by_its_work, assert_refused_to_run
from tests.test_nemotron_h import BIASED, DENSE, EXPERTS, LATENT
from workbench.cost.roofline import Grid, RowWork, Work, placed_messages
from workbench.cost.state_scan import state_scan_bytes, state_scan_flop
from workbench.export.decoder import decoder_of
from workbench.memory.layer import saved_bytes
from workbench.model.experts import LATENT_DOWN, LATENT_UP
from workbench.model.families.nemotron_h import kinds_of
from workbench.model.frozen import Needs
from workbench.model.hf_config import module_from_config
from workbench.model.layer import StateScan
from workbench.model.model_graph import TEXT

# Nemotron-H 8B: documentation of NVIDIA's Megatron Bridge, "Nemotron H and Nemotron Nano v2"; what it leaves
# out is transformers' default.
NEMOTRON_H_8B: dict[str, Any] = {
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    "hidden_size": 4096,
    "intermediate_size": 21504,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
}
# Nemotron 3 Nano 30B-A3B: config.json of nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16.
NEMOTRON_3_NANO: dict[str, Any] = {
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "hidden_size": 2688,
    "intermediate_size": 1856,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "mamba_num_heads": 64,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 8,
    "n_routed_experts": 128,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "vocab_size": 131072,
}
SCAN = StateScan(name="scan", num_heads=4, num_key_heads=2, key_dim=16, value_dim=24, kernel=4, chunk=32)


@pytest.mark.parametrize(
    ("config", "published"), [(NEMOTRON_H_8B, 8.1e9), (NEMOTRON_3_NANO, 31.6e9)], ids=["8B", "3 Nano"]
)
def test_published_models_have_their_number_of_weights(config: dict[str, Any], published: float) -> None:
    module = module_from_config(config, name="llm", modality=TEXT)
    assert module.num_parameters == pytest.approx(published, rel=1e-3)
    assert module.num_parameters == num_weights(config)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {**BIASED},
        LATENT,
        {"hybrid_override_pattern": None},
        {"layers_block_type": ["mamba", "moe", "attention"], **EXPERTS},
        {"mamba_n_groups": 4, "mamba_d_conv": 3, "mamba_conv_bias": False},
    ],
    ids=str,
)
def test_weights_are_counted_as_transformers_builds_them(change: dict[str, Any]) -> None:
    config = DENSE | change
    config = {key: value for key, value in config.items() if key != "hybrid_override_pattern" or value}
    module = tiny_models.llm(config)
    assert module.num_parameters == num_weights(config)
    assert list(kinds_of(config)) == NemotronHConfig.from_dict(config).layers_block_type
    adapter_of(module).check_layers()


def test_flop_are_those_that_torch_counts() -> None:
    """Of products: torch repeats keys for every head, and hands a chunk's state on to all later ones."""
    num_chunks, heads = 3, SCAN.num_heads
    num_tokens = num_chunks * SCAN.chunk
    torch.manual_seed(0)
    x, dt = torch.randn(1, num_tokens, heads, SCAN.value_dim), torch.rand(1, num_tokens, heads)
    keys, queries = torch.randn(2, 1, num_tokens, SCAN.num_key_heads, SCAN.key_dim)
    with FlopCounterMode(display=False) as counter:
        modeling.mamba2_chunk_scan(x, dt, -torch.ones(heads), keys, queries, chunk_size=SCAN.chunk)
    repeated = num_tokens * (heads - SCAN.num_key_heads) * 2 * SCAN.chunk * SCAN.key_dim
    of_state = 2 * heads * SCAN.key_dim * SCAN.value_dim
    in_turn, from_each = num_chunks * of_state, (num_chunks + 1) ** 2 * of_state
    convolution = 2 * num_tokens * SCAN.kernel * SCAN.width
    flop = state_scan_flop(SCAN, num_tokens)
    assert counter.get_total_flops() == flop.forward - convolution - in_turn + from_each + repeated
    assert flop.backward == 2 * flop.forward


def test_a_scan_is_priced_by_its_work_and_not_below_its_bound() -> None:
    layer = module_from_config(NEMOTRON_H_8B, name="llm", modality=TEXT).layers[1]
    assert_priced_by_its_work(layer, state_scan_bytes)


def test_fused_kernels_keep_what_they_read() -> None:
    """Of a whole block, in bfloat16: 98 numbers of the scan are 2 bytes wide, and its decays 4."""
    work, trained = Work((RowWork(10, 10, 55),)), Needs(input_grad=True, weight_grad=True)
    block = tiny_models.llm(DENSE).layers[1]
    width, values, channels, heads = 32, 32, 56, 8
    scan = 2 * (2 * channels + heads) + 4 * heads
    others = 2 * (width + width + 2 * values + values)  # norm, first matmul, gated norm, last matmul
    assert saved_bytes(block, trained, work, Grid(), 2) == 10 * (scan + others)


def test_members_sum_results_of_latent_experts_behind_the_last_product() -> None:
    """And gradients before the first one, once each; both in the stream's width."""
    layer = tiny_models.llm(LATENT).layers[2]
    names = [operator.name for operator in layer.operators]
    messages = placed_messages(layer, Work((RowWork(10, 10, 55),)), Grid(tp=2), 2)
    assert messages.forward == ((names.index(LATENT_UP), 10 * 32 * 2),)
    assert messages.backward == ((names.index(LATENT_DOWN), 10 * 32 * 2),)


def test_what_cannot_run_is_refused_in_one_line() -> None:
    assert_refused_to_run(DENSE, {"n_groups": 1}, "a state-space scan")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"hybrid_override_pattern": "MX"},
            r"hybrid_override_pattern must be M or \* or - or E for each block",
        ),
        (
            {"layers_block_type": ["mlp", "conv"]},
            "layers_block_type must be linear_attention or full_attention",
        ),
        ({"layers_block_type": []}, r"layers_block_type must be .* got \[\]"),
        ({"mamba_num_heads": 5}, "want heads that divide over 2 groups, got 5; nearest: 4"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings must be false"),
        (
            {**LATENT, "mlp_bias": True},
            "mlp_bias must be false where experts are latent",
        ),
    ],
    ids=str,
)
def test_configurations_that_cannot_be_are_refused(change: dict[str, Any], message: str) -> None:
    refused(message, lambda: tiny_models.llm(DENSE | change))


def test_groups_of_one_expert_are_refused() -> None:
    refused("n_group must divide 4 experts", lambda: adapter_of(tiny_models.llm(EXPERTS | {"n_group": 4})))


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("M-M*", "that differ from each other"),
        ("MM", "with a state-space scan"),
        ("**", "with norms elsewhere"),
    ],
)
def test_exports_to_megatron_refuse_it(pattern: str, words: str) -> None:
    module = tiny_models.llm(DENSE | {"hybrid_override_pattern": pattern})
    refused(words, lambda: decoder_of(module))
