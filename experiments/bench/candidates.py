"""Candidate plans per second that a search can evaluate on one core, each differing little from the others.

Setup:   24 GPUs: examples/valm.yaml. Every candidate is one step of a walk that a local search could take: a
         cut between two stages moves by a layer, or the number of samples in a microbatch, of stages of an
         encoder, or of tensor-parallel ranks changes. 1,296 GPUs: the job of `sim_speed`, 18 equal replicas;
         cuts and microbatches change. Each candidate passes every step: stages assigned, samples batched,
         programs made, checked, lowered, deadlock and memory checked, priced, swept. 10,000 GPUs: the same
         job with 139 replicas.
Ours:    candidates divided by CPU seconds of the one thread, and by wall seconds, refused ones included.
         Before: some of the same candidates without caches and with replicas written out, by `accept` and
         `step_s`. Both give the same seconds to the last bit, or the same refusal.
Run:     python -m experiments.bench.candidates [--json]
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from random import Random

from experiments.bench.speed_cases import CASES, PROFILE, Case, cluster_of, model, samples_of
from experiments.harness.command import Found, bench
from sim.predict import candidate_s, step_s
from workbench.collector import collector_paused
from workbench.cost.model import CostModel
from workbench.cost.profile import load_profile
from workbench.job.job import Job, load_job
from workbench.job.machines import cost_of
from workbench.job.module_layout import ModuleLayout
from workbench.plan.folded import Folded
from workbench.plan.lru_cache import clear_caches
from workbench.plan.plan import Plan
from workbench.planner.assembly import disjoint_stages, draft_plan, layout_of, scheduled
from workbench.planner.block_cuts import Cuts
from workbench.planner.one_replica import one_replica
from workbench.timing.accept import accept

VALM = Path(__file__).parents[2] / "examples" / "valm.yaml"
GOALS_PER_S = {"24": 200.0, "1296": 5.0}
GOAL_10000_S = 600.0
SEED = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A job with the stage count and the cuts of every module."""

    job: Job
    cuts: dict[str, Cuts]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Candidates judged per second of CPU and of wall time, and by the earlier way for comparison.

    Args:
        best_s: step of the best candidate.
        is_equal: whether both ways gave the same of all that were judged twice.
    """

    num_candidates: int
    num_refused: int
    per_cpu_s: float
    per_wall_s: float
    before_per_cpu_s: float
    ratio: float
    best_s: float
    is_equal: bool


def even_cuts(num_layers: int, num_stages: int) -> Cuts:
    """Cut every module into stages as evenly as possible."""
    bounds = [round(index * num_layers / num_stages) for index in range(num_stages + 1)]
    return tuple(pairwise(bounds))


def start(job: Job, stages: dict[str, int]) -> Candidate:
    """The candidate with every module cut evenly."""
    cuts = {m.name: even_cuts(len(m.layers), stages[m.name]) for m in job.model.modules}
    return Candidate(job=job, cuts=cuts)


def walk(first: Candidate, moves: Sequence[Callable[[Candidate, Random], Candidate]]) -> Iterator[Candidate]:
    """Yield candidates without end, each one random move from the one before."""
    rng = Random(SEED)
    while True:
        yield first
        first = rng.choice(moves)(first, rng)


def with_other_cut(candidate: Candidate, rng: Random) -> Candidate:
    """Move one layer to a neighbouring stage; unchanged where that would empty a stage."""
    module = rng.choice([name for name, cuts in candidate.cuts.items() if len(cuts) > 1])
    cuts = candidate.cuts[module]
    bounds = [0, *(last for _, last in cuts)]
    bounds[rng.randrange(1, len(cuts))] += rng.choice((-1, 1))
    moved = tuple(pairwise(bounds))
    if any(first >= last for first, last in moved):
        return candidate
    return replace(candidate, cuts={**candidate.cuts, module: moved})


def with_other_microbatch(candidate: Candidate, rng: Random) -> Candidate:
    """Draw another number of samples per microbatch."""
    share = len(candidate.job.batch) // candidate.job.replicas
    sizes = [size for size in (1, 2, 3, 4) if share % size == 0]
    return replace(candidate, job=replace(candidate.job, microbatch_samples=rng.choice(sizes)))


def with_other_stages(candidate: Candidate, rng: Random) -> Candidate:
    """Give an encoder one or two stages."""
    module = rng.choice(["vision", "audio"])
    cuts = even_cuts(len(candidate.job.model.module(module).layers), rng.choice((1, 2)))
    return replace(candidate, cuts={**candidate.cuts, module: cuts})


def with_other_ranks(candidate: Candidate, rng: Random) -> Candidate:
    """Give an encoder one or two tensor-parallel ranks."""
    module = rng.choice(["vision", "audio"])
    layout = replace(layout_of(candidate.job, module), tp=rng.choice((1, 2)))
    others = (other for other in candidate.job.layouts if other.module != module)
    return replace(candidate, job=replace(candidate.job, layouts=(*others, layout)))


def built(candidate: Candidate, cost: CostModel) -> Plan:
    """Build the plan with every replica written out."""
    draft = draft_plan(candidate.job, "candidate")
    stages = disjoint_stages(candidate.job, candidate.cuts)
    return scheduled(replace(draft, stages=stages), candidate.job.schedule, cost)


def folded(candidate: Candidate, cost: CostModel) -> Plan | Folded:
    """Build the plan of one replica where there are several."""
    if candidate.job.replicas == 1:
        return built(candidate, cost)
    one = one_replica(candidate.job)
    return one.folded(built(replace(candidate, job=one.job), cost))


def evaluated(candidate: Candidate, cost: CostModel) -> float | str:
    """Return the seconds of the candidate's step, or the reason why it is refused."""
    try:
        with collector_paused():
            return candidate_s(folded(candidate, cost), cost)
    except ValueError as error:
        return str(error)


