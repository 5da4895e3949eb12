"""Sharded weights that stay gathered for a backward or a step: their rounds, times, memory and training."""

import weakref
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from experiments.fidelity.memory import measure
from runtime.launch import run_lowered
from runtime.run_settings import Collect, RunSettings
from runtime.step.fsdp.weights import InFlight
from runtime.world.pool import Pool
from sim.predict import IterationJudge
from sim.step.engine import simulate
from tests.plans import LINK
from tests.test_expert_shards import sharded
from tests.test_fsdp import ALL_ON_ONE, IN_TWO, MODULES, assert_trains_as_one, sharded_parameters
from tests.test_fsdp_plan import A40, actions, batch_of, chain, fsdp_job, timed
from tests.test_parity import SEED, mixed
from tests.tiny_valm import tiny_batch
from workbench.cost.hardware import Node, uniform
from workbench.job.job import Job
from workbench.job.module_layout import ModuleLayout
from workbench.memory.account import memory_table, peak_bytes
from workbench.plan.codec import dumps, loads
from workbench.plan.kernels import Kernels
from workbench.plan.lower import lower
from workbench.plan.plan import ModuleSettings, Plan, Precision, Sharding
from workbench.schedule.action import Action, Pass
from workbench.schedule.sharded import ReshardAfter, with_rounds
from workbench.search.joint.choice import choice_of
from workbench.search.joint.drive import joint_search
from workbench.search.joint.move import Space
from workbench.search.joint.question import Question
from workbench.search.joint.setting_moves import Reshard
from workbench.search.joint.terms import Scope, Stop
from workbench.strategies import fsdp
from workbench.strategies.registry import PLANNERS
from workbench.timing.accept import accept
from workbench.timing.price import price

TWO_MICROBATCHES = "0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1"


def test_a_step_gathers_and_reduces_every_layer_once() -> None:
    programs = {(0, 1): actions(TWO_MICROBATCHES)}
    result = with_rounds(programs, [(0,), (1,)], [0, 1], dict.fromkeys((0, 1), ReshardAfter.STEP))
    assert result[0, 1] == actions(
        "0ALL_GATHER0 1ALL_GATHER0 0F0 1F0 1B0 0B0 0F1 1F1 1B1 1FREE0 1REDUCE_SCATTER0 "
        "0B1 0FREE0 0REDUCE_SCATTER0"
    )


def test_a_backward_finds_the_weights_of_its_forward() -> None:
    """Layer 1 is freed between microbatches; layer 0 has its next forward right behind the backward."""
    programs = {(0, 1): actions(TWO_MICROBATCHES)}
    result = with_rounds(programs, [(0,), (1,)], [0, 1], dict.fromkeys((0, 1), ReshardAfter.BACKWARD))
    assert result[0, 1] == actions(
        "0ALL_GATHER0 1ALL_GATHER0 0F0 1F0 1B0 1FREE0 1REDUCE_SCATTER0 1ALL_GATHER1 0B0 0F1 "
        "1F1 1B1 1FREE1 1REDUCE_SCATTER1 0B1 0FREE0 0REDUCE_SCATTER0"
    )


def test_modules_may_differ() -> None:
    """A frozen encoder gathers for every forward beside a model that keeps its weights."""
    programs = {(0, 1): actions("0F0 1F0 1B0 0F1 1F1 1B1")}
    result = with_rounds(programs, [(0,), (1,)], [1], {1: ReshardAfter.STEP})
    assert result[0, 1] == actions(
        "0ALL_GATHER0 1ALL_GATHER0 0F0 0FREE0 0ALL_GATHER1 1F0 1B0 0F1 0FREE1 1F1 1B1 1FREE0 1REDUCE_SCATTER0"
    )


def of_layers(
    num_layers: int, num_microbatches: int, reshard_after: ReshardAfter, instances: int = 1
) -> Plan:
    """One frozen layer of an encoder, which nobody shards, then the LLM's layers, two ranks an instance."""
    return sharded_parameters(
        chain(num_layers),
        batch_of(2 * instances * num_microbatches),
        replicas=2 * instances,
        instances=instances,
        cuts={"vision": ((0, 1),), "llm": ((0, num_layers),)},
        modules=("llm",),
        reshard_after=reshard_after,
    )


