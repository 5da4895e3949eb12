"""Recomputation of some layers of a module: which, their times and memory, and training with them."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from experiments.fidelity.memory import measure, summarise, tiny_job
from runtime.data.batches import SyntheticSource, microbatch_data
from runtime.step.stage_module import StageInput, build_stage_module
from runtime.world.pool import Pool
from tests import tiny_models
from tests.cost_models import assert_planners_see_prices
from tests.plans import disjoint_plan, finish, sample, two_encoders
from tests.split_programs import split, weights_anywhere, weights_last
from tests.test_fsdp import IN_TWO, assert_trains_as_one, sharded_parameters
from tests.test_parity import CUTS, assert_same, mixed
from tests.tiny_valm import tiny_batch
from workbench.cost.layer_time import CheckpointTime, LayerTime
from workbench.cost.model import CostModel
from workbench.cost.profile import ideal_profile
from workbench.memory.sizes import Sizes
from workbench.model.frozen import FrozenRule, Needs
from workbench.model.layer import Layer, LayerKind
from workbench.plan.check import check
from workbench.plan.kernels import Kernels
from workbench.plan.lower import lower
from workbench.plan.plan import ModuleSettings, Plan, Precision, Recompute
from workbench.plan.recomputed_layers import recomputed_in, recomputed_layers, recomputed_of
from workbench.plan.routing import routing_of
from workbench.plan.stage import Stage
from workbench.planner.layer_cost import layer_costs
from workbench.planner.layout_choice import on_tensor_ranks
from workbench.planner.module_price import ModulePrices
from workbench.strategies import cornstarch
from workbench.timing.pass_times import pass_times
from workbench.timing.price import price

COST = CostModel(ideal_profile())
FEW = {"vision": 2, "audio": 1, "llm": 3}
BLOCKS, FULL, NONE = Recompute.BLOCKS, Recompute.FULL, Recompute.NONE


def recomputing(plan: Plan, counts: Mapping[str, int | None] | None, recompute: Recompute = FULL) -> Plan:
    """The plan with this many layers of each module recomputed, None: all; without counts, none."""
    settings = plan.settings
    for module in plan.model.modules:
        chosen, count = (NONE, None) if counts is None else (recompute, counts[module.name])
        settings = settings.with_module(settings.of(module.name).recomputing(chosen, count))
    return replace(plan, settings=settings)


@given(st.data())
def test_some_layers_are_spread_evenly(data: st.DataObject) -> None:
    num_layers = data.draw(st.integers(1, 100))
    count = data.draw(st.integers(1, num_layers))
    flags = recomputed_layers(FULL, count, layers_of("b" * num_layers))
    indices = [index for index, again in enumerate(flags) if again]
    assert (len(flags), len(indices), indices[-1]) == (num_layers, count, num_layers - 1)
    distances = {after - before for before, after in zip([-1, *indices], indices, strict=False)}
    assert max(distances) - min(distances) <= 1
    size = data.draw(st.integers(1, num_layers))
    of_parts = {sum(flags[first : first + size]) for first in range(num_layers - size + 1)}
    assert max(of_parts) - min(of_parts) <= 1


def layers_of(kinds: str) -> list[Layer]:
    """A layer for each letter: embedding, block, projector or head."""
    kind_of = {kind[0]: kind for kind in LayerKind}
    return [
        Layer(name=f"{index}", kind=kind_of[letter], operators=(), out_width=1)
        for index, letter in enumerate(kinds)
    ]


def flags_of(recompute: Recompute, count: int | None, kinds: str) -> str:
    flags = recomputed_layers(recompute, count, layers_of(kinds))
    return "".join("x" if again else "." for again in flags)


def test_all_and_none_are_what_they_were() -> None:
    assert flags_of(FULL, 7, "ebbbbbh") == flags_of(FULL, None, "ebbbbbh") == "xxxxxxx"
    assert flags_of(NONE, None, "ebbbbbh") == "......."
    assert flags_of(FULL, 2, "ebbbh") == "..x.x"


@given(st.text("ebph", max_size=40), st.data())
def test_blocks_are_recomputed_as_if_nothing_were_around_them(kinds: str, data: st.DataObject) -> None:
    num_blocks = kinds.count("b")
    count = data.draw(st.none() | st.integers(0, num_blocks))
    flags = flags_of(BLOCKS, count, kinds)
    of_blocks = "".join(flag for flag, kind in zip(flags, kinds, strict=True) if kind == "b")
    assert of_blocks == flags_of(FULL, count, "b" * num_blocks)
    assert flags.count("x") == of_blocks.count("x") == (num_blocks if count is None else count)


def test_embedding_and_head_are_not_blocks() -> None:
    assert flags_of(BLOCKS, None, "ebbbbh") == ".xxxx."
    assert flags_of(BLOCKS, 2, "ebbbbph") == "..x.x.."
    assert flags_of(BLOCKS, None, "ep") == ".."


def test_a_stage_has_the_layers_of_its_module() -> None:
    plan = recomputing(disjoint_plan(two_encoders(), [sample(0)], {**CUTS_OF_TWO, "llm": (3, 1)}), OF_TWO)
    flags = [recomputed_in(plan, stage) for stage in plan.stages if stage.module == "llm"]
    assert flags == [(False, True, False), (True,)]
    assert recomputed_of(plan, "llm") == (False, True, False, True)


CUTS_OF_TWO = {"vision": (3,), "audio": (2,)}
OF_TWO = {"vision": 1, "audio": 1, "llm": 2}


def test_what_cannot_be_meant_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^module 'llm': want recompute_layers >= 1, got 0; nearest: 1$"):
        ModuleSettings(module="llm", recompute=FULL, recompute_layers=0)
    message = "'llm': recompute_layers 2 wants recompute 'blocks' or 'full', got 'none'; nearest: recompute"
    with pytest.raises(ValueError, match=message):
        ModuleSettings(module="llm", recompute_layers=2)
    plan = disjoint_plan(two_encoders(), [sample(0)])
    for count in (4, 5):
        message = (
            f"module 'llm': recompute_layers must be fewer than its 4 layers, got {count}; nearest: leave"
        )
        with pytest.raises(ValueError, match=message):
            check(recomputing(plan, OF_TWO | {"llm": count}))
    check(recomputing(plan, OF_TWO))
    with pytest.raises(ValueError, match="recompute_layers must be fewer than its 4 blocks, got 4; nearest"):
        check(recomputing(plan, OF_TWO | {"llm": 4}, BLOCKS))


def test_other_recomputation_forgets_the_number() -> None:
    some = ModuleSettings(module="llm", recompute=FULL, recompute_layers=2)
    assert some.recomputing(NONE) == ModuleSettings(module="llm")
    assert some.recomputing(FULL) == ModuleSettings(module="llm", recompute=FULL)


def test_times_are_those_of_each_layer() -> None:
    """Layer i of four takes 2 ** i seconds forward, without and with a measured checkpoint."""
    both, checkpoint = Needs(True, True), CheckpointTime(0.25, 0.5, 0.125)
    for added in (None, checkpoint):
        times = [LayerTime(2.0**i, 16.0, 32.0, forward_only_s=2.0**i, checkpoint=added) for i in range(4)]
        forward_s, backward_s = (0.0, 0.0) if added is None else (0.25, 0.5)
        for count in range(5):
            flags = recomputed_layers(FULL, count, layers_of("bbbb"))
            again_s = sum(2.0**i + backward_s for i in range(4) if flags[i])
            passes = pass_times(times, [both] * 4, flags)
            assert passes.of("F") == 15.0 + count * forward_s
            assert passes.of("B") == 4 * 48.0 + again_s
            assert (passes.of("I"), passes.of("W")) == (4 * 16.0 + again_s, 4 * 32.0)


def test_a_checkpoint_around_a_layer_without_gradients_costs_only_where_it_is() -> None:
    times = [LayerTime(4.0, 5.0, 6.0, checkpoint=CheckpointTime(0.5, 0.75, 0.25))] * 3
    needs = [Needs(False, False)] * 2 + [Needs(True, True)]
    assert pass_times(times, needs, [False, True, False]).of("F") == 12.25
    assert pass_times(times, needs, [False, True, True]).of("F") == 12.75


def layer_by_layer(kernels: Kernels = Kernels.FUSED) -> Plan:
    """Every layer a stage: the LLM's blocks 1 to 4 of layers 0 to 5 are equal but for their position."""
    model = mixed("everything")
    plan = disjoint_plan(model, tiny_batch(), {m.name: (1,) * len(m.layers) for m in model.modules})
    return replace(plan, settings=replace(plan.settings, kernels=kernels))


