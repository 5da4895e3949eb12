"""Expert parallelism: predicted and executed step times, and whether tokens spread as the cost model assumes.

Paper:   none; DistTrain (section 4.1) takes expert parallelism to behave as tensor parallelism does.
Setup:   a Mixtral of 2 blocks (width 256, 4 experts of 512, 2 a token), 4 samples of 256 tokens one by one,
         float32, two gloo ranks on two cores: tokens divided (cp 2) or weights divided (tp 2), each without
         and with expert parallelism (ep 2). This machine is measured first, predictions are made before any
         plan runs, and plans alternate.
Ours:    seconds of a step, predicted and as the median of the runs with their spread; rows of the busiest
         rank over the mean, with a freshly initialised router and as the cost model assumes.
Differs: a freshly initialised router is not a trained one.
Run:     python -m experiments.bench.expert_parallel [--rounds 3] [--json]
"""

import statistics
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from experiments.fidelity.work import text_only, text_samples, this_machine
from experiments.harness.command import Found, bench, want_at_least
from runtime.data.batches import SyntheticSource, microbatch_data
from runtime.launch import run_local
from runtime.measure.plans import BenchSettings, measure
from runtime.models.adapter import StageLayer
from runtime.run_settings import RunSettings
from runtime.step.stage_module import StageInput, build_stage_module
from runtime.world.pool import Pool
from sim.predict import predict
from workbench.calibrate.fit import fit
from workbench.cost.expert_load import busiest_share
from workbench.cost.hardware import Link
from workbench.cost.model import CostModel
from workbench.cost.profile import Profile, load_profile
from workbench.job.job import Job
from workbench.job.module_layout import ModuleLayout
from workbench.model.hf_config import module_from_config
from workbench.model.model_graph import TEXT
from workbench.plan.kernels import Kernels
from workbench.plan.plan import Plan, Precision, Settings
from workbench.strategies import megatron_heterogeneous
from workbench.timing.accept import accept

NUM_RANKS, TOKENS, NUM_SAMPLES, CHOSEN, NUM_EXPERTS = 2, 256, 4, 2, 4
LEAST_BUDGET_S = 1e-3
MODEL: dict[str, Any] = {
    "model_type": "mixtral",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "num_local_experts": NUM_EXPERTS,
    "num_experts_per_tok": CHOSEN,
}
GRIDS = {"cp2": (1, 2, 1), "cp2_ep2": (1, 2, 2), "tp2": (2, 1, 1), "tp2_ep2": (2, 1, 2)}
DEGREES = (2, 4)  # among how many ranks a fresh router's rows are counted
UNMEASURED = Link(name="unmeasured", bytes_per_s=1e9, latency_s=0.0)


def moe_plan(tp: int, cp: int, ep: int, cost: CostModel, link: Link = UNMEASURED) -> Plan:
    """Plan of the model on one stage of tp x cp ranks."""
    llm = module_from_config(MODEL, name="llm", modality=TEXT)
    job = Job(
        name="experts",
        model=text_only(llm),
        cluster=this_machine(link, NUM_RANKS),
        batch=text_samples((TOKENS,) * NUM_SAMPLES),
        layouts=(ModuleLayout(module="llm", pp=1, tp=tp, cp=cp, ep=ep),),
        settings=Settings(precision=Precision.FLOAT32, kernels=Kernels.EAGER),
        profile="A40",
    )
    return megatron_heterogeneous.plan(job, cost)


def calibrated(pool: Pool, budget_s: float) -> Profile:
    """Profile this machine for the layers of one rank and of two that share tokens."""
    anywhere = CostModel(load_profile("A40"))  # stages are given: costs decide nothing
    plans = [moe_plan(*grid, anywhere) for grid in ((1, 2, 1), (1, 1, 1))]
    settings = BenchSettings(concurrency=NUM_RANKS, budget_s=budget_s)
    return fit("this machine", [measure(plans, pool, settings=settings)])


