"""Figure 7: islands stay ahead of one layout for all when a 120B LLM goes from 256 to 512 GPUs.

Paper:   Y. Karnati et al., "Heterogeneous Parallelism for Multimodal Large Language Model Training",
         Figure 7; its labels are gains of Table A4.
Setup:   (a) 6B + 120B at 8K, 256/264 and 512/520 GPUs; (b) 6B, 7.2B and 12B at 16K on 512/520.
Given:   the printed layouts.
Differs: sizes are ours, see Table A4.
Ours:    the step model of the layout search, about 20 s on one CPU core.
Run:     python -m experiments.mimo.figure7
"""

from experiments.harness.printed import PrintedRow, printed_rows
from experiments.harness.script import Parts, main, script
from experiments.mimo import tablea4
from experiments.mimo.compared import gain_evidence
from experiments.mimo.models import PROFILE
from experiments.mimo.tablea2 import step_s


def is_shown(row: PrintedRow) -> bool:
    """Whether the figure has a bar for the row: half of the tokens vision, panel (a) or (b)."""
    panel_a = row["model"] == "6B+120B" and row["seq_len_k"] == "8"
    panel_b = row["seq_len_k"] == "16" and row["h_n_gpus"] == "512"
    return row["vision_token_pct"] == "50" and (panel_a or panel_b)


@script(profile=PROFILE)
def run() -> Parts:
    """The figure's five bars."""
    rows = [tablea4.compared(row) for row in printed_rows("mimo_tableA4") if is_shown(row)]
    evidence = gain_evidence("Figure 7", rows, step_s)
    for row in rows:
        ours = evidence.ours[f"modelled/{row.key}/speed_over_h"]
        evidence.claim(f"{row.key}: NC is ahead of H (ours {ours:.3f});", ours > 1)
    return [evidence]


if __name__ == "__main__":
    main(run)
