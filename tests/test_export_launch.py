"""Folders that run: fsdp2 and torchrun on gloo, with the losses of one process; the command."""

import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from runtime.data.batches import SyntheticSource
from runtime.fsdp2_train import ShardingMesh, WholeModule
from runtime.models.weights import weights_of
from runtime.reference import Reference, whole_stage
from runtime.state.weights_export import check_export
from runtime.step.optimizer import OptimizerSettings
from runtime.step.stage_module import StageModule, build_stage_module
from tests.command_line import accept, refuse
from tests.free_port import free_port
from tests.test_checkpoint_attacks import files_of_at_most
from workbench.cli.exporting import SimulatedPrices
from workbench.export.export import export
from workbench.export.folder import check_folder, write_folder
from workbench.export.fsdp2 import layout_words, program_text
from workbench.export.registry import BY_NAME
from workbench.job.job import Job, job_from_spec
from workbench.job.job_file import parse_spec
from workbench.job.machines import cost_of
from workbench.model.lora import is_of_adapter
from workbench.plan.codec import write_plan
from workbench.plan.plan import ModuleSettings, Plan, Recompute, Sharding
from workbench.schedule.sharded import ReshardAfter
from workbench.strategies import fsdp
from workbench.strategies.registry import BY_NAME as STRATEGIES

ROOT = Path(__file__).parents[1]
STEPS = 2
SMALL = """
name: small
profile: examples/elastic-cpu.json
precision: float32
model:
  modules:
    vision:
      config: {model_type: siglip_vision_model, hidden_size: 32, intermediate_size: 64,
        num_hidden_layers: 2, num_attention_heads: 2, image_size: 16, patch_size: 4, vision_use_head: false}
    llm:
      config: {model_type: llama, vocab_size: 259, hidden_size: 64, intermediate_size: 96,
        num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2,
        max_position_embeddings: 256, tie_word_embeddings: true}
cluster: {local: {ranks: 2, cores: 2}, memory_gib: 4, intra: {gb_per_s: 1.0, latency_us: 100.0}}
batch:
  samples: 8
  mixture: {seed: 1, text_tokens: [12, 24], items: {vision: {most: 1, missing: 0.6}}}
"""

STACKED = """
name: stacked
profile: examples/elastic-cpu.json
precision: float32
model:
  modules:
    vision:
      config: {model_type: qwen3_vl_vision, depth: 2, hidden_size: 32, intermediate_size: 64, num_heads: 2,
        patch_size: 4, out_hidden_size: 64, num_position_embeddings: 16, deepstack_visual_indexes: [0, 1]}
    llm:
      config: {model_type: qwen3_vl_text, vocab_size: 259, hidden_size: 64, intermediate_size: 96,
        num_hidden_layers: 3, num_attention_heads: 4, num_key_value_heads: 2, head_dim: 16,
        rope_scaling: {rope_type: default, mrope_section: [4, 2, 2]}}
cluster: {local: {ranks: 2, cores: 2}, memory_gib: 4, intra: {gb_per_s: 1.0, latency_us: 100.0}}
batch:
  samples: 8
  mixture: {seed: 1, text_tokens: [12, 24], items: {vision: {most: 1, missing: 0.6}}}
"""


@pytest.fixture(scope="module")
def job() -> Job:
    return job_from_spec(parse_spec(SMALL), folder=ROOT)


@pytest.fixture(scope="module")
def plan(job) -> Plan:
    """Some images are missing, so a rank takes part in gathers with an image that is not its own."""
    return STRATEGIES["fsdp"].planner(job, cost_of(job, None, None), lambda *_: None)


def test_features_of_several_blocks_enter_a_launched_model(tmp_path):
    job = job_from_spec(parse_spec(STACKED), folder=ROOT)
    plan = STRATEGIES["fsdp"].planner(job, cost_of(job, None, None), lambda *_: None)
    test_a_launched_folder_has_the_losses_of_one_process("fsdp2", job, plan, tmp_path)


