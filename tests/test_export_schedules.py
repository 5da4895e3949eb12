"""Schedules that torch has no class for leave as files of passes, which torch's own loader takes."""

import ast
import json
from dataclasses import replace

import pytest

from experiments.doors.targets import Folder, refusals
from tests.test_export_folders import JOBS, plan_of, prices_of
from tests.test_torch_csv import loaded
from workbench.export.export import export
from workbench.export.registry import BY_NAME
from workbench.export.torchtitan import SCHEDULE_FILE
from workbench.job.job import Job
from workbench.plan.plan import Plan
from workbench.schedule.action import COMPUTE
from workbench.schedule.choice import ScheduleKind, usual


def planned_under(kind: ScheduleKind) -> tuple[Job, Plan]:
    """Two replicas of two stages of two tensor-parallel ranks."""
    job = replace(JOBS["llama"], schedule=usual(kind))
    return job, plan_of(job, "megatron-heterogeneous")


def exported(job: Job, plan: Plan) -> dict[str, str]:
    return export(plan, BY_NAME["torchtitan"], prices_of(job))


def parallelism_of(files):
    [table] = [
        node.value
        for node in ast.parse(files["plan_config.py"]).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PARALLELISM"
    ]
    return ast.literal_eval(table)


def passes_of(plan: Plan, replica: int) -> list[list[str]]:
    """Passes of one rank of each stage of a replica, by the stage's position."""
    chain = plan.chain[plan.model.llm.name, replica]
    return [
        [
            f"{index}{action.kind.value}{action.microbatch}"
            for action in plan.program[stage.flat_ranks[0]]
            if action.kind in COMPUTE
        ]
        for index, stage in enumerate(chain)
    ]


def test_torch_executes_the_plan_s_own_passes(tmp_path):
    """Nothing differs: every replica's passes are in the file, as torch's runtime loads it."""
    job, plan = planned_under(ScheduleKind.ZB_H1)
    files = exported(job, plan)
    (tmp_path / SCHEDULE_FILE).write_text(files[SCHEDULE_FILE])
    assert json.loads(files["export.json"])["differences"] == []
    assert len(plan.replicas("llm")) == 2
    for replica in plan.replicas("llm"):
        assert loaded(tmp_path / SCHEDULE_FILE, 2, 2, 8) == passes_of(plan, replica)
    words = parallelism_of(files)
    assert (words["pipeline_parallel_schedule"], words["pipeline_parallel_schedule_csv"]) == (
        "1F1B",
        SCHEDULE_FILE,
    )


@pytest.mark.parametrize("kind", [ScheduleKind.ONE_F_ONE_B, ScheduleKind.GPIPE, ScheduleKind.ZB_V])
def test_schedules_of_torch_go_by_their_names(kind):
    files = exported(*planned_under(kind))
    assert SCHEDULE_FILE not in files
    assert "pipeline_parallel_schedule_csv" not in parallelism_of(files)


def test_torchtitan_takes_the_folder(packages):
    job, plan = planned_under(ScheduleKind.ZB_H1)
    files = exported(job, plan)
    without = {name: text for name, text in files.items() if name != SCHEDULE_FILE}
    folders = [Folder(files=each, ranks=len(plan.ranks)) for each in (files, without)]
    taken, refused = refusals("torchtitan", folders, packages)
    assert taken is None
    assert "no file schedule.csv" in refused
