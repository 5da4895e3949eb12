"""The joint search's plan, the best single strategy's and two between them, predicted and then executed.

Setup:   a SigLIP in front of a Llama, all trained, 24 samples of unequal sizes. Four gloo ranks on this
         machine's cores, and eight ranks with a core each by emulation. Stages of one rank, since layers are
         measured whole: the search is over layouts, cuts, schedules, replicas and grouping.
Ours:    layers are measured; strategies and joint search plan with that profile; predictions of all parts are
         written with the plans' hashes, and only then does any plan run, all in turn, round after round.
         Gains are ratios of medians over rounds with percentile intervals of the bootstrap. Emulated plans
         take turns in blocks of steps, since each start costs as much as several. Measurements, searches and
         runs are stored in the folder, and `--resume` continues from them.
Run:     python -m experiments.search.executed [--json] [--rounds N] [--candidates N] [--part PART] [--resume]
         [--out FOLDER]
"""

import hashlib
import json
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from experiments.entrain.executed import cases_of, charts_job, made_by, rows_of, seconds_by_plan, skewed_batch
from experiments.entrain.intervals import Interval, ratio_of_medians
from experiments.fidelity import plan_runs
from experiments.fidelity.cases import CROWD, Case, Part
from experiments.fidelity.work import UNMEASURED, this_machine
from experiments.harness.command import command_line, finish
from experiments.harness.record import RESULTS
from experiments.search.best_single import best_of, own_searches
from runtime.world.pool import Pool
from sim.predict import IterationJudge
from workbench.cost.hardware import Link
from workbench.cost.model import CostModel
from workbench.cost.profile import Profile, ideal_profile
from workbench.explain.timeline import Timeline
from workbench.job.job import Job
from workbench.job.module_layout import ModuleLayout
from workbench.plan.codec import plan_hash, read_plan, write_plan
from workbench.plan.plan import Plan, Sharding
from workbench.report.progress import ticking
from workbench.search.joint.drive import joint_search
from workbench.search.joint.result import SearchResult
from workbench.search.joint.terms import Scope, Stop
from workbench.strategies import cornstarch
from workbench.strategies.registry import PLANNERS
from workbench.whole_file import write_text

OUT = Path("out/search_executed")
RESULT = RESULTS / "search_executed.json"
ROUNDS, CANDIDATES, OWN_BUDGET_S = 30, 2000, 4.0
BLOCK = 5  # steps of an emulated plan, before the next one's
CHOSEN = "chosen.json"
WINNER, SINGLE = "joint", "best single"
NUM_SAMPLES, SEED = 24, 1
RANKS: Mapping[Part, int] = {Part.CROWDED: CROWD, Part.EMULATED: 8}


def job_on(part: Part, link: Link) -> Job:
    """The job on the ranks of a part, with open layouts."""
    ranks = RANKS[part]
    cores = ranks if part is Part.EMULATED else None
    cluster = this_machine(link, ranks, num_cores=cores)
    batch = skewed_batch(NUM_SAMPLES, SEED)
    return charts_job(f"charts on {ranks} ranks", cluster, batch, vision_blocks=6, llm_blocks=4)


@dataclass(frozen=True, slots=True)
class MeasuredJudge:
    """Judges plans whose layers were measured: stages of one rank with whole weights."""

    judge: IterationJudge

    def value(self, plan: Plan) -> float:
        """Seconds of a step; ValueError for what was not measured, and as the judge."""
        if any(len(stage.flat_ranks) > 1 for stage in plan.stages):
            raise ValueError("stages of several ranks were not measured")
        if any(
            settings.sharding is not Sharding.NONE or settings.sequence_parallel
            for settings in plan.settings.modules
        ):
            raise ValueError("sharded state was not measured")
        return self.judge.value(plan)

    def timeline(self, plan: Plan) -> Timeline:
        """The timeline of the underlying judge."""
        return self.judge.timeline(plan)


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched:
    """The plans of a part to be executed.

    Args:
        best_single: the best single strategy.
        candidates: number of the joint search's.
        seconds: of all searches.
        plans: by name, best first, from the winner to the best single strategy's.
    """

    best_single: str
    candidates: int
    seconds: float
    plans: Mapping[str, Plan]


def kept(part: Part, profile: Profile, folder: Path, candidates: int, own_budget_s: float) -> Searched:
    """As `searched`, but stored results are reused, so that plans and predictions stay the same."""
    path = folder / CHOSEN
    if not path.is_file():
        result = searched(part, profile, candidates, own_budget_s)
        for name, plan in result.plans.items():
            write_plan(plan, folder / f"{name}.plan.json")
        stored = {
            "best_single": result.best_single,
            "candidates": result.candidates,
            "seconds": result.seconds,
            "plans": list(result.plans),
        }
        write_text(json.dumps(stored) + "\n", path)
    stored = json.loads(path.read_text())
    return Searched(
        best_single=stored["best_single"],
        candidates=stored["candidates"],
        seconds=stored["seconds"],
        plans={name: read_plan(folder / f"{name}.plan.json") for name in stored["plans"]},
    )


