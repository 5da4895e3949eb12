"""Products in narrow formats in exported folders: as each system names them, or refused in one line."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.doors.export_jobs import export_jobs
from experiments.doors.targets import shell_arguments
from sim.predict import predict
from tests.test_export_folders import check_flags
from workbench.cost.model import CostModel
from workbench.cost.products import ProductFormat
from workbench.cost.profile import load_profile
from workbench.export.export import export
from workbench.export.narrow_products import uneven_products
from workbench.export.registry import BY_NAME
from workbench.model.block_modules import BlockModule
from workbench.plan.plan import ModuleSettings, Plan
from workbench.strategies.registry import BY_NAME as STRATEGIES
from workbench.timing.accept import accept

JOBS = {job.name: job for job in export_jobs()}


class Prices:
    """Of plans on B200, which has every format."""

    cost = CostModel(load_profile("B200"))

    def step_s(self, plan: Plan) -> float:
        return predict(*accept(plan), self.cost).iteration_s


def plan_of(job: str = "llama", products: ProductFormat = ProductFormat.SAME, module: str = "llm") -> Plan:
    strategy = "megatron-heterogeneous" if job == "llama" else "megatron-islands"
    plan = STRATEGIES[strategy].planner(JOBS[job], Prices.cost)
    own = replace(plan.settings.of(module), products=products)
    return replace(plan, settings=plan.settings.with_module(own))


def exported(target: str, plan: Plan) -> dict[str, str]:
    return export(plan, BY_NAME[target], Prices())


@pytest.mark.parametrize(
    ("products", "flags"),
    [
        ("fp8", ["--fp8-format", "hybrid", "--fp8-recipe", "tensorwise"]),
        ("fp8_delayed", ["--fp8-format", "hybrid", "--fp8-recipe", "delayed"]),
        ("fp8_block", ["--fp8-format", "hybrid", "--fp8-recipe", "blockwise"]),
        ("mxfp8", ["--fp8-format", "e4m3", "--fp8-recipe", "mxfp8"]),
        ("nvfp4", ["--fp4-format", "e2m1"]),
        ("same", []),
    ],
)
def test_megatron_s_flags_name_the_format_and_the_recipe(products, flags):
    words = shell_arguments(exported("megatron", plan_of(products=ProductFormat(products))))
    kept = json.loads((Path(__file__).parent / "golden" / "megatron_flags.json").read_text())
    check_flags(words, {row["flag"]: row for row in kept["flags"]})
    narrow = [index for index, word in enumerate(words) if word.startswith(("--fp8", "--fp4"))]
    assert [word for index in narrow for word in words[index : index + 2]] == flags


@pytest.mark.parametrize(
    ("target", "products", "instead"),
    [
        ("megatron", "fp8_row", "fp8"),
        ("megatron-bridge", "fp8_row", "fp8"),
        ("torchtitan", "fp8", "fp8_row"),
        ("torchtitan", "fp8_block", "fp8_row"),
    ],
)
def test_another_scaling_is_a_priced_difference(target, products, instead):
    readme = exported(target, plan_of(products=ProductFormat(products)))["README.md"]
    assert f"products in {products}" in readme
    assert f"in {instead}" in readme


def test_megatron_bridge_s_configurations_hold_them_by_module():
    tables = json.loads(exported("megatron-bridge", plan_of(products=ProductFormat.FP8))["tables.json"])
    assert (tables["language"]["fp8"], tables["language"]["fp8_recipe"]) == ("hybrid", "tensorwise")
    tables = json.loads(
        exported("megatron-bridge", plan_of("frozen-tower", ProductFormat.MXFP8))["tables.json"]
    )
    assert tables["language"]["fp8_recipe"] == "mxfp8"
    assert "fp8" not in tables["encoders"]["vision"]["config"]


@pytest.mark.parametrize(
    ("products", "converter"), [("fp8_row", "fp8_row"), ("mxfp8", "mxfp8"), ("same", None)]
)
def test_torchtitan_converts_linear_layers_of_blocks(products, converter):
    program = exported("torchtitan", plan_of(products=ProductFormat(products)))["plan_config.py"]
    assert f"PRODUCTS = {converter!r}" in program


@pytest.mark.parametrize(
    ("target", "products", "job", "module", "part"),
    [
        ("torchrun", "fp8", "llama", "llm", "products 'fp8' of 'llm'; nearest: products 'same'"),
        ("fsdp2", "fp8", "llama", "llm", "products 'fp8' of 'llm'"),
        ("torchtitan", "nvfp4", "llama", "llm", "products 'nvfp4' of 'llm'"),
        ("megatron", "fp8", "frozen-tower", "vision", "products 'fp8' of 'vision', an encoder"),
        ("megatron-bridge", "fp8", "frozen-tower", "vision", "products 'fp8' of 'vision', an encoder"),
    ],
)
def test_what_a_system_cannot_say_is_refused_in_one_line(target, products, job, module, part):
    with pytest.raises(ValueError, match="cannot express") as refused:
        exported(target, plan_of(job, ProductFormat(products), module))
    message = str(refused.value)
    assert message.startswith(f"{target} cannot express {part}")
    assert "\n" not in message
    assert "nearest: " in message
    assert "which runs this one" not in message


def test_samples_are_padded_to_the_tokens_that_products_want():
    plan = plan_of("frozen-tower", ProductFormat.MXFP8)
    folder = exported("megatron-bridge", plan)
    assert "padded to 2432 tokens" in folder["README.md"]
    assert json.loads(folder["tables.json"])["data"]["seq_length"] == 2432
    assert "wants a multiple" not in exported("megatron-bridge", plan_of("frozen-tower"))["README.md"]


def test_norms_recomputed_under_delayed_scales_and_uneven_widths_are_refused():
    plan = plan_of(products=ProductFormat.MXFP8)
    delayed = ModuleSettings(
        module="llm", products=ProductFormat.FP8_DELAYED, computed_again=(BlockModule.NORM,)
    )
    part = BY_NAME["megatron"].refuses(replace(plan, settings=plan.settings.with_module(delayed)))
    assert part == "norm recomputed beside products 'fp8_delayed' of 'llm'"
    llm = plan.model.llm
    layers = tuple(
        replace(layer, operators=tuple(_with_width(each, 5648) for each in layer.operators))
        for layer in llm.layers
    )
    uneven = replace(plan, model=replace(plan.model, modules=(replace(llm, layers=layers),)))
    assert uneven_products(uneven) == "products 'mxfp8' of 'llm' of width 2824, no multiple of 32"


def _with_width(operator, width: int):
    """An MLP's product of that inner width."""
    return replace(operator, in_features=width) if operator.name == "mlp.down" else operator
