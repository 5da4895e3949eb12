"""Table A3: long contexts, encoders kept whole on shared GPUs against encoders cut like the LLM.

Paper:   Y. Karnati et al., "Heterogeneous Parallelism for Multimodal Large Language Model Training",
         Table A3.
Setup:   a 1B encoder with 7B and 14B LLMs, 16K to 128K, printed layouts on both sides.
Given:   layouts, batch sizes; forward and backward alone are timed.
Differs: sizes are ours; one sample a microbatch on both sides, where the table prints one number of
         microbatches for layouts of different dp.
Ours:    the step model of the layout search, about 20 s on one CPU core.
Run:     python -m experiments.mimo.tablea3
"""

from itertools import pairwise

from experiments.harness.outcome import Evidence
from experiments.harness.printed import PrintedRow, printed_rows
from experiments.harness.script import Parts, main, script
from experiments.mimo.compared import Compared, compared_row, encoder_of, gain_evidence, llm_of
from experiments.mimo.models import PROFILE
from workbench.planner.layout_choice import LayoutChoice, LayoutStep, Mode


def compared(row: PrintedRow) -> Compared:
    """One row, both layouts as printed."""
    key = f"A3/{row['model']}/{row['seq_len_k']}K/{row['vision_token_pct']}"
    other = LayoutChoice(mode=Mode.COLOCATED, encoders=(encoder_of(row, "c_enc"),), llm=llm_of(row, "c_llm"))
    return compared_row(row, key, other, columns=("h", "c"), timed="fwd_bwd_ms")


def passes_s(step: LayoutStep) -> float:
    """Forward and backward."""
    return step.passes_s


def growth(evidence: Evidence, rows: list[Compared]) -> None:
    """Whether gains grow with context where the printed ones do."""
    ours = {row.key: evidence.ours[f"modelled/{row.key}/speed_over_h"] for row in rows}
    steps = [
        (before, after)
        for before, after in pairwise(sorted(rows, key=_group))
        if _group(before)[:2] == _group(after)[:2]
    ]
    same = sum(
        (after.printed_gain > before.printed_gain) == (ours[after.key] > ours[before.key])
        for before, after in steps
    )
    evidence.claim(
        f"from one context to the next, gains move as printed in {same} of {len(steps)} cases (want all);",
        same == len(steps),
    )


def _group(row: Compared) -> tuple[str, float, int]:
    return row.baseline.llm, row.baseline.vision_pct, row.baseline.sequence_tokens


@script(profile=PROFILE)
def run() -> Parts:
    """All rows."""
    rows = [compared(row) for row in printed_rows("mimo_tableA3")]
    evidence = gain_evidence("Table A3", rows, passes_s)
    growth(evidence, rows)
    return [evidence]


if __name__ == "__main__":
    main(run)
