"""Products of jobs in narrow formats: what prices, memory, searches, runs and files make of them."""

import json
import random
from dataclasses import replace
from functools import cache

import pytest
import yaml

from sim.predict import candidate_s, doubts_of_plan, iteration_s
from tests.command_line import accept, workbench
from tests.test_predict import row
from workbench.cost.layer_table import LayerPoint, LayerTable
from workbench.cost.model import CostModel
from workbench.cost.products import ProductFormat
from workbench.cost.profile import load_profile
from workbench.cost.roofline import Grid, RowWork, Work
from workbench.cost.signature import signature
from workbench.data.sample import Sample, Segment
from workbench.job.job import Job, load_job
from workbench.job.machines import cost_of
from workbench.job.module_layout import ModuleLayout
from workbench.llm_table.predict import RowPredictor
from workbench.llm_table.row_plan import MODULE, model_of, plan_of
from workbench.memory.layer import layer_bytes, layer_split_bytes
from workbench.memory.setting import Setting
from workbench.model.frozen import Needs
from workbench.model.layer import LayerKind
from workbench.model.lora import Adapted, Lora
from workbench.model.model_graph import TEXT
from workbench.model.trainable import Trainable, with_adapters
from workbench.model.zoo import from_shape
from workbench.plan.kernels import Kernels
from workbench.plan.lower import lower
from workbench.plan.plan import ModuleSettings, Plan, Precision, Sharding
from workbench.plan.runnable import check_runnable
from workbench.schedule.sharded import ReshardAfter
from workbench.search.joint.bounds import lower_bound_s
from workbench.search.joint.own_spaces import Draws
from workbench.search.joint.replan import _without_memory
from workbench.strategies import cornstarch
from workbench.strategies.registry import BY_NAME

SPEC = {
    "name": "narrow",
    "model": {
        "modules": {
            "vision": {"zoo": "siglip-so400m-14-384", "trainable": "projector", "projector": "linear"},
            "llm": {"zoo": "llama-3.1-8b"},
        }
    },
    "cluster": {"device": "H100", "nodes": 1, "ranks_per_node": 4},
    "batch": {"samples": 4, "fixed": {"text_tokens": 2048, "items": {"vision": {"each": 1}}}},
    "layouts": {"llm": {"tp": 2, "pp": 1}, "vision": {"pp": 1}},
    "profile": "H100",
}
BOTH = Needs(input_grad=True, weight_grad=True)


LINK = {"gb_per_s": 1, "latency_us": 1}
LOCAL = {"local": {"ranks": 4, "cores": 4}, "memory_gib": 999, "intra": LINK}


def refused(*arguments: object) -> str:
    result = workbench(*arguments)
    assert result.exit_code == 2, f"{result.output}{result.exception!r}"
    (line,) = (line for line in result.output.splitlines() if line.startswith("workbench: error"))
    return line


def file_of(tmp_path, products="fp8", module="llm", **changes):
    spec = json.loads(json.dumps(SPEC | changes))
    spec["layouts"].setdefault(module, {})["products"] = products
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(spec))
    return path


@cache
def llama() -> tuple:
    llm = from_shape("llama-3.1-8b", module="llm", llm_width=None, projector=None, trainable=Trainable.ALL)
    return llm, next(layer for layer in llm.layers if layer.kind is LayerKind.BLOCK)


def of_one_llm(llm_row, products: ProductFormat) -> Job:
    """The job of the row's model on one GPU, in the row's settings."""
    plan, tokens = plan_of(llm_row, load_profile(llm_row.gpu)), llm_row.sequence
    own = ModuleSettings(module=MODULE, products=products)
    return Job(
        name="one",
        model=model_of(llm_row),
        cluster=plan.cluster,
        batch=tuple(
            Sample(index, (Segment(TEXT, 0, tokens, tokens),)) for index in range(llm_row.global_batch)
        ),
        layouts=(ModuleLayout(module=MODULE, pp=1),),
        settings=replace(plan.settings, kernels=Kernels.FUSED, modules=(own,)),
        profile=llm_row.gpu,
    )


