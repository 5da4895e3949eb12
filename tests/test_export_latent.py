"""Latent attention for Megatron-LM and Megatron-Bridge: their fields make the weights."""

import json

import pytest

from experiments.doors.export_jobs import job_as_in_a_file
from experiments.doors.targets import Folder, refusals
from tests.test_export_folders import Path, check_flags, plan_of, prices_of, shell_arguments
from workbench.export.export import export
from workbench.export.registry import BY_NAME

YARN = {"rope_type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "mscale": 1.0}
CONFIG = {
    "model_type": "deepseek_v3",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "q_lora_rank": 192,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_shared_experts": 2,
    "moe_intermediate_size": 256,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "rope_scaling": YARN | {"mscale_all_dim": 1.0},
}


def job_of(**other):
    return job_alone(CONFIG | other, {"tp": 2})


def job_alone(config, layout, **module):
    """One language model on four GPUs."""
    return job_as_in_a_file(
        {
            "name": "alone",
            "model": {"modules": {"llm": {"config": config, "trainable": "all"} | module}},
            "cluster": {"device": "H100", "nodes": 1, "ranks_per_node": 4},
            "profile": "H100",
            "batch": {
                "samples": 4,
                "microbatch_samples": 1,
                "replicas": 1,
                "fixed": {"text_tokens": 128},
            },
            "layouts": {"llm": layout},
        }
    )


LORA = {"trainable": "none", "lora": {"rank": 8, "alpha": 16, "modules": "attention"}}


def test_adapters_of_latents_are_refused_by_name():
    plan = plan_of(job_alone(CONFIG, {}, **LORA), "fsdp")
    assert BY_NAME["fsdp2"].refuses(plan) == "lora adapters of 'kv_down_proj' of 'llm'"


def plan_with(**other):
    return plan_of(job_of(**other), "megatron-heterogeneous")


def flags_of(words):
    starts = [index for index, word in enumerate(words) if word.startswith("--")]
    return {words[i]: words[i + 1] if i + 1 < len(words) else None for i in starts}


def num_weights(flags):
    """Of megatron-core's GPTModel with these flags; a router's correction is no weight."""

    def size(name):
        return int(flags[f"--{name}"])

    width, heads, rank = size("hidden-size"), size("num-attention-heads"), size("kv-lora-rank")
    nope, rope, value = size("qk-head-dim"), size("qk-pos-emb-head-dim"), size("v-head-dim")
    if "--q-lora-rank" in flags:
        latent = size("q-lora-rank")
        queries = latent * (width + 1 + heads * (nope + rope))
    else:
        queries = width * heads * (nope + rope)
    keys = width * (rank + rope) + rank + rank * heads * (nope + value)
    block = queries + keys + heads * value * width + 2 * width
    dense = 3 * width * size("ffn-hidden-size")
    experts = size("num-experts") * (width + 3 * width * size("moe-ffn-hidden-size"))
    experts += 3 * width * size("moe-shared-expert-intermediate-size")
    num_dense = eval(flags["--moe-layer-freq"]).count(0) if "--moe-layer-freq" in flags else 0
    layers = size("num-layers")
    mlps = num_dense * dense + (layers - num_dense) * experts
    return 2 * width * size("vocab-size") + width + layers * block + mlps


NULLS = {"mscale": None, "mscale_all_dim": None, "beta_fast": None, "factor": None}
CASES = [
    {},
    {
        "max_position_embeddings": 163840,
        "rope_scaling": YARN | NULLS,
        "n_group": None,
        "topk_group": None,
        "n_routed_experts": 32,
        "num_experts_per_tok": 8,
    },
    {"q_lora_rank": None},
    {"n_group": 1, "topk_group": 1},
    {"first_k_dense_replace": 0},
]


@pytest.mark.parametrize("other", CASES)
def test_megatron_has_as_many_weights_and_the_router_s_settings(other):
    plan = plan_with(**other)
    words = shell_arguments(export(plan, BY_NAME["megatron"], prices_of(job_of(**other))))
    kept = json.loads((Path(__file__).parent / "golden" / "megatron_flags.json").read_text())
    check_flags(words, {row["flag"]: row for row in kept["flags"]})
    flags = flags_of(words)
    assert num_weights(flags) == plan.model.llm.num_parameters
    assert flags["--moe-router-score-function"] == "sigmoid"
    assert float(flags["--moe-router-topk-scaling-factor"]) == 2.5
    assert ("--moe-router-num-groups" in flags) == ((CONFIG | other)["n_group"] != 1)
    assert (flags["--rope-type"], float(flags["--rotary-scaling-factor"])) == ("yarn", 40)


BRIDGES = [*CASES, {"rope_scaling": CONFIG["rope_scaling"] | {"beta_fast": 1.0, "factor": 64}}]


@pytest.mark.parametrize(("target", "cases"), [("megatron", CASES), ("megatron-bridge", BRIDGES)])
def test_the_systems_take_it(target, cases, packages):
    folders = [folder_of(target, other) for other in cases]
    assert refusals(target, folders, packages) == [None] * len(folders)


def folder_of(target, other):
    plan = plan_with(**other)
    return Folder(files=export(plan, BY_NAME[target], prices_of(job_of(**other))), ranks=len(plan.ranks))


def test_a_bridge_s_program_has_the_layers_and_positions_of_the_model():
    other = BRIDGES[-1]
    files = export(plan_with(**other), BY_NAME["megatron-bridge"], prices_of(job_of(**other)))
    words = json.loads(files["tables.json"])["language"]
    assert words["moe_layer_freq"] == [0, 1, 1, 1]
    assert (words["beta_fast"], words["beta_slow"], words["original_max_position_embeddings"]) == (1, 1, 4096)
    assert "get_gpt_decoder_block_spec" in files["train.py"]


@pytest.mark.parametrize(
    ("target", "other", "part"),
    [
        ("megatron-bridge", {"attention_bias": True}, "latent attention of 'llm' with biases"),
        (
            "megatron-bridge",
            {"rms_norm_eps": 1e-5},
            "norms of the latents of 'llm' with another epsilon than other norms",
        ),
        ("torchtitan", {}, "latent attention of 'llm'"),
        ("megatron", {"attention_bias": True}, "latent attention of 'llm' with biases"),
        (
            "megatron",
            {"norm_topk_prob": False},
            "weights of a token's experts of 'llm' that do not sum to one",
        ),
        ("megatron", {"topk_group": 4}, "groups of experts of 'llm' ranked by two experts' scores"),
        ("megatron", {"rope_scaling": YARN}, "scaled positions with one of mscale and mscale_all_dim alone"),
        (
            "megatron",
            {"rope_scaling": CONFIG["rope_scaling"] | {"beta_fast": 16}},
            "beta_fast 16 of scaled positions, not 32",
        ),
        ("megatron", {"model_type": "deepseek_v2"}, "a language model of the family DeepSeek-V2"),
    ],
)
def test_what_is_refused(target, other, part):
    assert BY_NAME[target].refuses(plan_with(**other)) == part
