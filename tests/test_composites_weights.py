"""Checkpoints of composite models: their loss is that of the whole model, and they come back bit by bit."""

import json
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from experiments.doors.whole_configs import CONFIGS
from experiments.doors.whole_features import FEATURES
from experiments.doors.whole_models import (
    LOSSES,
    MASKS,
    modules_of,
    sample_of,
    saved,
    whole_loss,
    whole_model,
)
from runtime.launch import run_local
from runtime.models.choose import adapter_of
from runtime.models.weights import weights_of
from runtime.run_settings import RunSettings
from runtime.state.weights_export import exporting, finish_export, start_export, with_dtype, write_part
from runtime.step.stage_module import build_stage_module
from runtime.world.pool import Pool
from tests import cross_models
from tests.encoder_cases import widen_vision_rotations
from tests.plans import disjoint_plan
from tests.test_checkpoint_attacks import files_of_at_most
from tests.test_cross_attention import loss_of
from workbench.data.sample import Sample, Segment
from workbench.masks.patterns import CAUSAL
from workbench.model.checkpoint import CONFIG, SINGLE
from workbench.model.composites.composite import LLM
from workbench.model.composites.registry import take_apart
from workbench.model.model_graph import TEXT, ModelGraph, connect
from workbench.plan.plan import Plan, Precision
from workbench.plan.runnable import count_targets

F64 = torch.float64


def plan_of(name: str) -> Plan:
    modules = modules_of(dict(take_apart(CONFIGS[name]).modules))
    encoders = [module for called, module in modules.items() if called != LLM]
    graph: ModelGraph = connect("whole", *([encoder, modules[LLM]] for encoder in encoders))
    cuts = {encoder.name: (len(encoder.layers),) for encoder in encoders}
    cuts[LLM] = (2, len(modules[LLM].layers) - 2)
    return disjoint_plan(graph, (sample_of(name, modules),), cuts)


