"""Sharded parameters train as one process; the timeline of the figure."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from experiments.cornstarch.figure_plots import has_throughputs, throughputs
from experiments.cornstarch.models import icml_model
from experiments.cornstarch.planned import Planned, simulated
from experiments.cornstarch_icml.figure5 import (
    GRIDS,
    NUM_GPUS,
    NUM_STAGES,
    Method,
    evidence_of,
    fsdp_bound,
    fsdp_job,
    gains,
    megatron_counts,
    models,
    pipeline_job,
)
from experiments.fidelity.memory import measure
from experiments.harness.drawing import save
from experiments.harness.printed import claim_value
from runtime.emulation.emulate import emulate
from runtime.launch import RunResult, run_lowered
from runtime.run_settings import Collect, RunSettings
from runtime.state.checkpoint import Checkpoints
from runtime.state.checkpoint_files import check_whole, identity_of
from runtime.step.fsdp import weights as sharded_weights
from runtime.step.fsdp.weights import ShardedWeights
from runtime.world.pool import Pool
from tests.layout_jobs import layout_job, vision_language
from tests.plans import finish
from tests.test_parity import SEED, assert_order, assert_parity, execute, mixed
from tests.tiny_valm import tiny_batch
from workbench.cost.model import CostModel
from workbench.cost.profile import load_profile
from workbench.data.sample import Sample
from workbench.model.model_graph import ModelGraph
from workbench.plan.kernels import Kernels
from workbench.plan.lower import lower
from workbench.plan.plan import ModuleSettings, Plan, Precision, Settings, Sharding
from workbench.plan.stage import Stage
from workbench.schedule.action import Pass
from workbench.schedule.choice import Schedule
from workbench.schedule.sharded import ReshardAfter
from workbench.strategies import encoders_colocated, megatron_heterogeneous
from workbench.timing.accept import accept

MODULES = ("vision", "audio", "llm")
ALL_ON_ONE = {"vision": ((0, 5),), "audio": ((0, 4),), "llm": ((0, 6),)}
IN_TWO = {"vision": ((0, 5),), "audio": ((0, 4),), "llm": ((0, 3), (3, 6))}


def sharded_parameters(
    model: ModelGraph,
    batch: Sequence[Sample],
    *,
    replicas: int,
    cuts: dict[str, Sequence[tuple[int, int]]] = ALL_ON_ONE,
    modules: Sequence[str] = MODULES,
    samples: int = 1,
    instances: int = 1,
    reshard_after: ReshardAfter = ReshardAfter.PASS,
    schedule: Schedule | None = None,
    **settings: object,
) -> Plan:
    """Stage i of every module on rank i of a replica, layer by layer where a module is sharded."""
    depth = max(map(len, cuts.values()))
    stages = [
        Stage(id=0, module=name, replica=replica, layers=layers, ranks=((replica * depth + place,),))
        for replica in range(replicas)
        for name, parts in cuts.items()
        for place, layers in enumerate(parts)
    ]
    sharded = ModuleSettings(
        module="", sharding=Sharding.PARAMETERS, instances=instances, reshard_after=reshard_after
    )
    chosen = tuple(replace(sharded, module=name) for name in modules)
    return finish(
        model,
        batch,
        [replace(stage, id=place) for place, stage in enumerate(stages)],
        replicas=replicas,
        samples=samples,
        settings=Settings(precision=Precision.FLOAT32, modules=chosen, **settings),  # type: ignore[arg-type]
        schedule=schedule,
    )


def assert_trains_as_one(plan: Plan, pool: Pool) -> RunResult:
    accept(plan)
    result, reference = execute(plan, pool, clip_norm=0.05)
    assert_parity(plan, result, reference, Precision.FLOAT64)
    assert_order(plan, result)
    return result


@pytest.mark.parametrize(
    ("mix", "replicas", "cuts"),
    [
        pytest.param("everything", 2, IN_TWO, id="two-stages"),
        pytest.param("projectors", 3, ALL_ON_ONE, id="frozen-llm"),
        pytest.param("vision-frozen", 4, ALL_ON_ONE, id="frozen-vision"),
    ],
)
def test_trains_as_one_process(
    mix: str, replicas: int, cuts: dict[str, Sequence[tuple[int, int]]], pool: Pool
):
    """Unequal tokens, missing modalities: replicas differ in their microbatches, not in their rounds."""
    images, clips = (1, 2, 0, 1, 3, 0), (1, 0, 0, 2, 0, 1)
    count = 6 if replicas == 3 else 4
    assert_trains_as_one(
        sharded_parameters(
            mixed(mix), tiny_batch(images[:count], clips[:count]), replicas=replicas, cuts=cuts
        ),
        pool,
    )


@pytest.mark.parametrize(
    ("tied", "cuts"),
    [pytest.param(True, ALL_ON_ONE, id="tied-on-one"), pytest.param(False, ALL_ON_ONE, id="one-stage")],
)
def test_instances_add_up_their_parts(tied: bool, cuts: dict[str, Sequence[tuple[int, int]]], pool: Pool):
    """Two instances of two ranks, unequal items; the norm that clips counts every part once."""
    model = mixed("llm", tied=True) if tied else mixed("everything")
    plan = sharded_parameters(model, tiny_batch(), replicas=4, cuts=cuts, instances=2)
    result = assert_trains_as_one(plan, pool)
    groups = [group for group in lower(plan).groups if len(group.ranks) > 1]
    assert {group.ranks for group in groups} == {(0, 2), (1, 3)}
    assert result.losses


def test_a_weight_tied_between_ranks(pool: Pool) -> None:
    """Embedding and head on different ranks: the i-th of each holds the i-th part of both."""
    plan = sharded_parameters(mixed("llm", tied=True), tiny_batch(), replicas=2, cuts=IN_TWO)
    assert_trains_as_one(plan, pool)
    tied = [group for group in lower(plan).groups if group.weights[0].shared is not None]
    assert [group.ranks for group in tied] == [(0, 1), (2, 3)]


def test_a_tied_weight_and_whole_encoders_beside_it(pool: Pool) -> None:
    plan = sharded_parameters(mixed("llm", tied=True), tiny_batch(), replicas=2, modules=("llm",))
    assert_trains_as_one(plan, pool)


def test_whole_encoders_whose_items_one_replica_has_alone(pool: Pool) -> None:
    """The other sums their gradients before its first round, this one after its last."""
    plan = sharded_parameters(mixed("everything"), tiny_batch((1, 0), (1, 0)), replicas=2, modules=("llm",))
    kinds = [[action.kind for action in plan.program[rank]] for rank in (0, 1)]
    assert kinds[0][0] is Pass.ALL_GATHER
    assert kinds[1][0] is Pass.REDUCE_GRAD
    assert_trains_as_one(plan, pool)


THREE_STEPS = RunSettings(seed=SEED, steps=3, timeout_s=120.0, collect=Collect.STATE)


def narrow(plan: Plan) -> Plan:
    """The plan with bfloat16 weights and a float32 optimizer."""
    precisions = {"precision": Precision.BFLOAT16, "optimizer_precision": Precision.FLOAT32}
    return replace(plan, settings=replace(plan.settings, **precisions))


def assert_same_bits(ours: RunResult, *others: RunResult) -> None:
    """Sums of two ranks are the same in either order."""
    for theirs in others:
        assert ours.losses == theirs.losses
        for mine, other in zip(ours.states, theirs.states, strict=True):
            assert all(torch.equal(mine.weights[key], other.weights[key]) for key in other.weights)


def assert_goes_on(plan: Plan, folder: Path, pool: Pool) -> None:
    """From the save of the second of three steps, to the last bit."""
    lowered = lower(plan)
    saving = replace(THREE_STEPS, checkpoints=Checkpoints(folder=folder, every=2))
    through = run_lowered(lowered, saving, pool=pool)
    start = check_whole(folder / "step-0000000002", identity_of(plan, THREE_STEPS.dtype(plan), SEED))
    again = Checkpoints(folder=folder / "again", every=2, start=start)
    assert_same_bits(run_lowered(lowered, replace(THREE_STEPS, checkpoints=again), pool=pool), through)


def assert_exports_train_alike(plans: Iterable[Plan], folder: Path, pool: Pool) -> None:
    """What one plan's ranks trained and wrote has the loss of what the others' did."""
    settings = RunSettings(seed=SEED, precision=Precision.FLOAT64, steps=2, timeout_s=30.0)
    losses = []
    for number, lowered in enumerate(map(lower, plans)):
        run_lowered(lowered, replace(settings, export=folder / str(number)), pool=pool)
        read = replace(settings, weights=folder / str(number), steps=1)
        losses.append(run_lowered(lowered, read, pool=pool).losses)
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


def test_a_wide_optimizer_of_parts_equals_that_of_the_whole(pool: Pool) -> None:
    """bfloat16 weights, float32 optimizer: three steps."""
    plans = (
        narrow(sharded_parameters(mixed("llm"), tiny_batch(), replicas=2, modules=modules))
        for modules in (MODULES, ())
    )
    assert_same_bits(*(run_lowered(lower(plan), THREE_STEPS, pool=pool) for plan in plans))


def test_an_export_is_of_whole_weights(tmp_path: Path, pool: Pool) -> None:
    """What two replicas trained in parts is what they trained whole."""
    plans = (
        sharded_parameters(mixed("llm"), tiny_batch(), replicas=2, modules=modules)
        for modules in (MODULES, ())
    )
    assert_exports_train_alike(plans, tmp_path, pool)


def test_a_run_goes_on_from_parts_to_the_last_bit(tmp_path: Path, pool: Pool) -> None:
    """Frozen parts, narrow parts and wide ones are saved and read; moments too."""
    assert_goes_on(narrow(sharded_parameters(mixed("llm"), tiny_batch(), replicas=2)), tmp_path, pool)


def test_holds_less_than_whole_weights_and_no_more_than_predicted(pool: Pool) -> None:
    peaks: dict[int, list[int]] = {1: [], 2: [], 4: []}  # by how many ranks hold each weight
    for holders, modules in ((1, MODULES), (2, MODULES), (4, ())):
        plan = sharded_parameters(
            mixed("everything"),
            tiny_batch((1,) * 4, (1,) * 4),
            replicas=4,
            modules=modules,
            instances=holders,
            kernels=Kernels.EAGER,
        )
        for row in measure("sharded", plan, pool):
            assert row.measured_bytes <= row.predicted_bytes, row
            peaks[holders].append(row.measured_bytes)
    assert max(peaks[1]) < min(peaks[2])
    assert max(peaks[2]) < min(peaks[4])
    assert max(peaks[1]) < 0.6 * min(peaks[4])


def test_an_emulation_is_refused() -> None:
    plan = sharded_parameters(mixed("llm"), tiny_batch(), replicas=2)
    with pytest.raises(ValueError, match="weights are not sharded; want sharding none or optimizer"):
        emulate(lower(plan), RunSettings())


def test_memory_comes_and_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five elements on two ranks: parts of three; what autograd kept is whole again at the backward."""
    noted: list[int] = []
    weights = [nn.Parameter(torch.arange(3.0, dtype=torch.float64)), nn.Parameter(torch.ones(2).double())]
    # The peer holds zeros: gathers and sums are the own part and gradient.
    monkeypatch.setattr(sharded_weights, "GATHER", lambda whole, part, **_: whole[: len(part)].copy_(part))
    monkeypatch.setattr(sharded_weights, "SUM", lambda whole, **_: whole)
    shared = ShardedWeights(weights, (0, 1), 0, None, resized=noted.append)
    assert shared.own.tolist() == [0.0, 1.0, 2.0]
    assert weights[0].untyped_storage().nbytes() == 0
    shared.gather()
    loss = (weights[0] ** 2).sum()
    shared.release()
    shared.gather()
    loss.backward()
    scattered = shared.reduce_scatter()
    shared.release()
    shared.add(scattered.received())
    assert shared.own.grad.tolist() == [0.0, 2.0, 4.0]
    assert weights[0].grad is None
    assert noted == [48, -48, 48, -48]


