"""Entrain's plan against 1F1B in random order, predicted and then executed on this machine.

Setup:   two gloo ranks, each with a core of its own: a SigLIP on one, a Llama on the other, all trained; 48
         samples in 24 microbatches. Charts cut into tiles and their tables as text, with sizes drawn from the
         most skewed corpus, at half its resolution; every third sample is its text alone, as instruction
         mixes contain conversations without images. Both ranks have about the same work. The batch was fixed
         by simulation before the first run: predicted are 1.12 and 1.23 times. With `--stages 2` and more
         each module has as many ranks and the LLM as many blocks, so that pipelines get deeper; DIP has both
         modules on all ranks. `--emulate`: one process executes all ranks, one action at a time, each alone
         on its core, because machines with fewer cores than ranks cannot show more.
Ours:    layers are measured, every plan is simulated and its prediction written; then all plans run in
         turn, round after round. Ratios are of medians over rounds, the orders' mean over a plan's.
Differs: the paper runs 16 A40s; two cores show that the gain is real, not how large it is there.
Run:     python -m experiments.entrain.executed [--json] [--rounds N] [--resume] [--out FOLDER]
         [--stages N] [--emulate]
"""

import random
import shutil
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from experiments.entrain.intervals import Interval, ratio_of_medians
from experiments.fidelity.cases import Case, Part
from experiments.fidelity.plan_runs import Predicted, Runs, calibrate, predict, write_predictions
from experiments.fidelity.work import LLM, UNMEASURED, decoder, emulated_machine, this_machine, with_encoders
from experiments.harness.command import command_line, finish
from experiments.harness.record import RESULTS, commit
from runtime.measure.microbench import header_here
from runtime.world.device import CPU
from runtime.world.pool import Pool
from workbench.cost.hardware import Cluster, Link
from workbench.cost.model import CostModel
from workbench.cost.profile import Profile, ideal_profile
from workbench.data.corpora import corpus
from workbench.data.sample import Sample, Segment
from workbench.data.sizes import Sizes
from workbench.job.job import Job
from workbench.job.module_layout import ModuleLayout
from workbench.model.hf_config import module_from_config
from workbench.model.projector import Projector
from workbench.model.trainable import Trainable
from workbench.plan.kernels import Kernels
from workbench.plan.plan import Plan, Precision, Settings
from workbench.planner.stage_counts import silent
from workbench.planner.strategy_spec import Planner
from workbench.report.progress import ticking
from workbench.strategies import cornstarch, dip, entrain, entrain_graded, reordered

OUT = Path("out/entrain_executed")
ROUNDS = 30
DEEP_ROUNDS = 12  # of four ranks and more: processes take longer to start than to step
EMULATED_ROUNDS, EMULATED_STEPS = 4, 3  # a step takes the time of all ranks
NUM_SAMPLES, MICROBATCH_SAMPLES = 48, 2
TEXT_ONLY = 3  # every third sample
CORPUS, SEED = "synthchartnet-like", 1
ORDERS = 2  # random ones
MOST_STAGES = 4  # 48 samples are few microbatches for deeper pipelines
TILE_PX, PATCH_PX = 112, 28
WIDTH = 128
PLANNERS: Mapping[str, Planner] = {
    "disttrain": reordered.plan,
    "dip": dip.plan,
    "entrain-in-turn": entrain.plan_in_turn,
    "entrain": entrain.plan,
    "entrain-graded": entrain_graded.plan,
}


def skewed_batch(num: int, seed: int) -> tuple[Sample, ...]:
    """Samples of charts and their tables; sides of the corpus's charts are halved."""
    return tuple(_sample(index, sizes) for index, sizes in enumerate(corpus(CORPUS).draw(num, seed)))