@pytest.mark.parametrize("num_layers", [2, 5])
@pytest.mark.parametrize("num_microbatches", [1, 3])
def test_hidden_gathers_cost_only_the_first(num_layers: int, num_microbatches: int) -> None:
    """L layers, M microbatches: the first gather and the last reduction have nothing to hide behind."""
    plan = of_layers(num_layers, num_microbatches, ReshardAfter.STEP)
    assert timed(plan, 0.25, 1.0, 0.5) == 0.25 + 2 * num_layers * num_microbatches + 0.5


@pytest.mark.parametrize("num_layers", [2, 5])
def test_slow_gathers_and_reductions_follow_each_other_once(num_layers: int) -> None:
    """L layers, three microbatches: L gathers, a forward, 4 L passes, a backward, L reductions."""
    plan = of_layers(num_layers, 3, ReshardAfter.STEP)
    assert timed(plan, 4.0, 1.0, 8.0) == 4.0 * num_layers + 1 + 4 * num_layers + 1 + 8.0 * num_layers


def test_passes_lose_time_only_where_collectives_run_beside() -> None:
    """Three microbatches: first forward beside gathers, last backward beside reductions, others alone."""
    node = Node(device="A40", num_ranks=2, memory_bytes=2**34)  # ranks with a device each
    seconds: dict[tuple[ReshardAfter, Pass], list[float]] = {}
    for after in ReshardAfter:
        plan = replace(
            of_layers(2, 3, after), cluster=uniform("one", node, num_nodes=1, intra=LINK, inter=LINK)
        )
        prices = price(lower(plan), A40)
        stage = plan.chain["llm", 0][0].id
        for kind in (Pass.F, Pass.B):
            seconds[after, kind] = [prices.duration_s(Action(stage, kind, index)) for index in range(3)]
    for kind, position in ((Pass.F, 0), (Pass.B, 2)):
        alone_s = seconds[ReshardAfter.STEP, kind][1]
        slowed = {after: [each > alone_s for each in seconds[after, kind]] for after in ReshardAfter}
        assert slowed[ReshardAfter.PASS] == slowed[ReshardAfter.BACKWARD] == [True] * 3
        assert slowed[ReshardAfter.STEP] == [index == position for index in range(3)]
    assert seconds[ReshardAfter.BACKWARD, Pass.B][0] < seconds[ReshardAfter.PASS, Pass.B][0]


@pytest.mark.parametrize(
    ("mix", "replicas", "cuts", "instances", "after"),
    [
        pytest.param("everything", 2, IN_TWO, 1, ReshardAfter.STEP, id="two-stages"),
        pytest.param("vision-frozen", 2, IN_TWO, 1, ReshardAfter.BACKWARD, id="backward"),
        pytest.param("projectors", 3, ALL_ON_ONE, 1, ReshardAfter.STEP, id="frozen-llm"),
        pytest.param("everything", 4, ALL_ON_ONE, 2, ReshardAfter.STEP, id="instances"),
    ],
)
def test_trains_as_one_process(
    mix: str,
    replicas: int,
    cuts: dict[str, Sequence[tuple[int, int]]],
    instances: int,
    after: ReshardAfter,
    pool: Pool,
) -> None:
    """Unequal tokens, missing modalities, two microbatches or more of each replica."""
    images, clips = (1, 2, 0, 1, 3, 0, 1, 0), (1, 0, 0, 2, 0, 1, 1, 0)
    count = 8 if replicas == 4 else 6
    plan = sharded_parameters(
        mixed(mix),
        tiny_batch(images[:count], clips[:count]),
        replicas=replicas,
        cuts=cuts,
        instances=instances,
        reshard_after=after,
    )
    rounds = [action for action in plan.program[0] if action.kind is Pass.ALL_GATHER]
    assert (len(rounds) == len({action.stage for action in rounds})) is (after is ReshardAfter.STEP)
    assert_trains_as_one(plan, pool)


def test_a_tied_weight_is_summed_once(pool: Pool) -> None:
    batch = tiny_batch((1, 0, 2, 1), (0, 1, 1, 0))
    plan = sharded_parameters(
        mixed("llm", tied=True), batch, replicas=2, cuts=IN_TWO, reshard_after=ReshardAfter.STEP
    )
    assert_trains_as_one(plan, pool)


