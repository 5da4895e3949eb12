"""The orchestration's formula against the simulator: what it misses, and what the search loses by it.

Paper:   Z. Zhang et al., "DistTrain", sections 4.2 and 4.3; nothing is printed about the formula's error.
Setup:   MLLM-9B and MLLM-15B on 4 nodes of 8 A100, a batch of 32 samples with two images read and one drawn,
         ZeRO-1. The best degrees by formula for every data-parallel degree of the LLM, as printed and with
         whole layers; each is built, checked and simulated.
Ours:    formula and simulator have the same cost model.
Differs: smaller than the paper's clusters, so that every candidate is simulated.
"""

from dataclasses import dataclass, replace
from math import ceil
from operator import attrgetter

from scipy.stats import kendalltau

from experiments.disttrain import systems
from experiments.harness.outcome import Evidence
from experiments.harness.script import script
from sim.predict import candidate_s
from workbench.balance.orchestration.exact import best_of_every_pace, evaluate
from workbench.balance.orchestration.task import Cut, Orchestration, Task
from workbench.cost.hardware import Link, Node, uniform
from workbench.cost.model import CostModel
from workbench.cost.profile import load_profile
from workbench.data.corpus import ItemTokens, fixed_samples
from workbench.job.job import Job
from workbench.model.model_graph import TEXT
from workbench.plan.plan import ModuleSettings, Settings, Sharding
from workbench.strategies import megatron_heterogeneous
from workbench.strategies.disttrain import task_of, with_degrees

MODELS = ("MLLM-9B", "MLLM-15B")
FORMULAS = {"printed": attrgetter("printed_s"), "whole layers": attrgetter("whole_s")}  # of a candidate
NODES, BATCH = 4, 32
IMAGES, PATCHES, LATENTS, TOKENS = systems.Images(read=2, drawn=1), 1024, 4096, 8192
FABRIC = Link(name="RDMA, one GPU's part", bytes_per_s=systems.FABRIC_BYTES_PER_S, latency_s=5e-6)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Degrees, both formulas' seconds, and the simulated ones; None: it does not fit."""

    orchestration: Orchestration
    printed_s: float
    whole_s: float
    simulated_s: float | None


def job_of(model: str, nodes: int = NODES, batch: int = BATCH) -> Job:
    """The job of a model on a small cluster."""
    graph = systems.Systems(systems.Workload(model=model, images=IMAGES)).model
    node = Node(
        device=systems.PROFILE,
        num_ranks=systems.NODE_GPUS,
        memory_bytes=80 * 10**9,
        num_cards=systems.NODE_GPUS,
    )
    items = {
        "vision": [ItemTokens(PATCHES, PATCHES)] * IMAGES.read,
        "generator": [ItemTokens(LATENTS, LATENTS)] * IMAGES.drawn,
    }
    return Job(
        name=model,
        model=graph,
        cluster=uniform(model, node, num_nodes=nodes, intra=systems.NVLINK, inter=FABRIC),
        batch=fixed_samples(batch, text_tokens=TOKENS - IMAGES.read * PATCHES, items=items),
        settings=Settings(
            modules=tuple(ModuleSettings(module=m.name, sharding=Sharding.OPTIMIZER) for m in graph.modules)
        ),
        profile=systems.PROFILE,
    )


def candidates(job: Job, cost: CostModel) -> tuple[Candidate, ...]:
    """The distinct best candidates of both formulas, at every pace."""
    whole = task_of(job, cost)
    printed = replace(whole, cut=Cut.EQUAL)
    by_degrees = {
        orchestration.degrees: orchestration
        for task in (printed, whole)
        for orchestration in best_of_every_pace(task)
    }
    return tuple(
        _candidate(job, cost, printed, whole, orchestration) for orchestration in by_degrees.values()
    )


def _candidate(
    job: Job, cost: CostModel, printed: Task, whole: Task, orchestration: Orchestration
) -> Candidate:
    simulated_s: float | None = None
    try:
        plan = megatron_heterogeneous.plan(with_degrees(job, orchestration), cost)
        simulated_s = candidate_s(plan, cost)
    except ValueError:
        pass  # does not fit: that is what is counted
    return Candidate(
        orchestration=orchestration,
        printed_s=evaluate(printed, orchestration.degrees).iteration_s,
        whole_s=evaluate(whole, orchestration.degrees).iteration_s,
        simulated_s=simulated_s,
    )


def add_model(evidence: Evidence, model: str, tried: tuple[Candidate, ...]) -> None:
    """Add errors, ranking and regret of both formulas over fitting candidates."""
    fitting = [(candidate, candidate.simulated_s) for candidate in tried if candidate.simulated_s is not None]
    least_s = min(seconds for _, seconds in fitting)
    first = min(tried, key=lambda candidate: candidate.printed_s)
    evidence.claim(f"{model}: the printed formula's own choice fits", first.simulated_s is not None)
    evidence.ours[f"modelled/{model}/candidates"] = len(tried)
    evidence.ours[f"modelled/{model}/that fit"] = len(fitting)
    for name, seconds in FORMULAS.items():
        best, chosen_s = min(fitting, key=lambda candidate: seconds(candidate[0]))
        tau = kendalltau([seconds(candidate) for candidate, _ in fitting], [s for _, s in fitting]).statistic
        error = sum(seconds(candidate) / s - 1 for candidate, s in fitting) / len(fitting)
        key = f"modelled/{model}/{name}"
        evidence.ours |= {
            f"{key}/mean_error": error,
            f"{key}/tau": float(tau),
            f"{key}/regret": chosen_s / least_s - 1,
        }
        degrees = ", ".join(f"{d.tp}x{d.dp}x{d.pp}" for d in best.orchestration.degrees)
        evidence.notes.append(
            f"{model}, {name}: {error:+.1%} off the simulator in the mean, tau {tau:.2f}; {len(fitting)} of "
            f"{len(tried)} fit, of these it picks {degrees}: {chosen_s:.2f} s, "
            f"{chosen_s / least_s - 1:.1%} above the best"
        )


def _why_regretted(model: str, formula: str, tried: tuple[Candidate, ...]) -> str:
    """The layers of the longest stage in the formula's choice, against equal shares of them."""
    fitting = [candidate for candidate in tried if candidate.simulated_s is not None]
    choice = min(fitting, key=FORMULAS[formula]).orchestration.degrees
    (index,) = (i for i, module in enumerate(job_of(model).model.modules) if module.modality == TEXT)
    num_layers, num_stages = len(job_of(model).model.modules[index].layers), choice[index].pp
    return (
        f"it cuts {num_layers} layers of the LLM into {num_stages} stages, which the printed formula takes "
        f"to be equal: the longest has {ceil(num_layers / num_stages)} layers or more, "
        f"{num_layers / num_stages:.1f} are its share"
    )


@script(profile=systems.PROFILE)
def run() -> Evidence:
    evidence, cost = Evidence(), CostModel(load_profile(systems.PROFILE))
    for model in MODELS:
        tried = candidates(job_of(model), cost)
        add_model(evidence, model, tried)
        for formula in FORMULAS:
            regret = evidence.ours[f"modelled/{model}/{formula}/regret"]
            evidence.claim(
                f"{model}: {formula}: its choice is within 5 % of the best simulated",
                regret <= 0.05,
                cause=_why_regretted(model, formula, tried),
            )
    return evidence
