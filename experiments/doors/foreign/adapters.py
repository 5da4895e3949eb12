"""Megatron-Bridge's adapters of a block, on one rank of a host without GPUs and Transformer Engine.

Run: adapters.py ROOT, with tables.json of a folder on stdin; writes one line of JSON.
"""

import dataclasses
import json
import sys
import types
import typing
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

ALONE = (  # how ranks share the model, which one rank does not
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "pipeline_model_parallel_layout",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "cp_comm_type",
    "sequence_parallel",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "moe_grouped_gemm",
)
FUSED = {"linear_qkv": "linear_", "linear_fc1": "linear_fc1_"}  # begins names of the targets in it


def canonical_lora(root: Path) -> Any:
    """The class, without importing the rest of its package."""
    import torch

    if not hasattr(typing, "override"):  # the wheels are for Python 3.12; nothing else in them is
        import typing_extensions

        setattr(typing, "override", typing_extensions.override)  # noqa: B010  (no type checker knows it)
    package = types.ModuleType("megatron.bridge")
    package.__path__ = [str(root)]
    sys.modules["megatron.bridge"] = package
    for unused in ("utils.common_utils", "peft.lora_merge"):
        sys.modules[f"megatron.bridge.{unused}"] = MagicMock()
    from megatron.bridge.peft import utils

    utils.HAVE_TE = False
    engine = MagicMock()
    engine.pytorch.Linear = type("Linear", (torch.nn.Module,), {})
    engine.pytorch.ops.Sequential = torch.nn.Sequential
    sys.modules |= {"transformer_engine": engine, "transformer_engine.pytorch": engine.pytorch}
    from megatron.bridge.peft.canonical_lora import CanonicalLoRA

    return CanonicalLoRA


def block_of(words: dict[str, Any]) -> Any:
    """A model of one block of these sizes."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer import TransformerConfig

    store = vars(torch.distributed)["HashStore"]()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    vars(torch.cuda)["Stream"] = MagicMock  # which a block with experts has
    fields = {field.name for field in dataclasses.fields(TransformerConfig)} - {*ALONE, "bf16"}
    own_words = {name: value for name, value in words.items() if name in fields} | {"num_layers": 1}
    config = TransformerConfig(**own_words, use_cpu_initialization=True, bias_activation_fusion=False)
    spec = get_gpt_layer_local_spec(
        num_experts=words.get("num_moe_experts"),
        qk_layernorm=words["qk_layernorm"],
        normalization=words["normalization"],
    )
    return GPTModel(config, spec, words["vocab_size"], words["seq_length"], position_embedding_type="rope")


def rows_of(words: dict[str, Any]) -> dict[str, Any]:
    """Target -> rows of the fused product that are its own, or all."""
    import torch

    heads, groups, size = (words[f"{n}"] for n in ("num_attention_heads", "num_query_groups", "kv_channels"))
    per_group = heads // groups
    rows = torch.arange((heads + 2 * groups) * size).view(groups, per_group + 2, size)
    ffn = words["ffn_hidden_size"]
    return {
        "linear_q": rows[:, :per_group].flatten(),
        "linear_k": rows[:, per_group].flatten(),
        "linear_v": rows[:, per_group + 1].flatten(),
        "linear_fc1_gate": slice(0, ffn),
        "linear_fc1_up": slice(ffn, 2 * ffn),
    }


def adapters_of(model: Any, words: dict[str, Any], scale: float) -> dict[str, dict[str, Any]]:
    """Shapes of the adapters beside every product, and how far their result is from the formula."""
    import torch

    rows, found = rows_of(words), {}
    for name, weight in model.named_parameters():
        if weight.requires_grad and ".linear_out." in name:
            torch.nn.init.normal_(weight)  # instead of zero
    for name, module in model.named_modules():
        if not hasattr(module, "to_wrap"):
            continue
        product, adapter = name.rpartition(".")[2], module.adapter
        parts: dict[str, Any] = dict(adapter) if isinstance(adapter, torch.nn.ModuleDict) else {"": adapter}
        x = torch.randn(2, 1, next(iter(parts.values())).linear_in.weight.shape[1])
        added = module(x)[0] - module.to_wrap(x)[0]
        for part, half in parts.items():
            target = FUSED.get(product, product) + part.removeprefix("adapter_")
            down, up = half.linear_in.weight, half.linear_out.weight
            wanted = scale * (x @ down.T) @ up.T
            error = (added[..., rows.get(target, slice(None))] - wanted).abs().max() / wanted.abs().max()
            found[target] = {"down": list(down.shape), "up": list(up.shape), "error": float(error)}
    return found


def main() -> None:
    """Of the folder whose tables are on stdin."""
    tables = json.loads(sys.stdin.read())
    lora = canonical_lora(Path(sys.argv[1]))(**tables["lora"])
    model = lora(block_of(tables["language"]))
    adapters = adapters_of(model, tables["language"], lora.alpha / lora.dim)
    num_trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    counted = sum(one["down"][0] * one["down"][1] + one["up"][0] * one["up"][1] for one in adapters.values())
    assert num_trained == counted, f"{num_trained} trained weights, {counted} of adapters"
    sys.stdout.write("\n" + json.dumps(adapters) + "\n")


if __name__ == "__main__":
    main()
