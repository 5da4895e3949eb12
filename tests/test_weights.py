"""Weights: from a seed on any rank, from a folder by name, and back to a folder that transformers reads."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.clip.modeling_clip import CLIPVisionModel
from transformers.models.llama.modeling_llama import LlamaForCausalLM
from transformers.models.siglip.modeling_siglip import SiglipVisionModel
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from runtime.data.batches import SyntheticSource, microbatch_data
from runtime.models.adapter import MicrobatchData
from runtime.models.choose import adapter_of
from runtime.models.glm import CORRECTION
from runtime.models.initialise import initial_value, normal
from runtime.reference import whole_stage
from runtime.state.weights_export import exporting, finish_export, part_folder, start_export, write_part
from runtime.step.stage_module import StageInput, StageModule, build_stage_module
from tests import paper_models, tiny_models
from tests.command_line import workbench
from tests.test_adapters_decoders import NOT_AUTO
from workbench.data.sample import Sample, Segment
from workbench.model.checkpoint import check_weights
from workbench.model.families.registry import ARCHITECTURES
from workbench.model.model_graph import TEXT, ModelGraph
from workbench.plan.codec import write_plan
from workbench.plan.plan import Plan

F32 = torch.float32
CUTS = {"vision": (1, 3), "audio": (4,), "llm": (2, 1, 1)}


def plan_of(
    llm: dict[str, object] | None = None, vision: dict[str, object] | None = None, *, cut: bool = True
) -> Plan:
    model = tiny_models.two_encoders(llm, vision)
    return tiny_models.plan_of(model, tiny_models.mixed_batch(), CUTS if cut else None)


def export(plan: Plan, target: Path) -> dict[int, StageModule]:
    built = {s.id: build_stage_module(plan, s, seed=9, dtype=F32) for s in plan.stages}
    start_export(target, plan.model)
    for module in built.values():
        write_part(target, module.stage.module, module.stage.layers[0], module.owned_weights())
    finish_export(target, plan.model)
    return built


@pytest.mark.parametrize("llm", [tiny_models.LLAMA, tiny_models.TIED], ids=["untied", "tied"])
def test_round_trip_is_bit_equal(tmp_path: Path, llm: dict[str, object]) -> None:
    plan = plan_of(llm)
    built = export(plan, tmp_path / "out")
    other = plan_of(llm, cut=False)
    for stage in (*plan.stages, *other.stages):
        read = build_stage_module(plan, stage, seed=1, dtype=F32, weights=tmp_path / "out")
        theirs = {
            key: value
            for module in built.values()
            if module.module.name == stage.module
            for key, value in module.named_weights()
        }
        for name, weight in read.named_weights():
            assert torch.equal(weight, theirs[name]), name


def data_of(plan: Plan, module: str) -> MicrobatchData:
    stage = whole_stage(plan.model.module(module))
    microbatch = next(m for m in plan.microbatches if m.module == module)
    return microbatch_data(plan, stage, microbatch, SyntheticSource(1), dtype=F32)


@pytest.mark.parametrize("cut", [True, False], ids=["shards", "one-file"])
@pytest.mark.parametrize("llm", [tiny_models.LLAMA, tiny_models.TIED], ids=["untied", "tied"])
def test_transformers_reads_an_exported_llm(tmp_path: Path, llm: dict[str, object], cut: bool) -> None:
    plan = plan_of(llm, cut=cut)
    export(plan, tmp_path / "out")
    theirs, report = LlamaForCausalLM.from_pretrained(tmp_path / "out" / "llm", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    ours = build_stage_module(plan, whole_stage(plan.model.module("llm")), seed=9, dtype=F32)
    original = dict(theirs.named_parameters())
    for name, weight in ours.named_weights():
        assert torch.equal(weight, original[name]), name
    assert theirs.config.vocab_size == 64
    if cut:
        index = json.loads((tmp_path / "out" / "llm" / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == 4 * sum(
            weight.numel() for _, weight in ours.named_weights()
        )


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_experts_one_by_one_are_read_and_those_in_one_tensor_written(tmp_path: Path, name: str) -> None:
    """Checkpoints of a hub hold each expert's products; what we write transformers reads back."""
    plan = plan_of(paper_models.DECODERS[name], cut=False)
    config = AutoConfig.for_model(**paper_models.DECODERS[name])
    theirs = AutoModelForCausalLM.from_config(config)
    theirs.save_pretrained(tmp_path / "hub" / "llm")
    stored = load_file(tmp_path / "hub" / "llm" / "model.safetensors")
    (last,) = [
        key for key in stored if key.endswith(("4.w2.weight", "experts.4.down_proj.weight")) and ".1." in key
    ]
    original = dict(theirs.named_parameters())
    stage = whole_stage(plan.model.module("llm"))
    ours = build_stage_module(plan, stage, seed=1, dtype=F32, weights=tmp_path / "hub")
    for key, weight in ours.named_weights():
        assert torch.equal(weight, original[key]), key

    export(plan, tmp_path / "out")
    again, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "llm", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    loaded = dict(again.named_parameters())
    for key, weight in build_stage_module(plan, stage, seed=9, dtype=F32).named_weights():
        assert torch.equal(weight, loaded[key]), key

    del stored[last]
    save_file(stored, tmp_path / "hub" / "llm" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"module 'llm': tensor '{re.escape(last)}' is missing"):
        build_stage_module(plan, stage, seed=1, dtype=F32, weights=tmp_path / "hub")