def executed_s(plans: Sequence[Plan], pool: Pool, rounds: int) -> list[list[float]]:
    """Execute the plans in turns; returns the seconds of every plan's steps."""
    seconds_of_plans: list[list[float]] = [[] for _ in plans]
    for _ in range(rounds):
        for plan, seconds in zip(plans, seconds_of_plans, strict=True):
            result = run_local(plan, RunSettings(warmup=2, steps=3), pool=pool)
            seconds += [trace.iteration_s for trace in result.traces]
    return seconds_of_plans


def fresh_choices() -> list[Tensor]:
    """Return [T, K] the experts a freshly initialised router chooses, by block and sample."""
    plan = moe_plan(1, 1, 1, CostModel(load_profile("A40")))
    module = build_stage_module(plan, plan.stages[0], seed=0, dtype=torch.float32)
    choices: list[Tensor] = []
    for layer in module.layers:
        assert isinstance(layer, StageLayer)
        for mixture in layer.mixtures().values():
            mixture.module.gate.register_forward_hook(lambda _, __, output: choices.append(output[2]))
    for microbatch in plan.microbatches:
        data = microbatch_data(
            plan,
            plan.stages[0],
            microbatch,
            SyntheticSource(0),
            dtype=torch.float32,
            device="cpu",
            context=None,
        )
        with torch.no_grad():
            module(StageInput(None, data))
    return choices


def busiest(experts: Tensor, num_experts: int, ep: int) -> float:
    """Rows of the busiest rank over the mean for [T, K] choices; neighbouring experts share a rank."""
    counts = torch.bincount(experts.reshape(-1), minlength=num_experts).view(ep, -1).sum(1)
    return float(counts.max() / counts.double().mean())


def routing() -> dict[str, float]:
    """By degree, the busiest rank's share as counted (mean over blocks and samples) and as assumed."""
    choices = fresh_choices()
    busiest_by_degree: dict[str, float] = {}
    for ep in DEGREES:
        counted = [busiest(experts_TK, NUM_EXPERTS, ep) for experts_TK in choices]
        busiest_by_degree[f"busiest.ep{ep}.counted"] = statistics.mean(counted)
        busiest_by_degree[f"busiest.ep{ep}.assumed"] = busiest_share(TOKENS * CHOSEN, ep)
    return busiest_by_degree


def step_times(rounds: int, budget_s: float) -> dict[str, float]:
    """By grid: predicted and executed (median) seconds, the error, and the quartile spread of the runs."""
    with Pool(NUM_RANKS) as pool:
        profile = calibrated(pool, budget_s)
        cost = CostModel(profile)
        link = profile.machine_link("intra").link
        plans = {name: moe_plan(*grid, cost, link) for name, grid in GRIDS.items()}
        predicted_s = {name: predict(*accept(plan), cost).iteration_s for name, plan in plans.items()}
        seconds = executed_s(list(plans.values()), pool, rounds)
    values: dict[str, float] = {}
    for name, step_s in zip(plans, seconds, strict=True):
        median, quarters = statistics.median(step_s), statistics.quantiles(step_s, n=4)
        values[f"{name}.predicted_s"], values[f"{name}.executed_s"] = predicted_s[name], median
        values[f"{name}.error"] = predicted_s[name] / median - 1
        values[f"{name}.spread"] = (quarters[2] - quarters[0]) / median
    return values


@bench(budget_s="of each kind of pass that is measured")
def run(rounds: int = 3, budget_s: float = 0.1) -> Found:
    """Print predictions, runs and counts; there is no goal to miss."""
    want_at_least(1, rounds=rounds)
    want_at_least(LEAST_BUDGET_S, budget_s=budget_s)
    record = step_times(rounds, budget_s) | routing()
    for name in GRIDS:
        print(
            f"{name:8} predicted {record[f'{name}.predicted_s'] * 1e3:7.1f} ms, executed "
            f"{record[f'{name}.executed_s'] * 1e3:7.1f} ms, error {record[f'{name}.error']:+.1%}, "
            f"spread {record[f'{name}.spread']:.1%}"
        )
    for ep in DEGREES:
        counted, assumed = record[f"busiest.ep{ep}.counted"], record[f"busiest.ep{ep}.assumed"]
        print(f"busiest of {ep}: {counted:.3f} of the mean as counted, {assumed:.3f} as assumed")
    return Found(record)
