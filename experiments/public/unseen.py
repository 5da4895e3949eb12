"""Published training runs that were predicted before anybody here had seen what they took.

Source:  experiments/public/data/unseen: NeMo AutoModel and torchtitan, whose rows no number was fitted to and
         no choice was made by. Cells come from the pages and their recipes; `predictions.csv` was committed
         while `measured.csv` was kept apart, unopened.
Ours:    the path of `workbench predict` with the shipped profiles. A pipeline that fills and drains several
         times an iteration is `x_schedules` of them. Where a share of the products is recomputed, which no
         column says, the time lies that share, `x_full_share`, on the way to full recomputation.
Setup:   rows are judged unless `x_why_not` says why not, chosen before any number was seen. An error is the
         relative difference from the measured seconds; above zero: predicted too slow.
Run:     python -m experiments.public.unseen [--predict] [--json]
"""

from experiments.harness.outcome import Evidence
from experiments.harness.script import script
from experiments.public.blind import FOLDER, predicting
from experiments.public.text_round import TextRound

ROUND = TextRound(
    files=("automodel", "torchtitan"),
    predictions=FOLDER / "predictions.csv",
    measured=FOLDER / "measured.csv",
)


@script(command=predicting(ROUND))
def run() -> Evidence:
    """Errors of the predictions that were written before, and of today's."""
    return ROUND.evidence()