def test_narrow_gradients_of_microbatches_are_added_in_the_optimizer_s_type(pool: Pool) -> None:
    """bfloat16 weights, float32 optimizer, two microbatches a rank: as whole weights, to the last bit."""
    runs = []
    for modules, after in ((MODULES, ReshardAfter.STEP), ((), ReshardAfter.PASS)):
        plan = sharded_parameters(
            mixed("llm"),
            tiny_batch(),
            replicas=2,
            modules=modules,
            reshard_after=after,
            optimizer_precision=Precision.FLOAT32,
        )
        plan = replace(plan, settings=replace(plan.settings, precision=Precision.BFLOAT16))
        settings = RunSettings(seed=SEED, steps=3, timeout_s=30.0, collect=Collect.STATE)
        runs.append(run_lowered(lower(plan), settings, pool=pool))
    sharded, whole = runs
    assert sharded.losses == whole.losses
    for mine, other in zip(sharded.states, whole.states, strict=True):
        assert all(torch.equal(mine.weights[key], other.weights[key]) for key in other.weights)


@pytest.mark.parametrize("precision", [Precision.FLOAT32, Precision.BFLOAT16])
def test_memory_is_what_was_predicted(precision: Precision, pool: Pool) -> None:
    """Kept weights and whole gradients are counted: more than resharding after every pass, none forgotten."""
    peaks = {}
    for after in ReshardAfter:
        plan = sharded_parameters(
            mixed("everything"),
            tiny_batch((1,) * 4, (1,) * 4),
            replicas=2,
            reshard_after=after,
            kernels=Kernels.EAGER,
            optimizer_precision=Precision.FLOAT32,
        )
        plan = replace(plan, settings=replace(plan.settings, precision=precision))
        rows = measure(after, plan, pool)
        for row in rows:
            assert 0.97 * row.predicted_bytes <= row.measured_bytes <= row.predicted_bytes, row
        peaks[after] = max(row.predicted_bytes for row in rows)
    assert peaks[ReshardAfter.PASS] < peaks[ReshardAfter.BACKWARD] <= peaks[ReshardAfter.STEP]


def test_sent_tensors_are_freed_while_the_transport_still_holds_them() -> None:
    """A thread of gloo holds them a moment longer than the wait, in which they would count for the rank."""
    sent, gathered = torch.ones(4), torch.ones(4)
    storage = weakref.ref(sent.untyped_storage())
    in_flight = InFlight(dist.Work(), flat=gathered, given=sent)
    in_flight.free_inputs()
    assert storage() is None
    assert gathered.tolist() == [1, 1, 1, 1]


def test_a_plan_file_says_it_only_where_it_is_chosen() -> None:
    plan = of_layers(2, 1, ReshardAfter.STEP)
    assert loads(dumps(plan)) == plan
    assert '"reshard_after": "step"' in dumps(plan)
    assert "reshard_after" not in dumps(of_layers(2, 1, ReshardAfter.PASS))


def test_only_sharded_parameters_are_resharded() -> None:
    with pytest.raises(
        ValueError, match="module 'llm': reshard_after 'step' wants sharding 'parameters', got 'optimizer'"
    ):
        ModuleSettings(module="llm", sharding=Sharding.OPTIMIZER, reshard_after=ReshardAfter.STEP)
    sharded = ModuleSettings(module="llm", sharding=Sharding.PARAMETERS, reshard_after=ReshardAfter.STEP)
    assert sharded.sharded(Sharding.OPTIMIZER, 2) == ModuleSettings(
        module="llm", sharding=Sharding.OPTIMIZER, instances=2
    )
    assert sharded.sharded(Sharding.PARAMETERS, 2).reshard_after is ReshardAfter.STEP


