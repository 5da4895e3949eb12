"""Muon: torch's bits in float32, the same on ranks as in one process, priced from shapes."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from runtime.emulation.memory import state_bytes as emulated_bytes
from runtime.launch import run_lowered
from runtime.run_settings import Collect, RunSettings
from runtime.state.checkpoint import Checkpoints, live_tensors
from runtime.state.checkpoint_files import ForeignError, Whole, check_whole, identity_of
from runtime.step.muon import MuonAndAdamW
from runtime.step.muon_matrices import Matrix, Position
from runtime.step.newton_schulz import orthogonalised
from runtime.step.optimizer import OptimizerSettings, RateSchedule
from runtime.world.pool import Pool
from tests.plans import disjoint_plan
from tests.test_checkpoint import assert_same
from tests.test_export_folders import JOBS, plan_of
from tests.test_parity import CUTS, SEED, assert_parity, execute, mixed
from tests.test_sharded_optimizer import WHOLE, on_fewer_ranks
from tests.tiny_valm import tiny_batch
from workbench.cost.model import CostModel
from workbench.cost.profile import load_profile
from workbench.export.registry import TARGETS
from workbench.export.target import Target
from workbench.memory.layer import StateBytes, state_bytes
from workbench.memory.stage import state_of
from workbench.model.layer import LayerKind
from workbench.model.muon import (
    NEWTON_SCHULZ_STEPS,
    muon_matrices,
    newton_schulz_bytes,
    newton_schulz_flop,
)
from workbench.model.trained import num_trained
from workbench.plan.check import check
from workbench.plan.codec import dumps, loads, plan_hash
from workbench.plan.kernels import Kernels
from workbench.plan.lower import lower
from workbench.plan.optimizer import Optimizer
from workbench.plan.plan import Plan, Precision
from workbench.plan.runnable import check_runnable
from workbench.schedule.action import Pass
from workbench.timing.muon import matrix_bytes, matrix_s
from workbench.timing.price import least_update_s, price, update_bytes

F64 = Precision.FLOAT64


def by_muon(plan: Plan) -> Plan:
    return replace(plan, settings=replace(plan.settings, optimizer=Optimizer.MUON))


def planned(cuts: dict[str, Sequence[int]], replicas: int = 1, *, tied: bool = False) -> Plan:
    plan = disjoint_plan(mixed("everything", tied=tied), tiny_batch(), cuts, replicas=replicas)
    return by_muon(plan if replicas == 1 else on_fewer_ranks(plan, replicas))


def by_identity(matrix: nn.Parameter) -> dict[int, Matrix]:
    return {id(matrix): Matrix(matrix, Position("llm", 0, experts=False, number=0))}


@pytest.mark.parametrize("shape", [(5, 9), (9, 5), (6, 6)])
def test_float32_has_the_bits_of_torch(shape: tuple[int, int]) -> None:
    """Three steps against `torch.optim.Muon` with the same rate, and AdamW for a vector."""
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(shape)), nn.Parameter(torch.randn(7))]
    theirs = [nn.Parameter(each.detach().clone()) for each in ours]
    settings = OptimizerSettings(learning_rate=0.1)
    optimizer = MuonAndAdamW(ours, by_identity(ours[0]), settings)
    muon = torch.optim.Muon(theirs[:1], lr=0.1, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(theirs[1:], lr=0.1, weight_decay=0.01, foreach=False)
    for _ in range(3):
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad = torch.randn_like(mine)
            other.grad = mine.grad.clone()
        optimizer.step()
        muon.step()
        adamw.step()
        assert all(torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True))


def test_float64_is_orthogonalised_in_float64() -> None:
    """Singular values end in the band of the iteration, with the update's singular vectors."""
    torch.manual_seed(0)
    update = torch.randn(4, 6, dtype=torch.float64)
    result = orthogonalised(update)
    left, _, right = torch.linalg.svd(update, full_matrices=False)
    inner = left.T @ result @ right.T
    values = inner.diagonal()
    assert result.dtype == torch.float64
    assert (inner - values.diag()).norm() < 1e-12
    assert ((values > 0.5) & (values < 1.3)).all()


