"""Algorithm 3: degrees chosen by the formula, compared with simulations of the same configurations.

Paper:   I. Jang, dissertation, section 4.4.3, Algorithm 3, Equation 4.2.
Setup:   Qwen2.5-VL vision and Llama 3 on 16 A40s, 128 samples, four a microbatch; dp, tp and pp are free.
Given:   nothing printed; Tables 4.1 and C.1 fix tp 2 and dp 4 by hand.
Differs: cp stays 1. The formula has mean stage times, no bubbles of unequal microbatches.
Ours:    the best configurations by formula and evenly spaced worse ones, planned and simulated.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from scipy.stats import kendalltau

from experiments.cornstarch.modelled import a40_cost
from experiments.entrain.workload import CORPUS_OF, batch_of, job_of
from experiments.harness.outcome import Evidence
from experiments.harness.script import Parts, script
from sim.predict import candidate_s
from workbench.job.job import Job
from workbench.strategies import entrain
from workbench.strategies.entrain_search import Configuration, configurations

MEANS = "the formula has means of stages, no bubbles of unequal microbatches and no slowest replica"
NUM_SAMPLES, SIMULATED, LLM = 128, 16, "Llama3-3b"


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """A configuration with both scores; None: it does not fit in memory."""

    configuration: Configuration
    simulated_s: float | None


def job(dataset: str) -> Job:
    """The data set's job without layouts."""
    return replace(job_of(dataset, LLM, batch_of(dataset, NUM_SAMPLES, 1)), layouts=())


def simulated(open_job: Job, configuration: Configuration) -> Simulated:
    """Plan and simulate one configuration."""
    plan = entrain.plan(configuration.job(open_job), a40_cost())
    try:
        simulated_s = candidate_s(plan, a40_cost())
    except ValueError:
        return Simulated(configuration=configuration, simulated_s=None)
    return Simulated(configuration=configuration, simulated_s=simulated_s)


def spread(configurations: Sequence[Configuration], count: int) -> tuple[Configuration, ...]:
    """`count` configurations: half the best by formula, half evenly spaced over the others."""
    best, remaining = list(configurations[: count // 2]), configurations[count // 2 :]
    num_others = min(count - len(best), len(remaining))
    return (*best, *(remaining[index * len(remaining) // num_others] for index in range(num_others)))


def named(configuration: Configuration) -> str:
    """A short name, such as dp 2, vision tp 2 pp 4, llm tp 1 pp 8."""
    modules = ", ".join(f"{x.module} tp {x.tp} pp {x.pp}" for x in configuration.layouts)
    return f"dp {configuration.replicas}, {modules}"


def data_set_evidence(dataset: str) -> Evidence:
    """Evidence on both rankings of a data set's configurations."""
    evidence = Evidence()
    ordered = configurations(job(dataset), a40_cost())
    planned = [simulated(job(dataset), configuration) for configuration in spread(ordered, SIMULATED)]
    fitting = [candidate for candidate in planned if candidate.simulated_s]
    formula_s = [candidate.configuration.formula_s for candidate in fitting]
    simulated_s = [candidate.simulated_s or 0.0 for candidate in fitting]
    chosen, best = fitting[0], min(fitting, key=lambda candidate: candidate.simulated_s or 0.0)
    regret = simulated_s[0] / min(simulated_s) - 1
    key = f"modelled/{dataset}"
    agreement = float(kendalltau(formula_s, simulated_s).statistic)
    errors = [a / b - 1 for a, b in zip(formula_s, simulated_s, strict=True)]
    evidence.ours |= {
        f"{key}/configurations": float(len(ordered)),
        f"{key}/kendall_tau": agreement,
        f"{key}/regret": regret,
        f"{key}/formula_error": statistics.median(errors),
    }
    evidence.notes += [
        f"{dataset}: {len(ordered)} configurations; "
        f"{len(fitting)} of the {len(planned)} planned fit in memory",
        f"{dataset}: formula takes {named(chosen.configuration)}: {formula_s[0]:.2f} s, simulated "
        f"{simulated_s[0]:.2f} s; simulator takes {named(best.configuration)}: {min(simulated_s):.2f} s",
    ]
    evidence.claim(
        f"{dataset}: the formula's choice is within 10 % of the best simulated ({regret:.1%});",
        regret < 0.1,
        cause=f"{MEANS}: of {named(chosen.configuration)} it misses {-errors[0]:.0%}, of the best simulated, "
        f"{named(best.configuration)}, {-errors[fitting.index(best)]:.0%}",
    )
    evidence.claim(
        f"{dataset}: both rank alike, Kendall's tau over 0.5 ({agreement:.2f});",
        agreement > 0.5,
        cause=f"{MEANS}: over {len(fitting)} configurations, which are at most "
        f"{max(formula_s) / min(formula_s) - 1:.0%} apart by formula, it misses {-max(errors):.0%} to "
        f"{-min(errors):.0%} of the simulated time",
    )
    return evidence


@script(profile="A40")
def run() -> Parts:
    return map(data_set_evidence, CORPUS_OF)
