"""Figures 4.14 and C.1 to C.7: memory of every rank under DistTrain, DIP and Entrain.

Paper:   I. Jang, dissertation, section 4.7.2, Figure 4.14; appendix C.4.
Setup:   one replica of 16 A40s, tp 2, 128 samples in 32 microbatches, stages of the data set's mean ratio;
         DIP has 8 stages of either module on the same ranks.
Given:   "about 12 GB" more under DIP on rank 7; curves are not printed, nor whether the encoder's activations
         are kept or computed again.
Differs: sizes are ours; DistTrain has Entrain's stages. Under DIP a rank keeps encoder activations of all 32
         microbatches, so its peak grows with the batch; whether that fits decides if it can run at all. The
         paper has Entrain run forwards ahead as far as memory allows and take hardly more memory than 1F1B,
         which cannot both be true: its curve is compared with `entrain-in-turn`, without eager forwards, and
         `entrain` is shown beside it.
Ours:    simulated with the memory of every action, about 10 s a data set; draws the curves.
"""

from collections.abc import Mapping

from experiments.entrain.traced import PLANNERS, traced
from experiments.entrain.workload import PANELS
from experiments.harness.figure import SKY, Grid, Line, Lines
from experiments.harness.outcome import Evidence, PaperNumber
from experiments.harness.script import Parts, script
from workbench.plan.plan import Recompute
from workbench.report.palette import INK, mixed
from workbench.units import GB

DRAWN = ("disttrain", "dip", "entrain-in-turn", "entrain")
ENTRAIN = "entrain-in-turn"
RANK = 7  # the text's
NUM_RANKS = 16


Curve = tuple[list[float], list[float]]  # seconds, GB


def curves_of(dataset: str, llm: str, system: str, recompute: Recompute = Recompute.NONE) -> dict[int, Curve]:
    """Rank -> its memory over a step."""
    curves: dict[int, Curve] = {}
    for sample in traced(dataset, llm, system, recompute).trace.memory:
        seconds, used_gb = curves.setdefault(sample.rank, ([], []))
        seconds.append(sample.time_s)
        used_gb.append(sample.num_bytes / GB)
    return dict(sorted(curves.items()))


def panel_evidence(dataset: str, llm: str, curves: Mapping[str, Mapping[int, Curve]]) -> Evidence:
    """Evidence of one panel: peaks by system."""
    evidence = Evidence()
    peaks_gb = {
        system: [max(memory_gb) for _, memory_gb in curve_of_rank.values()]
        for system, curve_of_rank in curves.items()
    }
    where, key = f"{dataset}, {llm}", f"modelled/{llm}/{dataset}"
    for system, used_gb in peaks_gb.items():
        evidence.ours[f"{key}/{system}_peak_gb"] = max(used_gb)
        listed = " ".join(f"{peak_gb:.1f}" for peak_gb in used_gb)
        evidence.notes.append(f"{where}, {system}: GB by rank {listed}")
    most = {system: max(used_gb) for system, used_gb in peaks_gb.items()}
    evidence.claim(
        f"{where}: DIP needs most ({most['dip']:.1f} GB, Entrain {most[ENTRAIN]:.1f});",
        most["dip"] >= max(most[ENTRAIN], most["disttrain"], most["1f1b"]),
    )
    evidence.claim(
        f"{where}: deferral costs <= 10 % over 1F1B ({most[ENTRAIN]:.1f}, {most['1f1b']:.1f} GB);",
        most[ENTRAIN] <= 1.1 * most["1f1b"],
    )
    evidence.claim(
        f"{where}: Entrain's peak is not above DistTrain's ({most['disttrain']:.1f} GB);",
        most[ENTRAIN] <= most["disttrain"],
    )
    evidence.claim(
        f"{where}: with eager forwards it is still within 10 % of 1F1B's ({most['entrain']:.1f} GB);",
        most["entrain"] <= 1.1 * most["1f1b"],
        cause="the paper contradicts itself: forwards that run ahead as far as memory allows (section 4.5.3) "
        f"hold more than 1F1B's, here {most['entrain'] / most['1f1b']:.1f} times as much; in turn, Entrain "
        f"takes {most[ENTRAIN] / most['1f1b']:.2f} times as much",
    )
    return evidence


def more_under_dip(dataset: str, llm: str) -> Evidence:
    """Evidence on a rank's extra memory under DIP over Entrain, by the encoder's recomputation."""
    evidence, more_gb = Evidence(), {}
    for recompute in (Recompute.NONE, Recompute.FULL):
        dip_gb, entrain_gb = (
            curves_of(dataset, llm, system, recompute)[RANK][1] for system in ("dip", ENTRAIN)
        )
        more_gb[f"recompute {recompute} in the encoder"] = max(dip_gb) - max(entrain_gb)
    number = PaperNumber("modelled/dip_more_gb", 12, "GB", "section 4.7.2", rel_tol=0.25)
    evidence.add_range(number, more_gb, "what the encoder's backward computes again")
    return evidence


def drawing(curves_of_panel: Mapping[tuple[str, str], Mapping[str, Mapping[int, Curve]]]) -> Grid:
    """One row per data set and model, one column per system, a line for every other rank."""
    rows = [
        [
            Lines(
                title=f"{dataset}, {llm}, {system}",
                x="seconds of a step",
                y="held, GB",
                y_limits=(0, None),
                lines=[_memory_line(rank, curve) for rank, curve in list(curves[system].items())[::2]],
            )
            for system in DRAWN
        ]
        for (llm, dataset), curves in curves_of_panel.items()
    ]
    return Grid(rows=rows, panel_inches=(4.3, 2.4), shares_y="row")


def _memory_line(rank: int, curve: Curve) -> Line:
    seconds, used_gb = curve
    colour = mixed(SKY, INK, 1 - rank / NUM_RANKS)
    return Line(x=seconds, y=used_gb, colour=colour, label=f"rank {rank}", width=0.6, step=True)


@script(profile="A40")
def run() -> Parts:
    curves_of_panel = {
        (llm, dataset): {system: curves_of(dataset, llm, system) for system in PLANNERS}
        for llm, dataset in PANELS
    }
    parts = [panel_evidence(dataset, llm, curves) for (llm, dataset), curves in curves_of_panel.items()]
    parts[0].figures["entrain_figure4_14"] = drawing(curves_of_panel)
    return [*parts, more_under_dip("SynthChartNet", "Llama3-3b")]
