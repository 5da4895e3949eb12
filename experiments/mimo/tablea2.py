"""Table A2: layouts of their own on shared GPUs at 8K, against one layout for all.

Paper:   Y. Karnati et al., "Heterogeneous Parallelism for Multimodal Large Language Model Training",
         Table A2.
Setup:   1B to 12B encoders with 14B to 120B LLMs on 72 or 256 H100s, printed layouts on both sides.
Given:   layouts, optimizer instances, batch sizes; encoders from 3B on are recomputed, LLMs are not.
Differs: sizes are ours (`module_sizes.csv`), so every row is UNDERSPECIFIED or OFF; gains are judged by
         the printed step times.
Ours:    the step model of the layout search, about 30 s on one CPU core.
Run:     python -m experiments.mimo.tablea2
"""

from experiments.harness.printed import PrintedRow, printed_rows
from experiments.harness.script import Parts, main, script
from experiments.mimo.compared import Compared, compared_row, encoder_of, gain_evidence, llm_of
from experiments.mimo.models import PROFILE
from workbench.planner.layout_choice import LayoutChoice, LayoutStep, Mode


def compared(row: PrintedRow) -> Compared:
    """One row, both layouts as printed."""
    key = f"A2/{row['model']}/{row['vision_token_pct']}"
    return compared_row(row, key, colocated(row), columns=("h_llm", "c"))


def colocated(row: PrintedRow) -> LayoutChoice:
    """C as printed."""
    encoder = encoder_of(row, "c_enc", instances=int(row["enc_opt_instances"]))
    return LayoutChoice(mode=Mode.COLOCATED, encoders=(encoder,), llm=llm_of(row, "c_llm"))


def step_s(step: LayoutStep) -> float:
    """The whole step."""
    return step.step_s


@script(profile=PROFILE)
def run() -> Parts:
    """All rows."""
    rows = [compared(row) for row in printed_rows("mimo_tableA2")]
    return [gain_evidence("Table A2", rows, step_s)]


if __name__ == "__main__":
    main(run)
