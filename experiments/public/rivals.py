"""The published training runs by three predictors: this project, llm-analysis, and a roofline by data sheet.

Source:  the rows of `experiments.public.all`; llm-analysis 0.2.2 (github.com/cli99/llm-analysis, Apache-2.0).
Ours:    as in `experiments.public.all`. Roofline: the same plans, on a machine whose every kernel reaches the
         data sheet's peak of FLOP/s or of bytes/s, whichever takes longer; links as in the profile.
Setup:   llm-analysis with its own default efficiency of 1, and with 0.5, which its constants name as
         Megatron's, in an environment of its own, since it pins transformers < 5; `--python PATH` runs it,
         and its output is stored in `results/public_llm_analysis.json`, which runs without `--python` read.
         It takes GPUs from our data sheets. Refused are rows that a predictor cannot express.
Differs: llm-analysis has no virtual stages and no overlap; rows with them are priced without. Where a page
         prints TFLOP/s or MFU, an error is relative to that: 100 % for a prediction that is twice as fast.
Run:     python -m experiments.public.rivals [--python PATH] [--json]
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from experiments.harness.command import command_line
from experiments.harness.foreign import answer
from experiments.harness.outcome import About, Evidence
from experiments.harness.record import RESULTS
from experiments.harness.script import Parts, Script, finished, script
from experiments.public.published import Published, published
from sim.predict import iteration_s
from workbench.calibrate.device_sheet import shipped_sheet
from workbench.cost.profile import Profile, Table, load_profile
from workbench.llm_table.columns import read_row
from workbench.llm_table.llm_row import SEES_ALL, LlmRow, Number, Recomputed
from workbench.llm_table.predict import RowPredictor
from workbench.units import GB
from workbench.whole_file import write_text

KEPT = RESULTS / "public_llm_analysis.json"
PROGRAM = Path(__file__).parent / "foreign" / "llm_analysis_rows.py"
LONGEST_S = 600
TERA = 1e12
RECOMPUTED = {Recomputed.NONE: 0, Recomputed.SELECTIVE: 1, Recomputed.FULL: 2}
NVLINK_LATENCY_S = 8e-6  # as in the GPU files of llm-analysis
USUAL_EFFICIENCY = 0.5  # llm_analysis/constant.py: what Megatron-LM achieves
PREDICTORS = ("ours", "llm-analysis", "llm-analysis at 0.5", "roofline")

Answer = float | str  # seconds, or why there are none


def unsayable(row: LlmRow) -> str | None:
    """The part of a row that llm-analysis cannot express; None: it can express all."""
    reasons = {
        f"architecture {row.architecture}": row.architecture in SEES_ALL,
        "latent attention": row.is_mla,
        "shared experts": row.shared_expert_ffn > 0 or row.first_dense_layers > 0,
        "adapters": row.lora_rank > 0,
        "head_dim": row.head_dim * row.heads != row.hidden,
        "an MLP no multiple of hidden": (row.expert_ffn or row.ffn) % row.hidden != 0,
        "context parallelism": row.cp > 1,
        "sharding in groups": row.sharing_ranks not in (1, row.data_ranks),
        f"precision {row.precision}": row.precision in (Number.MXFP8, Number.NVFP4, Number.FP32),
        "recomputation by module": row.recompute not in RECOMPUTED,
    }
    return next((name for name, is_so in reasons.items() if is_so), None)


def arguments(row: LlmRow) -> dict[str, Any]:
    """The arguments of llm-analysis for a row."""
    bits = 8 if row.precision is Number.FP8 else 16
    return {
        "model": {
            "name": "row",
            "num_layers": row.layers,
            "n_head": row.heads,
            "hidden_dim": row.hidden,
            "vocab_size": row.padded_vocab,
            "max_seq_len": row.sequence,
            "num_key_value_heads": row.kv_heads,
            "ffn_embed_dim": row.expert_ffn or row.ffn,
            "moe_num_experts": max(1, row.experts),
            "moe_top_k": max(1, row.topk),
        },
        "gpu": _gpu(row),
        "dtype": {"name": "row", "weight_bits": bits, "activation_bits": bits, "embedding_bits": 16},
        "parallelism": {"tp_size": row.tp, "pp_size": row.pp, "dp_size": row.dp, "ep_size": row.ep},
        "run": {
            "batch_size_per_gpu": row.micro_batch,
            "gradient_accumulation_steps": row.num_microbatches,
            "global_batch_size": row.global_batch,
            "seq_len": row.sequence,
            "ds_zero": row.zero_stage,
            "activation_recomputation": RECOMPUTED[row.recompute],
            "mlp_gated_linear_units": row.gated_mlp == "yes",
        },
    }


def _gpu(row: LlmRow) -> dict[str, Any]:
    sheet = shipped_sheet(load_profile(row.gpu).name)
    link_rate = sheet.link_bytes_per_s or sheet.pcie_bytes_per_s
    return {
        "name": sheet.device,
        "mem_per_GPU_in_GB": sheet.memory_bytes / GB,
        "hbm_bandwidth_in_GB_per_sec": sheet.memory_bytes_per_s / GB,
        "intra_node_bandwidth_in_GB_per_sec": link_rate / GB,
        "intra_node_min_message_latency": NVLINK_LATENCY_S,
        "peak_fp16_TFLOPS": sheet.bfloat16_flop_per_s / TERA,
        "inter_node_bandwidth_in_GB_per_sec": row.inter_gbytes_per_s or sheet.card_bytes_per_s * 8 / GB,
    }


def by_llm_analysis(rows: Sequence[LlmRow], python: str) -> list[Answer]:
    """Seconds by the package, in the environment of an interpreter; ValueError where it cannot run."""
    expressible = [row for row in rows if unsayable(row) is None]
    seconds = answer(
        [python, str(PROGRAM)],
        failure=f"--python {python}: want an interpreter with llm-analysis, got",
        limit_s=LONGEST_S,
        asked=json.dumps([arguments(row) for row in expressible]),
    )
    answers = iter(seconds)
    return [f"no words for {reason}" if (reason := unsayable(row)) else next(answers) for row in rows]


def by_roofline(rows: Sequence[LlmRow]) -> list[Answer]:
    """Seconds with every kernel at the device's peak."""
    predictors: dict[str, RowPredictor] = {}
    answers: list[Answer] = []
    for row in rows:
        if row.gpu not in predictors:
            predictors[row.gpu] = RowPredictor(iteration_s, profile=at_peak(load_profile(row.gpu)))
        answers.append(predictors[row.gpu].predict(row).iteration_s)
    return answers