@pytest.mark.parametrize(
    ("encoder", "llm"),
    [pytest.param((2, 1, 1), (2, 2, 1), id="pipeline"), pytest.param((2, 1, 1), (1, 1, 2), id="tokens")],
)
def test_a_job_shares_out_one_module(encoder: tuple[int, ...], llm: tuple[int, ...], pool: Pool) -> None:
    """Beside whole encoders: the layers of a pipeline's stages; weights and tokens over the same ranks."""
    job = layout_job(vision_language(), {"vision": encoder, "llm": llm}, microbatch=1, images=(1, 2, 0, 1))
    modules = (ModuleSettings(module="llm", sharding=Sharding.PARAMETERS),)
    plan = megatron_heterogeneous.plan(
        replace(job, settings=replace(job.settings, modules=modules)), CostModel(load_profile("A40"))
    )
    assert {s.layers[1] - s.layers[0] for s in plan.stages if s.module == "llm"} == {1}
    assert_trains_as_one(plan, pool)


COST = CostModel(load_profile("A40"))


def planned(iteration_s: float) -> Planned:
    return Planned((), NUM_GPUS, iteration_s, f"hash-{iteration_s}")


def runs(cornstarch_s: float = 1.0) -> dict[str, dict[Method, list[Planned]]]:
    """FSDP slower as models grow, Megatron* slowest where encoders are large."""
    return {
        name: {
            Method.FSDP: [planned(1.5 + place), planned(2.0 + place)],
            Method.MEGATRON: [planned(3.0 if name in ("LLS", "LLM") else 1.2)] * 4,
            Method.CORNSTARCH: [planned(cornstarch_s), planned(2 * cornstarch_s)],
        }
        for place, name in enumerate(("SSS", "LLS", "MMM", "LLM", "LLL"))
    }