def variants(plan: Plan) -> dict[bool | None, Plan]:
    """Recomputing nothing, everything, and last, with caches that the others filled, some layers."""
    everything = recomputing(plan, dict.fromkeys(FEW))
    return {False: recomputing(plan, None), True: everything, None: recomputing(plan, FEW)}


def test_stages_that_differ_only_in_recomputation_have_prices_of_their_own() -> None:
    plans = variants(layer_by_layer())
    durations_s = {
        again: {str(action): seconds for action, seconds in price(lower(plan), COST).durations_s.items()}
        for again, plan in plans.items()
    }
    some = plans[None]
    for stage in some.stages:
        (again,) = recomputed_in(some, stage)
        for kind in "FB":
            assert durations_s[None][f"{stage.id}{kind}1"] == durations_s[again][f"{stage.id}{kind}1"]
    seconds = [durations_s[None][f"{s.id}B1"] for s in some.stages if s.module == "llm"]
    assert seconds[1] > seconds[2] < seconds[3] > seconds[4]  # layers 1 and 3 of 0..5 are recomputed


@pytest.mark.parametrize("kernels", [Kernels.FUSED, Kernels.EAGER])
def test_stages_that_differ_only_in_recomputation_have_memory_of_their_own(kernels: Kernels) -> None:
    plans = variants(layer_by_layer(kernels))
    sizes = {again: Sizes(plan, routing_of(plan)) for again, plan in plans.items()}
    some = plans[None]
    for stage in some.stages:
        (again,) = recomputed_in(some, stage)
        microbatch = some.microbatches_of[stage.module, 0][1]
        for account in (partial(Sizes.of, keeps=True), Sizes.split):
            assert account(sizes[None], stage, microbatch) == account(sizes[again], stage, microbatch)
    microbatch = some.microbatches_of["llm", 0][1]
    kept = [sizes[None].of(stage, microbatch, keeps=True).kept for stage in some.chain["llm", 0]]
    assert kept[1] < kept[2] > kept[3] < kept[4]