def test_weights_that_stay_for_a_step_and_recomputed_blocks_have_the_same_losses(job, tmp_path):
    """Two microbatches of each rank; gradients are reduced after the second."""
    sharded = ModuleSettings(module="llm", sharding=Sharding.PARAMETERS, reshard_after=ReshardAfter.STEP)
    settings = replace(job.settings, modules=(sharded, replace(sharded, module="vision")))
    kept_job = replace(job, settings=settings, microbatch_samples=2)
    _, plan = fsdp.fastest_of_size(kept_job, cost_of(job, None, None))
    assert len(plan.microbatches_of["llm", 0]) == 2
    some = plan.settings.of("llm").recomputing(Recompute.BLOCKS)
    plan = replace(plan, settings=plan.settings.with_module(some))
    test_a_launched_folder_has_the_losses_of_one_process("fsdp2", job, plan, tmp_path)
    layout = json.loads((tmp_path / "out" / "fsdp2.json").read_text())
    assert (layout["reshard_after"], layout["recompute"]) == ("step", {"llm": [1, 2]})


@pytest.fixture(scope="module")
def adapted(job) -> Plan:
    """Adapters of the language model and the projector are trained, in float32."""
    tower, llm = "vision_use_head: false}", "tie_word_embeddings: true}"
    text = SMALL.replace(tower, f"{tower}\n      projector: mlp\n      trainable: projector")
    text = text.replace(llm, f"{llm}\n      trainable: none\n      lora: {{rank: 4, alpha: 8}}")
    job = job_from_spec(parse_spec(text), folder=ROOT)
    return STRATEGIES["fsdp"].planner(job, cost_of(job, None, None), lambda *_: None)


@pytest.mark.parametrize(
    ("compute", "rel"),
    [("float32", 1e-5), pytest.param("bfloat16", 1e-2, marks=pytest.mark.thorough)],
)
def test_adapters_have_the_losses_of_one_process(compute, rel, job, adapted, tmp_path):
    """At a rate at which they change the loss; in bfloat16, frozen weights are in another format."""
    files = export(adapted, BY_NAME["fsdp2"], SimulatedPrices(cost_of(job, None, None)))
    layout = json.loads(files["fsdp2.json"]) | {"compute": compute}
    write_folder(files | {"fsdp2.json": json.dumps(layout)}, tmp_path / "out")
    rate = ("--learning-rate", "0.03")
    losses = launched("fsdp2", tmp_path / "out", "--steps", "3", *rate, "--export", str(tmp_path / "saved"))
    reference = Reference(
        adapted, seed=0, dtype=torch.float32, optimizer=OptimizerSettings(learning_rate=0.03)
    )
    steps = [reference.step(SyntheticSource(0)) for _ in range(3)]
    expected = [step.loss for step in steps]
    assert losses == pytest.approx(expected, rel=rel)
    assert expected[2] + 0.1 < expected[1] + 0.05 < expected[0]
    if compute == "float32":
        check_saved(tmp_path / "saved", steps[-1].weights, reference.modules)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_weights_of_a_training_that_is_stopped_are_those_of_its_last_step(number, job, adapted, tmp_path):
    """SIGTERM to torchrun: of the step in progress; all processes gone at once: of the last written.

    Losses until then are those of one process.
    """
    write_folder(
        export(adapted, BY_NAME["fsdp2"], SimulatedPrices(cost_of(job, None, None))), tmp_path / "out"
    )
    words = (
        "--steps",
        "1000000",
        "--learning-rate",
        "0.03",
        "--export-every",
        "2",
        "--export",
        tmp_path / "saved",
    )
    losses = []
    with subprocess.Popen(
        ["bash", tmp_path / "out/launch.sh", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(str(free_port())),
        start_new_session=True,
    ) as running:
        assert running.stdout is not None
        for line in running.stdout:
            losses.append(json.loads(line)["loss"])
            if len(losses) == 4:
                running.send_signal(number)  # to torchrun, which bash became
        assert running.stderr is not None
        told = re.findall(r"weights of step (\d+) written to (\S+)", running.stderr.read())
    assert running.returncode != 0
    assert told[0] == ("2", str(tmp_path / "saved-step-2"))
    if number == signal.SIGTERM:
        assert [path.name for path in tmp_path.glob("saved*")] == ["saved"]
        assert told[-1][1] == str(tmp_path / "saved")
    last, folder = int(told[-1][0]), Path(told[-1][1])
    reference = Reference(
        adapted, seed=0, dtype=torch.float32, optimizer=OptimizerSettings(learning_rate=0.03)
    )
    steps = [reference.step(SyntheticSource(0)) for _ in range(last)]
    assert losses[: min(last, 3)] == pytest.approx([step.loss for step in steps[:3]], rel=1e-5)
    assert losses[2] + 0.1 < losses[1] + 0.05 < losses[0]
    check_saved(folder, steps[-1].weights, reference.modules)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--export-every", "2"), "--export-every writes weights every few steps; want --export FOLDER"),
        (("--export-every", "0", "--export", "new"), "--export-every: want at least 1 step, got 0"),
        (("--export-every", "3", "--export", "taken"), "taken-step-6 exists already; give a new one"),
        (("--export", "plan.json/new"), "plan.json is no folder that I may write to"),
    ],
)
def test_a_place_where_weights_cannot_go_is_refused_before_the_first_step(
    words, line, adapted, tmp_path, monkeypatch, capsys
):
    (tmp_path / "taken-step-6").mkdir()
    (tmp_path / "taken-step-6" / "mine").touch()
    (tmp_path / "train.py").write_text(program_text())
    write_plan(adapted, tmp_path / "plan.json")
    layout = ShardingMesh(1, 1, ReshardAfter.STEP, weights="float32", compute="float32", recompute={})
    (tmp_path / "fsdp2.json").write_text(json.dumps(layout._asdict()))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(sys, "argv", ["train.py", *words])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path("train.py", run_name="__main__")
    told = capsys.readouterr()
    assert (ended.value.code, told.out) == (2, "")
    assert line in told.err