def evaluated_uncached(candidate: Candidate, cost: CostModel) -> float | str:
    """Return the same as `evaluated`, from the full plan and with empty caches."""
    clear_caches()
    try:
        lowered, _ = accept(built(candidate, cost))
        return step_s(lowered, cost)
    except ValueError as error:
        return str(error)


def rates(candidates: Sequence[Candidate], cost: CostModel, num_before: int) -> Rates:
    """Judge all candidates one way and a sample of them the other, starting from empty caches."""
    evaluated_uncached(candidates[0], cost)  # compiles, and fills the cost model
    clear_caches()
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    answers = [evaluated(candidate, cost) for candidate in candidates]
    cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - wall_s
    indices = range(0, len(candidates), max(1, len(candidates) // num_before))
    before_s = time.process_time()
    before = [evaluated_uncached(candidates[index], cost) for index in indices]
    before_per_s = len(indices) / (time.process_time() - before_s)
    times_s = [answer for answer in answers if isinstance(answer, float)]
    return Rates(
        num_candidates=len(answers),
        num_refused=len(answers) - len(times_s),
        per_cpu_s=len(answers) / cpu_s,
        per_wall_s=len(answers) / wall_s,
        before_per_cpu_s=before_per_s,
        ratio=len(answers) / cpu_s / before_per_s,
        best_s=min(times_s),
        is_equal=before == [answers[index] for index in indices],
    )


def gpus_24(num_candidates: int) -> tuple[list[Candidate], CostModel]:
    """Walk from the example job; returns the candidates and the cost model of its machine."""
    job = load_job(VALM)
    moves = (with_other_cut, with_other_cut, with_other_microbatch, with_other_stages, with_other_ranks)
    steps = walk(start(job, {"vision": 2, "audio": 2, "llm": 8}), moves)
    return [next(steps) for _ in range(num_candidates)], cost_of(job, None, None)


def many_gpus(num_candidates: int, case: Case) -> tuple[list[Candidate], CostModel]:
    """Walk from a large job; returns the candidates and the cost model of its machine."""
    layouts = tuple(ModuleLayout(module=name, tp=tp) for name, (_, tp) in case.layout.items())
    job = Job(
        name=case.name,
        model=model(case.llm),
        cluster=cluster_of(case),
        batch=samples_of(case),
        microbatch_samples=case.samples,
        replicas=case.replicas,
        layouts=layouts,
        profile=PROFILE,
    )
    steps = walk(
        start(job, {name: pp for name, (pp, _) in case.layout.items()}),
        (with_other_cut, with_other_cut, with_other_microbatch),
    )
    return [next(steps) for _ in range(num_candidates)], CostModel(load_profile(PROFILE))


def show(name: str, rates_of_size: Rates) -> None:
    """Print one line for a size."""
    print(
        f"{name:>6} GPUs: {rates_of_size.num_candidates} candidates ({rates_of_size.num_refused} refused), "
        f"{rates_of_size.per_cpu_s:.1f} a CPU second, {rates_of_size.per_wall_s:.1f} a second, before "
        f"{rates_of_size.before_per_cpu_s:.2f}: {rates_of_size.ratio:.0f} times, "
        f"{'equal' if rates_of_size.is_equal else 'UNEQUAL'}; best {rates_of_size.best_s:.4g} s",
        flush=True,
    )


@bench(candidates="at 24 GPUs; a tenth of it at more")
def run(candidates: int = 1000) -> Found:
    """Measure the three sizes; a claim fails where the two ways differ or a goal is missed."""
    num_large = max(4, candidates // 10)
    large = CASES[2]
    rates_by_size = {
        "24": rates(*gpus_24(candidates), num_before=20),
        "1296": rates(*many_gpus(num_large, large), num_before=2),
    }
    for name, rates_of_size in rates_by_size.items():
        show(name, rates_of_size)
    huge = replace(large, name="10008 GPUs", replicas=139)
    of_huge, cost = many_gpus(num_large, huge)
    clear_caches()
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    times_s = [evaluated(candidate, cost) for candidate in of_huge]
    cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - wall_s
    best_s = min(rates_of_size for rates_of_size in times_s if isinstance(rates_of_size, float))
    print(f" 10008 GPUs: {num_large} candidates in {cpu_s:.1f} CPU s, {wall_s:.1f} s; best {best_s:.4g} s")
    record = {
        "candidates_per_s_24": rates_by_size["24"].per_cpu_s,
        "candidates_per_s_1296": rates_by_size["1296"].per_cpu_s,
        "seconds_10000": wall_s,
        "cpu_seconds_10000": cpu_s,
        "candidates_10000": num_large,
        "rates": {name: asdict(rates_of_size) for name, rates_of_size in rates_by_size.items()},
    }
    claims = {
        "both ways give the same": all(rates_of_size.is_equal for rates_of_size in rates_by_size.values()),
        "as many a second as the goals say": all(
            rates_by_size[name].per_cpu_s >= goal for name, goal in GOALS_PER_S.items()
        ),
        f"all on 10,008 GPUs in {GOAL_10000_S:g} s": wall_s < GOAL_10000_S,
    }
    return Found(record, claims)