OWN_NAMES = (
    *("mistral4", "olmo3", "olmoe", "ernie4_5_moe", "hunyuan_v1_moe"),
    *("dots1", "solar_open", "minimax_m2", "apertus", "nemotron", "starcoder2"),
    *("aria_text", "qwen2_moe", "glm4_moe_lite", "lfm2_moe"),
)  # families with experts, norms, activations or corrections under names of their own


@pytest.mark.parametrize("kind", OWN_NAMES)
def test_what_transformers_writes_is_read_and_what_we_write_it_reads(tmp_path: Path, kind: str) -> None:
    """Also corrections of routers, which are no weights."""
    config = {"model_type": kind, **next(iter(ARCHITECTURES[kind].examples.values())).config}
    module = tiny_models.llm(config)
    graph = ModelGraph(name="text", modules=(module,))
    plan = tiny_models.plan_of(graph, (Sample(0, (Segment(TEXT, 0, 5, 5),)),))
    make = NOT_AUTO.get(kind, AutoModelForCausalLM)
    read = AutoConfig.for_model(**config)
    theirs = make._from_config(read) if kind in NOT_AUTO else make.from_config(read)
    state = theirs.state_dict()
    for name, tensor in state.items():
        if CORRECTION in name:
            tensor.copy_(torch.linspace(-1, 1, tensor.numel()).view_as(tensor))
    theirs.save_pretrained(tmp_path / "hub" / "llm")
    ours = build_stage_module(plan, whole_stage(module), seed=1, dtype=F32, weights=tmp_path / "hub")
    for key, tensor in (dict(ours.named_weights()) | ours.named_constants()).items():
        assert torch.equal(tensor, state[key]), key

    with exporting(tmp_path / "out", graph, dtype=F32):
        write_part(tmp_path / "out", "llm", 0, ours.owned_weights())
    again, report = make.from_pretrained(tmp_path / "out" / "llm", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    for key, tensor in again.state_dict().items():
        assert torch.equal(tensor, state[key]), key


def test_transformers_reads_exported_encoders(tmp_path: Path) -> None:
    plan = plan_of()
    export(plan, tmp_path / "out")
    for module, kind in (("vision", SiglipVisionModel), ("audio", WhisperEncoder)):
        theirs = kind.from_pretrained(tmp_path / "out" / module).eval()
        ours = build_stage_module(plan, whole_stage(plan.model.module(module)), seed=9, dtype=F32)
        data = data_of(plan, module)
        index = -1  # an image, and a clip, of the configured size
        hidden = theirs(data.raw[index][None]).last_hidden_state[0]
        features = ours(StageInput(None, data))[-data.tokens_out[index] :]
        torch.testing.assert_close(features, ours.layers[-1].projector(hidden))


def test_transformers_reads_an_exported_clip(tmp_path: Path) -> None:
    plan = plan_of(vision=tiny_models.CLIP)
    export(plan, tmp_path / "out")
    theirs = CLIPVisionModel.from_pretrained(tmp_path / "out" / "vision")
    ours = build_stage_module(plan, whole_stage(plan.model.module("vision")), seed=9, dtype=F32)
    original = dict(theirs.named_parameters())
    for name, weight in ours.named_weights():
        assert name.startswith("projector.") or torch.equal(weight, original[name]), name


def test_reads_a_folder_that_transformers_wrote(tmp_path: Path) -> None:
    """Sharded, with tied weights; encoders keep a head we do not use, and need our projector."""
    plan = plan_of(tiny_models.TIED, cut=False)
    ours = build_stage_module(plan, plan.stages[-1], seed=4, dtype=F32)
    theirs = LlamaForCausalLM(ours.adapter.config)
    theirs.save_pretrained(tmp_path / "llm", max_shard_size="20KB")
    assert len(list((tmp_path / "llm").glob("*.safetensors"))) > 1
    read = build_stage_module(plan, plan.stages[-1], seed=4, dtype=F32, weights=tmp_path)
    original = dict(theirs.named_parameters())
    for name, weight in read.named_weights():
        assert torch.equal(weight, original[name]), name


def test_names_under_a_prefix_are_found(tmp_path: Path) -> None:
    plan = plan_of(cut=False)
    audio = build_stage_module(plan, plan.stages[1], seed=4, dtype=F32)
    (tmp_path / "audio").mkdir()
    tensors = {
        (name if name.startswith("projector.") else f"model.encoder.{name}"): weight
        for name, weight in audio.owned_weights().items()
    }
    tensors["model.decoder.layers.0.fc1.bias"] = torch.zeros(3)
    save_file(tensors, tmp_path / "audio" / "model.safetensors")
    read = build_stage_module(plan, plan.stages[1], seed=5, dtype=F32, weights=tmp_path)
    for (name, a), (_, b) in zip(read.named_weights(), audio.named_weights(), strict=True):
        assert torch.equal(a, b), name


def broken(tmp_path: Path, **changes: torch.Tensor | None) -> Plan:
    """An export whose LLM file was tampered with: tensors replaced, or dropped where None."""
    plan = plan_of(cut=False)
    export(plan, tmp_path / "out")
    file = tmp_path / "out" / "llm" / "model.safetensors"
    held = load_file(file) | {name.replace("__", "."): value for name, value in changes.items()}
    save_file({name: value for name, value in held.items() if value is not None}, file)
    return plan


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"lm_head__weight": None}, "lacks tensor 'lm_head.weight'", id="missing"),
        pytest.param(
            {"model__norm__weight": torch.ones(7)},
            r"'model.norm.weight' .* shape \(7,\), want \(32,\)",
            id="shape",
        ),
        pytest.param({"model__extra": torch.ones(1)}, "unexpected tensors model.extra", id="unexpected"),
    ],
)
def test_wrong_folders_are_named(
    tmp_path: Path, changes: dict[str, torch.Tensor | None], message: str
) -> None:
    plan = broken(tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        build_stage_module(plan, plan.stages[-1], seed=9, dtype=F32, weights=tmp_path / "out")


def test_weights_of_another_model_are_one_short_line(tmp_path: Path) -> None:
    plan = plan_of(cut=False)
    (tmp_path / "llm").mkdir()
    others = {f"transformer.h.{layer}.attn.weight": torch.zeros(1) for layer in range(400)}
    save_file(others, tmp_path / "llm" / "model.safetensors", metadata={"format": "pt"})
    own = len(adapter_of(plan.model.module("llm")).stored_shapes())
    with pytest.raises(ValueError, match="unexpected") as refused:
        build_stage_module(plan, plan.stages[-1], seed=9, dtype=F32, weights=tmp_path)
    assert str(refused.value) == (
        f"module 'llm': {tmp_path / 'llm'} has unexpected tensors transformer.h.0.attn.weight and 399 more, "
        f"and lacks {own} of the {own} of this module; want weights of this model"
    )


def test_unreadable_folders_are_named(tmp_path: Path) -> None:
    plan = plan_of(cut=False)
    with pytest.raises(ValueError, match=r"'llm': .* has neither model.safetensors nor"):
        build_stage_module(plan, plan.stages[-1], seed=9, dtype=F32, weights=tmp_path)
    (tmp_path / "llm").mkdir()
    (tmp_path / "llm" / "model.safetensors").write_bytes(b"\x10\x00\x00")
    with pytest.raises(ValueError, match="not readable as safetensors"):
        build_stage_module(plan, plan.stages[-1], seed=9, dtype=F32, weights=tmp_path)


def test_an_export_is_complete_or_not_there(tmp_path: Path) -> None:
    plan = plan_of()
    target = tmp_path / "out"
    start_export(target, plan.model)
    for stage in plan.stages[:-1]:
        module = build_stage_module(plan, stage, seed=9, dtype=F32)
        write_part(target, stage.module, stage.layers[0], module.owned_weights())
    with pytest.raises(ValueError, match=r"no part holds tensors lm_head.weight, model.norm.weight"):
        finish_export(target, plan.model)
    assert not target.exists()
    last = build_stage_module(plan, plan.stages[-1], seed=9, dtype=F32)
    write_part(target, "llm", 3, last.owned_weights())
    finish_export(target, plan.model)
    assert not part_folder(target).exists()
    assert json.loads((target / "llm" / "config.json").read_text())["model_type"] == "llama"
    with pytest.raises(ValueError, match="exists already"):
        finish_export(target, plan.model)


def test_parts_of_an_interrupted_export_are_dropped(tmp_path: Path) -> None:
    plan, target = plan_of(), tmp_path / "out"
    old = build_stage_module(plan, whole_stage(plan.model.module("llm")), seed=8, dtype=F32)
    start_export(target, plan.model)
    write_part(target, "llm", 3, old.owned_weights())
    export(plan, target)
    with pytest.raises(ValueError, match="exists already"):
        start_export(target, plan.model)


def test_two_parts_with_one_tensor_are_refused(tmp_path: Path) -> None:
    plan, target = plan_of(cut=False), tmp_path / "out"
    whole = build_stage_module(plan, whole_stage(plan.model.module("llm")), seed=8, dtype=F32)
    start_export(target, plan.model)
    for first_layer in (0, 1):
        write_part(target, "llm", first_layer, whole.owned_weights())
    for stage in plan.stages:
        if stage.module != "llm":
            module = build_stage_module(plan, stage, seed=9, dtype=F32)
            write_part(target, stage.module, 0, module.owned_weights())
    with pytest.raises(ValueError, match="two parts hold tensor"):
        finish_export(target, plan.model)


def test_initial_values_depend_on_seed_module_and_name_alone() -> None:
    one = initial_value(normal(0.02), (4, 5), seed=1, module="llm", name="w")
    torch.randn(3)
    assert torch.equal(one, initial_value(normal(0.02), (4, 5), seed=1, module="llm", name="w"))
    for seed, module, name in ((2, "llm", "w"), (1, "vision", "w"), (1, "llm", "v")):
        assert not torch.equal(one, initial_value(normal(0.02), (4, 5), seed=seed, module=module, name=name))


def test_initial_scales_are_those_of_transformers() -> None:
    model = tiny_models.two_encoders(tiny_models.LLAMA | {"initializer_range": 0.3})
    plan = tiny_models.plan_of(ModelGraph(name="m", modules=model.modules), tiny_models.mixed_batch())
    weights = {
        stage.module: dict(build_stage_module(plan, stage, seed=0, dtype=F32).named_weights())
        for stage in plan.stages
    }
    llm, vision, audio = weights["llm"], weights["vision"], weights["audio"]
    assert abs(llm["model.layers.0.mlp.up_proj.weight"].std().item() / 0.3 - 1) < 0.1
    assert torch.equal(llm["model.norm.weight"], torch.ones(32))
    assert torch.equal(vision["encoder.layers.0.layer_norm1.bias"], torch.zeros(24))
    xavier = (2 / (24 + 40)) ** 0.5
    assert abs(vision["encoder.layers.0.mlp.fc1.weight"].std().item() / xavier - 1) < 0.1
    positions = WhisperEncoder(_config(plan)).embed_positions.weight
    torch.testing.assert_close(audio["embed_positions.weight"], positions)


def _config(plan: Plan) -> object:
    stage = next(stage for stage in plan.stages if stage.module == "audio")
    return build_stage_module(plan, stage, seed=0, dtype=F32).adapter.config


def test_a_checkpoint_that_is_not_whole_is_refused_before_anything_starts(tmp_path: Path) -> None:
    """A file that its index names, and one that ends before its header says."""
    config = tiny_models.LLAMA | {"model_type": "llama"}
    LlamaForCausalLM(AutoConfig.for_model(**config)).save_pretrained(tmp_path / "llm", max_shard_size="20KB")
    check_weights(tmp_path, ["llm"])
    first, *_, last = sorted((tmp_path / "llm").glob("*.safetensors"))
    whole = first.read_bytes()
    first.write_bytes(whole[:-1])
    with pytest.raises(
        ValueError, match=rf"{first.name}: want {len(whole):,} bytes, it has {len(whole) - 1:,}"
    ):
        check_weights(tmp_path, ["llm"])
    first.write_bytes(b"version https://git-lfs.github.com/spec/v1")
    with pytest.raises(ValueError, match=rf"{first.name}: no safetensors file"):
        check_weights(tmp_path, ["llm"])
    last.unlink()
    with pytest.raises(ValueError, match=rf"1 of \d+ files are not there \({last.name}\); is it half"):
        check_weights(tmp_path, ["llm"])
    with pytest.raises(ValueError, match=r"audio: it has neither model\.safetensors nor"):
        check_weights(tmp_path, ["audio"])


def test_run_refuses_half_a_checkpoint_with_one_line(tmp_path: Path) -> None:
    write_plan(plan_of(), tmp_path / "plan.json")
    (tmp_path / "half" / "vision").mkdir(parents=True)
    (tmp_path / "half" / "vision" / "model.safetensors.index.json").write_text('{"weight_map": {"a": "b"}}')
    done = workbench("run", tmp_path / "plan.json", "--local", "--weights", tmp_path / "half")
    assert done.exit_code == 2
    assert "1 of 1 files are not there (b); is it half downloaded?" in done.output
