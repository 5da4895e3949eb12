"""The model goes on behind the LLM: both losses at once, gradients back through the LLM."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaForCausalLM, LlamaRMSNorm

from runtime.data.batches import SyntheticSource
from runtime.launch import run_lowered
from runtime.measure.executor import build_empty
from runtime.models.choose import adapter_of
from runtime.models.diffusion import kept_share, noise_of, time_of, waves
from runtime.models.norm import widen_norms
from runtime.reference import Reference
from runtime.run_settings import RunSettings
from runtime.step.stage_module import build_stage_module
from runtime.world.pool import Pool
from sim.predict import predict
from sim.step.engine import simulate
from tests.generator_models import CONDITION, DIT, SETTINGS, drawing_batch, drawing_model, generator
from tests.job_files import write
from tests.plans import cluster, disjoint_plan
from tests.test_parity import assert_same
from tests.tiny_valm import LLM
from workbench.cost.model import CostModel
from workbench.cost.profile import load_profile
from workbench.data.sample import Item, Segment
from workbench.job.job import Job, load_job
from workbench.job.module_layout import ModuleLayout
from workbench.model.hf_config import module_from_config
from workbench.model.item_tokens import native_tokens
from workbench.model.projector import Projector
from workbench.model.zoo import from_shape
from workbench.plan.lower import lower
from workbench.plan.plan import ModuleSettings, Plan, Precision, Recompute, Settings
from workbench.plan.routing import routing_of
from workbench.planner.stage_counts import silent
from workbench.schedule.action import Pass
from workbench.strategies import cornstarch, fsdp, megatron_heterogeneous
from workbench.strategies.registry import BY_NAME as STRATEGIES
from workbench.timing.accept import accept
from workbench.timing.price import price

CUTS = {"vision": (5,), "llm": (3, 3), "generator": (5,)}
SEED = 3


def test_layers_hold_what_the_plan_says() -> None:
    for projector in (Projector.MLP, Projector.LINEAR):
        module = module_from_config(
            DIT, name="generator", modality="generator", projector=projector, llm_width=32
        )
        adapter = adapter_of(module)
        for index, layer in enumerate(module.layers):
            built = adapter.build(index)
            assert sum(each.numel() for each in built.parameters()) == layer.num_parameters, layer.name


def test_one_process_trains_what_the_equations_say() -> None:
    """Loss and gradients of the LLM out of transformers' model and the equations, by plain autograd."""
    plan = disjoint_plan(drawing_model(), drawing_batch(images=(0,), drawn=(2,)), CUTS)
    reference = Reference(plan, seed=SEED, dtype=torch.float64)
    llm = LlamaForCausalLM(LlamaConfig(**{k: v for k, v in LLM.items() if k != "model_type"})).double().eval()
    llm.load_state_dict({k: v.detach() for k, v in reference.modules["llm"].named_weights()})
    widen_norms(llm, LlamaRMSNorm)
    llm.double().load_state_dict({k: v.detach() for k, v in reference.modules["llm"].named_weights()})
    states: list[Tensor] = []
    llm.model.layers[-1].register_forward_hook(lambda *call: states.append(call[-1]))

    (sample,) = plan.batch
    source, starts, pieces, labels = SyntheticSource(SEED), {}, [], []
    for segment in sample.segments:
        if segment.modality == "text":
            ids = source.token_ids(sample.id, segment, LLM["vocab_size"])
            pieces.append(llm.model.embed_tokens(ids))
            labels += ids.tolist()
        else:
            starts[segment] = len(labels)
            pieces.append(torch.zeros(segment.tokens_out, 32, dtype=torch.float64))
            labels += [-100] * segment.tokens_out
    logits = llm(inputs_embeds=torch.cat(pieces)[None]).logits[0]
    loss = functional.cross_entropy(logits[:-1], torch.tensor(labels[1:]), reduction="sum")
    num_targets = sum(label >= 0 for label in labels[1:])
    for segment, start in starts.items():
        condition = states[-1][0, start : start + segment.tokens_out]
        loss = loss + denoising_loss(reference, condition, Item(sample.id, segment.k), segment, source)
    (loss / num_targets).backward()

    result = reference.step(source)
    assert result.loss == pytest.approx(float(loss.detach()) / num_targets, rel=1e-12)
    for name, parameter in llm.named_parameters():
        ours = result.gradients["llm", name]
        assert (ours - parameter.grad).norm() <= 1e-10 * parameter.grad.norm(), name


