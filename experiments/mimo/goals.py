"""The goals of the layout paper's simulated tables, and whether each holds.

Paper:   Karnati et al., Tables A2 to A5, Figure 8.
Setup:   as each table's script, under the rules of `protocol.toml`, which was committed before a score was
         seen; gains by printed step times.
Given:   the printed layouts; two numbers of the machine, fitted on homogeneous step times alone.
Differs: sizes are ours. A note gives the values for another reading, and for a machine as profiled; no goal
         uses them.
Ours:    plans of the strategies, simulated, about 4 minutes on one CPU core.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from experiments.harness.outcome import About, Evidence
from experiments.harness.printed import printed_rows
from experiments.harness.script import Parts, script
from experiments.mimo import figure8, tablea3, tablea5
from experiments.mimo.gains import CUT, Gains, both_s, gains_of, ratios
from experiments.mimo.models import PROFILE, Images, assumptions, protocol
from experiments.mimo.rows import Compared, tables

LARGEST_LLM, HALF = "120B", 50.0


def signs(gains_of_tables: Sequence[Gains]) -> Evidence:
    """Evidence: signs, ranks and errors of every table, and of all their rows."""
    evidence = Evidence()
    whole = Gains(
        name="all tables",
        rows=tuple(row for table_gains in gains_of_tables for row in table_gains.rows),
        printed=tuple(gain for table_gains in gains_of_tables for gain in table_gains.printed),
        ours=tuple(gain for table_gains in gains_of_tables for gain in table_gains.ours),
    )
    for table_gains in (*gains_of_tables, whole):
        table_gains.judge(evidence)
    return evidence


def steps(rows_of: Mapping[str, Sequence[Compared]]) -> Evidence:
    """Evidence on the mean of our step times over the printed ones."""
    evidence = Evidence()
    ratios_of = {name: ratios(rows) for name, rows in rows_of.items()}
    least, most = protocol()["judged"]["step_over_printed"]
    mean = fmean(ratio for of_table in ratios_of.values() for ratio in of_table)
    evidence.ours["modelled/step_over_printed"] = mean
    for name, of_table in ratios_of.items():
        evidence.ours[f"modelled/{name}/step_over_printed"] = fmean(of_table)
    evidence.claim(
        f"our steps over the printed: {mean:.3f} in the mean (want {least:g} to {most:g});",
        least <= mean <= most,
        About.METHODS,
    )
    return evidence


def one_llm(rows: Sequence[Compared]) -> Evidence:
    """Notes on the printed values of one LLM under one layout, beside ours."""
    evidence = Evidence()
    same = [row for row in rows if row.baseline.llm == LARGEST_LLM and row.baseline.vision_pct == HALF]
    ours = [both_s(row, assumptions()) for row in same]
    text = "; ".join(
        f"{row.baseline.encoder} {row.printed_s[0]:.1f} and {row.printed_s[1]:.1f} s printed, "
        f"{h_s:.1f} and {c_s:.1f} s ours"
        for row, (h_s, c_s) in zip(same, ours, strict=True)
    )
    evidence.notes.append(f"the 120B LLM under one layout, 8/1/4/8, by encoder, H and C: {text}")
    return evidence


@script(profile=PROFILE)
def run() -> Parts:
    rows = tables()
    modes = [tablea5.modes_of(row) for row in printed_rows("mimo_tableA5")]
    gains = {name: gains_of(f"Table {name}", of_table, assumptions()) for name, of_table in rows.items()}
    over_nc = tablea5.modes_gains(printed_rows("mimo_tableA5"), modes)
    by_signs = signs([*gains.values(), over_nc])
    for table_gains in gains.values():
        by_signs.notes += [f"{table_gains.name}: another sign: {row}" for row in table_gains.missed()]
    cut = replace(assumptions(), under_context=Images.CUT)
    for name in ("A3", "A4"):
        by_signs.notes.append(f"read otherwise ({CUT}), {gains_of(f'Table {name}', rows[name], cut)}")
    other_evidence = Evidence()
    tablea3.growth(other_evidence, rows["A3"])
    tablea5.crossover(other_evidence, printed_rows("mimo_tableA5"), modes)
    for claim in (*other_evidence.claims, *figure8.run().claims):
        by_signs.claim(claim.text, claim.holds, About.BOOKKEEPING, cause=claim.cause)
    return [by_signs, steps(rows), one_llm(rows["A2"])]