def test_rates_follow_the_schedule_after_state_is_restored() -> None:
    """The fourth step of one optimizer is the first of another that has its state."""
    schedule = RateSchedule(warmup_steps=2, decay_steps=3, floor=0.1)
    settings = OptimizerSettings(learning_rate=0.1, schedule=schedule)
    matrix = nn.Parameter(torch.ones(2, 3))
    first = MuonAndAdamW([matrix], by_identity(matrix), settings)
    for step in range(4):
        matrix.grad = torch.ones_like(matrix)
        first.step()
        assert first.param_groups[0]["lr"] == pytest.approx(0.1 * schedule.factor(step))
    second = MuonAndAdamW([matrix], by_identity(matrix), settings)
    live_tensors([], second)["optimizer/0/step"].fill_(4)
    second.step()
    assert second.param_groups[0]["lr"] == pytest.approx(0.1 * schedule.factor(4))


@pytest.mark.parametrize(
    ("cuts", "replicas", "tied"), [(WHOLE, 1, False), (CUTS, 1, False), (WHOLE, 2, True)]
)
def test_ranks_train_as_one_process(
    cuts: dict[str, Sequence[int]], replicas: int, tied: bool, pool: Pool
) -> None:
    """One rank a module, pipelines, replicas with a tied weight: gradients, and weights after the step."""
    plan = planned(cuts, replicas, tied=tied)
    check(plan)
    check_runnable(plan)
    result, reference = execute(plan, pool, clip_norm=1.0)
    assert_parity(plan, result, reference, F64)
    adamw = replace(plan, settings=replace(plan.settings, optimizer=Optimizer.ADAMW))
    key = ("llm", "model.layers.1.mlp.up_proj.weight")
    _, other = execute(adamw, pool, clip_norm=1.0)
    assert not torch.allclose(reference.weights[key], other.weights[key], atol=1e-5)
    for state in result.states:
        for (module, name), moments in state.moments.items():
            is_matrix = moments[0].ndim == 2 and ("layers." in name or "blocks." in name)
            assert len(moments) == (1 if is_matrix else 2), (module, name)


@pytest.mark.parametrize("precision", list(Precision))
def test_state_is_as_planned(precision: Precision) -> None:
    """One momentum of matrices of blocks, two moments of all others."""
    plan = planned(WHOLE)
    plan = replace(plan, settings=replace(plan.settings, precision=precision, kernels=Kernels.EAGER))
    size, expected = precision.num_bytes, 0
    for module in plan.model.modules:
        for layer in module.layers:
            matrices = {each.name for each in muon_matrices(layer)}
            assert bool(matrices) == (layer.kind is LayerKind.BLOCK)
            for parameter in layer.parameters():
                expected += parameter.num_elements * size * (1 if parameter.name in matrices else 2)
    ranks = [rank for stage in plan.stages for rank in stage.flat_ranks]
    held = sum(n for rank in ranks for _, kind, n in state_of(plan, rank) if kind.part == "optimizer")
    assert held == expected
    weights = sum(n for rank in ranks for _, kind, n in state_of(plan, rank) if kind.part == "parameters")
    assert emulated_bytes(plan) == weights + held


def test_bytes_per_parameter() -> None:
    assert state_bytes(2, Kernels.FUSED, num_moments=1) == StateBytes(2, 2, 8)  # master copy and momentum
    assert state_bytes(2, Kernels.EAGER, 4, num_moments=1) == StateBytes(2, 4, 8)
    assert state_bytes(4, Kernels.EAGER, num_moments=1) == StateBytes(4, 4, 4)


@given(st.integers(1, 40), st.integers(1, 40))
def test_flop_are_those_of_the_products_that_run(rows: int, columns: int) -> None:
    """Counted by torch, and in closed form."""
    with FlopCounterMode(display=False) as counter:
        orthogonalised(torch.ones(rows, columns, dtype=torch.float64))
    m, n = sorted((rows, columns))
    assert newton_schulz_flop((rows, columns)) == 5 * (4 * m * m * n + 2 * m**3)
    assert counter.get_total_flops() == newton_schulz_flop((rows, columns))


def test_temporaries_in_closed_form() -> None:
    assert newton_schulz_bytes((8, 4), 4, 2) == 4 * 32 + 2 * 2 * (32 + 16)
    assert newton_schulz_bytes((4, 8), 2, 2) == 2 * 32 + 2 * 2 * (32 + 16)


