"""Granite 4: Mamba-2 or attention before an MLP, or experts beside one: over ranks, names, refusals."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from runtime.world.pool import Pool
from tests import tiny_models
from tests.command_line import accept
from tests.language_models import assert_read_by_transformers, model_of, num_weights
from tests.recurrent_cases import assert_recomputed_split, assert_sharded
from tests.test_expert_plan import moe_plan
from tests.test_parity import assert_same
from workbench.export.decoder import decoder_of
from workbench.job.job import load_job
from workbench.model.hf_config import module_from_config
from workbench.model.model_graph import TEXT

DENSE: dict[str, Any] = tiny_models.LLAMA | {
    "model_type": "granitemoehybrid",
    "num_hidden_layers": 3,
    "layer_types": ["mamba", "attention", "mamba"],
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 6,
    "mamba_chunk_size": 16,
    "shared_intermediate_size": 40,
    "num_local_experts": 0,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.2,
    "logits_scaling": 2.0,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
}
EXPERTS = DENSE | {
    "num_local_experts": 4,
    "intermediate_size": 12,
    "tie_word_embeddings": False,
    "position_embedding_type": "rope",
}


@pytest.mark.parametrize(
    ("degrees", "config"),
    [
        ({"tp": 2, "pp": 2}, DENSE),
        ({"tp": 2, "ep": 2}, EXPERTS),
        ({"tp": 2, "dp": 2}, EXPERTS),
    ],
    ids=lambda value: str(value) if len(value) < 3 else "",
)
def test_ranks_train_as_one_process(degrees: dict[str, int], config: dict[str, Any], pool: Pool) -> None:
    """Samples of two chunks."""
    assert_same(moe_plan(**degrees, config=config, tokens=20), pool)


def test_recomputed_split_and_sequence_parallel(pool: Pool) -> None:
    assert_recomputed_split(EXPERTS, pool, ep=2)


def test_sharded_parameters_train_as_one_process(pool: Pool) -> None:
    assert_sharded(EXPERTS, (5, 20, 6, 7), pool)


# Granite 4.0 H Small: config.json of ibm-granite/granite-4.0-h-small.
H_SMALL: dict[str, Any] = {
    "model_type": "granitemoehybrid",
    "hidden_size": 4096,
    "num_hidden_layers": 40,
    "layer_types": ["attention" if index % 10 == 5 else "mamba" for index in range(40)],
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 72,
    "num_experts_per_tok": 10,
    "shared_intermediate_size": 1536,
    "intermediate_size": 768,
    "mamba_d_state": 128,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "tie_word_embeddings": True,
    "vocab_size": 100352,
}


def test_the_published_model_has_its_number_of_weights() -> None:
    """32.2 billion."""
    module = module_from_config(H_SMALL, name="llm", modality=TEXT)
    assert module.num_parameters == pytest.approx(32.2e9, rel=2e-3)
    assert module.num_parameters == num_weights(H_SMALL)


@pytest.mark.parametrize(
    "change",
    [
        {},
        EXPERTS,
        {"layer_types": None},
        {"mamba_proj_bias": True, "mamba_conv_bias": False, "attention_bias": True},
        {"mamba_expand": 1, "mamba_d_head": 4, "mamba_d_conv": 3},
    ],
    ids=str,
)
def test_weights_are_counted_as_transformers_builds_them(change: dict[str, Any]) -> None:
    config = DENSE | change
    assert tiny_models.llm(config).num_parameters == num_weights(config)


def test_a_checkpoint_is_read_and_written_as_transformers_does(tmp_path: Path) -> None:
    """It has experts' weights under other names."""
    theirs = model_of(EXPERTS)
    theirs.save_pretrained(tmp_path / "in" / "llm")
    stored = load_file(tmp_path / "in" / "llm" / "model.safetensors")
    assert "model.layers.0.block_sparse_moe.input_linear.weight" in stored
    assert_read_by_transformers(theirs, moe_plan(config=EXPERTS), tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"layer_types": ["mamba"]},
            "layer_types must be linear_attention or full_attention for each of the 3",
        ),
        (
            {"layer_types": ["mamba", "mlp", "mamba"]},
            "layer_types must be linear_attention or full_attention",
        ),
        ({"mamba_n_heads": 5}, "must be mamba_expand x hidden_size 64, got 5 x 12"),
    ],
    ids=str,
)
def test_configurations_that_cannot_be_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_models.llm(DENSE | change)


def test_exports_to_megatron_refuse_it() -> None:
    with pytest.raises(ValueError, match="blocks of 'llm' that differ from each other"):
        decoder_of(tiny_models.llm(DENSE))


def test_a_drafted_job_has_no_tensor_parallelism_that_its_one_group_of_heads_forbids(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(H_SMALL))
    accept("init", tmp_path, "--gpus", "32xH100", "-o", tmp_path / "job.yaml")
    job = load_job(tmp_path / "job.yaml")
    assert all(layout.tp == 1 for layout in job.layouts)  # a module without one has tp 1, too
