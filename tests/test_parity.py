"""Every plan gives the loss, gradients and weights of one process on the whole batch."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from runtime.data.batches import SyntheticSource
from runtime.launch import RunResult, run_lowered
from runtime.parallel.expert.cuts import held_parts
from runtime.rank_report import RankState
from runtime.reference import Reference, ReferenceResult, reference_step
from runtime.run_settings import Collect, RunSettings
from runtime.step.optimizer import OptimizerSettings
from runtime.world.pool import Pool
from tests.plans import cluster, disjoint_plan, finish
from tests.tiny_valm import tiny_batch, tiny_valm
from workbench.cost.model import CostModel
from workbench.cost.profile import load_profile
from workbench.data.sample import Sample
from workbench.job.job import Job
from workbench.job.module_layout import ModuleLayout
from workbench.model.model_graph import ModelGraph
from workbench.model.trainable import Trainable
from workbench.plan.lower import lower
from workbench.plan.plan import ModuleSettings, Plan, Precision, Recompute, Settings
from workbench.plan.stage import Stage
from workbench.schedule.action import COMPUTE
from workbench.strategies import cornstarch, encoders_colocated, encoders_replicated

SEED = 3
NEGLIGIBLE = 1e-12  # of the global norm: such a gradient is rounding
BOUND = {Precision.FLOAT64: 1e-10, Precision.FLOAT32: 1e-5}
CUTS = {"vision": (3, 2), "audio": (4,), "llm": (2, 4)}
ALL, PROJECTOR, NONE = Trainable.ALL, Trainable.PROJECTOR, Trainable.NONE
MIXES = {
    "projectors-and-llm": (PROJECTOR, PROJECTOR, ALL),
    "projectors": (PROJECTOR, PROJECTOR, NONE),
    "vision-frozen": (NONE, ALL, ALL),
    "encoders": (ALL, ALL, NONE),
    "llm": (NONE, NONE, ALL),
    "everything": (ALL, ALL, ALL),
}


def mixed(mix: str, *, tied: bool = False) -> ModelGraph:
    vision, audio, llm = MIXES[mix]
    return tiny_valm(vision=vision, audio=audio, llm=llm, tied=tied)


def execute(
    plan: Plan, pool: Pool, precision: Precision = Precision.FLOAT64, clip_norm: float | None = None
) -> tuple[RunResult, ReferenceResult]:
    """The plan on its ranks, and one process on the whole batch."""
    optimizer = OptimizerSettings(clip_norm=clip_norm)
    settings = RunSettings(
        seed=SEED, precision=precision, collect=Collect.STATE, optimizer=optimizer, timeout_s=30.0
    )
    torch.set_num_threads(1)
    result = run_lowered(lower(plan), settings, pool=pool)
    reference = reference_step(
        plan, seed=SEED, dtype=settings.dtype(plan), source=SyntheticSource(SEED), optimizer=optimizer
    )
    return result, reference


def negligible(plan: Plan) -> frozenset[tuple[str, str]]:
    """Weights whose gradient is rounding (a key bias: softmax does not see it), judged in float64."""
    exact = reference_step(plan, seed=SEED, dtype=torch.float64, source=SyntheticSource(SEED)).gradients
    least = NEGLIGIBLE * norm_of(exact)
    return frozenset(key for key, gradient in exact.items() if 0 < gradient.norm() <= least)


def norm_of(gradients: dict[tuple[str, str], Tensor]) -> float:
    return float(torch.stack([gradient.norm() for gradient in gradients.values()]).norm())


def assert_parity(plan: Plan, result: RunResult, reference: ReferenceResult, precision: Precision) -> None:
    bound = BOUND[precision]
    assert abs(result.losses[0] - reference.loss) <= bound * abs(reference.loss)
    global_norm, rounding = norm_of(reference.gradients), negligible(plan)
    compared: set[tuple[str, str]] = set()
    for state in result.states:
        parts = held_parts(plan, state.rank)
        for held, gradient in state.gradients.items():
            key = first_name(plan, held)
            theirs = parts.get(held, whole)(reference.gradients[key])
            scale = global_norm if key in rounding else reference.gradients[key].norm()
            assert (gradient - theirs).norm() <= bound * scale, f"gradient of {key} on rank {state.rank}"
            compared.add(key)
        if precision is Precision.FLOAT64:
            assert_weights(plan, state, reference, rounding)
    assert compared == set(reference.gradients)


def assert_trains_checkpoint(plan: Plan, weights: Path, pool: Pool, *, seed: int) -> None:
    """A step from the weights of a checkpoint, in float64, as one process does it."""
    settings = RunSettings(
        seed=seed, weights=weights, precision=Precision.FLOAT64, collect=Collect.STATE, timeout_s=30.0
    )
    result = run_lowered(lower(plan), settings, pool=pool)
    source = SyntheticSource(seed)
    reference = reference_step(plan, seed=seed, dtype=torch.float64, source=source, weights=weights)
    assert_parity(plan, result, reference, Precision.FLOAT64)


def whole(weight: Tensor) -> Tensor:
    return weight


def assert_weights(
    plan: Plan,
    state: RankState,
    reference: ReferenceResult,
    rounding: frozenset[tuple[str, str]],
) -> None:
    parts = held_parts(plan, state.rank)
    for held, weight in state.weights.items():
        key = first_name(plan, held)
        if key in rounding:
            continue  # Adam divides rounding by rounding
        theirs = parts.get(held, whole)(reference.weights[key])
        assert (weight - theirs).norm() <= BOUND[Precision.FLOAT64] * theirs.norm().clamp(min=1e-30), key


def first_name(plan: Plan, held: tuple[str, str]) -> tuple[str, str]:
    """A tied head is the embedding."""
    module, name = held
    tied = any(layer.tied for layer in plan.model.module(module).layers)
    return (module, "model.embed_tokens.weight") if tied and name == "lm_head.weight" else held


def assert_order(plan: Plan, result: RunResult) -> None:
    for rank in plan.ranks:
        planned = tuple(action for action in plan.program[rank] if action.kind in COMPUTE)
        executed = tuple(action for action in result.traces[0].order(rank) if action.kind in COMPUTE)
        assert executed == planned


def assert_same(plan: Plan, pool: Pool, precision: Precision = Precision.FLOAT64) -> None:
    result, reference = execute(plan, pool, precision)
    assert_parity(plan, result, reference, precision)
    assert_order(plan, result)


@pytest.mark.parametrize("mix", MIXES)
def test_disjoint_ranks(mix: str, pool: Pool) -> None:
    assert_same(disjoint_plan(mixed(mix), tiny_batch(), CUTS), pool)


@pytest.mark.parametrize("mix", ["projectors-and-llm", "everything"])
def test_float32(mix: str, pool: Pool) -> None:
    assert_same(disjoint_plan(mixed(mix), tiny_batch(), CUTS), pool, Precision.FLOAT32)


@pytest.mark.parametrize("mix", ["projectors", "vision-frozen", "everything"])
def test_two_replicas(mix: str, pool: Pool) -> None:
    cuts = {"vision": (5,), "audio": (4,), "llm": (2, 4)}
    assert_same(disjoint_plan(mixed(mix), tiny_batch(), cuts, replicas=2), pool)


@pytest.mark.parametrize(
    ("images", "clips"),
    [
        pytest.param((1, 0, 1, 0), (0, 1, 0, 1), id="never-both"),
        pytest.param((0, 0, 0, 0), (1, 1, 1, 1), id="no-image-at-all"),
        pytest.param((0, 0, 0, 0), (0, 0, 0, 0), id="text-only"),
        pytest.param((3, 0, 0, 2), (0, 0, 2, 1), id="several"),
    ],
)
def test_missing_modalities(images: Sequence[int], clips: Sequence[int], pool: Pool) -> None:
    batch = tiny_batch(images, clips)
    assert_same(disjoint_plan(mixed("projectors-and-llm"), batch, CUTS), pool)
    replicated = {"vision": (5,), "audio": (4,), "llm": (3, 3)}
    assert_same(disjoint_plan(mixed("projectors-and-llm"), batch, replicated, replicas=2), pool)


@pytest.mark.parametrize("replicas", [1, 2])
def test_tied_embeddings_on_two_stages(replicas: int, pool: Pool) -> None:
    cuts = {"vision": (5,), "audio": (4,), "llm": (3, 3)}
    model = mixed("projectors-and-llm", tied=True)
    assert_same(disjoint_plan(model, tiny_batch(), cuts, replicas=replicas), pool)


def on_ranks(model: ModelGraph, batch: Sequence[Sample], *, encoders: int, llm: Sequence[int]) -> Plan:
    """All modules in one replica; stage i of every encoder and of the LLM on rank i."""
    stages: list[Stage] = []
    for module in model.modules:
        num_layers = len(module.layers)
        counts = llm if module.name == "llm" else _even(num_layers, encoders)
        first = 0
        for rank, count in enumerate(counts):
            layers = (first, first + count)
            stages.append(
                Stage(id=len(stages), module=module.name, replica=0, layers=layers, ranks=((rank,),))
            )
            first += count
    return finish(model, batch, stages)


def _even(total: int, parts: int) -> list[int]:
    return [total // parts + (part < total % parts) for part in range(parts)]


@pytest.mark.parametrize("mix", ["projectors-and-llm", "encoders"])
def test_stages_that_share_ranks(mix: str, pool: Pool) -> None:
    assert_same(on_ranks(mixed(mix), tiny_batch(), encoders=2, llm=(3, 3)), pool)


def test_everything_on_one_rank(pool: Pool) -> None:
    """Virtual stages: the tied weight has two copies on the same rank, and one gradient."""
    plan = on_ranks(mixed("everything", tied=True), tiny_batch(), encoders=1, llm=(6,))
    assert_same(plan, pool)


def test_clipping_counts_every_weight_once(pool: Pool) -> None:
    model = mixed("projectors-and-llm", tied=True)
    cuts = {"vision": (5,), "audio": (4,), "llm": (3, 3)}
    plan = disjoint_plan(model, tiny_batch(), cuts, replicas=2)
    result, reference = execute(plan, pool, clip_norm=0.01)
    free, _ = execute(plan, pool)
    assert_parity(plan, result, reference, Precision.FLOAT64)
    changed = [
        not torch.equal(ours, free.states[0].weights[key]) for key, ours in result.states[0].weights.items()
    ]
    assert any(changed)


def test_recomputed_stages(pool: Pool) -> None:
    plan = disjoint_plan(mixed("everything"), tiny_batch(), CUTS)
    recomputed = tuple(
        ModuleSettings(module=module.name, recompute=Recompute.FULL) for module in plan.model.modules
    )
    settings = Settings(precision=Precision.FLOAT32, modules=recomputed)
    assert_same(replace(plan, settings=settings), pool)


def test_several_steps_follow_the_reference(pool: Pool) -> None:
    """The loss of the second and third step depends on every weight of the steps before."""
    plan = disjoint_plan(mixed("projectors-and-llm"), tiny_batch(), CUTS)
    settings = RunSettings(seed=SEED, precision=Precision.FLOAT64, steps=2, warmup=1, timeout_s=30.0)
    result = run_lowered(lower(plan), settings, pool=pool)
    reference = Reference(plan, seed=SEED, dtype=torch.float64)
    expected = [reference.step(SyntheticSource(SEED)).loss for _ in range(3)]
    assert result.losses == pytest.approx(expected, rel=1e-10)
    assert result.losses[2] < result.losses[0]
    assert [trace.loss for trace in result.traces] == list(result.losses[1:])


STRATEGIES = {
    "cornstarch": (cornstarch.plan, {"vision": 2, "audio": 1, "llm": 2}),
    "cornstarch-unaware": (cornstarch.plan_frozen_unaware, {"vision": 1, "audio": 1, "llm": 3}),
    "colocated": (encoders_colocated.plan, {"vision": 1, "audio": 1, "llm": 2}),
    "colocated-aware": (encoders_colocated.plan_frozen_aware, {"vision": 2, "audio": 2, "llm": 2}),
    "replicated": (encoders_replicated.plan, {"vision": 1, "audio": 1, "llm": 3}),
}


def planned(strategy: str, model: ModelGraph, *, replicas: int) -> Plan:
    make, depths = STRATEGIES[strategy]
    batch = tiny_batch((1, 2, 0, 1) * replicas, (1, 0, 0, 2) * replicas)
    job = Job(
        name="parity",
        model=model,
        cluster=cluster(8),
        batch=batch,
        microbatch_samples=2,
        replicas=replicas,
        layouts=tuple(ModuleLayout(module=name, pp=depth) for name, depth in depths.items()),
        settings=Settings(precision=Precision.FLOAT32),
        profile="A40",
    )
    return make(job, CostModel(load_profile("A40")))


@pytest.mark.parametrize("mix", ["projectors-and-llm", "encoders"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy(strategy: str, mix: str, pool: Pool) -> None:
    assert_same(planned(strategy, mixed(mix), replicas=1), pool)


@pytest.mark.parametrize("strategy", ["colocated", "replicated"])
def test_strategies_with_two_replicas(strategy: str, pool: Pool) -> None:
    assert_same(planned(strategy, mixed("projectors-and-llm", tied=True), replicas=2), pool)
