"""Figures 18 and 19: DistTrain against Megatron-LM with frozen modules.

Paper:   Z. Zhang et al., "DistTrain", section 7.3; the bars are not printed, the prose gives ranges.
Setup:   as Figure 15, with projectors, encoder, LLM or generator alone trained.
Ours:    a module computes the gradients that autograd needs; frozen modules have no optimizer.
Differs: as Figures 13 and 14. The prose lists four settings and then speaks of three.
"""

from dataclasses import replace

from experiments.disttrain.gains import Experiment, add_inside, add_range, mfu, throughput
from experiments.disttrain.systems import MODELS, PROFILE, Trained
from experiments.harness.outcome import Evidence
from experiments.harness.script import script

FROZEN = Experiment(name="frozen_training", budget=96)
SETTINGS = {
    "projectors": Trained.PROJECTORS,
    "encoder": Trained.ENCODER,
    "LLM": Trained.LLM,
    "generator": Trained.GENERATOR,
}


@script(profile=PROFILE)
def run() -> Evidence:
    """Evidence on the gains of every model and setting."""
    evidence = Evidence()
    for claim, quantity in (("dt_frozen_mfu", mfu), ("dt_frozen_tput", throughput)):
        cases = {
            f"{model}, {name} trained": (replace(FROZEN, trained=trained), model)
            for name, trained in SETTINGS.items()
            for model in MODELS
        }
        gains = {key: frozen.ratio(model, "megatron", quantity) for key, (frozen, model) in cases.items()}
        causes = {key: frozen.idle_cause(model, "megatron") for key, (frozen, model) in cases.items()}
        add_range(evidence, claim, "section 7.3", gains)
        add_inside(evidence, f"{quantity.__name__} over Megatron-LM", claim, gains, causes)
    evidence.causes["modelled/dt_frozen*"] = (
        "see the gains by model and setting: those of large models vary less here than in print"
    )
    evidence.notes.append(
        "as in Figure 15, and frozen modules leave Megatron-LM's encoder and generator with still less to do"
    )
    return evidence
