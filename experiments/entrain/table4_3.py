"""Table 4.3: how far forward times of microbatches spread, by module, method and data set.

Paper:   I. Jang, dissertation, section 4.7.4, Table 4.3 and Figures 4.16, C.11 to C.13; "up to 10.6x".
Setup:   standard deviation over a replica's 32 microbatches of a module's forward time over all stages,
         averaged over replicas and batches of `experiments.entrain.series`.
         The balancer's own costs have no error; `noise` gives every microbatch one, as a run on GPUs has.
Differs: sizes are ours, so no printed cell is compared: only who spreads least, and the largest reduction.
         The table's rows "Vision" and "Llama 1b" are the same in 9 of 12 cells, one of them by mistake.
Ours:    reads the series.
"""

import statistics

from experiments.entrain.series import STUDIES, Figures, kept_series
from experiments.entrain.stage_work import NOISE_SHARE
from experiments.harness.outcome import Evidence, PaperNumber
from experiments.harness.printed import printed_rows
from experiments.harness.script import Parts, script
from workbench.units import MS_PER_S

MODULES = {"vision": "vision_std_s", "llm": "llm_std_s"}
METHODS = ("disttrain", "dip", "entrain")


def printed() -> dict[tuple[str, str, str], float]:
    """(module, system, data set) -> the printed cell, without its unit."""
    return {
        (row["module"], row["system"], row["dataset"]): float(row["fwd_time_std"])
        for row in printed_rows("entrain_table4_3")
    }


def data_set_evidence(llm: str, dataset: str, methods: dict[str, Figures]) -> Evidence:
    """Evidence of one column of the table for one model."""
    evidence = Evidence()
    cells = printed()
    for module, name in MODULES.items():
        ours_ms = {method: statistics.fmean(methods[method][name]) * MS_PER_S for method in METHODS}
        for method, spread_ms in ours_ms.items():
            evidence.ours[f"modelled/{llm}/{dataset}/{module}/{method}_std_ms"] = spread_ms
        row = module if module == "vision" else f"llama_{llm[-2:]}"
        listed = ", ".join(f"{m} {ours_ms[m]:.1f} (paper {cells[row, m, dataset]:g})" for m in METHODS)
        where = f"{dataset}, {module} of {llm}"
        evidence.notes.append(f"{where}, ms: {listed}")
        evidence.claim(
            f"{where}: Entrain spreads least ({listed});", ours_ms["entrain"] == min(ours_ms.values())
        )
    return evidence


def largest_reduction(series_of: dict[str, dict[str, dict[str, Figures]]]) -> float:
    """The largest ratio of DistTrain's spread to Entrain's."""
    return max(
        statistics.fmean(methods["disttrain"][name]) / statistics.fmean(methods["entrain"][name])
        for series in series_of.values()
        for methods in series.values()
        for name in MODULES.values()
    )


@script(profile="A40")
def run() -> Parts:
    series_of = kept_series()
    parts = [
        data_set_evidence(llm, dataset, methods)
        for llm, series in series_of.items()
        for dataset, methods in series.items()
    ]
    summary = Evidence()
    number = PaperNumber("modelled/most_reduction", 10.6, "times", "section 4.7", rel_tol=0.25)
    reductions = {
        f"forwards {100 * NOISE_SHARE:.0f} % off what the balancer believes": largest_reduction(
            kept_series(STUDIES["noise"])
        ),
        "forwards as the balancer believes": largest_reduction(series_of),
    }
    summary.add_range(number, reductions, "how far measured forwards are from the cost model's")
    return [summary, *parts]
