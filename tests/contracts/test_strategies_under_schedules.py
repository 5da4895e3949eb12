"""Every strategy under every schedule: a plan follows the schedule and trains as one process, or is refused.

The cases are the two registries; a strategy that takes few schedules stands in `TAKES`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import pytest
import torch

from experiments.fidelity.mutant_runs import compared
from experiments.nccl.cases import jobs, priced
from runtime.data.batches import SyntheticSource
from runtime.launch import run_lowered
from runtime.reference import ReferenceResult, reference_step
from runtime.run_settings import Collect, RunSettings
from runtime.world.pool import Pool
from sim.step.sweep import Sweep
from tests.test_schedule_golden import job_with
from workbench.cost.model import CostModel
from workbench.cost.profile import load_profile
from workbench.job.job import Job
from workbench.plan.codec import plan_hash
from workbench.plan.lowered import Lowered, Route
from workbench.plan.plan import Plan, Precision
from workbench.planner.stage_counts import silent
from workbench.schedule.action import Pass
from workbench.schedule.choice import ScheduleKind, rank_block, usual
from workbench.schedule.spec import StagePlacement
from workbench.strategies.registry import BY_NAME, STRATEGIES
from workbench.timing.accept import accept

IN_PHASES = {ScheduleKind.ONE_F_ONE_B, *(kind for kind in ScheduleKind if kind.spec.shares_ranks_in_part)}
TAKES = {  # all others take all
    "dip": IN_PHASES,
    "megatron-colocated": IN_PHASES,
    "fsdp": {ScheduleKind.ONE_F_ONE_B},
    "hsdp": {ScheduleKind.ONE_F_ONE_B},
}
CHOOSES_STAGES = ("disttrain", "disttrain-cheapest")
PAIRS = [(spec.name, kind) for spec in STRATEGIES for kind in ScheduleKind]
TAKEN = [(name, kind) for name, kind in PAIRS if kind in TAKES.get(name, set(ScheduleKind))]
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Planned:
    """Plans by strategy and schedule, lowered, and the error of the first job where there is none."""

    lowered: Mapping[tuple[str, ScheduleKind], Lowered]
    refused: Mapping[tuple[str, ScheduleKind], str]


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Planned:
    """Of the first job that a pair takes: an encoder and an LLM of two stages, twice, else a quick one."""
    cost, folder = CostModel(load_profile("A40")), tmp_path_factory.mktemp("jobs")
    lowered: dict[tuple[str, ScheduleKind], Lowered] = {}
    refused: dict[tuple[str, ScheduleKind], str] = {}
    others = [_on_own_cores(job) for job in jobs()]
    for name, kind in PAIRS:
        few = [
            job_with(folder, kind, replicas=2, samples=4),
            *(replace(job, schedule=usual(kind)) for job in others),
        ]
        for job in few if (name, kind) in TAKEN else few[:1]:
            try:
                plan = BY_NAME[name].planner(priced(job) if BY_NAME[name].wants_prices else job, cost, silent)
                lowered[name, kind], _ = accept(plan)
                break
            except ValueError as error:
                refused.setdefault((name, kind), str(error))
    return Planned(lowered, refused)


def _on_own_cores(job: Job) -> Job:
    """As the sweep wants it."""
    nodes = tuple(replace(node, num_cores=None) for node in job.cluster.nodes)
    return replace(job, cluster=replace(job.cluster, nodes=nodes))


def test_who_takes_few_is_a_strategy() -> None:
    assert TAKES.keys() <= BY_NAME.keys()


def test_all_others_are_refused_by_one_line_that_names_a_schedule_they_take(planned: Planned) -> None:
    assert set(planned.lowered) == set(TAKEN)
    for name, kind in set(PAIRS) - set(TAKEN):
        message = planned.refused[name, kind]
        assert message.startswith(f"{name}: ")
        assert f"got schedule {kind}; nearest: " in message
        assert message.rpartition("nearest: ")[2] in TAKES[name]
        assert "\n" not in message


@pytest.mark.parametrize(("strategy", "kind"), TAKEN)
def test_a_plan_follows_the_jobs_schedule(strategy: str, kind: ScheduleKind, planned: Planned) -> None:
    lowered = planned.lowered[strategy, kind]
    plan, schedule = lowered.plan, usual(kind)
    if strategy not in TAKES:
        for replica in plan.replicas("llm"):
            homes = [stage.ranks for stage in plan.chain["llm", replica]]
            if strategy in CHOOSES_STAGES:
                assert len(homes) % kind.usual_virtual_stages == 0
            else:
                assert len(homes) == 2 * kind.usual_virtual_stages
            assert homes == [homes[rank_block(schedule, index, len(homes))] for index in range(len(homes))]
    kinds = {action.kind for action in plan.program_actions}
    assert (Pass.W in kinds) == kind.splits_backward
    assert Sweep(lowered).times(lambda action: 1.0).iteration_s > 0
    if kind.spec.layout is StagePlacement.VEE:  # the turn of the V stays on its rank
        assert any(row.route is Route.LOCAL and row.edge == "llm" for row in lowered.transfers)


@pytest.fixture(scope="module")
def references() -> dict[object, ReferenceResult]:
    """What one process came to, by what it sees of a plan; filled as plans run."""
    return {}


@pytest.mark.parametrize("kind", ScheduleKind)
def test_each_trains_as_one_process(
    kind: ScheduleKind, planned: Planned, references: dict[object, ReferenceResult], pool: Pool
) -> None:
    """Loss and gradients in float64 within 1e-10; plans that are equal run once."""
    of_kind = [(pair[0], lowered) for pair, lowered in planned.lowered.items() if pair[1] is kind]
    different = {plan_hash(lowered.plan): (strategy, lowered) for strategy, lowered in of_kind}
    settings = RunSettings(precision=Precision.FLOAT64, collect=Collect.GRADIENTS, timeout_s=TIMEOUT_S)
    torch.set_num_threads(1)
    found = {}
    for strategy, lowered in different.values():
        plan = lowered.plan
        alone = _alone(plan)
        if alone not in references:
            references[alone] = reference_step(
                plan, seed=settings.seed, dtype=torch.float64, source=SyntheticSource(settings.seed)
            )
        result = run_lowered(lowered, settings, pool=pool)
        found[strategy] = compared(plan, result, references[alone])
    assert found
    assert found == dict.fromkeys(found, "same")


def _alone(plan: Plan) -> object:
    """What one process sees of a plan."""
    return plan.model, frozenset(plan.batch)
