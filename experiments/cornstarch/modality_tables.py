"""Tables 2, 7 and 8 of Cornstarch v1: encoders colocated against encoders on ranks of their own.

Setup:   A40 GPUs, 24 microbatches of one sample: 1k text tokens, one 1280x720 image, a 30 s clip.
Given:   printed stage counts, model sizes and plausible inputs -> throughput per GPU of the simulated plans
         with the A40 profile. No stage times are printed, so there is no other evidence.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import geometric_mean

from experiments.cornstarch import frozen_tables
from experiments.cornstarch.end_to_end import NUM_GPUS, stage_counts
from experiments.cornstarch.modelled import RATIO_REL_TOL, Setting
from experiments.cornstarch.models import v1_model
from experiments.cornstarch.planned import STRATEGIES, Awareness, Placement, Planned, paper_job, simulated
from experiments.harness.outcome import About, Bound, Evidence, PaperNumber
from experiments.harness.printed import PrintedRow, printed_rows
from workbench.cost.model import CostModel

TABLE_OF = {"M": "table2", "S": "table7", "L": "table8"}
TPUT_REL_TOL = 0.25
KEPT = 0.98  # of a throughput, which counts as not sacrificed
UNSTATED = "tokens per image and clip, tensor and context degrees, recompute"


@dataclass(frozen=True, slots=True, eq=False)
class ModalityRow:
    """One model: stages by module and throughput of both methods; None where the cell is missing."""

    model: str
    colocated: Mapping[str, int]
    colocated_tput: float | None
    disjoint: Mapping[str, int]
    disjoint_tput: float | None

    @property
    def printed_ratio(self) -> float | None:
        """Modality parallelism's throughput over that of colocated encoders."""
        if self.colocated_tput is None or self.disjoint_tput is None:
            return None
        return self.disjoint_tput / self.colocated_tput


def modality_rows(llm_size: str) -> tuple[ModalityRow, ...]:
    """The nine models of the table with that LLM."""
    by_model: dict[str, dict[str, PrintedRow]] = {}
    for row in printed_rows(f"cornstarch_v1_{TABLE_OF[llm_size]}"):
        by_model.setdefault(row["model"], {})[row["method"]] = row
    return tuple(_row(model, **methods) for model, methods in by_model.items())


def _row(model: str, encoders_colocated: PrintedRow, modality_parallel: PrintedRow) -> ModalityRow:
    return ModalityRow(
        model=model,
        colocated=stage_counts(encoders_colocated),
        colocated_tput=_tput(encoders_colocated),
        disjoint=stage_counts(modality_parallel),
        disjoint_tput=_tput(modality_parallel),
    )


def _tput(row: PrintedRow) -> float | None:
    cell = row["tput_inputs_per_s_per_gpu"]
    return float(cell) if cell else None


def settings(llm_size: str) -> dict[str, Setting]:
    """Plausible inputs, degrees and recompute; only the large LLM needs cp 2 for its memory (appendix "
    "D.1)."""
    likely_cp, other_cp = (2, 1) if llm_size == "L" else (1, 2)
    guesses = [
        *((image, frozen_tables.CLIPS[0], likely_cp) for image in frozen_tables.IMAGES),
        (frozen_tables.IMAGES[0], frozen_tables.CLIPS[1], likely_cp),
        (frozen_tables.IMAGES[0], frozen_tables.CLIPS[0], other_cp),
    ]
    likely, *_ = settings_of_name = {
        f"{frozen_tables.input_name(image, clip)}, cp {cp}": frozen_tables.input_of(image, clip, tp=2, cp=cp)
        for image, clip, cp in guesses
    }
    return settings_of_name | frozen_tables.not_recomputed(likely, settings_of_name[likely])


def modality_evidence(llm_size: str, cost: CostModel) -> Evidence:
    """Evidence: throughput per GPU of both methods with the printed stages, and their ratio."""
    evidence = Evidence()
    where = f"Table {TABLE_OF[llm_size].removeprefix('table')}"
    rows, ratios, excess = modality_rows(llm_size), [], []
    llm_gpu_s = least_llm_gpu_s(llm_size)
    for row in rows:
        together = _plans(row, row.colocated, Placement.COLOCATED, llm_size, cost)
        apart = _plans(row, row.disjoint, Placement.DISJOINT, llm_size, cost)
        evidence.plan_hashes += [next(iter(plans.values())).plan_hash for plans in (together, apart)]
        for name, tput, ours, share in (
            ("colocated", row.colocated_tput, together, llm_share(row.colocated, Placement.COLOCATED)),
            ("disjoint", row.disjoint_tput, apart, llm_share(row.disjoint, Placement.DISJOINT)),
        ):
            key = f"modelled/{row.model}/{name}/tput"
            values = {name: tput_of(plan) for name, plan in ours.items()}
            evidence.ours[key] = next(iter(values.values()))
            if tput is not None:
                number = PaperNumber(key, tput, "inputs/s/GPU", where, TPUT_REL_TOL)
                evidence.add_range(number, values, UNSTATED)
                most = share / llm_gpu_s + frozen_tables.TPUT_ROUNDING
                excess.append(tput / most)
                evidence.bounds[key] = Bound(
                    what="the longest stage of the LLM printed beside one encoder, on the LLM's GPUs",
                    high=most,
                )
        both = {name: tput_of(apart[name]) / tput_of(together[name]) for name in apart}
        ratios.append(next(iter(both.values())))
        evidence.ours[f"modelled/{row.model}/ratio"] = ratios[-1]
        if row.printed_ratio is not None:
            number = PaperNumber(f"modelled/{row.model}/ratio", row.printed_ratio, "x", where, RATIO_REL_TOL)
            evidence.add_range(number, both, UNSTATED)
    _claim_no_sacrifice(evidence, rows, ratios)
    _note_ratios(evidence)
    evidence.causes |= {
        "modelled/*/ratio": "no stage times are printed; no plausible tokens or degrees give the ratio",
    }
    evidence.notes.append(
        "printed throughputs over the most that the printed stage times of the same LLM allow: "
        f"{min(excess):.1f} to {max(excess):.1f}"
    )
    return evidence


