"""The demo's predictions say what they rest on."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

from experiments.demo import ONE_STAGE_EACH, Planned, predicted, write_predictions
from experiments.demo_job import demo_job, local_cluster, write_job_file
from workbench.cost.hardware import Link
from workbench.cost.model import CostModel
from workbench.cost.profile import Profile, load_profile
from workbench.data.sample import Sample
from workbench.job.job import load_job
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


def test_the_job_file_is_the_demo_s_job(tmp_path: Path) -> None:
    """Layers, ranks, settings and, sample by sample, tokens."""
    own = demo_job("projectors", local_cluster(Link(name="gloo", bytes_per_s=2e9, latency_s=1e-4), 2**40))
    write_job_file("projectors", tmp_path / "job.yaml", own.cluster, "profile.json")
    job = load_job(tmp_path / "job.yaml")
    assert job.model.modules == own.model.modules
    assert (job.cluster.nodes, job.settings) == (own.cluster.nodes, own.settings)
    assert job.cluster.intra.bytes_per_s == own.cluster.intra.bytes_per_s
    assert [tokens_of(sample) for sample in job.batch] == [tokens_of(sample) for sample in own.batch]


def tokens_of(sample: Sample) -> Counter[str]:
    return sum((Counter({each.modality: each.tokens_out}) for each in sample.segments), Counter[str]())
