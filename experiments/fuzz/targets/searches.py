"""Logs of joint searches."""

import json
from pathlib import Path

from experiments.fuzz.target import Ready, Target, naming
from experiments.fuzz.targets.writing import CORPUS, JSON_LINES, reading
from sim.predict import IterationJudge
from workbench.bounded_file import read_bounded
from workbench.cost.model import CostModel
from workbench.cost.profile import load_profile
from workbench.job.job import load_job
from workbench.search.joint.log import replayed
from workbench.strategies import cornstarch

LOG = CORPUS / "joint.jsonl"
"""Of `search JOB --joint --candidates 12 --log joint.jsonl` on the small job of the corpus."""


def _log(folder: Path) -> Ready:
    job, cost = load_job(CORPUS / "job.yaml"), CostModel(load_profile("H100"))
    planners = {"cornstarch": cornstarch.plan}

    def replay(content: str) -> None:
        with naming("replay"):
            replayed(job, cost, IterationJudge(cost), planners, content.splitlines())

    seeds = [[json.loads(line) for line in LOG.read_text(encoding="utf-8").splitlines()]]
    return reading(JSON_LINES, folder / "log.jsonl", seeds, read_bounded, replay)


TARGETS = (
    Target(
        name="joint-log",
        make=_log,
        readers=("workbench.search.joint.log:_read", "workbench.cli.joint_searching:_replay"),
    ),
)