def job_with(after: ReshardAfter, num_samples: int = 24) -> Job:
    """A job whose weights are large beside its passes, on four ranks, in microbatches of two samples."""
    modules = tuple(
        ModuleSettings(module=name, sharding=Sharding.PARAMETERS, reshard_after=after)
        for name in ("vision", "llm")
    )
    job = fsdp_job(2)
    layouts = tuple(ModuleLayout(module=name, dp=4) for name in ("vision", "llm"))
    return replace(
        job,
        batch=tiny_batch((1,) * num_samples, (0,) * num_samples),
        layouts=layouts,
        settings=replace(job.settings, modules=modules),
    )


@pytest.mark.parametrize("after", ReshardAfter)
def test_the_step_model_says_what_is_simulated(after: ReshardAfter) -> None:
    """Three microbatches a rank."""
    job = job_with(after)
    formula_s, plan = fsdp.fastest_of_size(job, A40)
    assert {settings.reshard_after for settings in plan.settings.modules} == {after}
    lowered, _ = accept(plan)
    prices = price(lowered, A40)
    simulated_s = simulate(lowered, prices.duration_s, step_s=prices.step_s).iteration_s
    assert simulated_s == pytest.approx(formula_s, rel=0.05)


def test_a_search_finds_that_gathering_once_is_faster() -> None:
    """With layout, order, grouping and tokens as the only start has them, which gathers for every pass."""
    job = job_with(ReshardAfter.PASS)
    others = (question for question in Question if question is not Question.MEMORY)
    result = joint_search(
        job,
        A40,
        IterationJudge(A40),
        stop=Stop(candidates=40),
        scope=Scope(planners={"fsdp": PLANNERS["fsdp"]}, fixed=dict.fromkeys(others, "fsdp")),
    )
    assert result.value < result.best_start.value
    kept = {settings.reshard_after for settings in result.plan.settings.modules}
    assert ReshardAfter.STEP in kept


def test_whole_weights_are_not_resharded() -> None:
    """For one module a refusal, for all of them no change."""
    job = replace(job_with(ReshardAfter.PASS), settings=fsdp_job(2).settings)
    choice = choice_of(job, PLANNERS["megatron-colocated"](job, A40), A40)
    space = Space(job, A40, {})
    assert Reshard(None, ReshardAfter.STEP).apply(space, choice) == choice
    with pytest.raises(ValueError, match="reshard_after 'step' wants sharding 'parameters'"):
        Reshard("llm", ReshardAfter.STEP).apply(space, choice)


@pytest.mark.parametrize(
    ("layout", "after"),
    [
        pytest.param({"ep": 2, "dp": 2, "pp": 2}, ReshardAfter.STEP, id="one-holder"),
        pytest.param({"ep": 2, "dp": 4}, ReshardAfter.STEP, id="joint-stages"),
        pytest.param({"tp": 2, "ep": 2, "dp": 2}, ReshardAfter.BACKWARD, id="tp"),
    ],
)
def test_experts_over_ranks(layout: dict[str, int], after: ReshardAfter, pool: Pool) -> None:
    """Two microbatches or more of each replica; experts with one holder are in no round."""
    settings = ModuleSettings(module="llm", sharding=Sharding.PARAMETERS, reshard_after=after)
    assert_trains_as_one(sharded(settings, samples=8, **layout), pool)


def test_experts_with_one_holder_add_up_in_the_optimizer_s_type(pool: Pool) -> None:
    """bfloat16 weights, float32 optimizer: the losses of whole weights, and no more memory than predicted."""
    losses = []
    for chosen in (
        ModuleSettings(module="llm", sharding=Sharding.PARAMETERS, reshard_after=ReshardAfter.STEP),
        ModuleSettings(module="llm"),
    ):
        plan = sharded(chosen, samples=8, ep=2, dp=2)
        formats = {"precision": Precision.BFLOAT16, "optimizer_precision": Precision.FLOAT32}
        plan = replace(plan, settings=replace(plan.settings, kernels=Kernels.EAGER, **formats))
        lowered = lower(plan)
        settings = RunSettings(seed=SEED, steps=2, timeout_s=30.0, collect=Collect.MEMORY)
        result = run_lowered(lowered, settings, pool=pool)
        losses.append(result.losses)
        for rank, most in peak_bytes(lowered, memory_table(lowered)).items():
            assert max(s.num_bytes for s in result.traces[-1].memory if s.rank == rank) <= most * 1.05
    assert losses[0] == losses[1]
