"""Adapters for Megatron-Bridge: one beside each product, of the plan's shapes; others are refused by name."""

import ast
import json
from dataclasses import replace

import pytest

from experiments.doors.export_jobs import LLAMA
from experiments.doors.targets import Folder, bridge_adapters
from tests.test_export_folders import plan_of, prices_of
from tests.test_export_latent import CONFIG as LATENT
from tests.test_export_latent import job_alone
from workbench.export.adapters import TARGETS
from workbench.export.export import export
from workbench.export.folder import MARK
from workbench.export.registry import BY_NAME
from workbench.model.trained import adapted_products

BRIDGE = BY_NAME["megatron-bridge"]
LORA = {"rank": 4, "alpha": 8}
SMALL = LLAMA | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 128,
}
MIXTURE = SMALL | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
OPT = {
    "model_type": "opt",
    "vocab_size": 128,
    "hidden_size": 64,
    "ffn_dim": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "word_embed_proj_dim": 64,
}


def job_of(config=SMALL, layout=None, **lora):
    return job_alone(config, layout or {}, trainable="none", lora=LORA | lora)


def adapted(config=SMALL, layout=None, **lora):
    job = job_of(config, layout, **lora)
    return job, plan_of(job, "megatron-heterogeneous")


def folder_of(job, plan):
    return Folder(files=export(plan, BRIDGE, prices_of(job)), ranks=len(plan.ranks))


@pytest.mark.parametrize(
    ("config", "layout", "modules", "targets"),
    [
        (SMALL, {"tp": 2}, "all", set(TARGETS.values())),
        (SMALL, {}, "mlp", {"linear_fc1_gate", "linear_fc1_up", "linear_fc2"}),
        (MIXTURE, {}, "attention", {"linear_q", "linear_k", "linear_v", "linear_proj"}),
        (SMALL | {"model_type": "qwen2"}, {}, "qkv", {"linear_q", "linear_k", "linear_v"}),
    ],
)
def test_the_program_has_the_plans_adapters(config, layout, modules, targets):
    files = folder_of(*adapted(config, layout, modules=modules)).files
    words = json.loads(files["tables.json"])["lora"]
    assert set(words.pop("target_modules")) == targets
    assert words == {"dim": 4, "alpha": 8, "dropout": 0.0, "lora_A_init_method": "kaiming"}
    assert "peft=CanonicalLoRA(**LORA)" in files["train.py"]
    assert "pretrained_checkpoint=PRETRAINED" in files["train.py"]
    assert "PRETRAINED" in files["CONTAINER.md"]
    compile(files["train.py"], "train.py", "exec")
    differences = [each["has"] for each in json.loads(files[MARK])["differences"]]
    is_cut = "one half of each adapter whole on every tensor-parallel rank" in differences
    assert is_cut is (layout.get("tp", 1) > 1)


def test_frozen_weights_are_not_sharded():
    """Nor does the folder say when they are gathered."""
    job = job_of()
    mark = json.loads(export(plan_of(job, "fsdp"), BRIDGE, prices_of(job))[MARK])
    words = [(each["has"], each["gets"]) for each in mark["differences"]]
    assert ("sharding parameters", "sharding optimizer") in words
    assert not any("gathered" in has for has, _ in words)


@pytest.mark.parametrize(
    ("config", "layout", "lora", "part"),
    [
        (SMALL, {"tp": 2}, {"rank": 3}, "lora rank 3 of 'llm', which tp 2 does not divide"),
        (OPT, {}, {}, "lora adapters of 'mlp.up' of 'llm'"),
        (LATENT, {}, {"modules": "attention"}, "lora adapters of 'q_down_proj' of 'llm'"),
    ],
)
def test_other_adapters_are_refused_by_name(config, layout, lora, part):
    _, plan = adapted(config, layout, **lora)
    assert BRIDGE.refuses(plan) == part
    assert BY_NAME["megatron"].refuses(plan) == "lora adapters of 'llm'"


def test_tokens_that_ranks_do_not_divide_are_refused():
    """It joins the adapters of q, k and v for as many tokens at a time as there are ranks."""
    _, plan = adapted(layout={"tp": 2})
    odd = tuple(
        replace(sample, segments=(replace(sample.segments[0], tokens_in=127, tokens_out=127),))
        for sample in plan.batch
    )
    part = "lora adapters of 'q_proj' of 'llm' for 127 tokens, which tp 2 does not divide"
    assert BRIDGE.refuses(replace(plan, batch=odd)) == part


@pytest.mark.parametrize("kind", ["trained", "unequal"])
def test_blocks_with_other_weights_to_train_are_refused(kind):
    _, plan = adapted()
    llm = plan.model.llm
    first, block, *others = llm.layers
    bare = tuple(replace(each, lora=None) if each.name == "o_proj" else each for each in block.operators)
    layers = {
        "trained": (replace(first, trainable=True), block, *others),
        "unequal": (first, replace(block, operators=bare), *others),
    }
    parts = {
        "trained": "trained layers of 'llm' beside lora adapters",
        "unequal": "different lora adapters in blocks of 'llm'",
    }
    changed = replace(plan.model, modules=(replace(llm, layers=layers[kind]),))
    assert BRIDGE.refuses(replace(plan, model=changed)) == parts[kind]


@pytest.mark.parametrize(
    ("config", "modules"),
    [(SMALL, "all"), pytest.param(MIXTURE, "attention", marks=pytest.mark.thorough)],
)
def test_its_adapters_are_those_of_the_plan(config, modules, packages):
    """A and B of every product, of which each adds the result to its own rows of a fused one."""
    job, plan = adapted(config, modules=modules)
    found = bridge_adapters(folder_of(job, plan), packages)
    block = next(layer for layer in plan.model.llm.layers if layer.has_adapters)
    products = {each.name: each for each in block.operators if each.name in adapted_products([block])}
    assert found.keys() == {TARGETS[name] for name in products}
    for name, product in products.items():
        shapes = found[TARGETS[name]]
        down, up = product.adapter
        assert shapes["down"] == [down.out_features, down.in_features]
        assert shapes["up"] == [up.out_features, up.in_features]
        assert shapes["error"] < 1e-5
    config_file = packages / "megatron_bridge" / "megatron" / "bridge" / "training" / "config.py"
    assert fields_of(config_file, "ConfigContainer") >= {"peft", "checkpoint"}
    assert "pretrained_checkpoint" in fields_of(config_file, "CheckpointConfig")


def fields_of(file, name):
    """Annotated names of a class that cannot be imported here."""
    of_class = next(
        n for n in ast.parse(file.read_text()).body if isinstance(n, ast.ClassDef) and n.name == name
    )
    return {ast.unparse(node.target) for node in of_class.body if isinstance(node, ast.AnnAssign)}
