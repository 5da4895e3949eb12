"""Figure 15: orchestration by DistTrain, DistMM* and Megatron-LM on up to 96 GPUs.

Paper:   Z. Zhang et al., "DistTrain", section 7.2; the bars are not printed, the prose gives ranges.
Setup:   as Figures 13 and 14, batches of 128, 64 and 40 samples.
Ours:    DistMM* distributes GPUs by FLOP, and takes the best degrees on each module's own.
Differs: as Figures 13 and 14.
"""

from experiments.disttrain.gains import (
    Experiment,
    add_inside,
    add_range,
    mfu,
    throughput,
)
from experiments.disttrain.systems import MODELS, PROFILE
from experiments.harness.outcome import Evidence
from experiments.harness.script import script

ABLATION = Experiment(name="ablation_orchestration", budget=96)
RIVALS = {"Megatron-LM": "megatron", "DistMM*": "distmm"}


@script(profile=PROFILE)
def run() -> Evidence:
    """Evidence on gains over both, who wins, and GPU counts."""
    evidence = Evidence()
    for claim, quantity in (("dt_orch_mfu", mfu), ("dt_orch_tput", throughput)):
        gains = {
            f"{model} over {rival}": ABLATION.ratio(model, key, quantity)
            for rival, key in RIVALS.items()
            for model in MODELS
        }
        add_range(evidence, claim, "section 7.2", gains)
        causes = {
            f"{model} over {rival}": ABLATION.idle_cause(model, key)
            for rival, key in RIVALS.items()
            for model in MODELS
        }
        add_inside(evidence, quantity.__name__, claim, gains, causes)
    ABLATION.add_gpus(evidence, {"disttrain": "disttrain", "distmm_star": "distmm"})
    ABLATION.add_order(evidence)
    ABLATION.note_results(evidence)
    ABLATION.note_causes(evidence)
    ABLATION.note_rates(evidence, "MLLM-15B", "modelled/dt_orch*")
    evidence.causes["modelled/GPUs of disttrain*"] = "more GPUs go on to bring something, see the notes"
    evidence.causes["modelled/GPUs of distmm*"] = "shares of FLOP are rounded to GPUs, not to nodes or groups"
    return evidence
