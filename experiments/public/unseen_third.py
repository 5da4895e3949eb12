"""Published runs of a third set of training systems, predicted before anybody here had seen their times.

Source:  experiments/public/data/unseen/third.csv: BLOOM's tries, OneFlow, BERT of NVIDIA
         DeepLearningExamples, FlagPerf, PLSC, DeepSpeed's autotuning, Primus and others (`x_system`). Others
         transcribed cells, and measured values apart, from pages and recipes; `third_predictions.csv` was
         committed while `third_measured.csv` was kept apart, unopened.
Ours:    the path of `workbench predict` with the shipped profiles; no number was fitted to any of these
         systems, and intervals are those of systems never compared, chosen by the two sets before.
Setup:   rows are judged unless `x_why_not` says why not, chosen by their recipes alone. An error is the
         relative difference from the measured seconds; above zero: predicted too slow.
Run:     python -m experiments.public.unseen_third [--predict] [--json]
"""

from experiments.harness.outcome import Evidence
from experiments.harness.script import script
from experiments.public.blind import FOLDER, predicting
from experiments.public.text_round import TextRound

ROUND = TextRound(
    files=("third",),
    predictions=FOLDER / "third_predictions.csv",
    measured=FOLDER / "third_measured.csv",
)


@script(command=predicting(ROUND))
def run() -> Evidence:
    """Errors of the predictions that were written before, and of today's."""
    return ROUND.evidence()
