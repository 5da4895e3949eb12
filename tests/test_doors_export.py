"""The export part of the doors: counts of one job's plans add up, and each refusal has a reason."""

from experiments.doors.export import parsed, plans_of
from experiments.doors.export_jobs import export_jobs
from workbench.export.registry import BY_NAME


def test_every_plan_is_said_or_refused_for_a_reason():
    made = plans_of([job for job in export_jobs() if job.name == "mixtral"])
    for target in (BY_NAME["fsdp2"], BY_NAME["torchrun"]):
        record = parsed(target, made)
        assert record["tried"] == len(made) > 0
        assert record["said"] + record["refused"] == record["tried"]
        assert sum(record["reasons"].values()) == record["refused"]
        assert all(record["reasons"])
