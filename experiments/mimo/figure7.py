"""Figure 7: islands stay ahead of one layout for all when a 120B LLM goes from 256 to 512 GPUs.

Paper:   Karnati et al., Figure 7; its labels are gains of Table A4.
Setup:   (a) 6B + 120B at 8K, 256/264 and 512/520 GPUs; (b) 6B, 7.2B and 12B at 16K on 512/520.
Given:   the printed layouts.
Differs: sizes are ours, see Table A4.
Ours:    plans of the strategies, simulated, about 1 minute on one CPU core.
"""

from experiments.harness.script import Parts, script
from experiments.mimo.gains import gain_evidence
from experiments.mimo.models import PROFILE
from experiments.mimo.rows import Compared, table_a4


def is_shown(row: Compared) -> bool:
    """Whether the figure has a bar for the row: half of the tokens vision, panel (a) or (b)."""
    of_h = row.baseline
    panel_a = of_h.encoder == "6B" and of_h.sequence_tokens == 8 * 1024
    panel_b = of_h.sequence_tokens == 16 * 1024 and of_h.num_gpus == 512
    return of_h.vision_pct == 50 and (panel_a or panel_b)


@script(profile=PROFILE)
def run() -> Parts:
    """Evidence of the figure's five bars."""
    rows = [row for row in table_a4() if is_shown(row)]
    evidence = gain_evidence("Figure 7", rows)
    for row in rows:
        ours = evidence.ours[f"modelled/{row.key}/speed_over_h"]
        evidence.claim(f"{row.key}: NC is ahead of H (ours {ours:.3f});", ours > 1)
    return [evidence]
