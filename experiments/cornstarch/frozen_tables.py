"""Tables 3, 10 and 11 of Cornstarch v1: the printed stage times compared with the printed throughputs.

Setup:   A40 GPUs, 24 microbatches of one sample (1k text tokens, one 1280x720 image or a 30 s clip), tensor
         parallelism of Table 9, encoder and LLM frozen. Tokens of images and clips follow from section 6.1's
         totals; pixels, the bandwidth of PCIe and whether layers are recomputed are not stated: activation
         checkpointing is stated of Figure 3b alone. Shown: recomputed, as there.
Given:   printed stage times -> simulated throughput per GPU and gains ([printed]), once with the stage
         counts of Table 9 ("stated"), once with those that the stage times imply ("implied").
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from experiments.cornstarch.modelled import Setting
from experiments.cornstarch.modelled_tables import (
    LINKS,
    LLM_SPREAD,
    FrozenRow,
    Guess,
    ModelledTable,
    Pipeline,
    all_implied_stages,
    frozen_rows,
    implied_encoder_stages,
    implied_llm_stages,
    modelled_evidence,
    pairs,
    run_row,
    slower_links,
    winner,
)
from experiments.cornstarch.models import v1_model
from experiments.cornstarch.planned import Placement
from experiments.harness.outcome import Bound, Claim, Evidence, PaperNumber
from experiments.harness.printed import claim_value, printed_rows
from experiments.harness.printed_pipeline import PrintedRun
from workbench.cost.model import CostModel
from workbench.data.corpus import ItemTokens, square_image_tokens
from workbench.plan.plan import Recompute

TABLE_OF = {"M": "table3", "S": "table10", "L": "table11"}
NUM_MICROBATCHES = 24  # section 6.1: 24 microbatches of one sample
MAX_STAGES = 6  # section 6.1: at most 6 stages per module

TPUT_REL_TOL = 0.05  # a throughput out of printed stage times: nothing is estimated
GAIN_REL_TOL = 0.05  # frozen-aware over frozen-unaware
ROUNDING_S = 1e-5  # forward and backward in ms with two decimals
TPUT_ROUNDING = 0.005
ROUNDING = 0.005  # the prose has two decimals
SUM_DOUBT = 0.02  # two summands and the sum, or two throughputs above 1 and their ratio, of two decimals
COUNT_REL_TOL = 0.0  # stage counts are integers

TEXT_TOKENS = 1024
# Section 6.1: 1k text tokens, "1.5k~4k tokens in total". With an image, a clip, or both beside the text that
# leaves about 0.5k for the one and 2.5k for the other; stage times say that the clip is the longer one.
IMAGES = (  # EVA-CLIP's 336 px and 224 px; all 14 px patches of 1280x720, pooled into what the total leaves
    square_image_tokens(336, 14, num_class_tokens=1),
    square_image_tokens(224, 14, num_class_tokens=1),
    ItemTokens(91 * 51 + 1, 512),
)
CLIPS = (  # what the total leaves, and one token per 10 ms, 4k with the text alone; Whisper has 1,500 frames
    ItemTokens(1500, 2500),
    ItemTokens(1500, 3000),
)
UNSTATED = f"tokens per image and clip, recompute, {LINKS}"


def table_rows(llm_size: str) -> tuple[FrozenRow, ...]:
    """The rows of the table with that LLM."""
    return frozen_rows(f"cornstarch_v1_{TABLE_OF[llm_size]}", result="tput_inputs_per_s_per_gpu")


def stated_pipelines(rows: Sequence[FrozenRow]) -> dict[FrozenRow, Pipeline]:
    """Table 9's stage counts and tensor-parallel degree of every row."""
    printed = {
        (row["llm_size"], row["model"], row["method"]): row for row in printed_rows("cornstarch_v1_table9")
    }
    pipelines = {}
    for row in rows:
        stated = printed[row.llm_size, row.model, "cornstarch" if row.aware else "encoders_colocated"]
        pipelines[row] = Pipeline(int(stated["enc_pp"]), int(stated["llm_pp"]), int(stated["tp"]))
    return pipelines


