"""A sharded optimizer trains as a whole one does, holds its part of the state, and costs what is planned."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from experiments.fidelity.memory import measure
from runtime.emulation.emulate import emulate
from runtime.launch import RunResult, run_lowered
from runtime.run_settings import Collect, RunSettings
from runtime.step.gradients import Gradients
from runtime.step.optimizer import OptimizerSettings, build_adamw
from runtime.step.stage_module import build_stage_module
from runtime.step.timing import Recorder
from runtime.step.weight_bucket import Share, WeightBucket, weight_buckets
from runtime.world.mesh import Mesh
from runtime.world.pool import Pool
from tests.plans import LINK, disjoint_plan, finish
from tests.test_parity import SEED, assert_parity, execute, mixed
from tests.test_tensor_parallel import CONFIGS, encoders, laid_out
from tests.tiny_valm import tiny_batch
from workbench.cost.collectives import all_gather_s, all_reduce_s, reduce_scatter_s
from workbench.cost.model import CostModel
from workbench.cost.profile import ideal_profile
from workbench.memory.account import memory_table, static_holders
from workbench.plan.gradient_groups import gradient_groups
from workbench.plan.kernels import Kernels
from workbench.plan.lower import lower
from workbench.plan.lowered import GradientGroup, Weights
from workbench.plan.optimizer_shards import optimizer_shards
from workbench.plan.plan import ModuleSettings, Plan, Precision, Settings, Sharding
from workbench.plan.runnable import check_runnable
from workbench.plan.stage import Stage
from workbench.timing.price import price

WHOLE = {"vision": (5,), "audio": (4,), "llm": (6,)}
SAME = 1e-12


def sharded(plan: Plan, instances: int = 1, *, modules: tuple[str, ...] = ("vision", "audio", "llm")) -> Plan:
    chosen = tuple(
        ModuleSettings(module=name, sharding=Sharding.OPTIMIZER, instances=instances) for name in modules
    )
    return replace(plan, settings=replace(plan.settings, modules=chosen))


def steps(plan: Plan, pool: Pool, **settings: object) -> RunResult:
    chosen = RunSettings(seed=SEED, precision=Precision.FLOAT64, steps=3, timeout_s=30.0, **settings)  # type: ignore[arg-type]
    return run_lowered(lower(plan), chosen, pool=pool)


def assert_equal(ours: RunResult, theirs: RunResult) -> None:
    assert ours.losses == pytest.approx(theirs.losses, rel=SAME)
    for mine, other in zip(ours.states, theirs.states, strict=True):
        assert mine.gradients.keys() == other.gradients.keys()
        for key, weight in other.weights.items():
            assert (mine.weights[key] - weight).norm() <= SAME * weight.norm().clamp(min=1e-9), key


@pytest.mark.parametrize(("replicas", "instances"), [(2, 1), (4, 2)])
def test_parts_of_replicas_train_as_the_whole(replicas: int, instances: int, pool: Pool) -> None:
    """Three steps: moments, decay, clipping, a tied weight with a copy on the same rank."""
    model = mixed("llm", tied=True)
    cuts = {"vision": (5,), "audio": (4,), "llm": (6,)}
    plan = disjoint_plan(model, tiny_batch((1, 0, 0, 1), (0, 0, 0, 0)), cuts, replicas=replicas)
    plan = on_fewer_ranks(plan, replicas)
    how = {"optimizer": OptimizerSettings(clip_norm=0.05), "collect": Collect.STATE}
    assert_equal(steps(sharded(plan, instances), pool, **how), steps(plan, pool, **how))


def on_fewer_ranks(plan: Plan, replicas: int) -> Plan:
    """All modules of a replica on one rank."""
    stages = tuple(replace(stage, ranks=((stage.replica,),)) for stage in plan.stages)
    return finish(plan.model, plan.batch, stages, replicas=replicas)


def test_parts_beside_shared_weights_and_tokens_equal_one_process(pool: Pool) -> None:
    """Tensor- and context-parallel ranks, a norm inside attention, a clipping norm: each weight once."""
    layouts = {"image": (1, 1, 1, 2), "audio": (1, 1, 1, 1), "llm": (1, 1, 2, 2)}
    plan = sharded(laid_out(encoders(CONFIGS["qwen3"], tied=True), layouts), modules=("image", "llm"))
    result, reference = execute(plan, pool, clip_norm=0.01)
    assert_parity(plan, result, reference, Precision.FLOAT64)


def test_an_emulation_does_the_same() -> None:
    plan = sharded(disjoint_plan(mixed("everything"), tiny_batch(), WHOLE, replicas=2))
    settings = RunSettings(seed=SEED, precision=Precision.FLOAT64, warmup=1, steps=1, collect=Collect.STATE)
    whole = replace(plan, settings=Settings(precision=Precision.FLOAT32))
    ours, theirs = (emulate(lower(each), settings) for each in (plan, whole))
    assert ours.losses == pytest.approx(theirs.losses, rel=SAME)


GROUP = GradientGroup(index=0, ranks=(0, 2, 5, 7), weights=(Weights("llm", 0),), num_elements=8)


def test_neighbours_are_an_instance() -> None:
    plan = sharded(disjoint_plan(mixed("llm"), tiny_batch(), WHOLE), 2)
    shards = optimizer_shards(plan, GROUP)
    assert shards.instances == ((0, 2), (5, 7))
    assert (shards.of(5), shards.peers(5)) == ((5, 7), (0, 5))
    with pytest.raises(ValueError, match=r"'llm': optimizer instances must divide the 4 .*got 3; nearest: 2"):
        optimizer_shards(sharded(plan, 3), GROUP)


@pytest.mark.parametrize("instances", [1, 2, 4])
def test_moments_are_as_many_as_planned(instances: int) -> None:
    """What AdamW holds after a step, on every rank, is the plan's account up to padding."""
    assert_moments(sharded(disjoint_plan(mixed("everything"), tiny_batch(), WHOLE, replicas=4), instances))


