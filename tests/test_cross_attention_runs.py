"""A plan's ranks train Llama 3.2 Vision as one process does: the tower feeds several stages of the LLM."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.data.batches import SyntheticSource
from runtime.emulation.emulate import Emulation, emulate
from runtime.launch import RunResult, run_lowered
from runtime.models.choose import adapter_of
from runtime.reference import reference_step
from runtime.run_settings import Collect, RunSettings
from runtime.step.optimizer import OptimizerSettings
from runtime.world.pool import Pool
from sim.step.engine import simulate
from tests import cross_models, tiny_models
from tests.plans import cluster, disjoint_plan
from tests.test_parity import SEED, assert_order, assert_parity
from workbench.cost.execution import Execution, Launch
from workbench.cost.model import CostModel
from workbench.cost.operator_passes import kernels_of
from workbench.cost.profile import ideal_profile, load_profile
from workbench.data.sample import Sample, Segment
from workbench.job.job import Job, load_job
from workbench.job.module_layout import ModuleLayout
from workbench.memory.sizes import Sizes
from workbench.model.hf_config import module_from_config
from workbench.model.model_graph import ModelGraph, connect
from workbench.model.trainable import Trainable, with_trainable
from workbench.plan.codec import dumps, loads
from workbench.plan.lower import lower
from workbench.plan.lowered import Direction
from workbench.plan.plan import ModuleSettings, Plan, Precision, Recompute, Settings
from workbench.plan.routing import routing_of
from workbench.schedule.action import Action, Pass
from workbench.schedule.choice import Schedule, ScheduleKind
from workbench.strategies import cornstarch, encoders_colocated, encoders_replicated
from workbench.timing.price import price

ALL, PROJECTOR, NONE = Trainable.ALL, Trainable.PROJECTOR, Trainable.NONE
MIXES = {
    "everything": (ALL, ALL),
    "projector": (PROJECTOR, NONE),
    "language": (NONE, ALL),
    "tower": (ALL, NONE),
}
DEPTHS: dict[int, tuple[int, ...]] = {1: (8,), 2: (4, 4), 3: (3, 2, 3)}
OPTIMIZER = OptimizerSettings(clip_norm=None)
EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cross_models.save_weights(tmp_path_factory.mktemp("mllama"), cross_models.model().modules)


def model(mix: str = "everything") -> ModelGraph:
    vision, language = MIXES[mix]
    images = with_trainable(cross_models.vision(), vision)
    return cross_models.model(images, with_trainable(cross_models.language(), language))


def settings(weights: Path) -> RunSettings:
    return RunSettings(
        seed=SEED,
        precision=Precision.FLOAT64,
        collect=Collect.STATE,
        optimizer=OPTIMIZER,
        timeout_s=30.0,
        weights=weights,
    )


def assert_as_one_process(plan: Plan, result: RunResult | Emulation, weights: Path) -> None:
    reference = reference_step(
        plan,
        seed=SEED,
        dtype=torch.float64,
        source=SyntheticSource(SEED),
        weights=weights,
        optimizer=OPTIMIZER,
    )
    assert_parity(plan, result, reference, Precision.FLOAT64)


def emulated(plan: Plan, weights: Path) -> None:
    torch.set_num_threads(1)
    result = emulate(lower(plan), settings(weights))
    assert_as_one_process(plan, result, weights)


def executed(plan: Plan, weights: Path, pool: Pool) -> None:
    torch.set_num_threads(1)
    result = run_lowered(lower(plan), settings(weights), pool=pool)
    assert_as_one_process(plan, result, weights)
    assert_order(plan, result)


def plan_of(mix: str, depth: int, tower: Sequence[int] = (7,), batch: Sequence[Sample] | None = None) -> Plan:
    cuts = {"vision": tower, "llm": DEPTHS[depth]}
    return disjoint_plan(model(mix), cross_models.batch() if batch is None else batch, cuts)


def test_the_tower_crosses_once_to_every_stage_that_reads_it() -> None:
    """A message for each reading stage and microbatch with an image, and as many back."""
    lowered = lower(plan_of("everything", 3))
    rows = [row for row in lowered.transfers if row.edge == "vision>llm"]
    readers = {row.consumer.stage for row in rows if row.direction is Direction.FORWARD}
    assert readers == {1, 2, 3}
    assert len(rows) == 2 * 3 * 3  # directions, stages, samples with an image
    images = [
        row.num_tokens for row in rows if row.direction is Direction.FORWARD and row.consumer.stage == 1
    ]
    assert images == [cross_models.TOKENS, cross_models.TOKENS, 3 * cross_models.TOKENS]
    one = lower(plan_of("everything", 1))
    assert sum(row.edge == "vision>llm" for row in one.transfers) == 2 * 3


@pytest.mark.parametrize("depth", DEPTHS)
def test_depths_of_the_language_model(depth: int, weights: Path) -> None:
    emulated(plan_of("everything", depth), weights)


@pytest.mark.parametrize("mix", ["projector", "language", "tower"])
def test_frozen_parts(mix: str, weights: Path) -> None:
    emulated(plan_of(mix, 2, tower=(3, 4)), weights)


def test_on_processes_with_the_tower_cut_between_taps(weights: Path, pool: Pool) -> None:
    executed(plan_of("everything", 3, tower=(3, 4)), weights, pool)


def test_text_alone_passes_cross_attention_by(weights: Path) -> None:
    """A stage of cross-attention layers alone has nothing to train then."""
    cuts = {"vision": (7,), "llm": (4, 2, 2)}
    text = (cross_models.batch()[2],)
    plan = disjoint_plan(model("language"), text, cuts)
    emulated(plan, weights)


def test_frozen_text_below_a_stage_of_cross_attention(weights: Path) -> None:
    """Only the tower is trained; where a sample has no image, no gradient runs at all."""
    cuts = {"vision": (7,), "llm": (4, 2, 2)}
    emulated(disjoint_plan(model("tower"), cross_models.batch(), cuts), weights)


def test_language_models_that_share_tokens(weights: Path) -> None:
    """Every rank reads whole images with its own queries; their gradients are parts of a sum."""
    cuts = {"vision": (7,), "llm": (4, 4)}
    emulated(disjoint_plan(model(), cross_models.batch(), cuts, grids={"llm": (2, 1)}), weights)


def test_weights_cut_over_ranks(weights: Path, pool: Pool) -> None:
    """Tensor parallelism in the tower and, beside shared tokens, in the LLM."""
    grids = {"vision": (1, 2), "llm": (2, 2)}
    executed(disjoint_plan(model(), cross_models.batch(), grids=grids), weights, pool)


def test_towers_do_not_share_tokens(weights: Path) -> None:
    with pytest.raises(ValueError, match="does not share tokens over ranks; want cp 1, got 2"):
        emulated(disjoint_plan(model(), cross_models.batch(), grids={"vision": (2, 1)}), weights)


STRATEGIES = {
    "cornstarch": cornstarch.plan,
    "colocated": encoders_colocated.plan_frozen_aware,
    "replicated": encoders_replicated.plan,
}


def job(*, schedule: Schedule | None = None, **changes: object) -> Job:
    held = {"vision": 1, "llm": 2} | changes
    return Job(
        name="crossed",
        model=model(),
        cluster=cluster(8),
        batch=cross_models.batch(),
        microbatch_samples=2,
        layouts=tuple(ModuleLayout(module=name, pp=depth) for name, depth in held.items()),
        settings=Settings(precision=Precision.FLOAT64),
        schedule=schedule or Schedule(),
        profile="A40",
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_strategies(strategy: str, weights: Path) -> None:
    given = job(vision=2 if strategy == "colocated" else 1)
    plan = STRATEGIES[strategy](given, CostModel(load_profile("A40")))
    emulated(plan, weights)


@pytest.mark.parametrize("kind", [ScheduleKind.ZB_H1])
def test_schedules(kind: ScheduleKind, weights: Path) -> None:
    """Split backwards too: gates get their gradients in I, matmuls in W."""
    emulated(cornstarch.plan(job(schedule=Schedule(kind=kind)), CostModel(load_profile("A40"))), weights)


def test_recomputed_stages(weights: Path) -> None:
    plan = plan_of("everything", 2)
    modules = tuple(ModuleSettings(module=m.name, recompute=Recompute.FULL) for m in plan.model.modules)
    emulated(replace(plan, settings=replace(plan.settings, modules=modules)), weights)


def test_costs_count_what_is_read() -> None:
    """Where no host is waited for, a microbatch without an image costs least, one with three the most."""
    plan = plan_of("everything", 3)
    lowered = lower(plan)
    priced = price(lowered, CostModel(ideal_profile(), Execution(launch=Launch.GRAPH)))
    forward = {a.microbatch: priced.duration_s(a) for a in forward_actions(plan, 2)}
    assert forward[2] < forward[0] < forward[3]
    assert forward[2] < 0.7 * forward[0]
    spans = simulate(lowered, priced.duration_s).spans
    assert len(spans) >= len(plan.program_actions)
    sizes = Sizes(plan, routing_of(plan))
    kept = [sizes.of(plan.stage[2], m, keeps=True).kept for m in plan.microbatches_of["llm", 0]]
    assert kept[2] < 0.7 * kept[0] < kept[3]


def test_a_host_launches_what_looks_at_images_only_where_there_are_some() -> None:
    """Tiny kernels end before the next one is launched: a forward takes as long as its launches."""
    plan = plan_of("everything", 3)
    cost = CostModel(load_profile("A40"))
    priced = price(lower(plan), cost)
    first, end = plan.stage[2].layers
    layers = plan.model.module("llm").layers[first:end]
    every_s, words_s = (
        cost.execution.pass_s(0.0, sum(map(cost.execution.num_kernels, launched)), 0, 1)
        for launched in (
            [kernel for layer in layers for kernel in kernels_of(layer)],
            [kernel for layer in layers if not layer.reads_context for kernel in kernels_of(layer)],
        )
    )
    assert words_s < every_s
    forward = {a.microbatch: priced.duration_s(a) for a in forward_actions(plan, 2)}
    assert forward == pytest.approx({0: every_s, 1: every_s, 2: words_s, 3: every_s})


def forward_actions(plan: Plan, stage: int) -> list[Action]:
    return [a for a in plan.program_actions if a.stage == stage and a.kind is Pass.F]


def test_the_example_plans_and_simulates() -> None:
    job = load_job(EXAMPLES / "cross_attention.yaml")
    (edge,) = job.model.edges
    assert edge.entered == (2, 5, 8)
    lowered = lower(cornstarch.plan(job, CostModel(load_profile("A40"))))
    readers = {row.consumer.stage for row in lowered.transfers if row.edge == edge.name}
    assert readers >= {1, 2, 3}
    assert any(sample.of("vision") for sample in job.batch)
    assert any(not sample.of("vision") for sample in job.batch)


def test_a_tower_without_cross_attention_to_read_it() -> None:
    plain = module_from_config(tiny_models.LLAMA, name="llm", modality="text")
    with pytest.raises(ValueError, match="cross-attention reads vision, want a language model such as"):
        connect("wrong", (cross_models.vision(), plain))


def test_edges_that_enter_several_layers() -> None:
    edge = cross_models.model().edges[0]
    assert edge.entered == cross_models.CROSS
    with pytest.raises(ValueError, match=r"entered layers must ascend, got \[4, 2\]"):
        replace(edge, before_layer=4, also_before=(2,))
    with pytest.raises(
        ValueError, match=r"read one output several times, want some of \[2, 4, 5\], got \[1, 2\]"
    ):
        replace(cross_models.model(), edges=(replace(edge, before_layer=1, also_before=(2,)),))
    assert loads(dumps(plan_of("everything", 3))) == plan_of("everything", 3)


def test_grids_of_tiles_that_do_not_fit() -> None:
    adapter = adapter_of(cross_models.vision())
    assert adapter.raw_shape(cross_models.image(0, (3, 1))) == (3, 3, 8, 8)
    with pytest.raises(ValueError, match=r"tiles must be one of .* got \(2, 3\)"):
        adapter.raw_shape(cross_models.image(0, (2, 3)))
    with pytest.raises(
        ValueError, match=r"makes 32 tokens of an image and 1 stands for it in the LLM, got \(8, 8\)"
    ):
        adapter.raw_shape(Segment("vision", 0, 8, 8))


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"intermediate_layers_indices": [2, 0]}, "must ascend in 0..2, got"),
        ({"vision_output_dim": 40}, "vision_output_dim must be 48, got 40"),
        ({"max_num_tiles": 2}, "must have at most 2 tiles"),
    ],
)
def test_towers_that_are_refused(changes: dict[str, Any], what: str) -> None:
    config = cross_models.VISION | changes
    with pytest.raises(ValueError, match=what):
        module_from_config(config, name="vision", modality="vision", llm_width=8)


def test_language_models_that_are_refused() -> None:
    for changes, what in (
        ({"tie_word_embeddings": True}, "the table has 8 rows more"),
        ({"cross_attention_layers": [9]}, r"must lie within 0..5, got \[9\]"),
    ):
        with pytest.raises(ValueError, match=what):
            module_from_config(cross_models.LANGUAGE | changes, name="llm", modality="text")
