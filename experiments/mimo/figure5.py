"""Figure 5: where colocated layouts pay, how context helps them, and where islands take over.

Paper:   Karnati et al., Figure 5; its bars are rows of Tables A2 to A5.
Setup:   (a) C over H at 8K, half of the tokens vision; (b) C over H from 16K to 128K; (c) C and NC over H
         with a 120B LLM at 8K by size of the encoder, in tokens a second; (d) the same per GPU.
Given:   the printed layouts, see the tables.
Differs: the figure does not say which rows it draws: (a) takes those with half of the tokens vision, (b) all
         of Table A3. Sizes are ours; gains are compared by printed step times, in (c) and (d) by printed
         gains.
Ours:    plans of the strategies, simulated, about 2 minutes on one CPU core.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean

from experiments.harness.outcome import Evidence, PaperNumber
from experiments.harness.printed import PrintedRow, printed_rows
from experiments.harness.script import Parts, script
from experiments.mimo import tablea5
from experiments.mimo.gains import CAUSES, PERCENT, RATIO_TOL, add_speedup
from experiments.mimo.models import PROFILE
from experiments.mimo.rows import Compared, table_a2, table_a3

HALF = 50.0
LARGEST_LLM = "120"
LONG_TOKENS = 64 * 1024


def shorter_context() -> list[Compared]:
    """Panel (a)."""
    return [row for row in table_a2() if row.baseline.vision_pct == HALF]


def largest_llm() -> list[PrintedRow]:
    """Rows of panels (c) and (d), by size of the encoder."""
    rows = [row for row in printed_rows("mimo_tableA5") if row["llm_params_b"] == LARGEST_LLM]
    return sorted(rows, key=lambda row: float(row["enc_params_b"]))


def panel(name: str, rows: Sequence[Compared]) -> tuple[Evidence, dict[str, float]]:
    """Evidence on the speeds of a panel's bars, and our gains by row."""
    evidence, ours = Evidence(causes=dict(CAUSES)), {}
    for row in rows:
        key = f"{name}/{row.key.partition('/')[2]}"
        ours[row.key] = add_speedup(evidence, row, key, f"Figure 5({name})") - 1
    return evidence, ours


def shared_gpus() -> Evidence:
    """(a): colocated layouts are ahead where the printed ones are."""
    rows = shorter_context()
    evidence, ours = panel("a", rows)
    ahead = [row for row in rows if row.printed_gain > 0]
    num_kept = sum(ours[row.key] > 0 for row in ahead)
    evidence.claim(
        f"(a) C is ahead of H in {num_kept} of the {len(ahead)} models where it is printed so;",
        num_kept == len(ahead),
    )
    return evidence


def contexts() -> Evidence:
    """(b): gains from 64K on are larger than below."""
    rows = table_a3()
    evidence, ours = panel("b", rows)
    short, long = (mean_gain(rows, ours, is_long=is_long) for is_long in (False, True))
    evidence.claim(
        f"(b) gains are larger from 64K on than below (ours {long:.1%} against {short:.1%} in the mean);",
        long > short,
    )
    return evidence


def mean_gain(rows: Sequence[Compared], ours: Mapping[str, float], *, is_long: bool) -> float:
    """The mean gain of the rows at 64K and more, or of those below."""
    return fmean(ours[row.key] for row in rows if (row.baseline.sequence_tokens >= LONG_TOKENS) == is_long)


def modes() -> Evidence:
    """(c) and (d): who is best by size of the encoder."""
    evidence = Evidence(causes=dict(CAUSES))
    best: dict[float, tuple[str, str]] = {}
    per_gpu: dict[float, float] = {}
    for row in largest_llm():
        row_modes = tablea5.modes_of(row)
        size, gpus = float(row["enc_params_b"]), int(row["h_n_gpus"]) / int(row["nc_n_gpus"])
        nc, c = row_modes.h_s / row_modes.nc_s, row_modes.h_s / row_modes.c_s
        best[size] = (row["best_mode"], "C" if c > nc else "NC")
        per_gpu[size] = nc * gpus
        for name, speed in (("c", c), ("nc", nc)):
            printed = 1 + float(row[f"{name}_tokens_per_s_gain_pct"] or 0) / PERCENT  # empty: C is H
            _add(evidence, f"c/{row['model']}/{name}", printed, speed)
    for row in largest_llm():
        printed = 1 + float(row["nc_tflops_per_gpu_gain_pct"]) / PERCENT
        _add(evidence, f"d/{row['model']}/nc", printed, per_gpu[float(row["enc_params_b"])])
    same = sum(printed == ours for printed, ours in best.values())
    evidence.claim(
        f"(c) C or NC is best as printed for {same} of {len(best)} encoders;",
        same == len(best),
        cause="the claims of Table A5 on a 120B LLM, with their causes",
    )
    large = {size: speed for size, speed in per_gpu.items() if size >= tablea5.CROSSOVER_B}
    evidence.claim(
        f"(d) from 6B on NC is ahead of H per GPU too (ours {min(large.values()):.3f} at least);",
        min(large.values()) > 1,
        cause="its tokens a second gain less than its island has more GPUs, in ours and printed: "
        + ", ".join(
            _gain_and_more_gpus(row, evidence.ours)
            for row in largest_llm()
            if float(row["enc_params_b"]) in large
        ),
    )
    return evidence


def _gain_and_more_gpus(row: PrintedRow, ours: Mapping[str, float]) -> str:
    """Our and the printed gain of NC in tokens a second, and its share of more GPUs."""
    gain = ours[f"modelled/c/{row['model']}/nc/speed_over_h"] - 1
    more = int(row["nc_n_gpus"]) / int(row["h_n_gpus"]) - 1
    return (
        f"{row['model']} {gain:+.1%} and {float(row['nc_tokens_per_s_gain_pct']):+.1f}% for {more:+.1%} GPUs"
    )


def _add(evidence: Evidence, key: str, printed: float, ours: float) -> None:
    where = f"Figure 5({key[0]})"
    evidence.add(PaperNumber(f"modelled/{key}/speed_over_h", printed, "x", where, RATIO_TOL), ours)


@script(profile=PROFILE)
def run() -> Parts:
    return [shared_gpus(), contexts(), modes()]