def at_peak(profile: Profile) -> Profile:
    """The profile without measurements of kernels and collectives."""
    nothing = Table()
    return replace(
        profile,
        matmul=nothing,
        attention=nothing,
        pointwise=nothing,
        normalization=nothing,
        sustained_products=(),
        sustained_attention=(),
        attention_backward_rate=1.0,
        attention_head_dim=None,
        collectives=(),
        layers=(),
    )


def by_us(rows: Sequence[LlmRow]) -> list[Answer]:
    """Seconds as `workbench predict` gives them."""
    predictor = RowPredictor(iteration_s)
    return [predictor.predict(row).iteration_s for row in rows]


def _mean(rows: Sequence[Published], answers: Sequence[Answer], which: Sequence[bool]) -> Any:
    errors = [
        abs(row.error(answer))
        for row, answer, is_in in zip(rows, answers, which, strict=True)
        if is_in and isinstance(answer, float)
    ]
    return float(np.mean(errors)) if errors else None


def _values(rows: Sequence[Published], answers_of: Mapping[str, Sequence[Answer]]) -> dict[str, float]:
    values: dict[str, float] = {}
    for data_set in (*dict.fromkeys(row.data_set for row in rows), "all"):
        which = [data_set in ("all", row.data_set) for row in rows]
        for name in PREDICTORS:
            mean = _mean(rows, answers_of[name], which)
            refused = sum(
                isinstance(a, str) for a, is_in in zip(answers_of[name], which, strict=True) if is_in
            )
            values[f"{data_set}/{name}/refused"] = refused
            if mean is not None:
                values[f"{data_set}/{name}/mape"] = mean
    return values


def _notes(rows: Sequence[Published], answers_of: Mapping[str, Sequence[Answer]]) -> list[str]:
    """A table: mean error and refused rows of each predictor, by data set."""
    values = _values(rows, answers_of)
    notes = [f"{'data set':<26}" + "".join(f"{name:>26}" for name in PREDICTORS)]
    for data_set in (*dict.fromkeys(row.data_set for row in rows), "all"):
        cells = [
            f"{values.get(f'{data_set}/{name}/mape', float('nan')):.1%}, "
            f"{values[f'{data_set}/{name}/refused']:.0f} refused"
            for name in PREDICTORS
        ]
        notes.append(f"{data_set:<26}" + "".join(f"{cell:>26}" for cell in cells))
    return notes


def main(run: Script) -> int:
    """The script's command; `--python` runs llm-analysis again and stores its answers."""
    parser = command_line(__doc__)
    parser.add_argument("--python", help="interpreter of an environment with llm-analysis")
    arguments = parser.parse_args()
    if arguments.python is not None:
        rows = [read_row(row.cells) for row in published() if row.unscorable is None]
        write_text(json.dumps(by_llm_analysis(rows, arguments.python), indent=0) + "\n", KEPT)
    return finished(run(), as_json=arguments.json)


@script(command=main)
def run() -> Parts:
    """All three predictors on all scorable rows."""
    scorable = [row for row in published() if row.unscorable is None]
    rows = [read_row(row.cells) for row in scorable]
    stored = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.exists() else ["not run"] * len(rows)
    if len(stored) != len(rows):
        raise ValueError(f"{KEPT}: want {len(rows)} rows, got {len(stored)}; run it again with --python")
    answers: dict[str, Callable[[], list[Answer]]] = {
        "ours": lambda: by_us(rows),
        "llm-analysis": lambda: stored,
        "llm-analysis at 0.5": lambda: [a if isinstance(a, str) else a / USUAL_EFFICIENCY for a in stored],
        "roofline": lambda: by_roofline(rows),
    }
    answers_of = {name: ask() for name, ask in answers.items()}
    evidence = Evidence(ours=_values(scorable, answers_of), about=About.METHODS)
    evidence.notes += list(_notes(scorable, answers_of))
    both = [
        all(isinstance(answers_of[name][index], float) for name in PREDICTORS) for index in range(len(rows))
    ]
    means = {name: _mean(scorable, answers_of[name], both) for name in PREDICTORS}
    for other in PREDICTORS[1:]:
        if means[other] is not None and means["ours"] is not None:
            evidence.claim(
                f"nearer than {other} on the {sum(both)} rows that all can say", means["ours"] < means[other]
            )
    return [evidence]
