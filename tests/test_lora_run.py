"""Adapters train as in one process, and as plain torch has them: x W^T + (alpha / rank) (x A^T) B^T."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import cross_entropy, linear
from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaRMSNorm

from runtime.data.batches import SyntheticSource
from runtime.elastic.run import elastic_job
from runtime.emulation.emulate import emulate
from runtime.launch import run_lowered
from runtime.measure.plans import BenchSettings, layer_tasks
from runtime.models.adapter_files import check_origin
from runtime.models.choose import adapter_of
from runtime.models.initialise import initial_value
from runtime.models.norm import widen_norms
from runtime.reference import Reference
from runtime.run_settings import Collect, RunSettings
from runtime.step.optimizer import OptimizerSettings
from runtime.world.pool import Pool
from tests import tiny_models
from tests.plans import disjoint_plan, finish
from tests.test_fsdp import sharded_parameters
from tests.test_parity import CUTS, SEED, assert_parity, mixed
from tests.test_tensor_parallel import CONFIGS, ONE, encoders, laid_out
from tests.test_tensor_sequence import sequence_parallel
from tests.tiny_valm import tiny_batch
from workbench.calibrate.measurement import LayerRow
from workbench.cost.signature import signature
from workbench.data.sample import Sample, Segment
from workbench.model.lora import Adapted, Lora, is_of_adapter
from workbench.model.model_graph import TEXT, ModelGraph
from workbench.model.trainable import Trainable, with_adapters, with_trainable
from workbench.model.trained import without_adapters
from workbench.plan.build import with_programs
from workbench.plan.lower import lower
from workbench.plan.plan import ModuleSettings, Plan, Precision, Recompute
from workbench.plan.runnable import check_adapters, check_runnable, check_targets
from workbench.plan.stage import Stage
from workbench.schedule.choice import Schedule, ScheduleKind

STEPS = 3  # B is 0 at first, and A's gradient with it
R4 = Lora(rank=4, alpha=8)
SETTINGS = RunSettings(
    seed=SEED, precision=Precision.FLOAT64, collect=Collect.STATE, steps=STEPS, timeout_s=30.0
)


def tuned(
    model: ModelGraph, modules: Adapted = Adapted.ALL, *, adapted: tuple[str, ...] = ("llm",)
) -> ModelGraph:
    """Projectors are trained, and adapters of these modules; everything else is frozen."""

    def part(module):
        has_projector = module.name != "llm"
        frozen = with_trainable(module, Trainable.PROJECTOR if has_projector else Trainable.NONE)
        return with_adapters(frozen, R4, modules) if module.name in adapted else frozen

    return replace(model, modules=tuple(map(part, model.modules)))


def two_stages() -> Plan:
    return disjoint_plan(tuned(mixed("everything")), tiny_batch(), CUTS)


def recomputed(plan: Plan) -> Plan:
    modules = tuple(ModuleSettings(module=m.name, recompute=Recompute.FULL) for m in plan.model.modules)
    return replace(plan, settings=replace(plan.settings, modules=modules))


TENSOR = {"image": (1, 1, 1, 2), "audio": ONE, "llm": (1, 2, 1, 2)}
WIDE = {"image": ONE, "audio": ONE, "llm": (2, 1, 1, 2)}
TOKENS = {"image": ONE, "audio": ONE, "llm": (1, 1, 2, 2)}
PLANS = {
    "pipeline": two_stages,
    "two replicas": lambda: disjoint_plan(
        tuned(mixed("everything")), tiny_batch(), {"vision": (5,), "audio": (4,), "llm": (2, 4)}, replicas=2
    ),
    "recomputed": lambda: recomputed(two_stages()),
    "tensor parallel": lambda: laid_out(tuned(encoders()), TENSOR),
    "tensor parallel replicas": lambda: laid_out(tuned(encoders()), WIDE),
    "towers too": lambda: laid_out(tuned(encoders(), adapted=("image", "llm")), TENSOR),
    "qkv": lambda: laid_out(tuned(encoders(), Adapted.QKV), TENSOR),
    "mlp": lambda: laid_out(tuned(encoders(), Adapted.MLP), TENSOR),
    "divided tokens": lambda: sequence_parallel(laid_out(tuned(encoders()), TENSOR)),
    "shared tokens": lambda: sequence_parallel(laid_out(tuned(encoders()), TOKENS)),
    "split backward": lambda: with_programs(
        replace(laid_out(tuned(encoders()), TENSOR), programs=()), Schedule(kind=ScheduleKind.ZB_H1)
    ),
}


def assert_trains_alike(plan: Plan, result, clip_norm: float | None = 0.5) -> None:
    """Losses of all steps, and gradients and weights after the last."""
    check_runnable(plan)
    optimizer = OptimizerSettings(clip_norm=clip_norm)
    reference = Reference(plan, seed=SEED, dtype=torch.float64, optimizer=optimizer)
    steps = [reference.step(SyntheticSource(SEED)) for _ in range(STEPS)]
    assert result.losses == pytest.approx([step.loss for step in steps], rel=1e-10)
    last = SimpleNamespace(losses=result.losses[-1:], states=result.states)
    assert_parity(plan, last, steps[-1], Precision.FLOAT64)
    adapters = {key for key in steps[-1].gradients if is_of_adapter(key[1])}
    assert adapters
    assert all(steps[-1].gradients[key].norm() > 0 for key in adapters)


@pytest.mark.parametrize("name", PLANS)
def test_losses_gradients_and_weights_are_those_of_one_process(name: str) -> None:
    plan = PLANS[name]()
    result = emulate(lower(plan), replace(SETTINGS, optimizer=OptimizerSettings(clip_norm=0.5)))
    assert_trains_alike(plan, result)


def test_sharded_frozen_and_trained_weights_of_one_layer(pool: Pool) -> None:
    plan = sharded_parameters(tuned(mixed("everything")), tiny_batch(), replicas=2)
    plan = replace(plan, settings=replace(plan.settings, precision=Precision.FLOAT64))
    result = run_lowered(
        lower(plan), replace(SETTINGS, optimizer=OptimizerSettings(clip_norm=0.5)), pool=pool
    )
    assert_trains_alike(plan, result)


class PlainLora(nn.Module):
    """A frozen linear layer and its adapter, in plain torch."""

    def __init__(self, linear_: nn.Linear, down: torch.Tensor, up: torch.Tensor) -> None:
        super().__init__()
        self.frozen, self.scale = linear_.requires_grad_(False), 8 / 4
        self.down, self.up = (nn.Parameter(half.detach().clone()) for half in (down, up))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(x) + self.scale * linear(linear(x, self.down), self.up)


def text_reference() -> Reference:
    """A text model whose adapters add something: B is drawn, too."""
    llm = next(module for module in tuned(mixed("everything")).modules if module.name == "llm")
    batch = [Sample(i, (Segment(TEXT, 0, 5 + i, 5 + i),)) for i in range(2)]
    stage = Stage(id=0, module="llm", replica=0, layers=(0, len(llm.layers)), ranks=((0,),))
    plan = finish(ModelGraph(name="text", modules=(llm,)), batch, [stage])
    reference = Reference(plan, seed=SEED, dtype=torch.float64)
    draws = torch.Generator().manual_seed(SEED)
    for name, weight in reference.modules["llm"].named_weights():
        if name.endswith("lora_B.weight"):
            weight.data.normal_(generator=draws)
    return reference


def original(reference: Reference) -> nn.Module:
    """transformers' model with the same frozen weights."""
    config = copy.deepcopy(reference.modules["llm"].adapter.config)
    config._attn_implementation = "sdpa"
    model = LlamaForCausalLM(config).double().eval()
    widen_norms(model, LlamaRMSNorm)
    weights = {n: w.detach() for n, w in reference.modules["llm"].named_weights() if not is_of_adapter(n)}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not missing
    assert not unexpected
    return model