def test_gains_are_of_the_likeliest_with_all_others_as_a_range() -> None:
    found = gains(runs(), Method.FSDP)
    assert next(iter(found)) == "FSDP by our search, Cornstarch at TP 4"
    assert [each[0] for each in found.values()] == [1.5, 0.75, 2.0, 1.0]


def test_the_printed_gain_over_fsdp_is_more_than_its_own_stage_times_allow() -> None:
    """With the slowest stage busy all the time and no gather hidden, FSDP would still be ahead."""
    bound = fsdp_bound()
    assert bound.high is not None
    assert bound.high < 1
    assert bound.excludes(claim_value("cs_icml_e2e_vs_fsdp"))


def test_claims_hold_where_they_do_and_fail_where_they_do_not() -> None:
    good, bad = evidence_of(runs()), evidence_of(runs(cornstarch_s=4.0))
    assert [claim.holds for claim in good.claims] == [True] * 5
    assert [claim.holds for claim in bad.claims] == [False, True, True, True, True]
    assert good.ours["modelled/mean_gain_over_fsdp"] == pytest.approx(3.5)


@pytest.mark.parametrize("grid", GRIDS)
def test_jobs_are_of_the_stated_size(grid) -> None:
    model = icml_model("SSS")
    one, balanced = megatron_counts(model, grid, COST)
    assert one == {"vision": 1, "audio": 1, "llm": NUM_STAGES - 1}
    assert balanced["vision"] + balanced["llm"] == NUM_STAGES
    job = pipeline_job(model, grid, one, COST)
    assert (job.cluster.num_ranks, len(job.batch), job.microbatch_samples) == (NUM_GPUS, 48, 4)
    assert simulated(encoders_colocated.plan, job, COST).num_ranks <= NUM_GPUS


def test_fsdp_has_two_samples_a_gpu() -> None:
    job = fsdp_job(icml_model("SSS"), COST)
    assert (job.cluster.num_ranks, len(job.batch), job.microbatch_samples) == (NUM_GPUS, 48, 2)


def test_nine_models_and_a_picture(tmp_path) -> None:
    assert len(models()) == 9
    record = json.loads(json.dumps({"script": "cornstarch_icml/figure5", "ours": evidence_of(runs()).ours}))
    assert has_throughputs(record)
    assert all(path.stat().st_size > 10_000 for path in save(throughputs(record), tmp_path, "one"))