@pytest.mark.parametrize("instances", [1, 2])
def test_moments_of_a_tied_weight_are_cut_among_the_ranks_of_all_its_stages(instances: int) -> None:
    """Two replicas, embedding and head on ranks of their own: four hold it, two every other weight."""
    model, cuts = mixed("everything", tied=True), WHOLE | {"llm": (3, 3)}
    plan = disjoint_plan(model, tiny_batch(), cuts, replicas=2)
    assert_moments(sharded(plan, instances, modules=("llm",)))


def assert_moments(plan: Plan) -> None:
    plan = replace(plan, settings=replace(plan.settings, kernels=Kernels.EAGER))
    lowered = lower(plan)
    for rank in plan.ranks:
        modules = [build_stage_module(plan, s, seed=0, dtype=torch.float32) for s in plan.stages_on[rank]]
        buckets = weight_buckets(lowered, rank, modules)
        mesh = Mesh(rank=rank, ranks=plan.ranks, device=torch.device("cpu"))
        gradients = Gradients(lowered, mesh, modules, recorder=Recorder(rank), buckets=buckets)
        adamw = build_adamw(gradients.parameters(), OptimizerSettings())
        assert adamw is not None
        for parameter in gradients.parameters():
            parameter.grad = torch.ones_like(parameter)
        adamw.step()
        held = sum(m.nbytes for state in adamw.state.values() for m in state.values() if m.dim())
        (module,) = (stage.module for stage in plan.stages_on[rank])
        planned = static_holders(plan, rank)[f"optimizer of {module}"]
        padding = 2 * 4 * 4 * len(buckets)
        assert abs(held - planned) <= padding, (rank, held, planned)
        whole = 8 * sum(p.numel() for m in modules for p in m.parameters())
        is_cut = any(optimizer_shards(plan, g).num_shards > 1 for g in lowered.groups if rank in g.ranks)
        assert (planned < whole) == is_cut


def unequal_replicas() -> Plan:
    """A model whose LLM has one context-parallel rank in replica 0 and three in 1, its encoders two replicas
    on one rank."""
    stages = [
        Stage(id=0, module="vision", replica=0, layers=(0, 5), ranks=((0,),)),
        Stage(id=1, module="vision", replica=1, layers=(0, 5), ranks=((0,),)),
        Stage(id=2, module="audio", replica=0, layers=(0, 4), ranks=((1,),)),
        Stage(id=3, module="audio", replica=1, layers=(0, 4), ranks=((2,),)),
        Stage(id=4, module="llm", replica=0, layers=(0, 2), ranks=((3,),)),
        Stage(id=5, module="llm", replica=0, layers=(2, 6), ranks=((4,),)),
        Stage(id=6, module="llm", replica=1, layers=(0, 3), ranks=((5,), (6,), (7,))),
        Stage(id=7, module="llm", replica=1, layers=(3, 6), ranks=((8,), (9,), (10,))),
    ]
    return finish(mixed("everything", tied=True), tiny_batch(), stages, replicas=2)


def test_ranks_that_hold_a_weight_have_its_state_once_between_them() -> None:
    """Two float32 moments an element; a part is at most one byte more, of each of a rank's parameters."""
    plan = sharded(unequal_replicas())
    for module in plan.model.modules:
        parameters = {p.name: p.num_elements for layer in module.layers for p in layer.parameters()}
        held = sum(static_holders(plan, rank).get(f"optimizer of {module.name}", 0) for rank in plan.ranks)
        assert 0 <= held - 8 * sum(parameters.values()) < len(plan.ranks) * len(parameters)
    for rank in plan.ranks:
        groups = [group for group in gradient_groups(plan) if rank in group.ranks]
        own = sum(8 * g.num_elements / optimizer_shards(plan, g).num_shards for g in groups)
        held = sum(size for name, size in static_holders(plan, rank).items() if name.startswith("optimizer"))
        assert 0 <= held - own < len(parameters)
    table = memory_table(lower(plan))
    assert [table.static_bytes[rank] for rank in plan.ranks] == [
        sum(size for name, size in static_holders(plan, rank).items() if not name.startswith("gradients"))
        for rank in plan.ranks
    ]


