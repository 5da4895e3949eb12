"""Published runs of further training systems, predicted before anybody here had seen what they took.

Source:  experiments/public/data/unseen/second.csv: nanotron, xtuner, MaxText, transformers' Trainer, timm,
         and others (`x_system`). Others transcribed cells, and measured values apart, from pages and recipes;
         `second_predictions.csv` was committed while `second_measured.csv` was kept apart, unopened.
Ours:    the path of `workbench predict` with the shipped profiles; no system is one to which numbers were
         fitted, but torchtitan in `torchao_float8`. Modules of Hugging Face and timm that no compiler touches
         are `pointwise: eager`. Where a share of the products is recomputed, which no column says, the time
         lies that share, `x_full_share`, on the way to full recomputation.
Setup:   rows are judged unless `x_why_not` says why not, chosen before any number was seen. An error is the
         relative difference from the measured seconds; above zero: predicted too slow.
Run:     python -m experiments.public.unseen_systems [--predict] [--json]
"""

from experiments.harness.outcome import Evidence
from experiments.harness.script import script
from experiments.public.blind import FOLDER, predicting
from experiments.public.text_round import TextRound

ROUND = TextRound(
    files=("second",),
    predictions=FOLDER / "second_predictions.csv",
    measured=FOLDER / "second_measured.csv",
)


@script(command=predicting(ROUND))
def run() -> Evidence:
    """Errors of the predictions that were written before, and of today's."""
    return ROUND.evidence()