def loss_of(model: nn.Module, plan: Plan) -> torch.Tensor:
    """Mean next-token loss of the batch, sample by sample."""
    total = torch.zeros((), dtype=torch.float64)
    for sample in plan.batch:
        ids = SyntheticSource(SEED).token_ids(sample.id, sample.segments[0], 61)
        logits = model(input_ids=ids[None]).logits[0, :-1]
        total = total + cross_entropy(logits, ids[1:], reduction="sum")
    return total / check_targets(plan)


def test_an_adapter_is_what_plain_torch_makes_of_its_formula() -> None:
    reference = text_reference()
    model = original(reference)
    adapters = dict(reference.modules["llm"].named_weights())
    plain = {}
    for name in {name.rpartition(".lora_")[0] for name in adapters if is_of_adapter(name)}:
        owner, _, own = name.rpartition(".")
        halves = (adapters[f"{name}.{half}.weight"] for half in ("lora_A", "lora_B"))
        plain[name] = PlainLora(model.get_submodule(name), *halves)
        setattr(model.get_submodule(owner), own, plain[name])
    loss = loss_of(model, reference.plan)
    loss.backward()
    ours = reference.step(SyntheticSource(SEED))
    assert ours.loss == pytest.approx(loss.item(), rel=1e-12)
    assert len(ours.gradients) == 2 * len(plain) == 2 * 7 * 4
    for name, module in plain.items():
        for half, weight in (("lora_A", module.down), ("lora_B", module.up)):
            torch.testing.assert_close(
                ours.gradients["llm", f"{name}.{half}.weight"], weight.grad, rtol=1e-9, atol=1e-14
            )


