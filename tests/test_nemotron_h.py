"""Nemotron-H over ranks: Mamba-2 blocks beside attention, MLPs and experts train as one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.models.nemotron_h import modeling_nemotron_h as modeling

from experiments.fidelity.family_memory import EXAMPLES
from runtime.models.wide_float import KeepsFloat64
from runtime.world.pool import Pool
from tests import tiny_models
from tests.language_models import assert_read_by_transformers, model_of
from tests.recurrent_cases import (
    assert_packed,
    assert_recomputed_split,
    assert_sharded,
    assert_two_lengths,
    assert_untouched_in_float32,
)
from tests.test_adapters import relative
from tests.test_adapters_decoders import _plain  # noqa: F401  (a fixture)
from tests.test_expert_plan import moe_plan
from tests.test_parity import assert_same
from tests.test_tensor_parallel import assert_exported_whole

F64 = torch.float64
DENSE: dict[str, Any] = tiny_models.LLAMA | {
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "M-M*",
    "head_dim": 8,
    "mamba_num_heads": 8,
    "mamba_head_dim": 4,
    "n_groups": 2,
    "ssm_state_size": 6,
    "chunk_size": 16,
}
EXPERTS: dict[str, Any] = DENSE | {
    "hybrid_override_pattern": "ME*E",
    "n_routed_experts": 4,
    "moe_intermediate_size": 12,
    "moe_shared_expert_intermediate_size": 20,
    "routed_scaling_factor": 2.5,
    "n_group": 2,
    "topk_group": 1,
}
LATENT = EXPERTS | {"moe_latent_size": 10}
BIASED = DENSE | {"use_bias": True, "mlp_bias": True, "use_conv_bias": False}


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name.startswith("nemotron-h")])
def test_packed_samples_of_several_chunks_equal_transformers_on_each_alone(name: str) -> None:
    """Chunks have 32 tokens."""
    assert_packed(name, 70, 40, 70, 32, 3)


def test_float32_equals_the_untouched_model() -> None:
    assert_untouched_in_float32(DENSE, 40)


def test_chunks_equal_the_recurrence_of_the_paper_in_float64() -> None:
    """[1, T, heads, width] values, [1, T, groups, width] keys and queries, [1, T, heads] steps."""
    torch.manual_seed(0)
    num_tokens, heads, groups, keys, values = 40, 4, 2, 6, 5
    x, dt = torch.randn(1, num_tokens, heads, values, dtype=F64), torch.rand(1, num_tokens, heads, dtype=F64)
    b, c = torch.randn(2, 1, num_tokens, groups, keys, dtype=F64)
    a, d = -torch.rand(heads, dtype=F64), torch.randn(heads, dtype=F64)
    with KeepsFloat64():
        y = modeling.mamba2_chunk_scan(x, dt, a, b, c, chunk_size=16, D=d)
    state, outputs = torch.zeros(heads, keys, values, dtype=F64), []
    for t in range(num_tokens):
        key, query = (both[0, t].repeat_interleave(heads // groups, 0) for both in (b, c))
        step: Tensor = dt[0, t]
        added = torch.einsum("hk,hv->hkv", step[:, None] * key, x[0, t])
        state = state * (a * step).exp()[:, None, None] + added
        outputs.append(torch.einsum("hkv,hk->hv", state, query) + d[:, None] * x[0, t])
    assert y.dtype == F64
    assert relative(y[0], torch.stack(outputs)) <= 1e-10


@pytest.mark.parametrize(
    ("degrees", "config"),
    [
        ({"tp": 2, "pp": 2}, DENSE),
        ({"dp": 2, "pp": 2}, DENSE),
        ({"tp": 2}, EXPERTS),
        ({"tp": 2, "ep": 2}, LATENT),
        ({"tp": 2, "ep": 2, "pp": 2}, EXPERTS),
    ],
    ids=lambda value: str(value) if len(value) <= 3 else "",
)
def test_ranks_train_as_one_process(degrees: dict[str, int], config: dict[str, Any], pool: Pool) -> None:
    """Samples of two chunks, of two lengths in each microbatch."""
    assert_same(moe_plan(**degrees, config=config, tokens=20), pool)


@pytest.mark.parametrize("ep", [1, 2])
def test_recomputed_split_and_sequence_parallel(ep: int, pool: Pool) -> None:
    assert_recomputed_split(LATENT, pool, ep=ep)


def test_sequence_parallel_samples_of_two_lengths_with_biases(pool: Pool) -> None:
    assert_two_lengths(BIASED, pool)


def test_sharded_parameters_train_as_one_process(pool: Pool) -> None:
    assert_sharded(LATENT, (5, 20, 6, 7), pool)


def test_an_export_of_cut_weights_is_whole(tmp_path: Path, pool: Pool) -> None:
    assert_exported_whole(moe_plan(tp=2, ep=2, config=LATENT), tmp_path / "out", pool)


def test_a_checkpoint_is_read_and_written_as_transformers_does(tmp_path: Path) -> None:
    """It has experts one by one and begins names with `backbone`; its head for later tokens is left out."""
    theirs = model_of(LATENT)
    theirs.save_pretrained(tmp_path / "in" / "llm")
    file = tmp_path / "in" / "llm" / "model.safetensors"
    tensors = load_file(file)
    assert any(name.startswith("backbone.") and ".experts.3.up_proj." in name for name in tensors)
    save_file(tensors | {"mtp.layers.0.norm.weight": torch.ones(4)}, file, {"format": "pt"})
    assert_read_by_transformers(theirs, moe_plan(config=LATENT), tmp_path)