def implied_pipelines(llm_size: str) -> dict[FrozenRow, Pipeline]:
    """Stage counts that the printed stage times of a table imply.

    VLMs of one table share their LLM and its input, and so do ALMs. An encoder's times are
    shared by the tables with the same tensor-parallel degree: 2 for small and medium, 4 for large.
    """
    rows = table_rows(llm_size)
    stated = stated_pipelines(rows)
    llm = implied_llm_stages(same_llm(rows), max_stages=MAX_STAGES)
    same_tp = "L" if llm_size == "L" else "SM"
    everywhere = [row for size in same_tp for row in table_rows(size)]
    encoder = implied_encoder_stages(
        [[row for row in everywhere if row.model == model] for model in dict.fromkeys(r.model for r in rows)],
        max_stages=MAX_STAGES,
    )
    return {row: Pipeline(encoder[row], llm[row], stated[row].tp) for row in rows}


def tput_per_gpu(run: PrintedRun, pipeline: Pipeline) -> float:
    """Inputs per second and GPU: samples of the iteration / its time / GPUs."""
    return NUM_MICROBATCHES / run.iteration_s / pipeline.num_ranks


def printed_evidence(llm_size: str) -> Evidence:
    """Evidence of the simulator with the printed stage times, with stated and with implied stage counts."""
    rows = table_rows(llm_size)
    table = f"Table {TABLE_OF[llm_size].removeprefix('table')}"
    evidence = Evidence()
    stated, implied = stated_pipelines(rows), implied_pipelines(llm_size)
    for title, pipelines in (("stated", stated), ("implied", implied)):
        ours = {}
        for row in rows:
            run = run_row(row, pipelines[row], v1_model(row.model, row.llm_size), NUM_MICROBATCHES)
            evidence.plan_hashes.append(run.plan_hash)
            ours[row] = tput_per_gpu(run, pipelines[row])
            number = PaperNumber(
                f"printed/{title}/{row.name}/tput", row.result, "inputs/s/GPU", table, TPUT_REL_TOL
            )
            evidence.add(number, ours[row])
            evidence.bounds[number.key] = tput_bound(row, stated[row].tp)
        for model, (aware, unaware) in pairs(rows).items():
            key = f"printed/{title}/{model}/gain"
            gain = aware.result / unaware.result
            evidence.add(PaperNumber(key, gain, "x", table, GAIN_REL_TOL), ours[aware] / ours[unaware])
        evidence.notes.append(_scale_note(title, rows, ours))
    evidence.claims += _gain_claims(rows, evidence, implied)
    evidence.causes["printed/*"] = (
        "printed throughputs are not in the ratio of the stage times, whichever stage counts are taken"
    )
    return evidence


def tput_bound(row: FrozenRow, tp: int) -> Bound:
    """Upper bound on inputs a second and GPU: the slowest of two or more stages runs once a sample."""
    slowest_s = max(row.encoder.total_s, row.llm.total_s) - ROUNDING_S
    return Bound(
        what=f"one sample a microbatch, the slower stage of the row, one stage each on Table 9's {tp} GPUs",
        high=1 / slowest_s / (2 * tp) + TPUT_ROUNDING,
    )


