"""Recomputation of parts of blocks in a job: what it costs and saves, what is refused, what Megatron gets."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.command_line import refuse
from tests.cost_models import assert_planners_see_prices
from tests.job_files import put, write
from tests.test_export_folders import JOBS, plan_of, prices_of
from tests.vlm_job import H100, most_bytes, planned, vlm_job
from workbench.explain.neighbours import ChangeKind, neighbours
from workbench.export.export import export
from workbench.export.registry import BY_NAME
from workbench.job.job import Job, load_job
from workbench.model.block_modules import BlockModule
from workbench.model.frozen import FrozenRule
from workbench.plan.kernels import Kernels
from workbench.plan.lower import lower
from workbench.plan.plan import ModuleSettings, Recompute, Sharding
from workbench.plan.runnable import refusal_to_run
from workbench.planner.layer_cost import layer_costs
from workbench.planner.layout_choice import on_tensor_ranks
from workbench.planner.module_price import ModulePrices
from workbench.timing.price import price

ACT, CORE_ATTN, NORM = BlockModule.ACT, BlockModule.CORE_ATTN, BlockModule.NORM
MODULES = ("layouts", "llm", "recompute_modules")


def with_parts(job: Job, *parts: BlockModule, **others: object) -> Job:
    """The job whose LLM recomputes these parts of its blocks."""
    changed = replace(job.settings.of("llm"), computed_again=parts, **others)  # type: ignore[arg-type]
    return replace(job, settings=job.settings.with_module(changed))


def fused(data: dict[str, object]) -> None:
    data["kernels"] = "fused"
    put("layouts", "llm", "recompute", value="none")(data)


def test_a_job_file_names_them_in_any_order(tmp_path: Path) -> None:
    def edit(data: dict[str, object]) -> None:
        fused(data)
        put(*MODULES, value=["norm", "core_attn"])(data)

    job = load_job(write(tmp_path, edit))
    assert job.settings.of("llm") == ModuleSettings(module="llm", computed_again=(CORE_ATTN, NORM))


@pytest.mark.parametrize(
    ("parts", "change", "words"),
    [
        (["norms"], {}, "layouts.llm.recompute_modules.0: input should be 'core_attn', 'norm', 'act', 'mlp'"),
        (
            ["moe"],
            {},
            "'llm': recompute_modules want parts that its blocks have, got 'moe'; there are core_attn,",
        ),
        (["act"], {"recompute": "full"}, "recompute_modules want recompute 'none', got 'full'; nearest: one"),
        (["act"], {"kernels": "eager"}, "recompute_modules want kernels 'fused', whose kept activations"),
    ],
)
def test_a_mistake_is_one_line(parts: list[str], change: dict[str, str], words: str, tmp_path: Path) -> None:
    def edit(data: dict[str, object]) -> None:
        fused(data)
        put(*MODULES, value=parts)(data)
        data["kernels"] = change.get("kernels", "fused")
        put("layouts", "llm", "recompute", value=change.get("recompute", "none"))(data)

    path = write(tmp_path, edit)
    refuse("plan", path, "-o", tmp_path / "plan.json", words=words, folder=tmp_path)


def test_more_parts_take_longer_and_hold_less() -> None:
    """A fused attention keeps what its recomputation reads: that takes time and saves nothing."""
    plan = planned(vlm_job())
    backwards_s, held = [], []
    for parts in ((), (ACT,), (NORM, ACT), (CORE_ATTN, NORM, ACT)):
        own = replace(plan.settings.of("llm"), computed_again=parts)
        changed = replace(plan, settings=plan.settings.with_module(own))
        backwards_s.append(
            sum(s for a, s in price(lower(changed), H100).durations_s.items() if a.kind == "B")
        )
        held.append(most_bytes(changed))
    assert backwards_s[0] < backwards_s[1] < backwards_s[2] < backwards_s[3]
    assert held[0] > held[1] > held[2] == held[3]


def test_planners_see_the_same_seconds_as_prices() -> None:
    assert_planners_see_prices(planned(with_parts(vlm_job(), CORE_ATTN, ACT)), H100)


def test_planners_price_every_layer_with_its_parts() -> None:
    """Embedding and head have none."""
    plain, job = vlm_job(), with_parts(vlm_job(), ACT)
    layout = next(each for each in job.layouts if each.module == "llm")
    costs, totals = [], []
    for each in (plain, job):
        of_layers = layer_costs(each, planned(each), layout, H100, FrozenRule.EXACT)
        costs.append([cost.backward_s for cost in of_layers])
        totals.append(ModulePrices(each, H100).layers(on_tensor_ranks(each.settings.of("llm")), 1))
    more_s = [after - before for before, after in zip(*costs, strict=True)]
    assert (more_s[0], more_s[-1]) == (0.0, 0.0)
    assert more_s[1] > 0
    assert more_s[1:-1] == pytest.approx([more_s[1]] * 8)
    for before, after in zip(*(of_job[1:-1] for of_job in totals), strict=True):
        assert after.backward_s > before.backward_s
        assert after.kept_bytes < before.kept_bytes


def test_whole_layers_take_the_place_of_parts() -> None:
    job = with_parts(vlm_job(), NORM, ACT)
    by_name = {each.about: each for each in neighbours(job) if each.kind is ChangeKind.ACTIVATIONS}
    assert {"llm recompute norm+act -> none", "llm recompute norm+act -> blocks"} <= by_name.keys()
    none = by_name["llm recompute norm+act -> none"].edit(job).settings.of("llm")
    assert none == ModuleSettings(module="llm")
    blocks = by_name["llm recompute norm+act -> blocks"].edit(job).settings.of("llm")
    assert blocks == ModuleSettings(module="llm", recompute=Recompute.BLOCKS)


def test_megatron_gets_its_own_words_and_the_runtime_refuses() -> None:
    job = with_parts(replace_kernels(JOBS["llama"]), CORE_ATTN, NORM, sharding=Sharding.OPTIMIZER)
    plan = plan_of(job, "megatron-heterogeneous")
    files = export(plan, BY_NAME["megatron"], prices_of(job))
    assert any("--recompute-modules core_attn layernorm" in content for content in files.values())
    assert "the runtime computes whole layers again or nothing, got core_attn, norm" in refusal_to_run(plan)


def replace_kernels(job: Job) -> Job:
    return replace(job, settings=replace(job.settings, kernels=Kernels.FUSED))
