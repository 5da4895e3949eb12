"""Steps of FSDP on unequal samples, by the rule that gives ranks their samples.

Paper:   none; `fsdp` leaves samples where they came, as its sources do. Cf. Entrain (dissertation), 4.2.
Setup:   256 samples of each of Entrain's data sets, by our corpora; Llama 3.2 3B behind Qwen2.5-VL's encoder,
         all trained, on 32 H100 in nodes of eight. The plan is that of `fsdp`.
Ours:    the simulated step of that plan with its samples grouped by each rule of `planner.groupings`, and
         CPU seconds of the last one; null where the plan then does not fit in memory.
Run:     python -m experiments.bench.groupings [--json]
"""

import time
from dataclasses import asdict, dataclass
from functools import partial

from experiments.bench.speed_cases import INFINIBAND, NVLINK, PROFILE
from experiments.entrain.workload import CORPUS_OF, batch_of, model
from experiments.harness.command import Found, bench, print_rows, timed
from sim.predict import IterationJudge
from workbench.cost.hardware import Node, uniform
from workbench.cost.model import CostModel
from workbench.cost.profile import load_profile
from workbench.job.job import Job
from workbench.planner.groupings import Grouping, grouped
from workbench.planner.stage_counts import silent
from workbench.search.joint.choice import choice_of
from workbench.search.joint.evaluate import changed, plan_of
from workbench.search.joint.grouping_moves import Regroup
from workbench.search.joint.move import Space
from workbench.strategies.registry import PLANNERS

NUM_NODES, RANKS_PER_NODE = 4, 8
LLM, NUM_SAMPLES, SEED = "Llama3-3b", 256, 1
RULES = (Grouping.ARRIVAL, Grouping.EVEN, Grouping.EVEN_COUNTS, Grouping.EVEN_MODULES)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupingRow:
    """One data set: microbatches in all, and seconds of the step by rule; those of grouping are CPU time."""

    dataset: str
    num_microbatches: int
    step_s: dict[str, float | None]
    even_modules_took_s: float


def job_of(dataset: str) -> Job:
    """The job with its layouts open."""
    node = Node(device=PROFILE, num_ranks=RANKS_PER_NODE, memory_bytes=80 * 10**9)
    return Job(
        name=dataset,
        model=model(LLM),
        cluster=uniform("bench", node, num_nodes=NUM_NODES, intra=NVLINK, inter=INFINIBAND),
        batch=batch_of(dataset, NUM_SAMPLES, SEED),
        microbatch_samples=1,
        profile=PROFILE,
    )


def measure(dataset: str) -> GroupingRow:
    """The plan of a data set's job, grouped by every rule."""
    job, cost = job_of(dataset), CostModel(load_profile(PROFILE))
    space, judge = Space(job, cost, {}), IterationJudge(cost)
    choice = choice_of(job, PLANNERS["fsdp"](job, cost, silent), cost)

    def step_s(rule: Grouping) -> float | None:
        try:
            return judge.value(plan_of(space, changed(space, choice, (Regroup(rule),))))
        except ValueError:
            return None

    steps = {rule.value: step_s(rule) for rule in RULES}
    count = len([each for each in choice.microbatches if each.module == job.model.llm.name])
    ranks = job.cluster.num_ranks
    group = partial(grouped, job, cost, Grouping.EVEN_MODULES, count, ranks)
    took_s, _ = timed(group, time.process_time)
    return GroupingRow(dataset=dataset, num_microbatches=count, step_s=steps, even_modules_took_s=took_s)


@bench()
def run() -> Found:
    """Print the table, or JSON as the last line."""
    rows = print_rows(
        f"{'data set':14s} microbatches  " + "  ".join(rule.value for rule in RULES),
        map(measure, CORPUS_OF),
        lambda row: (
            f"{row.dataset:14s} {row.num_microbatches:12d}  "
            + "  ".join(
                f"{'does not fit' if seconds is None else f'{seconds:.4f} s':>{len(rule)}s}"
                for rule, seconds in row.step_s.items()
            )
            + f"   ({1e3 * row.even_modules_took_s:.1f} ms)"
        ),
    )
    best = Grouping.EVEN_MODULES.value
    claims = {
        f"{best} are the fastest of all on {row.dataset}": row.step_s[best]
        == min(seconds for seconds in row.step_s.values() if seconds is not None)
        for row in rows
    }
    return Found({"rows": [asdict(row) for row in rows]}, claims)