def denoising_loss(
    reference: Reference, condition: Tensor, item: Item, segment: Segment, source: SyntheticSource
) -> Tensor:
    """One item alone, out of the generator's weights."""
    weight = dict(reference.modules["generator"].named_weights())
    _, _, *blocks, _ = reference.modules["generator"].layers

    def linear(name: str, x: Tensor) -> Tensor:
        return functional.linear(x, weight[f"{name}.weight"], weight[f"{name}.bias"])

    prompt = linear("projector.linear_2", functional.gelu(linear("projector.linear_1", condition)))
    share = float(
        torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64).mul(-1).add(1)[: time_of(item) + 1].prod()
    )
    noise = noise_of(item, (3, 4, 6)).double()
    noisy = (
        math.sqrt(share) * source.raw(item.sample, segment, (3, 4, 6)).double() + math.sqrt(1 - share) * noise
    )
    time = linear("time.2", functional.silu(linear("time.0", waves(torch.tensor([time_of(item)]), 20))))

    def patches(latent: Tensor) -> Tensor:
        cut = [latent[:, y : y + 2, x : x + 2].flatten() for y in (0, 2) for x in (0, 2, 4)]
        return torch.stack(cut)

    rows, columns = torch.tensor([0, 0, 0, 1, 1, 1]), torch.tensor([0, 1, 2, 0, 1, 2])
    places = torch.cat((waves(rows, 10), waves(columns, 10)), dim=1)
    x = torch.cat((time, prompt, linear("patches", patches(noisy)) + places))
    for layer in blocks:
        block = layer.block
        block.self_attn.config._attn_implementation, kept = (
            "sdpa",
            block.self_attn.config._attn_implementation,
        )
        x = block(x[None], attention_mask=None)[0]
        block.self_attn.config._attn_implementation = kept
    tail = functional.layer_norm(
        x[1 + segment.tokens_out :], (20,), weight["norm.weight"], weight["norm.bias"]
    )
    return segment.tokens_out * functional.mse_loss(linear("out", tail), patches(noise))


def test_the_noise_schedule_is_that_of_ddpm() -> None:
    """Ho et al. 2020: variance falls to 4e-5 over a thousand times."""
    share = kept_share()
    assert float(share[0]) == pytest.approx(1 - 1e-4)
    assert float(share[-1]) == pytest.approx(4.0e-5, rel=0.02)
    assert bool((share.diff() < 0).all())


@pytest.mark.parametrize("setting", SETTINGS)
def test_frozen_settings_train_as_one_process(setting: str, pool: Pool) -> None:
    assert_same(disjoint_plan(drawing_model(setting), drawing_batch(), CUTS), pool)


def test_head_in_a_stage_of_its_own_and_a_generator_in_two(pool: Pool) -> None:
    """The state then leaves at the end of a stage, and the condition crosses between two."""
    cuts = {"vision": (5,), "llm": (5, 1), "generator": (1, 2, 2)}
    assert_same(disjoint_plan(drawing_model(), drawing_batch(), cuts), pool)


def test_recompute_gives_the_same(pool: Pool) -> None:
    plan = disjoint_plan(drawing_model(), drawing_batch(), CUTS)
    full = tuple(ModuleSettings(module=name, recompute=Recompute.FULL) for name in ("llm", "generator"))
    assert_same(replace(plan, settings=replace(plan.settings, modules=full)), pool)


def test_nothing_to_draw(pool: Pool) -> None:
    assert_same(disjoint_plan(drawing_model(), drawing_batch(drawn=(0, 0, 0, 0)), CUTS), pool)


def drawing_job(dp: dict[str, int], drawn: tuple[int, ...]) -> Job:
    return Job(
        name="drawing",
        model=drawing_model(),
        cluster=cluster(8),
        batch=drawing_batch(images=(1, 0, 2, 1), drawn=drawn),
        layouts=tuple(ModuleLayout(module=name, dp=degree, pp=1) for name, degree in dp.items()),
        settings=Settings(precision=Precision.FLOAT64),
        profile="A40",
    )


@pytest.mark.parametrize(
    "dp", [{"vision": 1, "llm": 2, "generator": 1}, {"vision": 2, "llm": 1, "generator": 2}]
)
def test_unequal_replicas(dp: dict[str, int], pool: Pool) -> None:
    plan = megatron_heterogeneous.plan(drawing_job(dp, (1, 1, 2, 1)), CostModel(load_profile("A40")))
    assert {name: len(plan.replicas(name)) for name in dp} == dp
    assert_same(plan, pool)


def test_a_frozen_model_behind_the_llm_gets_a_backward_only_where_something_upstream_trains() -> None:
    def backwards(setting: str) -> set[str]:
        plan = disjoint_plan(drawing_model(setting), drawing_batch(), CUTS)
        actions = {action for program in plan.programs for action in program.actions}
        return {plan.stage[a.stage].module for a in actions if a.kind is Pass.B and a.stage is not None}

    assert backwards("llm-behind-frozen") == {"llm", "generator"}
    assert backwards("generator-alone") == {"generator"}
    assert backwards("encoder") == {"vision", "llm", "generator"}


def test_states_leave_before_the_head() -> None:
    plan: Plan = disjoint_plan(drawing_model(), drawing_batch(), CUTS)
    (edge,) = plan.model.edges_into("generator")
    assert (edge.after_layer, edge.before_layer) == (4, 0)
    rows = [row for row in lower(plan).transfers if row.edge == edge.name]
    assert {row.width for row in rows} == {32}
    wanted = routing_of(plan).wanted(edge, plan.microbatches_of["generator", 0][0])
    assert [tuple(item) for item in wanted] == [(0, 0)]


