"""A job with low-rank adapters: its plans, their prices and state, and what refuses them."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from sim.predict import predict
from sim.step.sweep import Sweep
from tests.command_line import accept, refuse
from tests.job_files import write
from tests.test_expert_plan import MIXTRAL
from workbench.cost.model import CostModel
from workbench.cost.profile import load_profile
from workbench.job.job import Job, load_job
from workbench.memory.account import memory_table
from workbench.memory.stage import state_of
from workbench.model.layer import LayerKind, Matmul
from workbench.model.lora import Lora
from workbench.plan.codec import dumps, loads, plan_hash, write_plan
from workbench.plan.gradient_groups import gradient_groups
from workbench.plan.lower import lower
from workbench.plan.parameter_shards import shard_units
from workbench.plan.plan import Plan, Sharding
from workbench.strategies.registry import PLANNERS
from workbench.timing.price import price

LORA = {"rank": 4, "alpha": 8, "modules": "all"}


def job(tmp_path: Path, lora: dict[str, Any] | None, **llm: Any) -> Job:
    """The small job, with adapters of its frozen LLM."""

    def change(data: dict[str, Any]) -> None:
        if lora is not None:
            data["model"]["modules"]["llm"]["lora"] = lora
        data["layouts"]["llm"] |= llm
        num_ranks = 1 + data["layouts"]["llm"]["pp"] * llm.get("tp", 1)
        data["cluster"] = {"device": "H100", "nodes": 1, "ranks_per_node": num_ranks}
        data["profile"] = "H100"

    return load_job(write(tmp_path, change))


def planned(tmp_path: Path, lora: dict[str, Any] | None, strategy: str = "cornstarch", **llm: Any) -> Plan:
    return PLANNERS[strategy](job(tmp_path, lora, **llm), CostModel(load_profile("H100")))


def test_the_job_files_adapters_are_the_models(tmp_path: Path) -> None:
    llm = job(tmp_path, LORA).model.module("llm")
    assert llm.num_trained == 2 * 4 * (4 * 2 * 32 + 3 * (32 + 48))
    assert not any(layer.trainable for layer in llm.layers)
    adapters = {op.lora for layer in llm.layers for op in layer.operators if isinstance(op, Matmul)}
    assert adapters == {None, Lora(rank=4, alpha=8)}
    other = job(tmp_path, {"rank": 2, "modules": "qkv"}).model.module("llm")
    assert other.num_trained == 2 * 2 * 3 * 2 * 32


def test_a_rank_of_zero_is_the_frozen_module(tmp_path: Path) -> None:
    assert plan_hash(planned(tmp_path, LORA | {"rank": 0})) == plan_hash(planned(tmp_path, None))


def test_plan_files_keep_adapters_and_hashes_tell_them_apart(tmp_path: Path) -> None:
    changed = [LORA, LORA | {"rank": 8}, LORA | {"alpha": 16}, LORA | {"modules": "mlp"}]
    made = [planned(tmp_path, lora) for lora in changed]
    assert len({plan_hash(plan) for plan in made}) == len(made)
    assert loads(dumps(made[0])) == made[0]


@pytest.mark.parametrize(
    ("strategy", "llm"),
    [
        pytest.param("cornstarch", {"tp": 1}, id="pipeline"),
        pytest.param("cornstarch", {"tp": 2}, id="tensor"),
        pytest.param("cornstarch", {"tp": 2, "sequence_parallel": True}, id="sequence"),
        pytest.param("fsdp", {"pp": 1}, id="fsdp"),
    ],
)
def test_engine_and_sweep_agree_and_state_is_of_adapters(
    tmp_path: Path, strategy: str, llm: dict[str, Any]
) -> None:
    plan = planned(tmp_path, LORA, strategy, **llm)
    lowered, cost = lower(plan), CostModel(load_profile("H100"))
    prices = price(lowered, cost)
    trace = predict(lowered, memory_table(lowered), cost)
    assert trace.iteration_s == Sweep(lowered).iteration_s(prices.duration_s, prices.step_s)
    state: dict[str, int] = {}
    for rank in plan.ranks:
        for _, kind, num_bytes in state_of(plan, rank):
            if kind.module == "llm":
                state[kind.part] = state.get(kind.part, 0) + num_bytes
    module = plan.model.module("llm")
    if llm.get("tp", 1) == 1 and strategy == "cornstarch":
        assert state == {
            "parameters": 4 * module.num_parameters,
            "gradients": 4 * module.num_trained,
            "optimizer": 8 * module.num_trained,
        }
    else:
        assert state["optimizer"] == 2 * state["gradients"] < state["parameters"]


def test_what_is_reduced_gathered_and_scattered(tmp_path: Path) -> None:
    """Groups hold adapters alone; a unit gathers frozen and trained weights and scatters the trained."""
    plan = planned(tmp_path, LORA, "fsdp", pp=1)
    module = plan.model.module("llm")
    units = [unit for unit in shard_units(plan) if plan.stage[unit.stages[0]].module == "llm"]
    flat = {
        name: sum(f.num_elements for u in units for f in getattr(u, name)) for name in ("trained", "frozen")
    }
    assert flat == {"trained": module.num_trained, "frozen": module.num_parameters - module.num_trained}
    assert all(plan.settings.of(m.name).sharding is Sharding.PARAMETERS for m in plan.model.modules)
    pipeline = planned(tmp_path, LORA)
    groups = [g for g in gradient_groups(pipeline) if g.weights[0].module == "llm"]
    assert sum(group.num_elements for group in groups) == module.num_trained


def test_whole_halves_of_adapters_are_summed_over_tensor_parallel_ranks(tmp_path: Path) -> None:
    """Each rank has a part of their gradients, though it has all tokens: more time in STEP for more rank."""
    times = []
    for rank in (4, 64):
        plan = planned(tmp_path, LORA | {"rank": rank}, tp=2)
        times.append(price(lower(plan), CostModel(load_profile("H100"))).step_s(plan.ranks[-1]))
    assert times[0] < times[1]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"trainable": "all"}, "want trainable 'none' or 'projector', got 'all'"),
        ({"lora": {"rank": -1}}, "lora.rank"),
        ({"lora": {"modules": "heads"}}, "lora.modules"),
        ({"lora": {"alpha": 0}}, "lora.alpha"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    def changed(data: dict[str, Any]) -> None:
        data["model"]["modules"]["llm"] |= {"lora": LORA, **change}

    with pytest.raises(ValueError, match=words):
        load_job(write(tmp_path, changed))


def test_a_job_file_with_adapters_reads_as_yaml(tmp_path: Path) -> None:
    file = write(tmp_path)
    data = yaml.safe_load(file.read_text())
    data["model"]["modules"]["vision"]["lora"] = {"rank": 2}
    file.write_text(yaml.safe_dump(data))
    vision = load_job(file).model.module("vision")
    assert [layer.kind for layer in vision.layers if layer.has_adapters] == [LayerKind.BLOCK] * 2
    assert vision.layers[-1].trainable


@pytest.mark.parametrize("target", ["megatron", "megatron-bridge"])
def test_exports_refuse_adapters_in_one_line(tmp_path: Path, target: str) -> None:
    file = tmp_path / "plan.json"
    write_plan(planned(tmp_path, LORA, "fsdp", pp=1), file, profiles=("H100",))
    words = f"{target} cannot express lora adapters of 'llm'"
    refuse("export", file, "--to", target, "-o", tmp_path / "out", words=words, folder=tmp_path)


def test_a_draft_says_what_it_adapts(tmp_path: Path) -> None:
    """Everything of a dense model; the attention beside experts."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(MIXTRAL))
    for model, modules in (("llama-2-7b", "all"), (config, "attention")):
        file = tmp_path / f"{modules}.yaml"
        accept("init", model, "--gpus", "64xH100", "--train", "lora", "-o", file)
        llm = yaml.safe_load(file.read_text())["model"]["modules"]["llm"]
        assert llm["trainable"] == "none"
        assert llm["lora"] == {"rank": 16, "alpha": 32, "modules": modules}