def _sample(index: int, sizes: Sizes) -> Sample:
    (height_px, width_px), text = sizes.images[0], sum(sizes.text_tokens)
    tiles = -(-height_px // (2 * TILE_PX)) * -(-width_px // (2 * TILE_PX))
    tokens = (TILE_PX // PATCH_PX) ** 2
    if index % TEXT_ONLY == 0:
        tiles = 0
    images = tuple(Segment("image", tile, tokens, tokens) for tile in range(tiles))
    return Sample(index, (*images, Segment("text", 0, text, text)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """Stages of each module on its own ranks, and whether one process emulates all ranks."""

    stages: int = 1
    emulated: bool = False

    @property
    def count(self) -> int:
        return 2 * self.stages

    def cluster(self, link: Link) -> Cluster:
        """This machine, or an emulated one with a core for each rank."""
        return emulated_machine(CPU, self.count, link) if self.emulated else this_machine(link, self.count)


TWO = Ranks()


def charts_job(
    name: str, cluster: Cluster, batch: Sequence[Sample], *, vision_blocks: int, llm_blocks: int
) -> Job:
    """A SigLIP that reads charts in front of a Llama that reads their tables, all trained."""
    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": WIDTH,
        "intermediate_size": 4 * WIDTH,
        "num_hidden_layers": vision_blocks,
        "num_attention_heads": 2,
        "image_size": TILE_PX,
        "patch_size": PATCH_PX,
    }
    encoder = module_from_config(
        vision,
        name="vision",
        modality="image",
        trainable=Trainable.ALL,
        projector=Projector.MLP,
        llm_width=WIDTH,
    )
    return Job(
        name=name,
        model=with_encoders(decoder("llama", width=WIDTH, blocks=llm_blocks), encoder),
        cluster=cluster,
        batch=tuple(batch),
        settings=Settings(precision=Precision.FLOAT32, kernels=Kernels.EAGER),
    )


def job(link: Link, order: Sequence[int], ranks: Ranks = TWO, *, pp: int | None = 1) -> Job:
    """The job of the batch in a given order, with `pp` stages for each module."""
    batch = skewed_batch(NUM_SAMPLES, SEED)
    charts = charts_job(
        "charts",
        ranks.cluster(link),
        [batch[index] for index in order],
        vision_blocks=6 * ranks.stages,
        llm_blocks=ranks.stages,
    )
    return replace(
        charts,
        microbatch_samples=MICROBATCH_SAMPLES,
        layouts=(ModuleLayout(module="vision", pp=pp), ModuleLayout(module=LLM, pp=pp)),
    )


def path_of(ranks: Ranks) -> Path:
    """The result file for these ranks."""
    suffix = "" if ranks == TWO else f"_{ranks.count}{'_emulated' if ranks.emulated else ''}"
    return RESULTS / f"entrain_executed{suffix}.json"


def random_orders() -> tuple[tuple[int, ...], ...]:
    """Random orders of the batch's samples."""
    rng = random.Random(SEED)
    return tuple(tuple(rng.sample(range(NUM_SAMPLES), NUM_SAMPLES)) for _ in range(ORDERS))


def cases(profile: Profile, link: Link, ranks: Ranks = TWO) -> tuple[Case, ...]:
    """Plans of the random orders, then the planners' plans for the first of them."""
    cost, orders = CostModel(profile), random_orders()
    plans = {
        f"random order {number}": cornstarch.plan(job(link, order, ranks, pp=ranks.stages), cost)
        for number, order in enumerate(orders, 1)
    }
    for name, planner in PLANNERS.items():
        pp = None if name == "dip" else ranks.stages  # which has both modules on all ranks
        plans[name] = planner(job(link, orders[0], ranks, pp=pp), cost, silent)
    return cases_of(plans, "charts", Part.CLEAN)


def run(out: Path, rounds: int, ranks: Ranks = TWO, *, is_quiet: bool) -> dict[str, Any]:
    """Calibrate, predict and execute; continues an earlier run in the same folder."""
    started_s = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    with nullcontext() if ranks.emulated else Pool(ranks.count) as pool:
        unpriced = _unpriced(ranks)
        with ticking("calibrating", None, quiet=is_quiet) as ticker:
            profile = calibrate(unpriced, pool, out, ticker.at, budget_s=0.2)
        link = UNMEASURED if ranks.emulated else profile.machine_link("intra").link
        chosen = cases(profile, link, ranks)
        predicted = tuple(predict(case, profile) for case in chosen)
        write_predictions(predicted, out)
        runs = Runs(out, rounds=rounds, steps=EMULATED_STEPS if ranks.emulated else 1, pool=pool)
        executed_s = seconds_by_plan(runs, predicted, "plans", is_quiet=is_quiet)
    return {
        **made_by("entrain/executed", rounds),
        "ranks": ranks.count,
        "emulated": ranks.emulated,
        **summary(predicted, executed_s),
        "seconds": time.monotonic() - started_s,
    }


def _unpriced(ranks: Ranks) -> tuple[Case, ...]:
    """Plans whose layers are measured: one random order, and DIP's different cuts."""
    all_cases = cases(ideal_profile(), UNMEASURED, ranks)
    return tuple(case for case in all_cases if case.name in ("random order 1", "dip"))


def cases_of(plans: Mapping[str, Plan], job: str, part: Part) -> tuple[Case, ...]:
    """The plans as cases."""
    return tuple(
        Case(name=name, job=job, part=part, plan=replace(plan, strategy=name)) for name, plan in plans.items()
    )


def seconds_by_plan(
    runs: Runs, predicted: Sequence[Predicted], what: str, *, is_quiet: bool
) -> dict[str, list[float]]:
    """Plan -> seconds of every step after all rounds; ValueError where a plan does not run."""
    with ticking(what, None, quiet=is_quiet) as ticker:
        runs.execute(predicted, ticker.at)
    if runs.left_out:
        first = next(iter(runs.left_out.values()))
        raise ValueError(f"plan {first.name!r} did not run: {first.reason}")
    return {
        prediction.case.name: [trace.iteration_s for trace in runs.timed(prediction)]
        for prediction in predicted
    }


def made_by(script: str, rounds: int) -> dict[str, Any]:
    """The provenance of a result."""
    return {
        "script": script,
        "command": f"python -m experiments.{script.replace('/', '.')}",
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="minutes"),
        "device": header_here().device_name,
        "rounds": rounds,
    }


def rows_of(
    predicted: Sequence[Predicted], executed_s: Mapping[str, Sequence[float]]
) -> dict[str, dict[str, Any]]:
    """Predicted and executed seconds of every plan."""
    return {
        prediction.case.name: {
            "plan_hash": prediction.plan_hash,
            "predicted_s": prediction.simulated.iteration_s,
            "executed_s": statistics.median(executed_s[prediction.case.name]),
        }
        for prediction in predicted
    }


def summary(predicted: Sequence[Predicted], executed_s: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Seconds of every plan and its speed-up over random orders, both predicted and executed."""
    plain = [prediction for prediction in predicted if prediction.case.name not in PLANNERS]
    plain_s = statistics.fmean(prediction.simulated.iteration_s for prediction in plain)
    plans = rows_of(predicted, executed_s)
    for name, row in plans.items():
        speedup = ratio_of_medians([executed_s[other.case.name] for other in plain], executed_s[name])
        row |= {
            "predicted_speedup": plain_s / row["predicted_s"],
            "executed_speedup": speedup.mean,
            "interval_95": [speedup.low, speedup.high],
        }
    entrain_interval = plans["entrain"]["interval_95"]
    return {"plans": plans, "entrain_is_faster": entrain_interval[0] > 1}


def lines(result: Mapping[str, Any]) -> list[str]:
    """The table that the command prints."""
    table = ["plan               predicted   executed   speed-up predicted   executed (95 % interval)"]
    for name, row in result["plans"].items():
        interval = Interval(row["executed_speedup"], *row["interval_95"])
        table.append(
            f"{name:16} {row['predicted_s']:9.3f} s {row['executed_s']:8.3f} s "
            f"{row['predicted_speedup']:16.3f}      {interval}"
        )
    verdict = "holds" if result["entrain_is_faster"] else "FAILS"
    return [*table, f"claim: Entrain's plan runs faster than random orders, interval above 1: {verdict}"]


def main() -> int:
    """0 when the claim holds, 1 when not, 2 for bad input."""
    parser = command_line(__doc__)
    parser.add_argument(
        "--rounds",
        type=int,
        help=f"default {ROUNDS}, of deeper pipelines {DEEP_ROUNDS}, emulated {EMULATED_ROUNDS}",
    )
    parser.add_argument("--resume", action="store_true", help="continue from the files in the folder")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--stages", type=int, default=TWO.stages, help="of each module (default 1)")
    parser.add_argument("--emulate", action="store_true", help="one process plays all ranks")
    arguments = parser.parse_args()
    if not 1 <= arguments.stages <= MOST_STAGES:
        parser.error(f"--stages must be from 1 to {MOST_STAGES}, got {arguments.stages}")
    ranks = Ranks(stages=arguments.stages, emulated=arguments.emulate)
    usual = EMULATED_ROUNDS if ranks.emulated else ROUNDS if ranks == TWO else DEEP_ROUNDS
    rounds = usual if arguments.rounds is None else arguments.rounds
    if rounds < 2:
        parser.error(f"--rounds must be >= 2 for an interval, got {rounds}")
    if not arguments.resume:
        shutil.rmtree(arguments.out / "runs", ignore_errors=True)
        for name in ("measurement.json", "predictions.json", "runs.jsonl"):
            (arguments.out / name).unlink(missing_ok=True)
    result = run(arguments.out, rounds, ranks, is_quiet=arguments.json)
    print("\n".join(lines(result)))
    path = path_of(ranks) if rounds >= usual else None
    return finish(result, out=path, as_json=arguments.json, holds=result["entrain_is_faster"])


if __name__ == "__main__":
    sys.exit(main())
