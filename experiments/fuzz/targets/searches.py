"""Logs of joint searches."""

import json
from pathlib import Path

from experiments.fuzz.target import Ready, Target, naming
from experiments.fuzz.targets.writing import CORPUS, json_lines, parse_json_lines, written
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

    def read(path: Path) -> None:
        with naming(path.name):
            lines = read_bounded(path).splitlines()
        with naming("replay"):
            replayed(job, cost, IterationJudge(cost), planners, lines)

    return Ready(
        seeds=[[json.loads(line) for line in LOG.read_text(encoding="utf-8").splitlines()]],
        render=json_lines,
        parse=parse_json_lines,
        take=written(folder / "log.jsonl", read),
    )


TARGETS = (
    Target(
        name="joint-log",
        make=_log,
        readers=("workbench.search.joint.log:_read", "workbench.cli.joint_searching:_replay"),
    ),
)
