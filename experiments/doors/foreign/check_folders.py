"""Checks exported folders with the systems they are for; runs in an environment that has these, not ours.

Reads one JSON object from stdin, {"target", "bridge", "folders": [...]}, and writes a JSON list: per folder
null, or why the system refuses it.
"""

import argparse
import ast
import dataclasses
import importlib
import importlib.util
import inspect
import json
import os
import sys
import tempfile
import typing
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

Folder = dict[str, Any]

if not hasattr(typing, "override"):  # the wheels are for Python 3.12; nothing else in them is
    import typing_extensions

    setattr(typing, "override", typing_extensions.override)  # noqa: B010  (no type checker knows it)


def check_torchtitan(folder: Folder) -> None:
    """Let torchtitan's config manager read the module."""
    from torchtitan.config.manager import ConfigManager

    with tempfile.TemporaryDirectory() as index:
        (Path(index) / "plan_config.py").write_text(folder["files"]["plan_config.py"])
        sys.path.insert(0, index)
        sys.modules.pop("plan_config", None)
        importlib.invalidate_caches()
        try:
            config = ConfigManager().parse_args(["--module", "plan_config", "--config", "train"])
        finally:
            sys.path.remove(index)
    model, parallelism = config.model_spec.model, config.parallelism
    names = {"tok_embeddings", "norm", "lm_head", *(f"layers.{n}" for n in range(len(model.layers)))}
    parts = parallelism.module_fqns_per_model_part
    assert parts is None or sorted(name for part in parts for name in part) == sorted(names), f"parts {parts}"
    passes = parallelism.pipeline_parallel_schedule_csv
    assert not passes or passes in folder["files"], f"no file {passes}"
    ranks = folder["ranks"]
    known_keys = (
        parallelism.tensor_parallel_degree
        * parallelism.pipeline_parallel_degree
        * parallelism.context_parallel_degree
        * parallelism.data_parallel_replicate_degree
        * parallelism.data_parallel_shard_degree
    )
    assert known_keys == ranks, f"degrees make {known_keys} ranks, want {ranks}"


def check_megatron(folder: Folder) -> None:
    """Let Megatron's parser read the flags and build a TransformerConfig; build a program's parts."""
    if "train.py" in folder["files"]:
        check_program(folder)
        return
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
    from megatron.training.arguments import add_megatron_arguments, core_transformer_config_from_args

    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    add_megatron_arguments(parser)
    args, unknown = parser.parse_known_args(folder["arguments"])
    assert not unknown, f"unknown {unknown}"
    degrees = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    assert folder["ranks"] % degrees == 0, f"degrees {degrees} of {folder['ranks']} ranks"
    if args.pipeline_model_parallel_layout is not None:
        layout = PipelineParallelLayerLayout(
            args.pipeline_model_parallel_layout, args.pipeline_model_parallel_size
        )
        layout.validate_layer_layout(num_layers=args.num_layers, mtp_num_layers=None)
        args.pipeline_model_parallel_layout = layout
    import torch

    args.params_dtype = torch.bfloat16 if args.bf16 else torch.float32
    args.rank = 0
    args.world_size = folder["ranks"]
    args.apply_rope_fusion = False  # wants Transformer Engine, which no machine without CUDA has
    core_transformer_config_from_args(args)


def check_program(folder: Folder) -> None:
    """Check what a program of several modules builds, without weights and groups: specs and grids."""
    from megatron.core.models.mimo.config.base_configs import MimoModelConfig

    space = program_names(folder)
    encoders = check_specs(space)
    os.environ["WORLD_SIZE"] = str(folder["ranks"])
    grids = {name: space["grid_of"](words) for name, words in space["MODULE_PARALLELISMS"].items()}
    spans = sorted({(grid.rank_offset, grid.rank_offset + grid.size) for grid in grids.values()})
    ends = [0, *(end for _, end in spans)]
    assert [start for start, _ in spans] == ends[:-1], f"ranks {spans} overlap or leave gaps"
    assert ends[-1] == folder["ranks"], f"ranks {spans} of {folder['ranks']}"
    MimoModelConfig(space["language_spec"](), encoders, space["SPECIAL_TOKEN_IDS"], grids)


