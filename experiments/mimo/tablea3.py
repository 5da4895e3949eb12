"""Table A3: long contexts, encoders not divided on shared GPUs against encoders that inherit the LLM's grid.

Paper:   Karnati et al., Table A3.
Setup:   a 1B encoder with 7B and 14B LLMs, 16K to 128K, printed layouts on both sides.
Given:   layouts, batch sizes; forward and backward alone are timed. Two numbers of the machine are fitted on
         homogeneous step times (`calibration`).
Differs: sizes are ours; one sample a microbatch on both sides, where the table prints one number of
         microbatches for layouts of different dp. Whether H's ranks under cp encode whole images follows from
         printed memory, see `protocol.toml`; a note has the other reading.
Ours:    plans of the strategies, simulated, about 1 minute on one CPU core.
"""

from collections.abc import Sequence
from itertools import pairwise

from experiments.harness.outcome import Evidence
from experiments.harness.script import script
from experiments.mimo.gains import gain, gain_evidence
from experiments.mimo.models import PROFILE, assumptions
from experiments.mimo.rows import Compared, table_a3


def growth(evidence: Evidence, rows: Sequence[Compared]) -> None:
    """Evidence whether gains grow with context where the printed ones do."""
    ours = {row.key: gain(row, assumptions()) for row in rows}
    steps = [
        (before, after)
        for before, after in pairwise(sorted(rows, key=_group))
        if _group(before)[:2] == _group(after)[:2]
    ]
    others = [
        (before, after)
        for before, after in steps
        if (after.printed_gain > before.printed_gain) != (ours[after.key] > ours[before.key])
    ]
    same = len(steps) - len(others)
    evidence.claim(
        f"from one context to the next, gains move as printed in {same} of {len(steps)} cases (want all);",
        same == len(steps),
        cause="gains otherwise than printed, ours and printed: "
        + "; ".join(
            f"{before.key} to {after.key} {ours[before.key]:.1%} to {ours[after.key]:.1%}, "
            f"{before.printed_gain:.1%} to {after.printed_gain:.1%}"
            for before, after in others
        ),
    )


def memory_growth(evidence: Evidence, rows: Sequence[Compared]) -> None:
    """Evidence on the growth of printed memory with vision tokens: bytes a token, by reading of H."""
    for few, many in pairwise(rows):
        if _group(few)[0] != _group(many)[0] or few.baseline.sequence_tokens != many.baseline.sequence_tokens:
            continue
        if few.baseline_layout != many.baseline_layout or few.baseline_layout.llm.cp == 1:
            continue
        share = (many.baseline.vision_pct - few.baseline.vision_pct) / 100
        tokens = share * few.baseline.sequence_tokens
        h_gb, c_gb = (after - before for before, after in zip(few.printed_gb, many.printed_gb, strict=True))
        spread = few.other.num_samples / few.other_layout.encoders[0].dp
        whole, cut = h_gb / tokens, h_gb / tokens * few.baseline_layout.llm.cp
        evidence.notes.append(
            f"{few.key}: printed memory grows, per vision token of a rank, by {whole * 1e3:.2f} MB in H if "
            f"its ranks have whole images, {cut * 1e3:.2f} MB where they cut them (tp "
            f"{few.baseline_layout.llm.tp}), {c_gb / (tokens * spread) * 1e3:.2f} MB in C"
        )


def _group(row: Compared) -> tuple[str, float, int]:
    return row.baseline.llm, row.baseline.vision_pct, row.baseline.sequence_tokens


@script(profile=PROFILE)
def run() -> Evidence:
    rows = table_a3()
    evidence = gain_evidence("Table A3", rows)
    growth(evidence, rows)
    memory_growth(evidence, rows)
    return evidence