def itself_evidence(llm_size: str) -> Evidence:
    """Evidence comparing Table 9 with the stage counts implied by stage times, and with section 6.4."""
    rows = table_rows(llm_size)
    stated, implied = stated_pipelines(rows), implied_pipelines(llm_size)
    allowed = llm_stage_bounds(rows)
    evidence = Evidence()
    for row in rows:
        key = f"itself/{row.name}/llm_stages"
        number = PaperNumber(key, stated[row].llm_stages, "stages", "Table 9", COUNT_REL_TOL)
        evidence.add(number, implied[row].llm_stages)
        evidence.bounds[key] = allowed[row]
    for title, pipelines in (("Table 9", stated), ("the implied counts", implied)):
        equal = [pipelines[a].num_stages == pipelines[u].num_stages for a, u in pairs(rows).values()]
        pairs_equal = f"{sum(equal)} of {len(equal)} pairs do"
        evidence.claim(
            f"both methods have equal stage totals (section 6.4) by {title}, {pairs_equal}:",
            all(equal),
            cause="the paper contradicts itself: stages, frozen-aware against unaware, are "
            + ", ".join(
                f"{model} {pipelines[aware].num_stages} against {pipelines[unaware].num_stages}"
                for model, (aware, unaware) in pairs(rows).items()
            ),
        )
    counts = ", ".join(
        f"{row.name} {implied[row].encoder_stages}+{implied[row].llm_stages}"
        f" (stated {stated[row].encoder_stages}+{stated[row].llm_stages})"
        for row in rows
    )
    evidence.notes.append(f"encoder + LLM stages implied by the stage times: {counts}")
    return evidence


def llm_stage_bounds(rows: Sequence[FrozenRow]) -> dict[FrozenRow, Bound]:
    """The least and most stages of each row's LLM by which all rows of its kind have one backward."""
    bounds = {}
    for group in same_llm(rows):
        times = [row.llm.backward_s for row in group]
        fits = list(all_implied_stages(times, max_stages=MAX_STAGES, max_spread=LLM_SPREAD))
        for row, counts in zip(group, zip(*(fit.counts for fit in fits), strict=True), strict=True):
            bounds[row] = Bound(
                what="stages, 6 at most, of equal layers whose backwards add up to the same in all rows",
                low=min(counts),
                high=max(counts),
            )
    return bounds


def same_llm(rows: Sequence[FrozenRow]) -> list[list[FrozenRow]]:
    """Rows that run the same LLM on the same input."""
    return [[row for row in rows if row.model.startswith(kind)] for kind in ("VLM", "ALM")]


def prose_evidence() -> Evidence:
    """Evidence recomputing the sums and gains that section 6.4 takes from Table 3."""
    aware, unaware = pairs(table_rows("M"))["VLM-L"]
    gains = [a.result / u.result for a, u in pairs(table_rows("M")).values()]
    evidence = Evidence(causes={"itself/prose/*": "quotients of throughputs rounded to two decimals"})
    for claim_id, unit, ours in (
        ("cs_v1_vlml_aware_enc", "ms", 1e3 * aware.encoder.total_s),
        ("cs_v1_vlml_aware_llm", "ms", 1e3 * aware.llm.total_s),
        ("cs_v1_vlml_unaware_enc", "ms", 1e3 * unaware.encoder.total_s),
        ("cs_v1_vlml_unaware_llm", "ms", 1e3 * unaware.llm.total_s),
        ("cs_v1_vlml_tput", "x", aware.result / unaware.result),
        ("cs_v1_pp_max", "x", max(gains)),
    ):
        printed = claim_value(claim_id)
        key = f"itself/prose/{claim_id.removeprefix('cs_v1_')}"
        evidence.add(PaperNumber(key, printed, unit, "section 6.4", ROUNDING / printed), ours)
        evidence.bounds[key] = Bound(
            what="Table 3's cells, with what their rounding leaves open",
            low=ours - SUM_DOUBT,
            high=ours + SUM_DOUBT,
        )
    return evidence


