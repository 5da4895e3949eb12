"""Qwen1.5-MoE and Qwen2-57B-A14B: Qwen2's attention before experts beside a gated one for all tokens."""

from workbench.model.config_fields import Config, flag, whole
from workbench.model.families.decoder import default_sizes, llama_like, windowed
from workbench.model.families.family import EXAMPLE_LLM, Example, LanguageModel, Layers
from workbench.model.families.positions import check_fixed_positions
from workbench.model.families.qwen_hybrid import GATED_EXPERTS, with_gated_experts

_SIZES = default_sizes(151936, 2048, 5632, 24, 16, num_key_value_heads=16)
_EXPERTS = {
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
}


def _qwen2_moe(config: Config) -> Layers:
    """A window, if used, in every other block, up to block `max_window_layers`."""
    heads = {"bias": "qkv" if flag(config, "qkv_bias", default=True) else ""}
    plain = llama_like(config, defaults=_SIZES, heads=heads, mlp={})
    slides, last = flag(config, "use_sliding_window"), whole(config, "max_window_layers", 28)
    slid = windowed(config, plain, slides=lambda block: block % 2 == 0 and block < last) if slides else plain
    return with_gated_experts(config, slid, _EXPERTS)


def _check(config: Config) -> None:
    """Refuse windows, which transformers' attention of this family leaves to a mask of the whole batch."""
    if flag(config, "use_sliding_window"):
        raise ValueError("qwen2_moe: use_sliding_window must be false to run, got true; nearest: false")
    check_fixed_positions(config)


QWEN2_MOE = LanguageModel(
    name="Qwen1.5-MoE, Qwen2 with experts",
    model_type="qwen2_moe",
    check_config=_check,
    examples={"qwen2 with experts": Example(config=EXAMPLE_LLM | GATED_EXPERTS | {"mlp_only_layers": [1]})},
    make=_qwen2_moe,
)