@pytest.mark.parametrize(
    ("precision", "wide"), [(Precision.FLOAT32, None), (Precision.BFLOAT16, Precision.FLOAT32)]
)
def test_no_rank_holds_more_than_predicted(precision: Precision, wide: Precision | None, pool: Pool) -> None:
    cuts = {"vision": (5,), "audio": (4,), "llm": (6,)}
    plan = disjoint_plan(mixed("everything"), tiny_batch(), cuts, replicas=2)
    how = {"kernels": Kernels.EAGER, "precision": precision, "optimizer_precision": wide}
    for each in (plan, sharded(plan)):
        plan = replace(each, settings=replace(each.settings, **how))
        for row in measure("sharded", plan, pool):
            assert 0.85 * row.predicted_bytes <= row.measured_bytes <= row.predicted_bytes, row


def test_a_step_is_priced_as_it_is_executed() -> None:
    """Beside passes a reduce-scatter inside an instance; in the STEP parts between instances, a gather."""
    plan = disjoint_plan(mixed("llm"), tiny_batch((1, 0, 0, 1)), WHOLE, replicas=4)
    whole, one, two = (
        price(lower(each), CostModel(ideal_profile()))
        for each in (plan, sharded(plan, modules=("llm",)), sharded(plan, 2, modules=("llm",)))
    )
    lowered = lower(plan)
    groups = [group for group in lowered.groups if group.weights[0].module == "llm"]
    sizes = [4 * group.num_elements for group in groups]
    action = next(action for action in lowered.reductions if plan.stage[action.stage or 0].module == "llm")
    assert whole.duration_s(action) == pytest.approx(sum(all_reduce_s(size, 4, LINK) for size in sizes))
    assert one.duration_s(action) == pytest.approx(sum(reduce_scatter_s(size, 4, LINK) for size in sizes))
    assert two.duration_s(action) == pytest.approx(sum(reduce_scatter_s(size, 2, LINK) for size in sizes))
    rank = groups[0].ranks[0]
    peers_s = sum(all_reduce_s(size / 2, 2, LINK) for size in sizes)  # waits for the sums inside
    assert one.step_s(rank) - two.step_s(rank) == pytest.approx(
        sum(all_gather_s(size, 4, LINK) - all_gather_s(size, 2, LINK) for size in sizes) - peers_s
    )


def test_gradients_alone_are_refused() -> None:
    plan = disjoint_plan(mixed("llm"), tiny_batch(), WHOLE)
    modules = (ModuleSettings(module="llm", sharding=Sharding.GRADIENTS),)
    deeper = replace(plan, settings=replace(plan.settings, modules=modules))
    words = "'gradients' cannot be executed; want one of none, optimizer, para"
    with pytest.raises(ValueError, match=words):
        emulate(lower(deeper), RunSettings())
    with pytest.raises(ValueError, match=words):
        check_runnable(deeper)  # before any process is started


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(1, 4))
def test_parts_cover_every_weight_once(sizes: list[int], num_parts: int) -> None:
    """Pieces of all ranks together are the gradients; an update of all parts is an update of the whole."""
    ranks = tuple(range(num_parts))
    torch.manual_seed(0)
    values = [torch.randn(size) for size in sizes]
    gradients = [torch.randn(size) for size in sizes]
    parts = []
    for rank in ranks:
        weights = [nn.Parameter(value.clone()) for value in values]
        copies = [nn.Parameter(value.clone()) for value in values]
        bucket = WeightBucket(
            list(zip(weights, copies, strict=True)), Share(instance=ranks, peers=(rank,), rank=rank)
        )
        for weight, copy, gradient in zip(weights, copies, gradients, strict=True):
            weight.grad, copy.grad = gradient / 2, gradient / 2
        taken = bucket.take()
        own = taken.chunk(num_parts)[rank]
        for weight, piece in bucket.pieces(own):
            index = next(i for i, each in enumerate(weights) if each is weight)
            parts.append((index, piece.clone()))
        with torch.no_grad():
            bucket.own.sub_(own)
        bucket.updated()
        part = bucket.weights.chunk(num_parts)[rank]
        bucket.weights.copy_(torch.cat([*values, torch.zeros(len(taken) - sum(sizes))]) - taken)
        assert torch.equal(part, bucket.weights.chunk(num_parts)[rank])
        bucket.renew_copies()
        for value, gradient, weight, copy in zip(values, gradients, weights, copies, strict=True):
            assert torch.equal(weight.detach(), value - gradient)
            assert torch.equal(copy.detach(), weight.detach())
    for index, gradient in enumerate(gradients):
        assert torch.equal(torch.cat([piece for i, piece in parts if i == index]), gradient)