def check_specs(space: dict[str, Any]) -> dict[str, Any]:
    """Check that every class that a program names accepts its arguments."""
    language = space["language_spec"]()
    encoders = {name: space["encoder_spec"](words) for name, words in space["ENCODERS"].items()}
    for spec in (language, *encoders.values()):
        parts = spec.submodules or {}
        for module_spec in (spec, *parts.get("encoders", {}).values(), *parts.get("input_projections", ())):
            parameters = inspect.signature(module_spec.module.__init__).parameters
            unknown = [] if "kwargs" in parameters else sorted(set(module_spec.params) - set(parameters))
            assert not unknown, f"{module_spec.module.__name__} has no {unknown}"
    return encoders


def program_names(folder: Folder) -> dict[str, Any]:
    """Names of the folder's program, without running it; imports from Megatron-Bridge are mocked."""
    tree = ast.parse(folder["files"]["train.py"])
    space: dict[str, Any] = {"__name__": "program"}
    for node in [import_node for import_node in tree.body if isinstance(import_node, ast.ImportFrom)]:
        if str(node.module).startswith("megatron.bridge"):
            space |= {import_node.asname or import_node.name: MagicMock() for import_node in node.names}
            tree.body.remove(node)
    exec(compile(tree, "train.py", "exec"), space)
    return space


def check_bridge(folder: Folder, root: str) -> None:
    """Check the fields of its config classes; build those that import without CUDA packages."""
    import torch
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    tables = json.loads(folder["files"]["tables.json"])
    space = program_names(folder)
    if "parallelisms" not in tables:
        config_class = MLATransformerConfig if "MLAModelProvider" in space else TransformerConfig
        fields = {field.name for field in dataclasses.fields(config_class)}
        provider_fields = fields | fields_of(Path(root) / "models/gpt_provider.py", "GPTModelProvider")
        unknown = set(tables["language"]) - provider_fields
        assert not unknown, f"the provider has no {sorted(unknown)}"
        own_words = {key: value for key, value in tables["language"].items() if key in fields}
        config_class(**own_words, pipeline_dtype=torch.bfloat16)
        return
    module = load(Path(root) / "models/megatron_mimo/megatron_mimo_config.py")
    config = module.MegatronMIMOParallelismConfig(
        module_parallelisms={
            name: module.ModuleParallelismConfig(**words) for name, words in tables["parallelisms"].items()
        },
        special_token_ids=tables["special"],
    )
    config.finalize(folder["ranks"])
    check_specs(space)
    provider = fields_of(
        Path(root) / "models/megatron_mimo/megatron_mimo_provider.py", "MegatronMIMOProvider"
    )
    assert set(tables["freeze"]) <= provider, (
        f"MegatronMIMOProvider has no {set(tables['freeze']) - provider}"
    )
    mock = fields_of(Path(root) / "data/megatron_mimo/mock_provider.py", "MockMegatronMIMOProvider")
    assert set(tables["data"]) <= mock, f"MockMegatronMIMOProvider has no {set(tables['data']) - mock}"


def fields_of(file: Path, name: str) -> set[str]:
    """Annotated names of a class that cannot be imported here."""
    tree = ast.parse(file.read_text())
    class_node = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    return {
        node.target.id
        for node in class_node.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


def load(file: Path) -> Any:
    """Import a module by its file, since its package needs Transformer Engine."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None, "it is a file"
    assert spec.loader is not None, "of Python"
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return module


def refusal(target: str, folder: Folder, root: str) -> str | None:
    """Why the system refuses the folder; None: it accepts it."""
    try:
        if target == "torchtitan":
            check_torchtitan(folder)
        elif target == "megatron":
            check_megatron(folder)
        else:
            check_bridge(folder, root)
    except (Exception, SystemExit) as error:  # whatever it is, it is the system's refusal
        return f"{type(error).__name__}: {error}"[:500]
    return None


request = json.loads(sys.stdin.read())
answers = [refusal(request["target"], folder, request["bridge"]) for folder in request["folders"]]
sys.stdout.write("\n" + json.dumps(answers) + "\n")