@pytest.mark.parametrize("name", LOSSES)
def test_the_first_loss_is_that_of_the_whole_model(
    name: str, tmp_path: Path, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    widen_vision_rotations(monkeypatch)
    plan = plan_of(name)
    model = saved(name, tmp_path / "whole")
    settings = RunSettings(steps=1, warmup=0, weights=tmp_path / "whole", precision=Precision.FLOAT64)
    result = run_local(plan, settings, pool=pool)
    expected = whole_loss(name, model, plan)
    assert result.losses[0] == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("name", MASKS)
def test_under_a_causal_mask_it_is_another(name: str, tmp_path: Path, pool: Pool) -> None:
    plan = plan_of(name)
    model = saved(name, tmp_path / "whole")
    settings = RunSettings(steps=1, warmup=0, weights=tmp_path / "whole", precision=Precision.FLOAT64)
    causal = replace(plan, batch=tuple(replace(sample, mask=CAUSAL) for sample in plan.batch))
    expected = whole_loss(name, model, plan)
    assert run_local(causal, settings, pool=pool).losses[0] != pytest.approx(expected, rel=1e-6)


def tensors_of(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (not a mapping)
                assert name not in found
                found[name] = file.get_tensor(name)
    return found


@pytest.mark.parametrize("name", [*FEATURES, "mllama", "qwen2_5_omni"])
def test_a_checkpoint_comes_back_bit_by_bit(name: str, tmp_path: Path) -> None:
    """With what no module has; and transformers loads it."""
    origin, target = tmp_path / "whole", tmp_path / "again"
    model = saved(name, origin)
    plan = plan_of_text(name) if name == "mllama" else plan_of(name)
    start_export(target, plan.model)
    for stage in plan.stages:
        module = build_stage_module(plan, stage, seed=0, dtype=F64, weights=origin)
        write_part(target, stage.module, stage.layers[0], module.owned_weights())
    finish_export(target, plan.model, origin)
    before, after = tensors_of(origin), tensors_of(target)
    assert before.keys() == after.keys()
    for key, weight in before.items():
        assert torch.equal(weight, after[key]), key
    load = PreTrainedModel.from_pretrained.__func__  # Qwen2.5-Omni's own wants voices beside weights
    again, loading = load(type(model), target, output_loading_info=True)
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    loaded = dict(again.named_parameters())
    for key, weight in model.named_parameters():
        assert torch.equal(loaded[key].to(F64), weight), key


def test_a_tied_head_that_a_checkpoint_holds_too_is_the_trained_embedding(tmp_path: Path, pool: Pool) -> None:
    """So transformers ties them again, and not to what they were before training."""
    origin, target, name = tmp_path / "whole", tmp_path / "again", "llava, mistral, no bias"
    model = saved(name, origin)
    embedding, head = "language_model.model.embed_tokens.weight", "language_model.lm_head.weight"
    before = tensors_of(origin)
    assert head not in before
    save_file(before | {head: before[embedding].clone()}, origin / SINGLE, metadata={"format": "pt"})
    settings = RunSettings(
        steps=2, warmup=0, weights=origin, export=target, precision=Precision.FLOAT64, seed=3
    )
    run_local(plan_of(name), settings, pool=pool)
    after = tensors_of(target)
    assert after.keys() == {*before, head}
    assert not torch.equal(after[embedding], before[embedding])
    assert torch.equal(after[head], after[embedding])
    again = type(model).from_pretrained(target)
    assert again.lm_head.weight is again.get_input_embeddings().weight


def test_the_configuration_names_the_type_that_was_written(tmp_path: Path, pool: Pool) -> None:
    """A checkpoint in bfloat16, trained in float32, is loaded without being rounded."""
    origin, target = tmp_path / "whole", tmp_path / "again"
    model = saved("llava", tmp_path / "wide").to(torch.bfloat16)
    model.save_pretrained(origin)
    before = json.loads((origin / CONFIG).read_text())
    assert before["dtype"] == "bfloat16"
    before["text_config"]["dtype"] = "bfloat16"
    (origin / CONFIG).write_text(json.dumps(before))
    settings = RunSettings(steps=1, warmup=0, weights=origin, export=target, precision=Precision.FLOAT32)
    run_local(plan_of("llava"), settings, pool=pool)
    after = json.loads((target / CONFIG).read_text())
    assert (after["dtype"], after["text_config"]["dtype"]) == ("float32", "float32")
    assert {**after, "dtype": "", "text_config": ""} == {**before, "dtype": "", "text_config": ""}
    assert after["text_config"] == {**before["text_config"], "dtype": "float32"}
    name = "language_model.model.norm.weight"
    again = type(model).from_pretrained(target)
    assert torch.equal(again.model.language_model.norm.weight, tensors_of(target)[name])


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        pytest.param({}, {"dtype": "float32"}, id="none-named"),
        pytest.param({"torch_dtype": "bfloat16"}, {"torch_dtype": "float32"}, id="older-name"),
        pytest.param(
            {"dtype": "bfloat16", "a": {"torch_dtype": "bfloat16"}, "b": {"dtype": "float64"}, "c": {}},
            {"dtype": "float32", "a": {"torch_dtype": "float32"}, "b": {"dtype": "float64"}, "c": {}},
            id="nested",
        ),
    ],
)
def test_types_in_a_configuration(config: dict[str, Any], expected: dict[str, Any]) -> None:
    assert with_dtype(config, "float32") == expected


def test_experts_that_a_checkpoint_holds_turned_round(tmp_path: Path) -> None:
    """Hubs have Qwen3-VL's experts as [experts, in, out]; they are read, and written back as they were."""
    origin, target = tmp_path / "whole", tmp_path / "again"
    model = saved("qwen3_vl_moe", origin)
    turned = {
        name: weight.mT.contiguous() if ".experts." in name else weight
        for name, weight in tensors_of(origin).items()
    }
    for path in origin.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            held = {name: turned[name] for name in file.keys()}  # noqa: SIM118  (not a mapping)
        save_file(held, path, metadata={"format": "pt"})
    plan = plan_of("qwen3_vl_moe")
    start_export(target, plan.model)
    for stage in plan.stages:
        module = build_stage_module(plan, stage, seed=0, dtype=F64, weights=origin)
        weights = module.owned_weights()
        if stage.module == LLM:
            own = {name: weight for name, weight in weights.items() if ".experts." in name}
            original = dict(model.named_parameters())
            for name, weight in own.items():
                assert torch.equal(weight, original[name.replace("model.", "model.language_model.", 1)])
        write_part(target, stage.module, stage.layers[0], weights)
    finish_export(target, plan.model, origin)
    again = tensors_of(target)
    assert again.keys() == turned.keys()
    assert all(torch.equal(again[name], weight) for name, weight in turned.items())


