"""Windows and caps of a plan's attentions are those that transformers builds from the same configuration."""

from typing import Any

import pytest
from transformers.models.llama4.configuration_llama4 import Llama4TextConfig

from runtime.models.choose import adapter_of
from tests import tiny_models
from tests.test_adapters_llama4 import LLAMA4
from workbench.model.hf_config import module_from_config
from workbench.model.layer import Attention, LayerKind, Pointwise
from workbench.model.model_graph import TEXT, Module
from workbench.model.reach import Reach

FOUR = tiny_models.LLAMA | {"num_hidden_layers": 4, "pad_token_id": 0}
GEMMA = FOUR | {"head_dim": 8, "query_pre_attn_scalar": 8}
TYPES = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
DOTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1}
CONFIGS: dict[str, dict[str, Any]] = {
    "mistral, as it is": FOUR | {"model_type": "mistral"},
    "mistral, none": FOUR | {"model_type": "mistral", "sliding_window": None},
    "mixtral, as it is": FOUR | {"model_type": "mixtral", "num_local_experts": 2},
    "mixtral": FOUR | {"model_type": "mixtral", "num_local_experts": 2, "sliding_window": 8},
    "phi3": FOUR | {"model_type": "phi3", "sliding_window": 8},
    "phi3, as it is": FOUR | {"model_type": "phi3"},
    "qwen2, unused": FOUR | {"model_type": "qwen2", "sliding_window": 8},
    "qwen2": FOUR
    | {"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2},
    "qwen3, listed": FOUR
    | {"model_type": "qwen3", "sliding_window": 8, "use_sliding_window": True, "layer_types": TYPES},
    "cohere 2": FOUR | {"model_type": "cohere2"},
    "cohere 2, listed": FOUR | {"model_type": "cohere2", "sliding_window": 8, "layer_types": TYPES},
    "cohere 2, none": FOUR | {"model_type": "cohere2", "sliding_window": None},
    "olmo 3": FOUR | {"model_type": "olmo3"},
    "olmo 3, listed": FOUR | {"model_type": "olmo3", "sliding_window": 8, "layer_types": TYPES},
    "exaone 4": FOUR | {"model_type": "exaone4", "sliding_window_pattern": 3},
    "exaone 4, listed": FOUR
    | {"model_type": "exaone4", "sliding_window_pattern": "LG", "layer_types": TYPES},
    "exaone 4, none": FOUR
    | {"model_type": "exaone4", "sliding_window": None, "layer_types": ["full_attention"] * 4},
    "ministral 3": FOUR | {"model_type": "ministral3", "sliding_window": 8},
    "dots.llm1": FOUR | {"model_type": "dots1", "max_window_layers": 3, **DOTS},
    "dots.llm1, none": FOUR | {"model_type": "dots1", "sliding_window": None, **DOTS},
    "gpt-oss": FOUR | {"model_type": "gpt_oss", "num_local_experts": 4},
    "gpt-oss, listed": FOUR | {"model_type": "gpt_oss", "num_local_experts": 4, "layer_types": TYPES},
    "gemma2": GEMMA | {"model_type": "gemma2"},
    "gemma2, no caps": GEMMA
    | {"model_type": "gemma2", "attn_logit_softcapping": None, "final_logit_softcapping": None},
    "gemma3": GEMMA | {"model_type": "gemma3_text", "sliding_window": 8, "sliding_window_pattern": 3},
    "gemma3, capped": GEMMA | {"model_type": "gemma3_text", "final_logit_softcapping": 5.0},
    "gemma3, listed": GEMMA | {"model_type": "gemma3_text", "layer_types": TYPES},
}


def module_of(config: dict[str, Any]) -> Module:
    return module_from_config(config, name="llm", modality=TEXT)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_block_sees_as_far_as_in_transformers(name: str) -> None:
    module = module_of(CONFIGS[name])
    adapter = adapter_of(module)
    for index, layer in enumerate(module.layers):
        if layer.kind is not LayerKind.BLOCK:
            continue
        (attention,) = (each for each in layer.operators if isinstance(each, Attention))
        theirs: Any = adapter.build(index).block.self_attn  # type: ignore[union-attr]
        held = getattr(
            theirs, "sliding_window", getattr(getattr(theirs, "config", None), "sliding_window", None)
        )
        slides = getattr(theirs, "is_sliding", True)  # EXAONE 4's say their window in any case
        assert attention.window == (held if slides else None), layer.name
        cap = getattr(theirs, "attn_logit_softcapping", None)
        assert attention.is_capped == (cap is not None), layer.name


@pytest.mark.parametrize("name", [name for name in CONFIGS if "gemma" in name])
def test_logits_are_bent_where_they_are_in_transformers(name: str) -> None:
    module = module_of(CONFIGS[name])
    loss = module.layers[-1].operators[-1]
    head: Any = adapter_of(module).build(len(module.layers) - 1)
    assert isinstance(loss, Pointwise)
    assert loss.is_capped == (head.softcap is not None)


@pytest.mark.parametrize("rotated", [[1, 0, 1], None])
def test_llama4_norms_queries_where_it_rotates_them(rotated: list[int] | None) -> None:
    config = LLAMA4 | {"num_hidden_layers": 3, "no_rope_layers": rotated}
    if rotated is None:
        config |= {"num_hidden_layers": 5, "moe_layers": []}
    module = module_of(config)
    adapter = adapter_of(module)
    for index, layer in enumerate(module.layers[1:-1], start=1):
        theirs: Any = adapter.build(index).block.self_attn  # type: ignore[union-attr]
        is_normed = any(operator.name == "qk_norm" for operator in layer.operators)
        assert is_normed == (theirs.eps is not None), layer.name


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"attention_chunk_size": 16},
        {"attention_chunk_size": 16, "no_rope_layers": [1, 0, 1, 1, 0]},
        {"attention_chunk_size": 16, "layer_types": ["full_attention", *["chunked_attention"] * 4]},
    ],
)
def test_llama4_has_chunks_where_transformers_has_them(more: dict[str, Any]) -> None:
    config = LLAMA4 | {"num_hidden_layers": 5, "moe_layers": [], "no_rope_layers": None} | more
    theirs = Llama4TextConfig(**config)
    chunk = theirs.attention_chunk_size
    found = [
        op.reach for layer in module_of(config).layers for op in layer.operators if isinstance(op, Attention)
    ]
    assert found == [
        Reach(chunk=chunk if kind == "chunked_attention" else None) for kind in theirs.layer_types
    ]
    assert Reach(chunk=chunk) in found


def test_llama4_without_chunks_sees_everything() -> None:
    module = module_of(LLAMA4 | {"attention_chunk_size": None})
    assert module.reaches == ()


def test_a_window_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match=r"mistral: sliding_window must be a whole number >= 1, got 0"):
        module_of(FOUR | {"model_type": "mistral", "sliding_window": 0})