def _scale_note(title: str, rows: Sequence[FrozenRow], ours: Mapping[FrozenRow, float]) -> str:
    factors = sorted(row.result / ours[row] for row in rows)
    middle = factors[len(factors) // 2]
    return (
        f"printed / simulated throughput per GPU with {title} counts: {factors[0]:.1f} .. {factors[-1]:.1f}, "
        f"median {middle:.1f}; 1 is what one sample per microbatch gives"
    )


def _gain_claims(
    rows: Sequence[FrozenRow], evidence: Evidence, implied: Mapping[FrozenRow, Pipeline]
) -> list[Claim]:
    """Claims on who wins, by the implied counts: the simulator agrees with the printed throughputs."""
    claims = []
    for model, (aware, unaware) in pairs(rows).items():
        printed = winner(aware.result / unaware.result)
        gain = evidence.ours[f"printed/implied/{model}/gain"]
        text = f"{model}: the simulator, given the implied stages, sees what is printed: {printed};"
        cause = (
            "the printed throughputs contradict the printed stage times: the slowest stage takes "
            f"{_slowest_ms(aware):.0f} ms frozen-aware and {_slowest_ms(unaware):.0f} ms unaware, on "
            f"{implied[aware].num_stages} and {implied[unaware].num_stages} stages, a gain of {gain:.2f} for "
            f"the printed {aware.result / unaware.result:.2f}"
        )
        claims.append(Claim(text, printed == winner(gain), cause=cause))
    return claims


def _slowest_ms(row: FrozenRow) -> float:
    return 1e3 * max(row.encoder.total_s, row.llm.total_s)


def v1_guesses(row: FrozenRow, tp: int) -> tuple[Guess, ...]:
    """Guesses of tokens per image and clip, which section 6.1 leaves open; native sizes come first."""
    guesses = tuple(Guess(name, setting) for name, setting in plausible_inputs(row.model, tp=tp).items())
    return guesses + slower_links(guesses)


def plausible_inputs(model: str, *, tp: int, cp: int = 1) -> dict[str, Setting]:
    """Plausible settings: the likeliest, then other images and clips, if the model reads them, then no "
    "recompute."""
    kind = model.partition("-")[0]
    guesses = [(IMAGES[0], CLIPS[0])]
    guesses += [(image, CLIPS[0]) for image in IMAGES[1:]] if kind != "ALM" else []
    guesses += [(IMAGES[0], clip) for clip in CLIPS[1:]] if kind != "VLM" else []
    likely, *_ = inputs = {
        input_name(image, clip): input_of(image, clip, tp=tp, cp=cp) for image, clip in guesses
    }
    return inputs | not_recomputed(likely, inputs[likely])


def not_recomputed(name: str, setting: Setting) -> dict[str, Setting]:
    """A setting without recomputation, which no section states of these tables."""
    return {f"{name}, nothing recomputed": replace(setting, recompute=Recompute.NONE)}


def input_name(image: ItemTokens, clip: ItemTokens) -> str:
    """The name of a sample by the tokens that the LLM reads, and those of an image in the encoder."""
    return f"{image.tokens_out} tokens of {image.tokens_in} an image, {clip.tokens_out} a clip"


def input_of(image: ItemTokens, clip: ItemTokens, *, tp: int, cp: int) -> Setting:
    """A sample with an image and a clip, if the model reads them."""
    return Setting(text_tokens=TEXT_TOKENS, items=(("vision", image), ("audio", clip)), tp=tp, cp=cp)


def table_evidence(llm_size: str, cost: CostModel) -> list[Evidence]:
    """All evidence of the table with that LLM."""
    return [printed_evidence(llm_size), itself_evidence(llm_size), own_evidence(llm_size, cost)]


def own_evidence(llm_size: str, cost: CostModel) -> Evidence:
    """Evidence of our own cost model and planner on the rows of a table."""
    rows = table_rows(llm_size)
    pipelines = implied_pipelines(llm_size)
    evidence = modelled_evidence(
        ModelledTable(
            rows=rows,
            pipelines=pipelines,
            model_of=lambda row: v1_model(row.model, row.llm_size),
            guesses_of=lambda row: v1_guesses(row, pipelines[row].tp),
            unstated=UNSTATED,
            gain_of=lambda aware, unaware: aware.result / unaware.result,
            placement=Placement.DISJOINT,
            num_microbatches=NUM_MICROBATCHES,
            where=f"Table {TABLE_OF[llm_size].removeprefix('table')}",
        ),
        cost,
    )
    evidence.causes |= {
        "modelled/*/enc_fwd": "pixels that the encoder reads",
        "modelled/*/llm_*": "printed forwards of one LLM, times its stages, differ by up to a third",
        "modelled/*/gain": "printed throughputs do not follow from the printed stage times either",
    }
    return evidence