def test_first_values_are_those_of_peft() -> None:
    """A: uniform within 1 / sqrt(in), as Kaiming's for a slope of sqrt(5). B: zero."""
    plan = two_stages()
    adapter = adapter_of(plan.model.module("llm"))
    layer = adapter.build(1)
    for local, weight in layer.named_parameters():
        if is_of_adapter(local):
            values = initial_value(layer.fill(local), weight.shape, seed=SEED, module="llm", name=local)
            bound = 0.0 if "lora_B" in local else weight.shape[1] ** -0.5
            assert values.abs().max() <= bound
            assert "lora_B" in local or values.std() == pytest.approx(bound / 3**0.5, rel=0.2)


def test_adapters_are_written_as_peft_reads_them(tmp_path: Path) -> None:
    """Beside the frozen weights, which stay as they were drawn."""
    plan = two_stages()
    result = emulate(lower(plan), replace(SETTINGS, export=tmp_path / "out"))
    adapters = load_file(tmp_path / "out/llm/adapter/adapter_model.safetensors")
    config = json.loads((tmp_path / "out/llm/adapter/adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 4, 8)
    assert {name.rpartition(".lora_")[0] for name in adapters} == {
        f"base_model.model.{target}" for target in config["target_modules"]
    }
    trained = {
        name: weight
        for state in result.states
        for (module, name), weight in state.weights.items()
        if module == "llm"
    }
    for name, weight in adapters.items():
        torch.testing.assert_close(weight, trained[name.removeprefix("base_model.model.")], rtol=0, atol=0)
    frozen: dict[str, torch.Tensor] = {}
    for shard in (tmp_path / "out/llm").glob("*.safetensors"):
        frozen |= load_file(shard)
    first = dict(Reference(plan, seed=SEED, dtype=torch.float64).modules["llm"].named_weights())
    assert {name for name in first if not is_of_adapter(name)} == frozen.keys()
    for name, weight in frozen.items():
        torch.testing.assert_close(weight, first[name].detach(), rtol=0, atol=0)
    assert not (tmp_path / "out/vision/adapter").exists()


def test_layers_are_measured_without_their_adapters() -> None:
    """So a table is of the layer, to which a price adds the adapters."""
    model = tuned(mixed("everything"))
    text = replace(model, modules=model.modules[-1:], edges=())
    stage = Stage(id=0, module="llm", replica=0, layers=(0, 6), ranks=((0,),))
    plan = finish(text, [Sample(0, (Segment(TEXT, 0, 5, 5),))], [stage])
    tasks = layer_tasks([plan], None, BenchSettings(sizes=1, budget_s=0.001))
    rows = [row for task in tasks for row in task.measure() if isinstance(row, LayerRow)]
    assert {row.signature for row in rows} == {
        signature(without_adapters(layer)) for layer in text.modules[0].layers
    }


def test_frozen_weights_are_read_and_adapters_drawn(tmp_path: Path) -> None:
    plan = two_stages()
    emulate(lower(plan), replace(SETTINGS, export=tmp_path / "out"))
    drawn, read = (
        dict(Reference(plan, seed=seed, dtype=torch.float64, weights=weights).modules["llm"].named_weights())
        for seed, weights in ((SEED, None), (SEED, tmp_path / "out"))
    )
    assert all(torch.equal(drawn[name], read[name]) for name in drawn)
    other = dict(
        Reference(plan, seed=SEED + 1, dtype=torch.float64, weights=tmp_path / "out")
        .modules["llm"]
        .named_weights()
    )
    unlike = {name for name in drawn if not torch.equal(drawn[name], other[name])}
    assert unlike == {name for name in drawn if ".lora_A." in name}


def test_products_without_a_linear_layer_are_refused_by_name() -> None:
    latent = tiny_models.llm(CONFIGS["deepseek_v3"])
    module = with_adapters(with_trainable(latent, Trainable.NONE), R4, Adapted.ATTENTION)
    with pytest.raises(ValueError, match="lora of 'kv_down_proj' can be simulated, not run"):
        check_adapters(module, ModuleSettings(module="llm"))
    transposed = with_trainable(tiny_models.llm(CONFIGS["gpt2"]), Trainable.NONE)
    with pytest.raises(ValueError, match="lora wants a linear layer of its own for 'qkv_proj'"):
        adapter_of(with_adapters(transposed, R4, Adapted.QKV)).build(1)


def test_sums_in_pieces_are_refused() -> None:
    llm = two_stages().model.module("llm")
    with pytest.raises(ValueError, match="products with lora are summed whole, got collective_pieces 2"):
        check_adapters(llm, ModuleSettings(module="llm", collective_pieces=2))


def test_a_composites_checkpoint_gets_no_adapters() -> None:
    with pytest.raises(ValueError, match="adapters of 'llm' are written beside weights of single modules"):
        check_origin(two_stages().model.modules, "llava")


def test_training_through_failures_refuses_adapters() -> None:
    templates: Any = SimpleNamespace(job=SimpleNamespace(model=two_stages().model))
    with pytest.raises(ValueError, match="'llm': lora is not trained through failures"):
        elastic_job(templates, SimpleNamespace(), seed=0, wait_s=1.0, num_cores=1)  # type: ignore[arg-type]
