"""A fourth round of published multimodal runs, inputs by one hand and predictions by another.

Source:  experiments/public/data/unseen/multimodal_fourth.csv: NVIDIA's sports playbooks (Nemotron 3 Nano Omni
         by AutoModel and Megatron-Bridge), Megatron-Bridge's verification cards (Nemotron 3.5 Super VL), and
         Cosmos-Predict2's post-training. Figures lie outside the project, under a hash that the record
         states, until `multimodal_fourth_predictions.csv` is committed.
Ours:    as in `experiments.public.unseen_multimodal_third`, with state spaces, latent experts and adapters
         beside them.
Setup:   rows are judged unless `why_not` says why not, by what a recipe states and not by what it measured;
         `unsaid` names what no job says. Who transcribed the recipes has read the figures, who predicts has
         not: predictions follow from the inputs as they were committed. Above zero: predicted too slow, or
         too much.
Run:     python -m experiments.public.unseen_multimodal_fourth [--predict] [--json]
"""

from experiments.harness.outcome import Evidence
from experiments.harness.script import script
from experiments.public.blind import FOLDER, predicting
from experiments.public.multimodal_round import MultimodalRound

ROUND = MultimodalRound(
    inputs=FOLDER / "multimodal_fourth.csv",
    models=FOLDER / "multimodal_fourth_models.yaml",
    predictions=FOLDER / "multimodal_fourth_predictions.csv",
    measured=FOLDER / "multimodal_fourth_measured.csv",
)


@script(command=predicting(ROUND))
def run() -> Evidence:
    """Errors of the predictions that were written before, and of today's."""
    return ROUND.evidence()