def test_planners_see_the_same_seconds_as_prices() -> None:
    plan = recomputing(disjoint_plan(two_encoders(llm=(True,) * 4), [sample(0)]), OF_TWO)
    assert_planners_see_prices(plan, COST)


def test_planners_price_each_layer_as_recomputed_or_not() -> None:
    job = tiny_job("all")
    settings = ModuleSettings(module="llm")
    cases = {False: settings, True: settings.recomputing(FULL), None: settings.recomputing(FULL, 3)}
    flags = recomputed_layers(FULL, 3, job.model.llm.layers)
    costs, totals = {}, {}
    for again, chosen in cases.items():
        changed = replace(job, settings=replace(job.settings, modules=() if again is False else (chosen,)))
        layout = next(each for each in job.layouts if each.module == "llm")
        draft = cornstarch.plan(changed, COST)
        costs[again] = layer_costs(changed, draft, layout, COST, FrozenRule.EXACT)
        totals[again] = ModulePrices(job, COST).layers(on_tensor_ranks(chosen), 1)
    for priced in (costs, totals):
        assert priced[None] == tuple(priced[again][index] for index, again in enumerate(flags))


def test_the_runtime_computes_these_layers_again_and_no_others() -> None:
    plan = tiny_models.plan_of(tiny_models.two_encoders(), tiny_models.mixed_batch())
    plan = replace(plan, settings=replace(plan.settings, precision=Precision.FLOAT64))
    stage = plan.stages[0]
    num_layers = stage.layers[1]
    gradients = []
    names = [m.name for m in plan.model.modules]
    for chosen, total in (
        (recomputing(plan, None), 0),
        (recomputing(plan, dict.fromkeys(names, 2)), 2),
        (recomputing(plan, dict.fromkeys(names), BLOCKS), num_layers - 2),
    ):
        module = build_stage_module(chosen, stage, seed=3, dtype=torch.float64)
        calls = [0] * num_layers
        for index, layer in enumerate(module.layers):
            layer.register_forward_pre_hook(partial(_count, calls, index))
        data = microbatch_data(chosen, stage, chosen.microbatches[0], SyntheticSource(3), dtype=torch.float64)
        module(StageInput(None, data)).square().sum().backward()
        flags = recomputed_in(chosen, stage)
        assert calls == [2 if again else 1 for again in flags]
        assert sum(flags) == total
        gradients.append([parameter.grad for parameter in module.parameters()])
    for plain, *recomputed in zip(*gradients, strict=True):
        assert all(torch.equal(plain, each) for each in recomputed)