def plan_of_text(name: str) -> Plan:
    """Its modules side by side, of a sample without images."""
    parts = modules_of(dict(take_apart(CONFIGS[name]).modules))
    graph = connect("whole", tuple(parts.values())[::-1])
    cuts = {module.name: (len(module.layers),) for module in graph.modules}
    return disjoint_plan(graph, (Sample(0, (Segment(TEXT, 0, 4, 4),)),), cuts)


def test_a_tensor_that_nobody_knows_is_named(tmp_path: Path) -> None:
    saved("llava", tmp_path)
    tensors = tensors_of(tmp_path) | {"vision_tower.extra.weight": torch.zeros(2)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"unexpected tensors vision_tower\.extra\.weight"):
        weights_of(tmp_path, adapter_of(plan_of("llava").model.module("vision")))


def test_a_disk_that_is_full_at_the_end_of_an_export_is_named_and_the_modules_weights_are_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a folder that a run can start from."""
    saved("llava", tmp_path / "whole")
    model, kept = plan_of("llava").model, tmp_path / "out.trained"
    with pytest.raises(
        ValueError, match=r"model-00001-of-00003\.safetensors: cannot be written: .*too large"
    ):
        export_until_the_disk_is_full(model, tmp_path / "out", tmp_path / "whole")
    assert {path.name for path in tmp_path.iterdir()} == {"whole", "out.trained"}
    assert {path.name for path in kept.iterdir()} == {module.name for module in model.modules}
    told = f"{kept}: all weights as trained are kept here, as {tmp_path / 'out'} was not completed; "
    assert capsys.readouterr().err.splitlines()[-1] == f"{told}--weights reads them"
    for adapter in map(adapter_of, model.modules):
        reader = weights_of(kept, adapter)
        for name, shape in adapter.stored_shapes().items():
            assert torch.equal(reader.read(name, shape), torch.ones(shape))


def export_until_the_disk_is_full(model: ModelGraph, target: Path, origin: Path) -> None:
    """There is room for the parts, none for the checkpoint that they become."""
    with ExitStack() as full, exporting(target, model, origin, dtype=torch.float32):
        for module in model.modules:
            shapes = adapter_of(module).stored_shapes()
            write_part(target, module.name, 0, {name: torch.ones(shape) for name, shape in shapes.items()})
        full.enter_context(files_of_at_most(5000))


def test_modules_of_other_names_are_refused(tmp_path: Path) -> None:
    saved("llava", tmp_path)
    module = replace(plan_of("llava").model.module("vision"), name="eyes")
    with pytest.raises(ValueError, match=r"is a checkpoint of vision, llm; want modules of these names"):
        weights_of(tmp_path, adapter_of(module))


def test_the_first_loss_of_cross_attention_is_that_of_the_whole_model(tmp_path: Path, pool: Pool) -> None:
    """Llama 3.2 Vision's: an image of two tiles and one of four."""
    config = {
        "model_type": "mllama",
        "vision_config": cross_models.VISION,
        "text_config": cross_models.LANGUAGE,
        "image_token_index": cross_models.LANGUAGE["vocab_size"],
    }
    torch.manual_seed(1)
    model = whole_model(config)
    with torch.no_grad():  # gates that let images through
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.05)
    model.save_pretrained(tmp_path / "whole")
    modules = modules_of(dict(take_apart(config).modules))
    graph = cross_models.model(modules["vision"], modules[LLM])
    words, image = cross_models.words, cross_models.image
    sample = Sample(0, (words(0, 4), image(0, (1, 2)), words(1, 6), image(1, (2, 2)), words(2, 5)))
    plan = disjoint_plan(graph, (sample,), {"vision": (len(modules["vision"].layers),), LLM: (3, 5)})
    settings = RunSettings(seed=5, steps=1, warmup=0, weights=tmp_path / "whole", precision=Precision.FLOAT64)
    result = run_local(plan, settings, pool=pool)
    expected = float(loss_of(model, sample).detach()) / count_targets(sample)
    assert result.losses[0] == pytest.approx(expected, rel=1e-10)
