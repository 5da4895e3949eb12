"""Figure 12: seconds of the 8 ranks under four distributions of tokens, one mask of each kind, 64k tokens.

Paper:   I. Jang et al., Cornstarch, arXiv v1, section 6.5, Figure 12.
Setup:   as Table 4; one sampled mask each of EP, EE and MP.
Given:   the same layer as `table4`: mask -> tiles -> owners -> seconds of every rank.
Differs: 20 masks of each kind instead of one. The bars print no numbers, so only the text's claims are
         checked. The text says that all policies balance EP; in contiguous runs the last rank has the last
         eighth of a mostly causal mask, and in Table 4 itself the naive ring is 1.27 times slower there.
Ours:    simulated on one CPU core, about 3 s.
"""

from statistics import fmean

from experiments.cornstarch.attention_layers import BLOCK, MASKS, Testbed, tiles_of
from experiments.cornstarch.modelled import a40_cost
from experiments.cornstarch_v1.table4 import MAIN, POLICIES, rank_times
from experiments.harness.outcome import Evidence
from experiments.harness.printed import printed_rows
from experiments.harness.script import script

NUM_TOKENS = 65536
SEEDS = range(20)
SHOWN = 0  # the mask whose ranks are written out
EVEN = 1.10  # slowest rank over the mean: bars that look alike
DRAWN = (
    f"owners drawn independently for {NUM_TOKENS // BLOCK} blocks of {BLOCK} tokens leave ranks with unequal "
    "numbers of them; the printed times of Table 4 fit the mean over ranks, or a draw of equal numbers"
)


def spreads(bed: Testbed, kind: str, seed: int, evidence: Evidence) -> dict[str, float]:
    """Slowest rank over the ranks' mean, by policy."""
    times = rank_times(bed, tiles_of(MASKS[kind](NUM_TOKENS, seed=seed)), MAIN, seed)
    if seed == SHOWN:
        for policy, seconds in times.items():
            for rank, second in enumerate(seconds):
                evidence.ours[f"modelled/{kind}/{policy}/rank_{rank}_ms"] = 1e3 * second
    return {policy: max(seconds) / fmean(seconds) for policy, seconds in times.items()}


def unlike_lpt(policy: str) -> str:
    """The cause by Table 4, whose ranks would take equally long if all policies balanced EP."""
    printed = {
        row["distribution"]: float(row["attn_time_ms"])
        for row in printed_rows("cornstarch_v1_table4")
        if (row["seq_len_tokens"], row["mask_type"]) == (str(NUM_TOKENS), "EP")
    }
    return (
        "the paper contradicts itself: in Table 4 such masks take "
        f"{printed[policy] / printed['lpt']:.2f} times as long under {policy} as under LPT"
    )


@script(profile="A40")
def run() -> Evidence:
    """Evidence: seconds by rank, their spread over masks, and the text's claims."""
    evidence = Evidence()
    bed = Testbed(a40_cost())
    mean: dict[tuple[str, str], float] = {}
    for kind in MASKS:
        runs = [spreads(bed, kind, seed, evidence) for seed in SEEDS]
        for policy in POLICIES:
            mean[kind, policy] = fmean(run[policy] for run in runs)
            evidence.ours[f"modelled/{kind}/{policy}/max_over_mean"] = mean[kind, policy]
        for policy in ("lpt", "random") if kind != "EP" else ():
            count = sum(run[policy] < run["zigzag"] for run in runs)
            text = f"{kind}: {policy} spreads ranks less than zigzag in {count} of {len(runs)} masks: most,"
            evidence.claim(text, 2 * count > len(runs), cause=DRAWN)
    for policy in POLICIES:
        text = f"EP: {policy} is even within {EVEN - 1:.0%} (ours {mean['EP', policy] - 1:.0%}):"
        evidence.claim(
            text, mean["EP", policy] <= EVEN, cause=DRAWN if policy == "random" else unlike_lpt(policy)
        )
    evidence.notes.append(
        "slowest rank over mean: " + ", ".join(f"{k} {p} {value:.2f}" for (k, p), value in mean.items())
    )
    return evidence