def searched(part: Part, profile: Profile, candidates: int, own_budget_s: float) -> Searched:
    """The joint search's plan, the best single strategy's, and up to two with times in between.

    Raises:
        ValueError: no strategy has a plan.
    """
    started_s = time.monotonic()
    job, cost = job_on(part, profile.machine_link("intra").link), CostModel(profile)
    judge = MeasuredJudge(IterationJudge(cost))
    own_results = {
        each.strategy: each
        for each in own_searches(
            job, cost, judge, PLANNERS, budget_s=own_budget_s, seed=SEED, clock=time.process_time
        )
    }
    best = best_of(own_results)
    assert best.plan is not None, "the best one has a plan"
    assert best.value is not None, "the best one has a value"
    shorter = [_search(job, cost, judge, max(1, candidates // share)) for share in (64, 8)]
    joint = _search(job, cost, judge, candidates)
    pool = [(each.value, each.plan) for each in shorter] + list(joint.runners_up)
    between = _between(pool, joint.value, best.value)
    plans = {WINNER: joint.plan}
    plans |= {f"between {number}": plan for number, plan in enumerate(between, 1)}
    if plan_hash(replace(best.plan, strategy=WINNER)) != plan_hash(replace(joint.plan, strategy=WINNER)):
        plans[SINGLE] = best.plan
    return Searched(
        best_single=best.strategy,
        candidates=joint.candidates,
        seconds=time.monotonic() - started_s,
        plans=plans,
    )


def _search(job: Job, cost: CostModel, judge: MeasuredJudge, candidates: int) -> SearchResult:
    return joint_search(job, cost, judge, stop=Stop(candidates=candidates), scope=Scope(seed=SEED))


def _between(pool: Sequence[tuple[float, Plan]], low: float, high: float) -> list[Plan]:
    """Two plans with values between, those nearest to a third and two thirds of the way."""
    inside = {value: plan for value, plan in pool if low < value < high}
    selected: list[Plan] = []
    for share in (1 / 3, 2 / 3):
        if inside:
            nearest = min(inside, key=lambda value: abs(value - low - share * (high - low)))
            selected.append(inside.pop(nearest))
    return selected


def unpriced(parts: Sequence[Part]) -> Iterator[Case]:
    """Plans whose layers and sums of gradients are measured."""
    cost = CostModel(ideal_profile())
    for part in parts:
        job = job_on(part, UNMEASURED)
        layouts = tuple(ModuleLayout(module=module.name, pp=1) for module in job.model.modules)
        for replicas in (1, 2):
            plan = cornstarch.plan(replace(job, layouts=layouts, replicas=replicas), cost)
            yield Case(name=f"{part} x{replicas}", job="search", part=part, plan=plan)


def run(
    out: Path, parts: Sequence[Part], *, rounds: int, candidates: int, own_budget_s: float, is_quiet: bool
) -> dict[str, Any]:
    """Calibrate, search, predict and execute; continues an earlier run in the same folder."""
    started_s = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    with Pool(CROWD) as pool:
        with ticking("calibrating", None, quiet=is_quiet) as ticker:
            profile = plan_runs.calibrate(tuple(unpriced(parts)), pool, out, ticker.at, budget_s=0.2)
        calibrated_s = time.monotonic() - started_s
        predicted = [_predicted(part, profile, out, candidates, own_budget_s) for part in parts]
        records = {
            one.part.value: _executed(one, out / one.part, pool, rounds=rounds, is_quiet=is_quiet)
            for one in predicted
        }
    return {
        **made_by("search/executed", rounds),
        "parts": records,
        "calibrated_seconds": calibrated_s,
        "seconds": time.monotonic() - started_s,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A part whose predictions are written."""

    part: Part
    chosen: Searched
    predicted: tuple[plan_runs.Predicted, ...]
    digest: str


def _predicted(part: Part, profile: Profile, out: Path, candidates: int, own_budget_s: float) -> _Part:
    folder = out / part
    folder.mkdir(exist_ok=True)
    selected = kept(part, profile, folder, candidates, own_budget_s)
    predicted = tuple(
        plan_runs.predict(case, profile) for case in cases_of(selected.plans, f"search, {part}", part)
    )
    plan_runs.write_predictions(predicted, folder)
    digest = hashlib.sha256((folder / plan_runs.PREDICTIONS).read_bytes()).hexdigest()
    print(f"{part}: predictions {digest}, searched in {selected.seconds:.0f} s", file=sys.stderr, flush=True)
    return _Part(part=part, chosen=selected, predicted=predicted, digest=digest)


def _executed(part: _Part, folder: Path, pool: Pool, *, rounds: int, is_quiet: bool) -> dict[str, Any]:
    """The part's record, after all rounds; ValueError where a plan does not run."""
    started_s = time.monotonic()
    taken_s: dict[str, list[float]] = {each.case.name: [] for each in part.predicted}
    for runs in _turns(part.part, folder, pool, rounds):
        for name, seconds in seconds_by_plan(
            runs, part.predicted, part.part.value, is_quiet=is_quiet
        ).items():
            taken_s[name] += seconds
    return {
        "ranks": RANKS[part.part],
        "best_single": part.chosen.best_single,
        "candidates": part.chosen.candidates,
        "predictions_sha256": part.digest,
        "searched_seconds": part.chosen.seconds,
        "executed_seconds": time.monotonic() - started_s,
        **summary(part.predicted, taken_s),
    }


def _turns(part: Part, folder: Path, pool: Pool, rounds: int) -> Iterator[plan_runs.Runs]:
    """Turns in which every plan runs once a round; emulated plans run in blocks of steps."""
    if part is not Part.EMULATED:
        yield plan_runs.Runs(folder, rounds=rounds, steps=1, pool=pool)
        return
    for first in range(0, rounds, BLOCK):
        turn = folder / f"from step {first}"
        turn.mkdir(exist_ok=True)
        yield plan_runs.Runs(turn, rounds=1, steps=min(BLOCK, rounds - first), pool=pool)


def summary(
    predicted: Sequence[plan_runs.Predicted], executed_s: Mapping[str, Sequence[float]]
) -> dict[str, Any]:
    """Seconds of every plan, and the winner's gain over the best single strategy, predicted and executed.

    Where both are the same plan, the gain is 1 without an interval.
    """
    rows = rows_of(predicted, executed_s)
    if SINGLE not in rows:
        return {"plans": rows, "predicted_gain": 1.0, "executed_gain": 1.0, "interval_95": None}
    gain = ratio_of_medians([executed_s[SINGLE]], executed_s[WINNER])
    return {
        "plans": rows,
        "predicted_gain": rows[SINGLE]["predicted_s"] / rows[WINNER]["predicted_s"],
        "executed_gain": gain.mean,
        "interval_95": [gain.low, gain.high],
    }


def lines(result: Mapping[str, Any]) -> Iterator[str]:
    """The table that the command prints."""
    for name, part in result["parts"].items():
        yield f"{name}, {part['ranks']} ranks, best single strategy {part['best_single']}"
        for plan, row in part["plans"].items():
            yield f"  {plan:12} predicted {row['predicted_s']:.4f} s, executed {row['executed_s']:.4f} s"
        gain_text = "the same plan"
        if part["interval_95"] is not None:
            gain_text = str(Interval(part["executed_gain"], *part["interval_95"]))
        yield f"  predicted_gain {part['predicted_gain']:.3f}, executed_gain {gain_text}"


def main() -> int:
    """0 when the winner is no slower where its interval says anything, 1 when it is, 2 for bad input."""
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--candidates", type=int, default=CANDIDATES)
    parser.add_argument(
        "--own-budget", type=float, default=OWN_BUDGET_S, help="CPU seconds of every strategy's"
    )
    parser.add_argument("--part", choices=[part.value for part in RANKS], action="append")
    parser.add_argument("--resume", action="store_true", help="continue from the files in the folder")
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    if arguments.rounds < 2 or arguments.candidates < 1 or arguments.own_budget <= 0:
        parser.error(
            f"want --rounds >= 2 for an interval, --candidates >= 1 and --own-budget > 0, got "
            f"{arguments.rounds}, {arguments.candidates} and {arguments.own_budget}"
        )
    if not arguments.resume:
        shutil.rmtree(arguments.out, ignore_errors=True)
    parts = [Part(name) for name in arguments.part or [part.value for part in RANKS]]
    result = run(
        arguments.out,
        parts,
        rounds=arguments.rounds,
        candidates=arguments.candidates,
        own_budget_s=arguments.own_budget,
        is_quiet=arguments.json,
    )
    print("\n".join(lines(result)))
    is_whole = arguments.rounds >= ROUNDS and len(parts) == len(RANKS)
    intervals = [part["interval_95"] for part in result["parts"].values()]
    holds = all(interval is None or interval[1] >= 1 for interval in intervals)
    return finish(result, out=RESULT if is_whole else None, as_json=arguments.json, holds=holds)


if __name__ == "__main__":
    sys.exit(main())
