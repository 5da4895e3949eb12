"""gpt-oss, windows of some blocks, and YaRN for Megatron-LM and Megatron-Bridge."""

import json
from dataclasses import replace

import pytest
from transformers import GptOssConfig

from experiments.doors.targets import Folder, refusals
from tests.test_export_folders import Path, check_flags, plan_of, prices_of, shell_arguments
from tests.test_export_latent import CASES as LATENTS
from tests.test_export_latent import CONFIG as LATENT
from tests.test_export_latent import flags_of, job_alone
from tests.test_export_latent import folder_of as latent_folder
from workbench.export.decoder import decoder_of
from workbench.export.export import export
from workbench.export.registry import BY_NAME
from workbench.plan.plan import KeyExchange

YARN = {
    "rope_type": "yarn",
    "factor": 16.0,
    "beta_fast": 24.0,
    "beta_slow": 2.0,
    "truncate": False,
    "original_max_position_embeddings": 8192,
}
CONFIG = {
    "model_type": "gpt_oss",
    "hidden_size": 512,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 1000,
    "sliding_window": 64,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 131072,
    "rope_theta": 120000.0,
    "rope_scaling": YARN,
}
QWEN = {key: CONFIG[key] for key in CONFIG if "expert" not in key and key != "head_dim"} | {
    "model_type": "qwen2",
    "intermediate_size": 1024,
    "use_sliding_window": True,
    "max_window_layers": 2,
    "max_position_embeddings": 32768,
    "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192},
}
MISTRAL = QWEN | {"model_type": "mistral", "sliding_window": 32, "rope_scaling": None}


def job_of(config=CONFIG, layout=None, **other):
    sizes = {"tp": 2, "ep": 2} if config is CONFIG else {"tp": 2}
    return job_alone(config | other, layout or sizes)


def plan_with(config=CONFIG, layout=None, **other):
    return plan_of(job_of(config, layout, **other), "megatron-heterogeneous")


def flags_with(config=CONFIG, layout=None, **other):
    job = job_of(config, layout, **other)
    words = shell_arguments(export(plan_with(config, layout, **other), BY_NAME["megatron"], prices_of(job)))
    kept = json.loads((Path(__file__).parent / "golden" / "megatron_flags.json").read_text())
    check_flags(words, {row["flag"]: row for row in kept["flags"]})
    return flags_of(words)


def num_weights(flags):
    """Of megatron-core's GPTModel with these flags."""

    def size(name):
        return int(flags[f"--{name}"])

    width, heads, groups = size("hidden-size"), size("num-attention-heads"), size("num-query-groups")
    dim, ffn, experts = size("kv-channels"), size("moe-ffn-hidden-size"), size("num-experts")
    fused = (heads + 2 * groups) * dim
    attention = (width + 1) * fused + heads * dim * width + width + heads  # the last are sinks
    expert = 2 * ffn * (width + 1) + (ffn + 1) * width
    block = attention + (width + 1) * experts + experts * expert + 2 * width
    return 2 * width * size("vocab-size") + width + size("num-layers") * block


def test_megatron_has_as_many_weights_and_the_model_s_operators():
    flags = flags_with()
    assert num_weights(flags) == plan_with().model.llm.num_parameters
    assert flags["--softmax-type"] == "learnable"
    assert (flags["--window-size"], flags["--window-attn-skip-freq"]) == ("63,0", "[1,0,1,0]")
    assert (flags["--glu-linear-offset"], flags["--activation-func-clamp-value"]) == ("1.0", "7.0")
    assert {"--quick-geglu", "--no-bias-dropout-fusion"} <= flags.keys()
    assert not {"--swiglu", "--disable-bias-linear", "--add-qkv-bias"} & flags.keys()
    assert (flags["--expert-model-parallel-size"], flags["--expert-tensor-parallel-size"]) == ("2", "1")


def test_positions_are_yarn_s():
    flags = flags_with()
    assert (flags["--position-embedding-type"], flags["--rotary-base"]) == ("yarn", "120000")
    assert (float(flags["--rotary-scaling-factor"]), flags["--yarn-beta-fast"]) == (16, "24.0")
    assert (flags["--yarn-original-max-position-embeddings"], flags["--yarn-beta-slow"]) == ("8192", "2.0")
    assert {"--no-yarn-correction-range-round-to-int"} <= flags.keys()
    assert not {"--mscale", "--use-rope-scaling"} & flags.keys()
    rounded = flags_with(rope_scaling=YARN | {"truncate": True, "mscale": 1.0, "mscale_all_dim": 0.5})
    assert "--no-yarn-correction-range-round-to-int" not in rounded
    assert (rounded["--mscale"], rounded["--mscale-all-dim"]) == ("1.0", "0.5")


def test_a_configuration_that_states_no_positions_has_those_of_transformers():
    stated = {key: value for key, value in CONFIG.items() if key not in ("rope_scaling", "rope_theta")}
    decoder = decoder_of(plan_with(stated, {"tp": 2, "ep": 2}).model.llm)
    theirs = dict(GptOssConfig().rope_parameters)
    assert decoder.rope_base == theirs.pop("rope_theta")
    assert dict(decoder.rope_scaling) == theirs


