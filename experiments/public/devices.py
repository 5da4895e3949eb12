"""Measured devices, each left out and predicted from another by the two data sheets.

Setup:   products and causal attention of A100, H100, H200 and L40S (aiconfigurator), products and
         memory-bound operators of A40, A100 and H100 (vidur), collectives inside a node of A100, H100 and
         H200; L20 has no measurement of its own. Sizes of training only: products of 1 GFLOP, sequences of
         1,024 tokens, tensors and messages of 1 MiB and more.
Ours:    the rules of `workbench profile new`; also products scaled by the ratio of peaks alone. Fits of the
         profiles that ship are means over the pairs of one architecture, or of two.
Also:    an all-reduce of eight GB200 over NVLink, printed by lixueduan.com/posts/ai/13-gb200-mnnvl-nccl-test.
"""

import numpy as np

from experiments.harness.outcome import About, Evidence, PaperNumber
from experiments.harness.script import script
from workbench.calibrate.device_sheet import shipped_sheet
from workbench.calibrate.leave_one_out import Rule, RuleErrors, rule_errors
from workbench.cost.collectives import Collective, Collectives
from workbench.cost.profile import load_profile
from workbench.units import GB

RULES = {
    Rule.PRODUCTS: "products",
    Rule.PEAKS: "products_by_peaks",
    Rule.ATTENTION: "attention",
    Rule.MEMORY: "memory",
    Rule.COLLECTIVES: "collectives",
}
RANKS = 8
ALL_REDUCE_BYTES = 8 * 2**30
TOLERANCE = 0.17  # mean error of scaled collectives
GB200 = PaperNumber(
    "modelled/gb200/all_reduce_bus_gbytes_per_s",
    811,
    "GB/s",
    "highlights, 2 nodes of 4 GPUs over MNNVL",
    TOLERANCE,
)


def _line(pair: RuleErrors) -> str:
    return (
        f"{pair.rule}: {pair.device} after {pair.like}: median {pair.median:.1%}, "
        f"90th percentile {pair.p90:.1%}, signed {pair.signed:+.1%}, {pair.num_points} points"
    )


def _bus_gbytes_per_s(device: str) -> float:
    """Bus bandwidth of an all-reduce, 2 (n - 1) / n of the tensor over its seconds, as in nccl-tests."""
    profile = load_profile(device)
    assert shipped_sheet(device).link_ranks >= RANKS
    link = profile.machine_link("intra").link
    seconds = Collectives(profile).seconds(Collective.ALL_REDUCE, ALL_REDUCE_BYTES, RANKS, link)
    return 2 * (RANKS - 1) / RANKS * ALL_REDUCE_BYTES / seconds / GB


@script()
def run() -> Evidence:
    results = rule_errors()
    evidence = Evidence(about=About.METHODS)
    for rule, name in RULES.items():
        for alike, kind in ((True, "alike"), (False, "other")):
            pairs = [result for result in results if result.rule is rule and result.alike is alike]
            if not pairs:
                continue
            for figure in ("median", "p90", "signed"):
                value = float(np.mean([getattr(result, figure) for result in pairs]))
                evidence.ours[f"{name}/{kind}/{figure}"] = value
            evidence.notes += [_line(result) for result in pairs]
    evidence.add(GB200, _bus_gbytes_per_s("GB200"))
    ours = evidence.ours
    for kind in ("alike", "other"):
        evidence.claim(
            f"roofline and waves are no worse than peaks alone ({kind} architecture)",
            ours[f"products/{kind}/median"] <= ours[f"products_by_peaks/{kind}/median"],
            cause="medians, 90th percentiles of errors: "
            + " against ".join(
                f"{ours[f'{name}/{kind}/median']:.2%}, {ours[f'{name}/{kind}/p90']:.1%} {how}"
                for name, how in (("products", "by data sheets"), ("products_by_peaks", "by peaks"))
            )
            + ": the medians are too near to tell the rules apart, the largest errors are not",
        )
    return evidence
