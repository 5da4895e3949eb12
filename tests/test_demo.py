"""The demo's predictions say what they rest on."""

from dataclasses import replace
from pathlib import Path

from experiments.demo import ONE_STAGE_EACH, Planned, predicted, write_predictions
from experiments.demo_job import demo_job, local_cluster
from workbench.cost.model import CostModel
from workbench.cost.profile import Profile, load_profile
from workbench.plan.codec import write_plan
from workbench.report.folder import read_folder
from workbench.strategies import cornstarch
from workbench.timing.provenance import PROFILE, unmeasured_costs
from workbench.trace_json import write_trace


def planned(profile: Profile) -> Planned:
    cluster = local_cluster(profile.machine_link("intra").link, 2**36)
    plan = cornstarch.plan(demo_job("projectors", cluster, ONE_STAGE_EACH), CostModel(profile))
    return predicted("one", "projectors", plan, CostModel(profile))


def test_traces_name_profile_and_unmeasured_costs(tmp_path: Path) -> None:
    item = planned(replace(load_profile("H100"), name="this machine"))
    assert dict(item.simulated.details)[PROFILE] == "this machine"
    assert unmeasured_costs(item.simulated)
    write_predictions((item,), tmp_path / "predictions.json")
    write_plan(item.plan, tmp_path / "one.plan.json")
    write_trace(item.simulated, tmp_path / "one.sim.json")
    (entry,) = read_folder(tmp_path).entries
    assert entry.simulated == item.simulated