def check_saved(
    folder: Path, weights: Mapping[tuple[str, str], Tensor], modules: Mapping[str, StageModule]
) -> None:
    """A folder of each module, as transformers has it, and its adapters, as PEFT has them: one process's."""
    adapters = load_file(folder / "llm/adapter/adapter_model.safetensors")
    config = json.loads((folder / "llm/adapter/adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 4, 8)
    assert {f"base_model.model.{target}" for target in config["target_modules"]} == {
        name.rpartition(".lora_")[0] for name in adapters
    }
    saved = {("llm", name.removeprefix("base_model.model.")): weight for name, weight in adapters.items()}
    for module in modules:
        reader = weights_of(folder, modules[module].adapter)
        saved |= {
            (module, name): reader.read(name, tuple(weight.shape))
            for (owner, name), weight in weights.items()
            if owner == module and not is_of_adapter(name)
        }
    assert saved.keys() == weights.keys()
    for key, weight in saved.items():
        torch.testing.assert_close(weight, weights[key], rtol=1e-4, atol=1e-5)


def test_a_folder_that_exists_is_not_written_over_by_a_program(adapted, tmp_path):
    """Before any rank waits for another."""
    with pytest.raises(ValueError, match="exists already; give a new one"):
        check_export(ROOT / "docs", adapted.model, None, torch.float32)
    check_export(tmp_path, adapted.model, tmp_path, torch.float32)


def test_frozen_weights_are_read_and_have_the_format_of_computation(adapted, tmp_path):
    """As the plan counts them, not that of the optimizer."""
    layout = ShardingMesh(**layout_words(adapted))._replace(compute="bfloat16")
    for module in adapted.model.modules:
        written = build_stage_module(adapted, whole_stage(module), seed=1, dtype=torch.float32)
        weights = {name: each for name, each in written.owned_weights().items() if not is_of_adapter(name)}
        (tmp_path / module.name).mkdir()
        save_file(weights, tmp_path / module.name / "model.safetensors")
        whole = WholeModule(adapted, module, layout, torch.device("cpu"), tmp_path)
        named = dict(
            StageModule(
                whole.adapter, whole_stage(module), [u.layer for u in whole.units], ()
            ).named_weights()
        )
        assert named.keys() >= weights.keys()
        for name, weight in named.items():
            assert weight.dtype is (torch.float32 if weight.requires_grad else torch.bfloat16)
            if name in weights:
                torch.testing.assert_close(weight.detach(), weights[name].to(weight.dtype), rtol=0, atol=0)
        assert {weight.dtype for weight in named.values()} == {torch.float32, torch.bfloat16}


@pytest.mark.parametrize("target", ["fsdp2", "torchrun"])
def test_a_launched_folder_has_the_losses_of_one_process(target, job, plan, tmp_path):
    write_folder(export(plan, BY_NAME[target], SimulatedPrices(cost_of(job, None, None))), tmp_path / "out")
    losses = launched(target, tmp_path / "out", "--steps", str(STEPS))
    assert losses == pytest.approx(one_process(plan, STEPS), rel=1e-5)


@pytest.mark.parametrize("port", ["taken", "0", "65536", "one", "029500"])
def test_a_port_that_is_taken_or_none_ends_in_one_line(port, job, plan, tmp_path):
    """Before torchrun starts; where all is well, the folder runs, as above."""
    write_folder(
        export(plan, BY_NAME["torchrun"], SimulatedPrices(cost_of(job, None, None))), tmp_path / "out"
    )
    with socket.create_server(("127.0.0.1", 0)) as listening:
        number = listening.getsockname()[1]
        done = run_folder(tmp_path / "out", port=str(number) if port == "taken" else port)
    assert (done.returncode, done.stdout) == (2, "")
    if port == "taken":
        line = rf"launch.sh: error: port {number} is in use on this machine, .*, nearest: MASTER_PORT=(\d+)\n"
        match = re.fullmatch(line, done.stderr)
        assert match is not None, done.stderr
        socket.create_server(("127.0.0.1", int(match[1]))).close()
    else:
        assert done.stderr == f"launch.sh: error: MASTER_PORT: want 1 to 65535, got '{port}'\n"


def run_folder(folder: Path, *arguments: str, port: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(folder / "launch.sh"), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=environment(port),
    )


def environment(port: str) -> dict[str, str]:
    return os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "MASTER_PORT": port,
    }


def launched(target: str, folder: Path, *arguments: str) -> list[float]:
    """Losses of all steps."""
    done = run_folder(folder, *arguments, port=str(free_port()))
    assert done.returncode == 0, done.stderr[-2000:]
    if target == "fsdp2":
        return [json.loads(line)["loss"] for line in done.stdout.splitlines() if line.startswith("{")]
    return [float(loss) for loss in re.findall(r"step \d+: loss ([0-9.]+)", done.stdout)]


def one_process(plan: Plan, steps: int, **optimizer: float) -> list[float]:
    reference = Reference(plan, seed=0, dtype=torch.float32, optimizer=OptimizerSettings(**optimizer))
    return [reference.step(SyntheticSource(0)).loss for _ in range(steps)]


def test_the_command_writes_a_folder_and_writes_over_its_own(plan, tmp_path):
    write_plan(plan, tmp_path / "plan.json")
    arguments = ["export", str(tmp_path / "plan.json"), "--to", "fsdp2", "-o", str(tmp_path / "out")]
    profile = ["--profile", str(ROOT / "examples" / "elastic-cpu.json")]
    for _ in range(2):
        result = accept(*arguments, *profile, "--json")
        record = json.loads(result.stdout.splitlines()[-1])
        assert set(record["files"]) == {path.name for path in (tmp_path / "out").iterdir()}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "plan.json"]


