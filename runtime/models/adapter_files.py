"""Adapters in files as PEFT has them: `adapter_model.safetensors` and `adapter_config.json`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from safetensors import safe_open
from torch import Tensor

from runtime.models.adapter import Adapter
from runtime.models.stored_tensors import write_tensors
from workbench.model.lora import Lora, is_of_adapter
from workbench.model.model_graph import Module
from workbench.model.trained import adapted_products
from workbench.plain_text import some

Value = TypeVar("Value")
FOLDER = "adapter"  # beside the frozen weights of the module
TENSORS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
PART = "adapters"  # begins the names of files of single stages, until they are one
PREFIX = "base_model.model."  # of PEFT's model around the module's


def by_file(weights: Mapping[str, Value]) -> dict[str, dict[str, Value]]:
    """Beginning of the name of a stage's file -> its tensors: those of adapters apart from all others."""
    parts: dict[str, dict[str, Value]] = {"stage": {}, PART: {}}
    for name, weight in weights.items():
        parts[PART if is_of_adapter(name) else "stage"][name] = weight
    return {part: tensors for part, tensors in parts.items() if tensors}


def finish_adapters(folder: Path, adapter: Adapter) -> None:
    """Write the adapters of a module from the stages' files, which are deleted; nothing where it has none.

    Raises:
        ValueError: the files do not have every adapter of the module.
    """
    wanted = set(filter(is_of_adapter, adapter.shapes()))
    if not wanted:
        return
    tensors: dict[str, Tensor] = {}
    parts = sorted(folder.glob(f"{PART}-*.safetensors"))
    for part in parts:
        with safe_open(part, framework="pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a mapping)
    if missing := sorted(wanted - tensors.keys()):
        raise ValueError(f"module {adapter.module.name!r}: no part holds tensors {some(missing)}")
    (folder / FOLDER).mkdir()
    named = {PREFIX + name: tensor for name, tensor in tensors.items()}
    write_tensors(named, folder / FOLDER / TENSORS)
    lora = next(iter(adapted_products(adapter.module.layers).values()))
    config = _config(lora, {name.rpartition(".lora_")[0] for name in tensors})
    (folder / FOLDER / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for part in parts:
        part.unlink()


def check_origin(modules: tuple[Module, ...], composite: str) -> None:
    """Raise ValueError for adapters of a composite, whose names in memory are not those of its files."""
    for module in modules:
        if any(layer.has_adapters for layer in module.layers):
            raise ValueError(
                f"export: adapters of {module.name!r} are written beside weights of single modules, got a "
                f"checkpoint of {composite}; want --weights with a folder of each module, or no export"
            )


def _config(lora: Lora, targets: set[str]) -> dict[str, object]:
    return {
        "peft_type": "LORA",
        "base_model_name_or_path": None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "r": lora.rank,
        "target_modules": sorted(targets),
        "task_type": None,
    }
