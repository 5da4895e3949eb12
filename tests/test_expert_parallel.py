"""Ranks that distribute experts train as one process does, however tokens fall."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runtime.launch import run_lowered
from runtime.models.choose import adapter_of
from runtime.models.mixture import Mixture
from runtime.parallel.expert import layers
from runtime.parallel.expert.cuts import held_parts, parts_of, position_of
from runtime.parallel.expert.group import ExpertGroup, exchange_counts
from runtime.parallel.tensor.group import TensorGroup
from runtime.parallel.tensor.sequence import TokenParts
from runtime.run_settings import Collect, RunSettings
from runtime.step.stage_module import StageModule, build_stage_module
from runtime.world.failure import RankError, WorldFailed
from runtime.world.pool import Place, Pool
from tests import paper_models, tiny_models
from tests.forced_routes import build_with_last
from tests.test_adapters_llama4 import LLAMA4
from tests.test_expert_plan import MIXTRAL, moe_plan
from tests.test_parity import assert_parity, assert_same, execute
from tests.test_tensor_parallel import assert_exported_whole
from tests.waiting import impatient_group
from workbench.model.families.registry import ARCHITECTURES
from workbench.plan.build import with_programs
from workbench.plan.lower import lower
from workbench.plan.plan import ModuleSettings, Plan, Precision, Recompute, Sharding
from workbench.plan.stage import Stage
from workbench.schedule.action import Pass
from workbench.schedule.choice import Schedule, ScheduleKind

QWEN3_MOE = paper_models.DECODERS["qwen3_moe"] | {
    "num_experts": 4,
    "num_key_value_heads": 4,
    "vocab_size": 64,
}
FOUR_LLAMA4: dict[str, Any] = LLAMA4 | {"num_local_experts": 4, "num_key_value_heads": 4}


@pytest.mark.parametrize(
    "degrees",
    [
        {"cp": 2, "ep": 2},
        {"tp": 2, "ep": 2},
        {"tp": 2, "cp": 2, "ep": 2, "dp": 2},
        {"cp": 2, "ep": 2, "dp": 2, "pp": 2},
        {"tp": 4, "ep": 2, "pp": 2},
    ],
    ids=str,
)
def test_mixtral(degrees: dict[str, int], pool: Pool) -> None:
    assert_same(moe_plan(**degrees), pool)


def test_qwen3_with_a_dense_block(pool: Pool) -> None:
    """Every second block has experts, whose products have a width of their own."""
    assert_same(moe_plan(tp=2, cp=2, ep=4, config=QWEN3_MOE | {"decoder_sparse_step": 2}), pool)
    assert_same(moe_plan(tp=2, ep=2, pp=2, config=QWEN3_MOE | {"mlp_only_layers": [1]}), pool)


def example(kind: str) -> dict[str, Any]:
    return {"model_type": kind, **next(iter(ARCHITECTURES[kind].examples.values())).config}


SPARSE = (
    *("mistral4", "minimax_m2", "olmoe", "ernie4_5_moe", "hunyuan_v1_moe", "dots1", "solar_open"),
    *("aria_text", "qwen2_moe", "glm4_moe_lite", "lfm2_moe"),
)


@pytest.mark.parametrize("kind", SPARSE)
def test_mixtures_in_two_stages_of_two_ranks(kind: str, pool: Pool) -> None:
    assert_same(moe_plan(tp=2, pp=2, ep=2, config=example(kind)), pool)


DENSE = (
    *("ministral3", "olmo2", "olmo3", "exaone4", "seed_oss", "smollm3", "granite"),
    *("arcee", "nemotron", "starcoder2", "apertus", "ernie4_5", "hunyuan_v1_dense"),
)


@pytest.mark.parametrize("kind", DENSE)
def test_dense_models_in_two_stages_of_two_ranks(kind: str, pool: Pool) -> None:
    assert_same(moe_plan(tp=2, pp=2, config=example(kind)), pool)


@pytest.mark.parametrize("kind", ["ministral3", "olmo3", "exaone4", "ernie4_5", "mistral4"])
def test_positions_of_tokens_that_ranks_share(kind: str, pool: Pool) -> None:
    """Queries that grow with them, rotations by kind of block or of pairs, or none; recomputed, and split."""
    again = (ModuleSettings(module="llm", recompute=Recompute.FULL),)
    plan = moe_plan(cp=2, pp=2, config=example(kind), modules=again)
    assert_same(with_programs(replace(plan, programs=()), Schedule(kind=ScheduleKind.ZB_H1)), pool)


@pytest.mark.parametrize("degrees", [{"cp": 2, "ep": 2}, {"tp": 2, "cp": 2, "ep": 4}], ids=str)
def test_llama4(degrees: dict[str, int], pool: Pool) -> None:
    assert_same(moe_plan(**degrees, config=FOUR_LLAMA4), pool)


@pytest.mark.parametrize("config", [MIXTRAL, FOUR_LLAMA4], ids=["mixtral", "llama4"])
def test_tokens_that_are_split_already(config: dict[str, Any], pool: Pool) -> None:
    """Sequence parallelism: members come with tokens of their own, padding among them."""
    divided = (ModuleSettings(module="llm", sequence_parallel=True),)
    assert_same(moe_plan(tp=2, cp=2, ep=4, config=config, modules=divided), pool)


def test_sharded_recomputed_split_and_clipped(pool: Pool) -> None:
    """All that touches a gradient at once; a norm that counted an expert twice would clip otherwise."""
    settings = ModuleSettings(
        module="llm", sharding=Sharding.OPTIMIZER, instances=2, recompute=Recompute.FULL
    )
    plan = moe_plan(tp=2, ep=2, dp=2, pp=2, modules=(settings,))
    split = with_programs(replace(plan, programs=()), Schedule(kind=ScheduleKind.ZB_H1))
    assert any(action.kind is Pass.W for action in split.program_actions)
    result, reference = execute(split, pool, clip_norm=0.01)
    assert_parity(split, result, reference, Precision.FLOAT64)


def test_one_optimizer_instance(pool: Pool) -> None:
    """Experts have 4 holders, other weights as many."""
    settings = ModuleSettings(module="llm", sharding=Sharding.OPTIMIZER)
    plan = moe_plan(tp=2, cp=2, ep=2, dp=2, modules=(settings,))
    result, reference = execute(plan, pool, clip_norm=0.01)
    assert_parity(plan, result, reference, Precision.FLOAT64)


@pytest.mark.parametrize("degrees", [{"cp": 2, "ep": 2}, {"tp": 2, "cp": 2, "ep": 4}], ids=str)
def test_all_tokens_to_the_experts_of_one_rank(degrees: dict[str, int], pool: Pool) -> None:
    """Others hold experts without a row; they take part in every exchange, and their gradients are zero."""
    settings = RunSettings(seed=3, precision=Precision.FLOAT64, collect=Collect.STATE, timeout_s=30.0)
    ours = run_lowered(lower(moe_plan(**degrees)), settings, pool=pool, build=build_with_last)
    plan = moe_plan()
    one = run_lowered(lower(plan), settings, pool=pool, build=build_with_last)
    assert abs(ours.losses[0] - one.losses[0]) <= 1e-10 * abs(one.losses[0])
    idle = 0
    for state in ours.states:
        parts = held_parts(moe_plan(**degrees), state.rank)
        for key, gradient in state.gradients.items():
            theirs = parts.get(key, torch.clone)(one.states[0].gradients[key])
            assert (gradient - theirs).norm() <= 1e-10 * max(theirs.norm(), 1e-30), key
            idle += "experts" in key[1] and not gradient.any()
    assert idle > 0


def test_a_frozen_model_below_trained_experts(pool: Pool) -> None:
    """Rows travel without a gradient where nothing before the experts is trained."""
    plan = moe_plan(cp=2, ep=2)
    (llm,) = plan.model.modules
    model = replace(plan.model, modules=(tiny_models.frozen(llm, [0]),))
    assert_same(with_programs(replace(plan, model=model, programs=())), pool)
    model = replace(plan.model, modules=(tiny_models.frozen(llm, [1, 2]),))
    assert_same(with_programs(replace(plan, model=model, programs=())), pool)


@pytest.mark.parametrize("degrees", [{"cp": 2, "ep": 2}, {"tp": 2, "cp": 2, "ep": 4}], ids=str)
def test_an_export_is_of_all_experts(degrees: dict[str, int], tmp_path: Path, pool: Pool) -> None:
    assert_exported_whole(moe_plan(**degrees), tmp_path / "out", pool)


def build_raising(plan: Plan, stage: Stage, **how: Any) -> StageModule:
    return _with_last_router(_raise, build_stage_module(plan, stage, **how))


def _with_last_router(hook: Callable[..., None], built: StageModule) -> StageModule:
    """On the last rank alone: its peers wait for rows that never come."""
    assert built.experts is not None
    if built.experts.member == built.experts.size - 1:
        for layer in built.layers:
            for mixture in layer.mixtures().values():
                mixture.module.gate.register_forward_pre_hook(hook)
    return built


def _raise(*_: object) -> None:
    raise OSError("disk is gone")


def test_a_rank_that_fails_between_exchanges_is_named(pool: Pool) -> None:
    with pytest.raises(WorldFailed, match=r"rank 1 in 0F0: OSError: disk is gone"):
        run_lowered(lower(moe_plan(cp=2, ep=2)), RunSettings(), pool=pool, build=build_raising)


def wait_for_an_absent_one(place: Place) -> str:
    """What the first process says of an exchange that the second one never comes to."""
    group = impatient_group(0.3)
    if place.process == 1:
        return ""
    try:
        exchange_counts(torch.ones(2, 2, dtype=torch.int64), ExpertGroup((0, 1), 0, group))
    except RankError as error:
        return str(error)
    return "arrived"


def test_nobody_waits_for_a_rank_without_a_bound(pool: Pool) -> None:
    told, _ = pool.run(wait_for_an_absent_one, 2)
    assert told.startswith("rank 0 exchanging tokens among experts with ranks [1]: ")


def test_a_group_of_another_size_is_refused() -> None:
    plan = moe_plan(cp=2, ep=2)
    with pytest.raises(ValueError, match=r"stage 0: 1 ranks share its weights, want ep = 1, got ep 2"):
        build_stage_module(plan, plan.stages[0], seed=0, dtype=torch.float64)


@given(st.sampled_from([(1, 2, 2), (2, 1, 2), (2, 2, 2), (2, 2, 4), (4, 1, 2)]), st.sampled_from([0, 1]))
def test_ranks_hold_what_the_plan_says(degrees: tuple[int, int, int], which: int) -> None:
    """Elements of every parameter, over the ranks that hold all weights, are the layer's, each once."""
    tp, cp, ep = degrees
    config = (MIXTRAL, FOUR_LLAMA4)[which]
    plan = moe_plan(tp=tp, cp=cp, ep=ep, config=config)
    (stage,) = plan.stages
    layer = built_block(config)
    parts = parts_of(layer, tp=tp, ep=ep)
    whole = {
        name: torch.arange(1.0, 1 + each.numel()).view(each.shape) for name, each in layer.named_parameters()
    }
    for name, each in whole.items():
        owned = [position_of(stage, rank).own(name, parts, each) for rank in stage.flat_ranks]
        copies = {True: tp * cp // ep, False: tp * cp if name not in parts.tensor.cut else cp}[
            name in parts.experts
        ]
        assert sum(float(own.sum()) for own in owned) == copies * float(each.sum()), name


def built_block(config: dict[str, Any]) -> Any:
    return adapter_of(tiny_models.llm(config)).build(1)


@pytest.mark.parametrize("has_shared", [False, True])
def test_a_routers_part_of_the_tokens_does_not_keep_all(
    has_shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its part is a view only where an expert for all tokens keeps them anyway."""
    x_TD = torch.ones(4, 3)
    read: list[torch.Tensor] = []

    def routed(x_SD: torch.Tensor, *_: object) -> torch.Tensor:
        read.append(x_SD)
        return x_SD

    monkeypatch.setattr(layers, "routed", routed)
    monkeypatch.setattr(TokenParts, "gathered", lambda self, own_ND: own_ND.repeat(2, 1))
    tensor = TensorGroup(process_group=None, ranks=(0, 1), rank=1)
    mixture: Mixture = SimpleNamespace(for_all=torch.sin if has_shared else None)  # type: ignore[assignment]
    group: Any = None
    joined_TD = layers._ParallelForward(mixture, group, tensor, tensor)._chosen(x_TD)
    assert torch.equal(joined_TD, x_TD)
    shares = read[0].untyped_storage().data_ptr() == x_TD.untyped_storage().data_ptr()
    assert shares == has_shared