@pytest.mark.parametrize(
    ("cells", "products"),
    [
        ({"precision": "bf16"}, "same"),
        ({"precision": "fp8"}, "fp8"),
        ({"precision": "fp8", "fp8_scaling": "row"}, "fp8_row"),
        ({"precision": "mxfp8"}, "mxfp8"),
    ],
)
def test_a_job_of_one_llm_takes_as_long_as_the_same_row(cells, products):
    sizes = {"hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 32000, "sequence": 4096}
    same = row(architecture="llama", gpu="B200", layers=4, global_batch=2, **sizes, **cells)
    predictor = RowPredictor(iteration_s)
    plan = cornstarch.plan(of_one_llm(same, ProductFormat(products)), predictor.cost(same))
    assert candidate_s(plan, predictor.cost(same)) == pytest.approx(predictor.predict(same).iteration_s)


def test_formats_are_as_fast_as_their_casts_allow_and_only_the_module_s_own(tmp_path):
    def seconds(products: str, module: str = "llm") -> float:
        job = load_job(file_of(tmp_path, products, module))
        cost = cost_of(job, None, None)
        return candidate_s(BY_NAME["cornstarch"].planner(job, cost), cost)

    times = {each: seconds(each) for each in ("fp8_delayed", "fp8", "fp8_row", "same")}
    assert list(times.values()) == sorted(times.values())
    assert times["fp8"] < 0.85 * times["same"]
    assert times["fp8"] < seconds("fp8", "vision") <= times["same"]  # a frozen encoder's forwards alone


def kept(products: ProductFormat, kernels: Kernels = Kernels.FUSED, layer=None, needs: Needs = BOTH) -> int:
    setting = Setting(Work((RowWork(64, 64, 64),)), Grid(), 2, is_gathered=False, products=products)
    return layer_bytes(layer or llama()[1], needs, setting, kernels).kept.num_bytes


@pytest.mark.parametrize("kernels", [Kernels.FUSED, Kernels.MEGATRON])
def test_inputs_are_kept_as_cast(kernels):
    """Of qkv, gate and up, and down in one byte in place of two; of o one more, beside attention's output."""
    width, ffn, tokens = 4096, 14336, 64
    saved = kept(ProductFormat.SAME, kernels) - kept(ProductFormat.FP8, kernels)
    norms = 2 * width if kernels is Kernels.MEGATRON else 0  # whose results MLPs and attentions do not share
    assert saved == pytest.approx(tokens * (width + width + ffn - width), abs=tokens * norms)
    assert kept(ProductFormat.FP8_ROW, kernels) == kept(ProductFormat.SAME, kernels)
    assert kept(ProductFormat.FP8, kernels) < kept(ProductFormat.FP8_BLOCK, kernels)


def test_fused_kernels_keep_exactly_these_bytes():
    assert kept(ProductFormat.SAME) - kept(ProductFormat.FP8) == 64 * (4096 + 14336)


def test_working_memory_is_that_of_whole_inputs_and_a_cast_is_not_the_tensor_that_came_in():
    setting = Setting(Work((RowWork(64, 64, 64),)), Grid(), 2, is_gathered=False)
    first = replace(llama()[1], operators=llama()[1].operators[1:])  # without the norm in front
    for layer in (llama()[1], first):
        wide, narrow = (
            layer_bytes(layer, BOTH, setting._replace(products=each), Kernels.FUSED)
            for each in (ProductFormat.SAME, ProductFormat.FP8)
        )
        assert (narrow.forward, narrow.backward) == (wide.forward, wide.backward)
        assert narrow.kept.input_bytes == (0 if layer is first else wide.kept.input_bytes)
        assert wide.kept.input_bytes == 64 * 4096 * 2


def test_heads_and_embeddings_keep_what_they_kept():
    for layer in (llama()[0].layers[0], llama()[0].layers[-1]):
        assert kept(ProductFormat.FP8, layer=layer) == kept(ProductFormat.SAME, layer=layer)


def test_frozen_layers_and_adapters_keep_what_they_kept():
    only_inputs = Needs(input_grad=True, weight_grad=False)
    assert kept(ProductFormat.FP8, needs=only_inputs) == kept(ProductFormat.SAME, needs=only_inputs)
    frozen = from_shape("llama-3.1-8b", module="m", llm_width=None, projector=None, trainable=Trainable.NONE)
    adapted = with_adapters(frozen, Lora(rank=8, alpha=8), Adapted.ALL).layers[1]
    assert kept(ProductFormat.FP8, layer=adapted) == kept(ProductFormat.SAME, layer=adapted)


def test_a_split_backward_reads_casts_and_makes_whole_gradients():
    setting = Setting(Work((RowWork(64, 64, 64),)), Grid(), 2, is_gathered=False)
    wide, narrow = (
        layer_split_bytes(llama()[1], BOTH, setting._replace(products=each), Kernels.FUSED)
        for each in (ProductFormat.SAME, ProductFormat.FP8)
    )
    assert narrow.gradients == wide.gradients
    assert narrow.left < wide.left


def test_a_layer_that_was_measured_whole_in_its_precision_is_not_read_for_another():
    block, work = llama()[1], Work((RowWork(4096, 4096, 4096 * 2048),))
    times = {"forward_s": 1.0, "input_grad_s": 1.0, "weight_grad_s": 1.0}
    points = tuple(LayerPoint(rows=1, tokens_in=2**n, attention_area=4**n, **times) for n in range(4, 14))
    table = LayerTable(signature=signature(block), precision="bfloat16", points=points)
    profile = load_profile("H100")
    plain = CostModel(profile)
    measured = CostModel(replace(profile, layers=(table,)))
    narrow = [each.multiplying_in(ProductFormat.FP8) for each in (plain, measured)]
    seconds = [each.layer_time(block, work, tp=1, cp=1, precision="bfloat16") for each in narrow]
    assert seconds[0] == seconds[1]
    assert measured.measured_on(block, "bfloat16")
    assert not narrow[1].measured_on(block, "bfloat16")


@pytest.mark.parametrize("products", [ProductFormat.FP8, ProductFormat.FP8_ROW, ProductFormat.NVFP4])
def test_bounds_of_searches_hold(products, tmp_path):
    changes = {"profile": "B200", "cluster": {"device": "B200", "nodes": 1, "ranks_per_node": 4}}
    job = load_job(file_of(tmp_path, products.value, **changes))
    cost = cost_of(job, None, None)
    plan = BY_NAME["cornstarch"].planner(job, cost)
    assert lower_bound_s(job, cost, None) <= candidate_s(plan, cost)
    plain = replace(job, settings=replace(job.settings, modules=()))
    assert lower_bound_s(job, cost, None) < lower_bound_s(plain, cost, None)


@pytest.mark.parametrize("name", sorted(name for name, spec in BY_NAME.items() if not spec.wants_prices))
def test_every_strategy_keeps_the_format(name, tmp_path):
    job = load_job(file_of(tmp_path))
    plan = BY_NAME[name].planner(replace(job, layouts=()), cost_of(job, None, None))
    assert plan.settings.of("llm").products is ProductFormat.FP8
    assert plan.settings.of("vision").products is ProductFormat.SAME


def test_moves_of_searches_keep_the_format(tmp_path):
    job = load_job(file_of(tmp_path))
    drawn = [Draws(job, spec.own_space) for spec in BY_NAME.values()]
    rng = random.Random(0)
    for draws in drawn:
        for _ in range(8):
            try:
                fresh = draws.fresh(rng)
            except ValueError:
                continue
            assert fresh.settings.of("llm").products is ProductFormat.FP8
            assert _without_memory(fresh).settings.of("llm").products is ProductFormat.FP8
    after = ModuleSettings(
        module="llm",
        sharding=Sharding.PARAMETERS,
        reshard_after=ReshardAfter.STEP,
        products=ProductFormat.FP8,
    )
    kept_job = _without_memory(replace(job, settings=job.settings.with_module(after)))
    assert kept_job.settings.of("llm") == after


@pytest.mark.parametrize(
    ("products", "changes", "message"),
    [
        (
            "fp8",
            {"profile": "A100-80GB", "cluster": SPEC["cluster"] | {"device": "A100-80GB"}},
            "module 'llm': profile 'A100-80GB' has no products in fp8, only in: bfloat16, float32, float64; "
            "nearest: same",
        ),
        ("mxfp8", {}, "module 'llm': profile 'H100' has no products in mxfp8, only in: bfloat16, float32, "),
        ("nvfp4", {}, "fp8; nearest: fp8"),
        (
            "fp8",
            {"precision": "float32"},
            "module 'llm': products 'fp8' want precision 'bfloat16', got 'float32'; nearest: 'bfloat16'",
        ),
        (
            "fp8_row",
            {"kernels": "eager"},
            "module 'llm': products 'fp8_row' want kernels 'fused', got 'eager'; nearest: 'fused'",
        ),
        (
            "fp8",
            {"cluster": LOCAL},
            "job 'narrow': module 'llm': products 'fp8' want GPUs, got processes of this machine; nearest: "
            "'same'",
        ),
        ("int8", {}, "layouts.llm.products: input should be 'same', 'fp8', 'mxfp8'"),
    ],
)
def test_what_no_device_computes_is_refused_in_one_line(products, changes, message, tmp_path):
    path = file_of(tmp_path, products, **changes)
    assert message in refused("plan", path, "-o", tmp_path / "plan.json")


def planned(tmp_path, products: str = "fp8") -> Plan:
    job = load_job(file_of(tmp_path, products))
    return BY_NAME["cornstarch"].planner(job, cost_of(job, None, None))


def test_a_run_is_refused_and_a_prediction_says_what_it_rests_on(tmp_path):
    plan, cost = planned(tmp_path), CostModel(load_profile("H100"))
    with pytest.raises(ValueError, match="'llm': products 'fp8' can be simulated, not run; nearest"):
        check_runnable(plan)
    about = [doubt.about for doubt in doubts_of_plan(lower(plan), cost)]
    assert "fp8 by the ratio of peaks" in about
    plain = replace(plan, settings=replace(plan.settings, modules=()))
    assert "fp8 by the ratio of peaks" not in [d.about for d in doubts_of_plan(lower(plain), cost)]


def test_commands_plan_simulate_and_refuse_to_run(tmp_path):
    path, plan = file_of(tmp_path, "fp8_block"), tmp_path / "plan.json"
    result = accept("plan", path, "-o", plan)
    assert "can be simulated, not run" in result.output
    assert "products in fp8_block: at the rate of fp8" in accept("simulate", plan).output
    assert "products 'fp8_block' can be simulated, not run" in refused("run", plan, "--emulate")


def test_init_writes_the_format_of_the_llm(tmp_path):
    path = tmp_path / "job.yaml"
    accept("init", "llama-3.1-8b", "--gpus", "8xH100", "--products", "fp8", "-o", path)
    job = load_job(path)
    assert job.settings.of("llm").products is ProductFormat.FP8
    assert job.settings.precision is Precision.BFLOAT16
    message = refused("init", "llama-3.1-8b", "--gpus", "8xA100-80GB", "--products", "fp8", "-o", path)
    assert "--products: profile 'A100-80GB' has no products in fp8" in message