def _count(calls: list[int], index: int, *_: object) -> None:
    calls[index] += 1


@pytest.mark.parametrize("mix", ["everything", "projectors-and-llm"])
def test_pipelines_train_as_one_process(mix: str, pool: Pool) -> None:
    """1F1B, and backwards in two parts."""
    plan = recomputing(disjoint_plan(mixed(mix), tiny_batch(), CUTS), FEW)
    assert_same(plan, pool)
    assert_same(recomputing(plan, dict.fromkeys(FEW), BLOCKS), pool)
    assert_same(split(plan, weights_anywhere(7)), pool)


def test_sharded_layers_train_as_one_process(pool: Pool) -> None:
    """Stages are single layers, which only know by their position whether they are recomputed."""
    batch = tiny_batch((1, 2, 0, 1), (1, 0, 0, 2))
    plan = recomputing(sharded_parameters(mixed("everything"), batch, replicas=2, cuts=IN_TWO), FEW)
    assert {recomputed_in(plan, stage) for stage in plan.stages} == {(False,), (True,)}
    assert_trains_as_one(plan, pool)


@pytest.mark.parametrize(
    ("counts", "recompute"),
    [(FEW, FULL), ({"vision": 4, "audio": 5, "llm": 2}, FULL), (dict.fromkeys(FEW), BLOCKS)],
)
@pytest.mark.parametrize("is_split", [False, True])
def test_memory_is_what_was_predicted(
    counts: Mapping[str, int | None], recompute: Recompute, is_split: bool, pool: Pool
) -> None:
    """Of kernels that keep what torch does, on every rank."""
    plan = recomputing(cornstarch.plan(tiny_job("all"), COST), counts, recompute)
    assert plan.settings.kernels is Kernels.EAGER
    summary = summarise(measure("some", split(plan, weights_last) if is_split else plan, pool))
    assert summary.num_exceeded == 0
    assert summary.mean_abs_error <= 0.03
    assert summary.worst_abs_error <= 0.06


def test_memory_lies_between_that_of_none_and_of_all_layers() -> None:
    """Bytes kept for the backward: each layer adds its own, and what attention layers share counts once."""
    model = mixed("everything")
    whole = [
        Stage(id=i, module=m.name, replica=0, layers=(0, len(m.layers)), ranks=((i,),))
        for i, m in enumerate(model.modules)
    ]
    plan = finish(model, tiny_batch(), whole)
    plan = replace(plan, settings=replace(plan.settings, kernels=Kernels.EAGER))
    kept = []
    for counts in (None, *({"vision": 1, "audio": 1, "llm": n} for n in range(1, 6)), dict.fromkeys(FEW)):
        chosen = recomputing(plan, counts)
        microbatch = chosen.microbatches_of["llm", 0][0]
        stage = chosen.chain["llm", 0][0]
        kept.append(Sizes(chosen, routing_of(chosen)).of(stage, microbatch, keeps=True).kept)
    assert kept == sorted(kept, reverse=True)
    assert len(set(kept)) == len(kept)