def test_overheads_of_a_plan_with_a_generator_are_measured(pool: Pool) -> None:
    plan = disjoint_plan(drawing_model(), drawing_batch(images=(1, 0), drawn=(1, 1)), CUTS)
    result = run_lowered(lower(plan), RunSettings(), pool=pool, build=build_empty)
    assert result.losses == (0.0,)


def test_strategies_plan_a_model_with_a_generator() -> None:
    job = replace(drawing_job({}, (1, 1, 2, 1)), layouts=())
    plan = cornstarch.plan(job, CostModel(load_profile("A40")))
    assert {stage.module for stage in plan.stages} == {"vision", "llm", "generator"}


@pytest.mark.parametrize("name", ["fsdp", "hsdp"])
def test_sharded_strategies_plan_and_train_a_model_with_a_generator(name: str, pool: Pool) -> None:
    """Every rank does all modules, whatever their order; the plan's estimate is that of the simulator."""
    cost = CostModel(load_profile("A40"))
    batch = drawing_batch(images=(1, 1, 1, 1), drawn=(1, 1, 1, 1))
    job = replace(drawing_job({}, (1, 1, 1, 1)), layouts=(), batch=batch)
    plan = STRATEGIES[name].planner(job, cost, silent)
    assert {stage.module for stage in plan.stages} == {"vision", "llm", "generator"}
    assert plan.settings.of("generator").shards_parameters
    believed_s, sized = fsdp.fastest_of_size(job, cost)
    assert believed_s == pytest.approx(predict(*accept(sized), cost).iteration_s, rel=0.01)
    assert_same(plan, pool)


def test_strategies_whose_steps_end_with_the_llm_name_those_that_plan_a_generator() -> None:
    job = replace(drawing_job({}, (1, 1, 2, 1)), layouts=())
    for name in ("megatron-homogeneous", "megatron-colocated", "megatron-islands"):
        with pytest.raises(
            ValueError, match=r"'generator' reads 'llm'; nearest: strategy fsdp, cornstarch or "
        ):
            STRATEGIES[name].planner(job, CostModel(load_profile("A40")), silent)


def drawing_file(data: dict) -> None:
    data["model"]["modules"]["drawing"] = {"config": DIT, "trainable": "all", "projector": "linear"}
    data["batch"]["fixed"]["items"] = {"vision": {"each": 1}, "generator": {"each": 2}}
    data.pop("layouts")


def test_a_job_file_with_a_generator_is_planned_and_simulated(tmp_path: Path) -> None:
    job = load_job(write(tmp_path, drawing_file))
    assert [edge.name for edge in job.model.edges] == ["vision>llm", "llm>drawing"]
    segments = job.batch[0].of("generator")
    assert [(s.tokens_in, s.tokens_out) for s in segments] == [(1 + CONDITION + 4, CONDITION)] * 2
    cost = CostModel(load_profile("A40"))
    plan = cornstarch.plan(job, cost)
    lowered = lower(plan)
    trace = simulate(lowered, price(lowered, cost).duration_s)
    drawn = [s for s in trace.spans if s.action.stage == plan.chain["drawing", 0][0].id]
    assert {s.action.kind for s in drawn} >= {Pass.F, Pass.B}


def test_a_generator_that_nothing_feeds_is_refused(tmp_path: Path) -> None:
    def alone(data: dict) -> None:
        drawing_file(data)
        data["model"]["edges"] = [["vision", "llm"], ["drawing", "llm"]]

    with pytest.raises(ValueError, match=r"'drawing' is fed by nothing; want an edge \[llm, drawing"):
        load_job(write(tmp_path, alone))


def test_the_unet_of_stable_diffusion_reads_a_prompt_from_the_llm() -> None:
    unet = from_shape("sd-2.1-unet", llm_width=2048)
    assert native_tokens(unet) == (96 * 96, 77)
    assert unet.entering_width(0) == 2048
    assert unet.layers[0].out_width == 1024
    assert unet.has_loss


def test_what_cannot_run_is_refused() -> None:
    plan = disjoint_plan(drawing_model(), drawing_batch(), CUTS)
    edge = plan.model.edges_into("generator")[0]
    model = replace(
        plan.model, edges=(*plan.model.edges_into("llm"), replace(edge, after_layer=edge.after_layer - 1))
    )
    stage = plan.chain["generator", 0][0]
    with pytest.raises(
        ValueError, match="only the last layer's output can leave a module, want after_layer 4"
    ):
        build_stage_module(replace(plan, model=model), stage, seed=0, dtype=torch.float32)
    adapter = adapter_of(generator())
    with pytest.raises(ValueError, match="want more than 4 tokens inside, got 4"):
        adapter.raw_shape(Segment("generator", 0, 1 + CONDITION, CONDITION))
    with pytest.raises(ValueError, match="dit is a generator: modality must not be 'text'"):
        module_from_config(DIT, name="g", modality="text")
    with pytest.raises(ValueError, match="a generator needs llm_width"):
        module_from_config(DIT, name="g", modality="generator")
    with pytest.raises(ValueError, match="latent_side 5 must divide by patch_size 2"):
        module_from_config(DIT | {"latent_side": 5}, name="g", modality="generator", llm_width=32)
