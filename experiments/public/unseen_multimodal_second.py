"""A second round of published multimodal runs, predicted before anybody here had seen their figures.

Source:  experiments/public/data/unseen/multimodal_second.csv: vlm-training, MobileVLM, Video-ChatGPT,
         MiniCPM-V, F5-TTS, Cosmos, CogVideoX, LTX-Video, HunyuanVideo and others, of reports and recipes.
         Others transcribed inputs and figures apart; `multimodal_second_predictions.csv` was committed while
         figures were kept apart, unopened; so was `multimodal_lora_predictions.csv`, later, of runs that
         train adapters, when jobs could say these.
Ours:    each run becomes a job and a plan with its layouts; step and memory are the simulator's
         (`experiments.public.multimodal`). `inside_80`: the interval that `simulate` prints for a job;
         `inside_80_of_system`: with what a row of a system that was never compared has besides.
Setup:   rows are judged unless `why_not` says why not, chosen by their recipes alone; `unsaid` says what no
         job can say. Figures of runs with adapters are under `lora/`. A run's hours are divided by its
         steps. Memory is compared in GiB, also where a tool prints it as GB; of several figures with the
         smallest (allocated, not reserved). Above zero: predicted too slow, or too much.
Run:     python -m experiments.public.unseen_multimodal_second [--predict] [--json]
"""

from dataclasses import replace

from experiments.harness.outcome import Evidence
from experiments.harness.script import script
from experiments.public.blind import FOLDER, predicting
from experiments.public.multimodal_round import MultimodalRound

ROUND = MultimodalRound(
    inputs=FOLDER / "multimodal_second.csv",
    models=FOLDER / "multimodal_second_models.yaml",
    predictions=FOLDER / "multimodal_second_predictions.csv",
    measured=FOLDER / "multimodal_second_measured.csv",
)
LORA = replace(ROUND, trains="lora", predictions=FOLDER / "multimodal_lora_predictions.csv")


@script(command=predicting(LORA))
def run() -> Evidence:
    """Errors of the predictions that were written before, and of today's."""
    lora = {f"lora/{name}": value for name, value in LORA.evidence().ours.items()}
    return Evidence(ours=ROUND.evidence().ours | lora)
