"""Muon goes to Megatron-LM as its own, with what it does differently said; others refuse it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.doors.targets import shell_arguments
from tests.test_export_folders import JOBS, Prices, check_flags, plan_of, prices_of
from tests.test_export_latent import flags_of, job_alone
from tests.test_tensor_parallel import CONFIGS
from workbench.export.export import export
from workbench.export.registry import BY_NAME
from workbench.job.job import Job
from workbench.plan.optimizer import Optimizer
from workbench.plan.plan import Plan

MEGATRON = BY_NAME["megatron"]
DENSE = CONFIGS["llama"] | {"num_attention_heads": 4, "num_key_value_heads": 4}


def by_muon(job: Job) -> Job:
    return replace(job, settings=replace(job.settings, optimizer=Optimizer.MUON))


def plan_with(layout: dict[str, object], config: dict[str, object] = DENSE) -> tuple[Plan, Prices]:
    job = by_muon(job_alone(config, layout))
    return plan_of(job, "megatron-heterogeneous"), prices_of(job)


@pytest.mark.parametrize(
    ("layout", "name"),
    [({"tp": 2, "pp": 2}, "muon"), ({"tp": 2, "dp": 2, "sharding": "optimizer"}, "dist_muon")],
)
def test_flags_are_megatron_s(layout: dict[str, object], name: str) -> None:
    """In the kept list of its parser; state that is sharded is not of the other distributed optimizer."""
    plan, prices = plan_with(layout)
    words = shell_arguments(export(plan, MEGATRON, prices))
    kept = json.loads((Path(__file__).parent / "golden" / "megatron_flags.json").read_text())
    check_flags(words, {row["flag"]: row for row in kept["flags"]})
    flags = flags_of(words)
    assert flags["--optimizer"] == name
    assert flags["--muon-momentum"] == "0.95"
    assert flags["--muon-extra-scale-factor"] == "0.2"
    assert flags["--muon-scale-mode"] == "spectral"
    assert flags["--muon-coefficient-type"] == "simple"
    assert flags["--muon-tp-mode"] == "duplicated"
    assert "--muon-nesterov" in flags
    assert "--muon-no-split-qkv" not in flags
    assert "--use-distributed-optimizer" not in flags


def test_what_differs_is_said() -> None:
    """Gate and up are one weight to Megatron; sharded state is of whole matrices. Neither is priced."""
    plan, _ = plan_with({"tp": 2, "dp": 2, "sharding": "optimizer"})
    said = {change.has: change.gets for change in MEGATRON.changes(plan) if change.make is None}
    assert said["gate and up of an MLP orthogonalised each by itself"].startswith("one matrix of both")
    assert "whole momenta of some matrices on a rank" in said.values()
    adamw = replace(plan, settings=replace(plan.settings, optimizer=Optimizer.ADAMW))
    assert not [change for change in MEGATRON.changes(adamw) if change.has in said]
    mixture = by_muon(JOBS["mixtral"])
    changes = MEGATRON.changes(plan_of(mixture, "megatron-heterogeneous"))
    assert not [change for change in changes if change.has.startswith("gate and up")]  # one in an expert


@pytest.mark.parametrize(
    ("layout", "part"),
    [
        ({"dp": 4, "sharding": "parameters"}, "optimizer 'muon' with sharding 'parameters'"),
        (
            {"dp": 4, "sharding": "optimizer", "instances": 2},
            "optimizer 'muon' with 2 instances of sharded state",
        ),
    ],
)
def test_layouts_that_megatron_lacks_are_refused(layout: dict[str, object], part: str) -> None:
    plan, prices = plan_with(layout)
    assert MEGATRON.refuses(plan) == part
    with pytest.raises(ValueError, match=f"megatron cannot express {part}"):
        export(plan, MEGATRON, prices)


def test_learned_positions_are_a_matrix_to_megatron() -> None:
    plan, _ = plan_with({"dp": 4}, CONFIGS["gpt2"])
    assert MEGATRON.refuses(plan) == "optimizer 'muon' beside learned positions, which are a matrix to it"


@pytest.mark.parametrize("name", ["megatron-bridge", "torchtitan", "fsdp2"])
def test_other_targets_name_it(name: str) -> None:
    plan, _ = plan_with({"dp": 4, "sharding": "parameters"})
    assert BY_NAME[name].refuses(plan) == "optimizer 'muon'"
