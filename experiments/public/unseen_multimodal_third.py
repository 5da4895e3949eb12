"""A third round of published multimodal runs, of production systems, predicted before they were scored.

Source:  experiments/public/data/unseen/multimodal_third.csv: Megatron-Bridge's verification cards (Qwen3.5-VL
         and its successors), NeMo DFM's Wan 2.1, MLPerf's FLUX.1, FlagPerf's LLaVA 1.5 and others.
         `multimodal_third_predictions.csv` was committed while the figures lay in a file apart, whose hash
         the record states.
Ours:    as in `experiments.public.unseen_multimodal_second`, with pipelines, experts, predicting modules and
         products of eight bits besides. Runs with several stages have the vision module on the first.
Setup:   rows are judged unless `why_not` says why not, chosen by their recipes' words alone; `unsaid` says
         what no job can say. Whoever transcribed the recipes had read the figures: this round is blind by
         its order of commits, not by its hands. Where FLOP/s alone are printed, tokens follow from the
         source's own quotient. Above zero: predicted too slow, or too much.
Run:     python -m experiments.public.unseen_multimodal_third [--predict] [--json]
"""

from experiments.harness.outcome import Evidence
from experiments.harness.script import script
from experiments.public.blind import FOLDER, predicting
from experiments.public.multimodal_round import MultimodalRound

ROUND = MultimodalRound(
    inputs=FOLDER / "multimodal_third.csv",
    models=FOLDER / "multimodal_third_models.yaml",
    predictions=FOLDER / "multimodal_third_predictions.csv",
    measured=FOLDER / "multimodal_third_measured.csv",
)


@script(command=predicting(ROUND))
def run() -> Evidence:
    """Errors of the predictions that were written before, and of today's."""
    return ROUND.evidence()
