"""Gemma 4's language models as a whole: layouts, checkpoints, published sizes, refusals."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma4TextConfig, PreTrainedModel

from runtime.step.stage_module import StageInput
from runtime.world.pool import Pool
from tests import tiny_models
from tests.language_models import assert_read_by_transformers, model_of, num_weights
from tests.paper_models import GEMMA4, GEMMA4_SPARSE
from tests.test_adapters import build
from tests.test_adapters_decoders import SAMPLES
from tests.test_expert_plan import moe_plan
from tests.test_parity import assert_trains_checkpoint
from workbench.model.hf_config import module_from_config
from workbench.model.layer import Attention
from workbench.model.model_graph import TEXT
from workbench.plan.plan import ModuleSettings, Recompute, Sharding
from workbench.plan.runnable import check_family

SEED = 3
DIVIDED = ModuleSettings(module="llm", sequence_parallel=True)
SHARDED = ModuleSettings(module="llm", sharding=Sharding.PARAMETERS, recompute=Recompute.FULL)
# gemma-4-31B, as public copies of its config.json say; weights are as many as its model card says.
PUBLISHED: dict[str, Any] = {
    "model_type": "gemma4_text",
    "vocab_size": 262144,
    "hidden_size": 5376,
    "intermediate_size": 21504,
    "num_hidden_layers": 60,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "num_global_key_value_heads": 4,
    "sliding_window": 1024,
    "attention_k_eq_v": True,
    "final_logit_softcapping": 30.0,
    "use_bidirectional_attention": "vision",
    "hidden_size_per_layer_input": 0,
}
PUBLISHED_SPARSE = PUBLISHED | {
    "hidden_size": 2816,
    "intermediate_size": 2112,
    "num_hidden_layers": 30,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_global_key_value_heads": 2,
    "enable_moe_block": True,
    "num_experts": 128,
    "top_k_experts": 8,
    "moe_intermediate_size": 704,
}


def saved(config: dict[str, Any], folder: Path) -> PreTrainedModel:
    """transformers' model whose factors are not one, as a checkpoint of the module `llm`."""
    torch.manual_seed(7)
    model = model_of(config).double()
    with torch.no_grad():
        for name, values in (*model.named_parameters(), *model.named_buffers()):
            if values.dim() == 1 and "inv_freq" not in name:
                drawn = values + 0.3 * torch.randn_like(values)
                values.copy_(drawn.float())  # in which factors of layers are kept
    model.save_pretrained(folder / "llm")
    return model


@pytest.mark.parametrize(
    ("config", "degrees", "settings"),
    [
        (GEMMA4, {"tp": 2, "pp": 2}, ModuleSettings(module="llm", recompute=Recompute.FULL)),
        (GEMMA4_SPARSE, {"tp": 2, "dp": 2}, DIVIDED),
        (GEMMA4_SPARSE, {"cp": 2, "ep": 2}, ModuleSettings(module="llm")),
        (GEMMA4_SPARSE, {"tp": 2, "cp": 2, "ep": 4}, DIVIDED),
        (GEMMA4_SPARSE, {"tp": 2, "pp": 2}, ModuleSettings(module="llm")),
        (GEMMA4_SPARSE, {"tp": 2, "dp": 2}, SHARDED),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) and "tp" in value else "",
)
def test_layouts_train_a_checkpoint_as_one_process(
    config: dict[str, Any], degrees: dict[str, int], settings: ModuleSettings, tmp_path: Path, pool: Pool
) -> None:
    saved(config, tmp_path)
    plan = moe_plan(**degrees, config=config, modules=(settings,))
    assert_trains_checkpoint(plan, tmp_path, pool, seed=SEED)


def test_an_export_is_what_transformers_reads(tmp_path: Path) -> None:
    """Its tensors, bit by bit, behind a reading of them."""
    theirs = saved(GEMMA4_SPARSE, tmp_path / "in")
    assert_read_by_transformers(theirs, moe_plan(config=GEMMA4_SPARSE), tmp_path)


@pytest.mark.parametrize(
    ("config", "num_full_kv", "billions"), [(PUBLISHED, 4, 30.7), (PUBLISHED_SPARSE, 2, 25.2)]
)
def test_published_sizes_are_counted_as_transformers_builds_them(
    config: dict[str, Any], num_full_kv: int, billions: float
) -> None:
    """gemma-4-31B and gemma-4-26B-A4B, also from the configuration that transformers writes."""
    module = module_from_config(config, name="llm", modality=TEXT)
    check_family(module)
    assert module.num_parameters == num_weights(config)
    assert round(module.num_parameters / 1e9, 1) == billions
    written = Gemma4TextConfig.from_dict(config).to_dict()
    assert module_from_config(written, name="llm", modality=TEXT).layers == module.layers
    attentions = [op for layer in module.layers for op in layer.operators if isinstance(op, Attention)]
    full = [each for each in attentions if each.window is None]
    assert {(each.head_dim, each.num_kv_heads) for each in full} == {(512, num_full_kv)}
    sliding = [each for each in attentions if each.window == 1024]
    assert {(each.head_dim, each.num_kv_heads) for each in sliding} == {(256, config["num_key_value_heads"])}
    assert len(sliding) == 5 * len(full)
    assert attentions[-1] in full


@pytest.mark.parametrize("config", [GEMMA4, GEMMA4_SPARSE])
def test_the_residual_stream_stays_in_bfloat16(config: dict[str, Any]) -> None:
    """Though factors of layers are in float32."""
    ours, _, data = build(tiny_models.llm(config), torch.bfloat16, *SAMPLES)
    types: list[torch.dtype] = []
    for layer in ours.layers[:-1]:
        layer.register_forward_hook(lambda _layer, _given, stream: types.append(stream.dtype))
    ours(StageInput(None, data)).backward()
    assert types == [torch.bfloat16] * (1 + config["num_hidden_layers"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"hidden_size_per_layer_input": 256},
            "hidden_size_per_layer_input must be 0, got 256: a further emb",
        ),
        (
            {"num_kv_shared_layers": 2},
            "num_kv_shared_layers must be 0, got 2: keys and values that later blo",
        ),
        ({"layer_types": ["full_attention"]}, "for each of the 3 blocks, got"),
        ({"per_layer_config": [1]}, r"per_layer_config must be an object by number of block, got \[1\]"),
        ({"per_layer_config": {"1": 2}}, "per_layer_config must have an object for a block, got 2"),
        (
            {"per_layer_config": {"0": {"sliding_window": 2}}},
            "may set head_dim and num_key_value_heads, got 's",
        ),
        ({"enable_moe_block": True}, "moe_intermediate_size must be a whole number >= 1, got None"),
        ({"use_bidirectional_attention": "all"}, "must be null or 'vision', got 'all'"),
    ],
)
def test_what_is_not_taken_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_family(module_from_config(GEMMA4 | change, name="llm", modality=TEXT))


def test_a_configuration_without_sizes_is_one_with_embeddings_of_every_block() -> None:
    with pytest.raises(ValueError, match="hidden_size_per_layer_input must be 0, got 256"):
        module_from_config({"model_type": "gemma4_text"}, name="llm", modality=TEXT)
