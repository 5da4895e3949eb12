"""Numbers of DistTrain's prose that no figure has: examples, sizes, bounds and contradictions.

Paper:   Z. Zhang et al., "DistTrain", sections 1, 2.3, 4.1, 5.2, 7.1 and the abstract.
Setup:   `reference/disttrain_claims.csv`; each of its rows is checked here or by another script (`COVERED`).
Ours:    the algorithms and formulas of the workbench; sizes by arithmetic.
Differs: Figure 11 shows four samples without sizes: two large and two small ones are assumed.
"""

from experiments.disttrain.figures13_14 import OVERALL
from experiments.disttrain.gains import IMAGES as IMAGES_UNSTATED
from experiments.disttrain.gains import throughput
from experiments.disttrain.systems import MODELS, PROFILE, plausible_images
from experiments.harness.causes import open_cause
from experiments.harness.outcome import Bound, Evidence, PaperNumber, Unstated
from experiments.harness.printed import claim_value
from experiments.harness.script import script
from workbench.balance.microbatches.reorder import reorder_samples
from workbench.balance.orchestration.task import Degrees
from workbench.float_sum import float_sum

COVERED = {
    "figures13_14": ("dt_mfu", "dt_tput_gain", "dt_mfu_gain"),
    "figure15": ("dt_orch_mfu", "dt_orch_tput"),
    "table3": ("dt_orch_time",),
    "figure16": ("dt_reorder",),
    "figures18_19": ("dt_frozen",),
    "figure22": ("dt_stepccl",),
    "prose": (
        "dt_monolithic",
        "dt_gpus",
        "dt_tput_max",
        "dt_sample",
        "dt_fig11",
        "dt_fig9",
        "dt_greedy",
        "dt_fig12",
    ),
}
"""Script -> how the ids of its claims begin."""

FIGURE_9 = {
    "enc": Degrees(tp=2, dp=2, pp=1),
    "llm": Degrees(tp=4, dp=3, pp=1),
    "gen": Degrees(tp=4, dp=1, pp=1),
}
MB = 10**6
IMAGES, SIDE_PX, CHANNELS = 10, 1024, 3
FIGURE_11 = (2.0, 2.0, 1.0, 1.0)  # sizes of samples 1 to 4


def figure_11() -> tuple[int, ...]:
    """Samples, counted from 1, in the order of Algorithm 1 for two groups."""
    groups = reorder_samples(FIGURE_11, 2)
    return tuple(sample + 1 for group in groups for sample in group)


def _slowest(order: tuple[int, ...]) -> float:
    half = len(order) // 2
    return max(float_sum(FIGURE_11[s - 1] for s in part) for part in (order[:half], order[half:]))


def _sizes(evidence: Evidence) -> None:
    """Sizes of ten images by bytes of a value: 120 MB are about four bytes a value, or decoded floats."""
    values = IMAGES * SIDE_PX**2 * CHANNELS
    sizes_mb = {size: values * size / MB for size in (1, 2, 4)}
    number = PaperNumber("itself/dt_sample_mb", claim_value("dt_sample_mb"), "MB", "section 2.3", 0.05)
    unstated = Unstated("bytes of a colour value", min(sizes_mb.values()), max(sizes_mb.values()))
    evidence.add(number, sizes_mb[4], unstated)


def _extremes(evidence: Evidence) -> None:
    """Evidence on the lowest MFU of Megatron-LM, the largest gain, and the printed GPU counts of one run."""
    results = {
        model: OVERALL.results(model, next(iter(plausible_images(model).values()))) for model in MODELS
    }
    least = min(MODELS, key=lambda model: results[model]["megatron"].mfu)
    lowest = 100 * results[least]["megatron"].mfu
    ratios = {model: OVERALL.ratio(model, "megatron", throughput) for model in MODELS}
    most = max(MODELS, key=lambda model: next(iter(ratios[model].values())))
    largest = next(iter(ratios[most].values()))
    evidence.ours |= {"modelled/dt_monolithic_mfu": lowest, "modelled/dt_tput_max": largest}
    printed_monolithic, printed_largest = claim_value("dt_monolithic_mfu"), claim_value("dt_tput_max")
    evidence.claim(
        f"Megatron-LM's lowest MFU, {lowest:.1f} %, is near the {printed_monolithic:g} % seen in production",
        abs(lowest / printed_monolithic - 1) <= 0.25,
        cause=f"it is {least}'s, and no model or layout is printed of production. "
        f"{OVERALL.idle_cause(least, 'megatron')}",
    )
    evidence.claim(
        f"no gain in throughput is above the printed {printed_largest:g}: {largest:.2f}",
        largest <= printed_largest * 1.05,
        cause=f"{most}: {OVERALL.idle_cause(most, 'megatron')}. Of its gains, "
        + open_cause(ratios[most], lambda ratio: ratio <= printed_largest * 1.05, IMAGES_UNSTATED),
    )
    printed = float(OVERALL.printed("disttrain", "MLLM-72B")["n_gpus"])
    number = PaperNumber("itself/dt_gpus_72b", claim_value("dt_gpus_72b"), "GPUs", "abstract", 0.0)
    evidence.add(number, printed)
    evidence.bounds[number.key] = Bound(what="section 7.1 and Figure 13", low=printed, high=printed)


@script(profile=PROFILE)
def run() -> Evidence:
    evidence = Evidence()
    for unit, degrees in FIGURE_9.items():
        claim = f"dt_fig9_{unit}_gpus"
        evidence.add(
            PaperNumber(f"itself/{claim}", claim_value(claim), "GPUs", "section 4.1", 0.0), degrees.num_gpus
        )
    for index, sample in enumerate(figure_11(), start=1):
        claim = f"dt_fig11_pos{index}"
        evidence.add(PaperNumber(f"modelled/{claim}", claim_value(claim), "index", "Figure 11", 0.0), sample)
    _sizes(evidence)
    _extremes(evidence)
    bound = claim_value("dt_greedy_num") / claim_value("dt_greedy_den")
    evidence.claim(
        "greedy reordering stays below the printed 4/3 of the optimum for two groups of Figure 11",
        _slowest(figure_11()) <= bound * float_sum(FIGURE_11) / 2,
    )
    evidence.claim(
        "the last p - 1 of Figure 12's intervals begin at interval 4",
        claim_value("dt_fig12_l") - (claim_value("dt_fig12_p") - 1) + 1 == 4,
    )
    return evidence
