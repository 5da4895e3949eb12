"""Published training times of vision-language models, predicted before anybody here had seen them.

Source:  experiments/public/data/unseen/multimodal.csv: LLaVA, InternVL, ms-swift and SiQ-VL, from their
         scripts and READMEs. `multimodal_predictions.csv` was committed while the measured times were kept
         apart, unopened.
Ours:    each run becomes a job and a plan with its layouts, and the simulator predicts the step. Runs
         with transformers' modules have its kernels (`pointwise: eager`), PyTorch's loss and gradients in the
         weights' format.
Setup:   a run's hours are compared with its number of steps times the predicted step; start-up, loading of
         data and checkpoints are theirs alone. `passes`: without the optimizer's step, which that benchmark
         leaves out. Text lengths that no source states are presumed, see `note`. Peaks of memory were
         predicted afterwards, with transformers' kernels.
Run:     python -m experiments.public.unseen_multimodal [--predict] [--json]
"""

from statistics import fmean

from experiments.harness.outcome import Evidence
from experiments.harness.script import script
from experiments.public.blind import FOLDER, PEAK, STEP, judged, predicting, rows_of, scores
from experiments.public.multimodal_round import Measured, MultimodalRound

ROUND = MultimodalRound(
    inputs=FOLDER / "multimodal.csv",
    models=FOLDER / "multimodal_models.yaml",
    predictions=FOLDER / "multimodal_predictions.csv",
    measured=FOLDER / "multimodal_measured.csv",
)


@script(command=predicting(ROUND))
def run() -> Evidence:
    """Errors of the predictions that were written before, and of today's; above zero: predicted too slow."""
    rows = {row["id"]: row for row in rows_of(ROUND.inputs)}
    measured = Measured.read(rows, rows_of(ROUND.measured))
    groups = {name: row["project"] for name, row in rows.items()}
    today = {name: ROUND.predicted(row) for name, row in rows.items()}
    steps = judged(STEP, measured.step_s, groups, ROUND.before(), today)
    peaks = judged(PEAK, measured.peak_gib, groups, today, today)
    peaks = [one for one in peaks if rows[one.name]["covers"] == "passes"]
    ours = {f"{one.name}/error": one.error for one in steps}
    ours |= {f"{one.name}/memory_error": one.error for one in peaks}
    ours["memory_signed"] = fmean(one.error for one in peaks)
    ours |= scores([one for one in steps if not rows[one.name]["why_not"]], today=("mean",))
    return Evidence(ours=ours)