def test_a_window_counts_a_query_s_own_token_here_and_not_in_megatron():
    assert flags_with(MISTRAL)["--window-size"] == "31,0"
    assert "--window-attn-skip-freq" not in flags_with(MISTRAL)
    some = flags_with(QWEN)
    assert (some["--window-size"], some["--window-attn-skip-freq"]) == ("63,0", "[0,0,1,1]")
    assert some["--position-embedding-type"] == "yarn"


@pytest.mark.parametrize(
    ("config", "exchange", "becomes"),
    [
        (MISTRAL, KeyExchange.RING, "all_gather"),
        (MISTRAL, KeyExchange.ALL_TO_ALL, "a2a"),
        (CONFIG, KeyExchange.RING, "a2a"),
        (CONFIG, KeyExchange.ALL_GATHER, "a2a"),
        (LATENT, KeyExchange.ALL_GATHER, "p2p"),
        (QWEN | {"use_sliding_window": False}, KeyExchange.RING, "p2p"),
    ],
)
def test_keys_are_exchanged_as_transformer_engine_can(config, exchange, becomes):
    layout = {"cp": 2, "ep": 2} if config is CONFIG else {"cp": 2}
    job = job_of(config, layout)
    modules = tuple(replace(job.settings.of(m.name), key_exchange=exchange) for m in job.model.modules)
    job = replace(job, settings=replace(job.settings, modules=modules))
    files = export(plan_of(job, "megatron-heterogeneous"), BY_NAME["megatron"], prices_of(job))
    flags = flags_of(shell_arguments(files))
    assert flags["--cp-comm-type"] == becomes
    changed = [each["has"] for each in json.loads(files["export.json"])["differences"]]
    is_other = becomes != {"all-to-all": "a2a", "all-gather": "all_gather", "ring": "p2p"}[exchange]
    assert (f"keys exchanged by {exchange}" in changed) == is_other


CASES = [
    (CONFIG, {}),
    (CONFIG, {"rope_scaling": YARN | {"truncate": True, "mscale": 1.0, "mscale_all_dim": 0.5}}),
    (QWEN, {}),
    (MISTRAL, {}),
]


@pytest.mark.parametrize("target", ["megatron", "megatron-bridge"])
def test_the_systems_take_it(target, packages):
    """And latent attention: a system takes seconds to start."""
    folders = [
        Folder(
            files=export(plan_with(config, **other), BY_NAME[target], prices_of(job_of(config, **other))),
            ranks=len(plan_with(config, **other).ranks),
        )
        for config, other in CASES
    ]
    folders += [latent_folder(target, other) for other in LATENTS]
    assert refusals(target, folders, packages) == [None] * len(folders)


def test_a_bridge_s_program_has_the_fields_of_its_own_gpt_oss():
    """Those that gpt_oss_bridge.py of Megatron-Bridge 0.6.2 sets, but for how it is trained."""
    files = export(plan_with(), BY_NAME["megatron-bridge"], prices_of(job_of()))
    tables = json.loads(files["tables.json"])
    words = tables["language"]
    expected = {
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "add_bias_linear": True,
        "share_embeddings_and_output_weights": False,
        "position_embedding_type": "yarn",
        "moe_grouped_gemm": True,
        "moe_token_dispatcher_type": "alltoall",
        "bias_dropout_fusion": False,
        "activation_func_clamp_value": 7.0,
        "glu_linear_offset": 1.0,
        "softmax_type": "learnable",
        "window_size": [63, 0],
        "window_attn_skip_freq": [1, 0, 1, 0],
        "moe_ffn_hidden_size": 256,
        "yarn_rotary_scaling_factor": 16.0,
        "yarn_original_max_position_embeddings": 8192,
        "yarn_beta_fast": 24.0,
        "yarn_beta_slow": 2.0,
        "yarn_correction_range_round_to_int": False,
    }
    assert {key: words[key] for key in expected} == expected
    assert "moe_router_pre_softmax" not in words
    assert tables["activation"] == "quick_gelu"


@pytest.mark.parametrize(
    ("target", "layout", "other", "part"),
    [
        ("torchtitan", None, {}, "experts of 'llm'"),
        ("megatron", None, {"swiglu_alpha": 1.0}, "swiglu_alpha 1.0 of 'llm', not 1.702"),
        (
            "megatron",
            None,
            {"attention_bias": False},
            "attention of 'llm' without the biases of its experts",
        ),
        ("megatron", {"tp": 2}, {}, "experts of 'llm' with biases, cut over 2 ranks"),
        (
            "megatron-bridge",
            None,
            {"rope_scaling": YARN | {"attention_factor": 1.0}},
            "scaled positions with attention_factor",
        ),
        (
            "megatron",
            None,
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            "positions scaled as 'linear'",
        ),
    ],
)
def test_what_is_refused(target, layout, other, part):
    assert BY_NAME[target].refuses(plan_with(CONFIG, layout, **other)) == part