def test_the_step_is_priced_from_shapes() -> None:
    """A rank's STEP: AdamW's elements as before, and every matrix of its blocks."""
    plan = planned(WHOLE)
    settings = replace(plan.settings, precision=Precision.BFLOAT16)
    plan = replace(plan, settings=settings)
    cost = CostModel(load_profile("a40"))
    found = price(lower(plan), cost)
    assert any(each.startswith("Muon's update") for each in found.unmeasured)
    llm = next(stage for stage in plan.stages if stage.module == "llm")
    (rank,) = llm.flat_ranks
    matrices = [m for layer in plan.model.module("llm").layers for m in muon_matrices(layer)]
    of_matrices = sum(matrix_s(matrix.shape, settings, cost) for matrix in matrices)
    others = num_trained(plan.model.module("llm").layers) - sum(m.num_elements for m in matrices)
    update_s = cost.update_s(others * update_bytes(settings, cost))
    assert 0 < update_s < of_matrices
    factor, overhead_s = cost.profile.pipeline_factor(Pass.STEP), cost.profile.overhead_s(Pass.STEP)
    assert found.step_s(rank) == pytest.approx(overhead_s + factor * (update_s + of_matrices))


def test_large_matrices_take_the_time_of_their_products() -> None:
    """At 4096 x 16384 in bfloat16, between the FLOP at peak and five times that."""
    plan, shape = planned(WHOLE), (16384, 4096)
    settings = replace(plan.settings, precision=Precision.BFLOAT16)
    cost = CostModel(load_profile("a40"))
    least = newton_schulz_flop(shape) / cost.profile.peak("bfloat16")
    assert NEWTON_SCHULZ_STEPS == 5
    assert least < matrix_s(shape, settings, cost) < 5 * least


def test_a_plan_file_keeps_it() -> None:
    plan = planned(WHOLE)
    adamw = replace(plan, settings=replace(plan.settings, optimizer=Optimizer.ADAMW))
    assert loads(dumps(plan)).settings.optimizer is Optimizer.MUON
    assert plan_hash(plan) != plan_hash(adamw)
    assert '"muon"' not in dumps(adamw)
    assert '"adamw"' not in dumps(adamw)


def assert_goes_on(plan: Plan, pool: Pool, folder: Path) -> Whole:
    """From a checkpoint after the third of four steps to the last bit; returns the checkpoint."""
    lowered = lower(plan)
    settings = RunSettings(seed=SEED, steps=4, collect=Collect.STATE, timeout_s=120.0)
    saves = Checkpoints(folder=folder / "first", every=3)
    result = run_lowered(lowered, replace(settings, checkpoints=saves), pool=pool)
    whole = check_whole(folder / "first" / "step-0000000003", identity_of(plan, settings.dtype(plan), SEED))
    again = Checkpoints(folder=folder / "second", every=3, start=whole)
    assert_same(result, run_lowered(lowered, replace(settings, checkpoints=again), pool=pool))
    return whole


def test_a_run_goes_on_from_a_checkpoint_to_the_last_bit(pool: Pool, tmp_path: Path) -> None:
    """A pipeline; a checkpoint of AdamW is refused."""
    plan = planned(CUTS)
    whole = assert_goes_on(plan, pool, tmp_path)
    adamw = replace(plan, settings=replace(plan.settings, optimizer=Optimizer.ADAMW))
    with pytest.raises(ForeignError):
        check_whole(whole.folder, identity_of(adamw, RunSettings().dtype(adamw), SEED))


def test_the_bound_of_an_update_holds_where_adamw_is_slower() -> None:
    """With AdamW measured at a second a parameter, matrices are below it, and not below the bound."""
    settings = replace(planned(WHOLE).settings, precision=Precision.FLOAT32)
    profile = replace(load_profile("a40"), optimizer_s_per_parameter=(("float32", 1.0),))
    cost = CostModel(profile)
    bound = least_update_s(64 * 64, cost, settings)
    assert bound == pytest.approx(
        profile.pipeline_factor(Pass.STEP) * cost.least_update_s(64 * 64 * matrix_bytes(settings))
    )
    assert 0 < bound <= matrix_s((64, 64), settings, cost)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_exports_carry_it_or_refuse_it(target: Target) -> None:
    job = JOBS["llama"]
    plan = by_muon(plan_of(job, "cornstarch"))
    adamw_refused = target.refuses(plan_of(job, "cornstarch"))
    if target.name in {"torchrun", "megatron"}:
        assert target.refuses(plan) is None
    else:
        assert target.refuses(plan) in {adamw_refused or "optimizer 'muon'", "optimizer 'muon'"}
