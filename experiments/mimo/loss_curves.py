"""Tables A7 and A8, Figures 6, 10, 12 and 13: layouts do not change the loss curve.

Paper:   Karnati et al., section 5 and appendix C: controlled runs and eighteen layouts, apart and (with
         twice the replicas) on the same ranks, LLM frozen and trained.
Setup:   every configuration executed on up to eight gloo processes: a tiny LLaVA (CLIP, projector,
         Llama) from random weights, microbatches of 2 (of 4 where the LLM has one replica), AdamW as
         in Table A6 at its first learning rate.
Ours:    losses of every step in float64 against the homogeneous baseline of the same figure, and
         gradients, weights and both moments after the last step against one process.
Differs: float64 instead of float32, by default 16 samples and the same batch in every step, a constant
         learning rate; the paper shows ranges of losses, of which no number is printed in the text.
         With `--samples 96 --batches 100 --steps 100 --figures 6 10` every step has another batch of the
         printed size, each planned while the step before runs; its summary is a file of its own.
Run:     python -m experiments.mimo.loss_curves [--json] [--steps N] [--samples N] [--batches N]
         [--figures F ...] [--limit-s N] [--fresh]

Curves of the one batch are stored as each run ends, by plan hash and steps, so an interrupted command
resumes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from experiments.harness.command import Found, bench
from experiments.harness.record import RESULTS
from experiments.mimo.kept_runs import Kept
from experiments.mimo.loss_curves_runs import ONE_BATCH, Data, Run, model, one_process, plan_of, runs, train
from runtime.world.failure import WorldFailed
from runtime.world.pool import Pool
from workbench.plan.codec import plan_hash

BOUND = 1e-8  # of a loss, at every step, and of a state after the last one
STEPS = 50
KEPT = Kept(RESULTS / "mimo_loss_curves_curves.jsonl", key="key", done="losses")
SUMMARY = RESULTS / "mimo_loss_curves.json"
SUMMARY_OF_BATCHES = RESULTS / "mimo_loss_curves_batches.json"
BASELINE = "colocated_homogeneous_baseline"


def curve(
    run: Run, pool: Pool, known_records: Mapping[str, Mapping[str, Any]], *, steps: int, data: Data
) -> dict[str, Any]:
    """The record of one run, known or newly trained."""
    plan = plan_of(run, data.batches(model(run.trains_llm))[0])
    key = f"{plan_hash(plan)}:{steps}:{run.trains_llm}"
    if key in known_records:
        return {**known_records[key], "name": run.name}
    record = {"key": key, "name": run.name, "num_ranks": len(plan.ranks)}
    try:
        trained = train(run, steps, pool, data)
    except WorldFailed as error:
        return record | {"failed": " ".join(str(error).split())[:300]}
    return record | {"losses": list(trained.losses), "state": asdict(trained.state)}


def figure_of(run: Run) -> str:
    """The figure with a run's baseline: 12 and 13 use that of the figure with the same trained modules."""
    return "6" if run.trains_llm else "10"


def summary_of(runs_of: Sequence[Run], records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Distances of runs from their baseline and from one process, and ranges of curves by figure."""
    baselines = {
        run.figure: record["losses"]
        for run, record in zip(runs_of, records, strict=False)
        if run.config == BASELINE and "losses" in record
    }
    rows, figures = [], dict[str, list[list[float]]]()
    for run, record in zip(runs_of, records, strict=False):
        baseline = baselines.get(figure_of(run))
        row = {"name": run.name, "num_ranks": record["num_ranks"], "failed": record.get("failed")}
        if "losses" in record and baseline is not None:
            row["from_baseline"] = max(abs(a - b) for a, b in zip(record["losses"], baseline, strict=True))
            row["state"] = max(record["state"].values())
            figures.setdefault(run.figure, [baseline]).append(record["losses"])
        rows.append(row)
    off = [
        row
        for row in rows
        if max(row.get("from_baseline", 1.0), row.get("state", 1.0)) > BOUND or row["failed"]
    ]
    return {
        "runs": len(runs_of),
        "executed": sum("state" in row for row in rows),
        "off": off,
        "worst_from_baseline": max((row.get("from_baseline", 0.0) for row in rows), default=0.0),
        "worst_state": max((row.get("state", 0.0) for row in rows), default=0.0),
        "step_range": {
            figure: max(max(step) - min(step) for step in zip(*curves, strict=True))
            for figure, curves in figures.items()
        },
        "rows": rows,
        "holds": not off and len(records) == len(runs_of),
    }


@bench(
    samples="of a batch",
    batches="that differ, one a step",
    figures="of the paper; all by default",
    limit_s="stop after this, to resume later",
    fresh="run everything again",
)
def run(
    *,
    steps: int = STEPS,
    samples: int = ONE_BATCH.num_samples,
    batches: int = 1,
    figures: tuple[str, ...] = (),
    limit_s: float = 3600.0,
    fresh: bool = False,
) -> Found:
    if fresh:
        KEPT.path.unlink(missing_ok=True)
    selected = [each for each in runs() if not figures or each.figure in figures]
    data = Data(num_samples=samples, num_batches=batches)
    with TemporaryDirectory() as folder:
        store = KEPT if data == ONE_BATCH else replace(KEPT, path=Path(folder, KEPT.path.name))
        record_of = partial(curve, steps=steps, data=data)
        result = summary_of(selected, store.play(selected, record_of, limit_s))
    result |= {"steps": steps, "bound": BOUND}
    if data != ONE_BATCH:
        result |= asdict(data)
    alone = {trains: one_process(trains, steps, data)[0] for trains in (False, True)}
    for row in result["rows"]:
        gap, state = row.get("from_baseline", float("nan")), row.get("state", float("nan"))
        print(f"{row['name']:45} {row['num_ranks']} ranks, from baseline {gap:.1e}, state {state:.1e}")
    for figure, widest in result["step_range"].items():
        print(f"figure {figure}: widest range of the losses of a step {widest:.1e}")
    print(f"one process: loss {alone[False][0]:.6f} to {alone[False][-1]:.6f} with a frozen LLM,", end=" ")
    print(f"{alone[True][0]:.6f} to {alone[True][-1]:.6f} with a trained one")
    print(f"{result['executed']} of {result['runs']} curves executed over {steps} steps")
    claims = {f"every layout within {BOUND} of the baseline at every step, states included": result["holds"]}
    path = SUMMARY if data == ONE_BATCH else SUMMARY_OF_BATCHES
    return Found(result, claims, out=path)