def least_llm_gpu_s(llm_size: str) -> float:
    """A lower bound on the LLM's GPU-seconds of a sample, by the printed stage times.

    Tables 3, 10 and 11 print stages of the same LLM on the same text with an image or a clip; here it
    reads both. The longest of them is a part of the LLM, at most the whole. Other
    degrees are taken to save nothing.
    """
    rows = frozen_tables.table_rows(llm_size)
    stated = frozen_tables.stated_pipelines(rows)
    return max((row.llm.total_s - frozen_tables.ROUNDING_S) * stated[row].tp for row in rows)


def llm_share(counts: Mapping[str, int], placement: Placement) -> float:
    """The LLM's share of the GPUs, with equally many per stage; colocated encoders share theirs."""
    encoders = [count for name, count in counts.items() if name != "llm"]
    return counts["llm"] / (
        counts["llm"] + (max(encoders) if placement is Placement.COLOCATED else sum(encoders))
    )


def _note_ratios(evidence: Evidence) -> None:
    """Note how many ratios of the table are reproduced, and how much absolute throughputs differ."""
    ratios = [number for number in evidence.paper if number.key.endswith("/ratio")]
    near = sum(number.near(evidence.ours[number.key]) for number in ratios)
    tputs = [number for number in evidence.paper if number.key.endswith("/tput")]
    factors = [number.value / evidence.ours[number.key] for number in tputs]
    evidence.notes.append(
        f"in ratio: {near} of {len(ratios)} within {RATIO_REL_TOL:.0%}; printed over ours of the "
        f"{len(tputs)} absolute throughputs {min(factors):.1f} to {max(factors):.1f}, geometric mean "
        f"{geometric_mean(factors):.1f}"
    )


def layout_evidence(llm_size: str) -> Evidence:
    """Evidence whether Table 6's layouts, used in Tables 7 and 8, fit the 24 GPUs of section 6.1."""
    evidence = Evidence()
    gpus = {}
    for row in printed_rows("cornstarch_v1_table6"):
        if row["llm_size"] == llm_size and row["cp"]:
            counts = [row[column] for column in ("llm_pp", "coloc_enc_pp", "vision_pp", "audio_pp")]
            stages = sum(int(count) for count in counts if count)
            gpus[f"{row['model']}/{row['method']}"] = stages * int(row["tp"]) * int(row["cp"])
    over = {name: count for name, count in gpus.items() if count > NUM_GPUS}
    evidence.claim(
        f"the layouts of Table 6 fit {NUM_GPUS} GPUs ({len(gpus) - len(over)} of {len(gpus)} do, "
        f"the largest takes {max(gpus.values())}):",
        not over,
        cause="the paper contradicts itself: by Table 6, with tensor and context parallelism of 2 "
        f"each, {len(over)} layouts have more stages than its {NUM_GPUS} GPUs hold",
    )
    return evidence


def tput_of(plan: Planned) -> float:
    """Throughput: inputs a second and GPU."""
    return frozen_tables.NUM_MICROBATCHES / plan.iteration_s / plan.num_ranks


def _plans(
    row: ModalityRow, counts: Mapping[str, int], placement: Placement, llm_size: str, cost: CostModel
) -> dict[str, Planned]:
    """Plans by setting; colocated is the paper's baseline: frozen-unaware."""
    awareness = Awareness.AWARE if placement is Placement.DISJOINT else Awareness.UNAWARE
    model = v1_model(row.model, llm_size)
    return {
        name: simulated(
            STRATEGIES[placement, awareness],
            paper_job(model, setting, counts, frozen_tables.NUM_MICROBATCHES, cost),
            cost,
        )
        for name, setting in settings(llm_size).items()
    }


def _claim_no_sacrifice(evidence: Evidence, rows: Sequence[ModalityRow], ours: Sequence[float]) -> None:
    printed = {row: row.printed_ratio for row in rows if row.printed_ratio is not None}
    for name, about, ratios in (
        ("in print", About.BOOKKEEPING, printed),
        ("in our model", About.PAPER, dict(zip(rows, ours, strict=True))),
    ):
        mean = geometric_mean(ratios.values())
        evidence.claim(
            f"modality parallelism does not sacrifice throughput {name} (geometric mean {mean:.3f} of "
            f"colocated, at least {KEPT} in {sum(r >= KEPT for r in ratios.values())} of {len(ratios)}):",
            mean >= KEPT,
            about,
            cause=why_sacrificed(ratios) if about is About.PAPER else "",
        )


def why_sacrificed(ratios: Mapping[ModalityRow, float]) -> str:
    """The models that lose, with what is printed of them: a stage more whose time the others do not save."""
    lost = [
        f"{row.model} {sum(row.disjoint.values())} stages against "
        f"{row.colocated['llm'] + max(count for name, count in row.colocated.items() if name != 'llm')}, "
        f"ours {ratio:.2f}, printed {'none' if row.printed_ratio is None else f'{row.printed_ratio:.2f}'}"
        for row, ratio in ratios.items()
        if ratio < KEPT
    ]
    return f"a stage more that leaves the LLM's, the longest, as they were: {'; '.join(lost)}"
