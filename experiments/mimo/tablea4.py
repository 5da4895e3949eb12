"""Table A4: encoders on an island of 8 GPUs beside a 120B LLM, against one layout for all.

Paper:   Y. Karnati et al., "Heterogeneous Parallelism for Multimodal Large Language Model Training",
         Table A4.
Setup:   6B to 12B encoders, 8K and 16K, 256 or 512 GPUs and 8 more for the island; printed layouts.
Given:   layouts, batch sizes; encoders are recomputed, the LLM is not.
Differs: sizes and patches per vision token are ours: with a patch for each token, the printed island
         would have to run above a GPU's peak.
Ours:    the step model of the layout search, about 30 s on one CPU core.
Run:     python -m experiments.mimo.tablea4
"""

from experiments.harness.printed import PrintedRow, printed_rows
from experiments.harness.script import Parts, main, script
from experiments.mimo.compared import Compared, compared_row, encoder_of, gain_evidence, llm_of
from experiments.mimo.models import PROFILE
from experiments.mimo.tablea2 import step_s
from workbench.planner.layout_choice import LayoutChoice, Mode


def compared(row: PrintedRow) -> Compared:
    """One row, both layouts as printed."""
    key = f"A4/{row['model']}/{row['seq_len_k']}K/{row['vision_token_pct']}/{row['h_n_gpus']}"
    return compared_row(row, key, apart(row), columns=("h", "nc"))


def apart(row: PrintedRow) -> LayoutChoice:
    """NC as printed."""
    return LayoutChoice(mode=Mode.APART, encoders=(encoder_of(row, "nc_enc"),), llm=llm_of(row, "nc_llm"))


@script(profile=PROFILE)
def run() -> Parts:
    """All rows."""
    rows = [compared(row) for row in printed_rows("mimo_tableA4")]
    return [gain_evidence("Table A4", rows, step_s)]


if __name__ == "__main__":
    main(run)