@pytest.mark.parametrize("held", ["a folder", "a file"])
def test_what_no_export_wrote_is_not_written_over(held, tmp_path):
    path = tmp_path / "out"
    if held == "a folder":
        path.mkdir()
        (path / "mine.txt").write_text("mine")
    else:
        path.write_text("mine")
    with pytest.raises(ValueError, match=r"no export wrote|is a file"):
        check_folder(path)


def test_nothing_is_left_where_a_file_cannot_be_written(tmp_path):
    with pytest.raises(OSError, match="too long"):
        write_folder({"README.md": "one", "x" * 300: "two"}, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_full_names_the_folder(tmp_path):
    with files_of_at_most(10), pytest.raises(OSError, match="File too large") as raised:
        write_folder({"README.md": "longer than that"}, tmp_path / "out")
    assert raised.value.filename == str(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_plan_that_a_target_cannot_say_ends_with_code_2_and_no_folder(plan, tmp_path):
    write_plan(plan, tmp_path / "plan.json")
    profile = ("--profile", ROOT / "examples" / "elastic-cpu.json")
    told = ("export", tmp_path / "plan.json", "--to", "torchtitan", "-o", tmp_path / "out", *profile)
    words = "torchtitan cannot express modules beside the language model ('vision')"
    refuse(*told, words=words, folder=tmp_path)


def test_a_plan_given_as_a_job_s_layouts_is_told_where_to_go(plan, tmp_path):
    write_plan(plan, tmp_path / "plan.json")
    words = "a plan, want a job; `workbench export"
    refuse("layout", tmp_path / "plan.json", "--to", "bridge", words=words, folder=tmp_path)
