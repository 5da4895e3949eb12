"""Table 2.1: which model runs under which system, by the memory model.

Paper:   I. Jang, dissertation, section 2.7.1, Table 2.1: microbatch sizes, X where not even 1 fits.
Setup:   30 A40 with 40 GB as printed, one per node, float32 tensors (TF32 is a mode of computing).
Given:   microbatches, twice the model states and no recomputation for Bamboo (section 2.7.1).
Differs: sequence lengths are not printed (the models' own: 512, 1024, 2048), nor are pipeline depths:
         Varuna and Oobleck may take any, Bamboo the 6 nodes by which its throughput changes. Attention
         keeps its scores, as kernels of that time did; a redundant stage keeps its activations too.
         Bamboo's starred microbatches could be twice as large in ours: what of its framework fills
         the rest is not in the model.
Ours:    bytes of the busiest stage, under a second on one CPU core.
Run:     python -m experiments.oobleck.table2_1
"""

from experiments import paper
from experiments.evidence import Evidence, outcome_of
from experiments.oobleck.modelled import (
    BAMBOO_DEPTH,
    ELEMENT_BYTES,
    GLOBAL_BATCH,
    MEMORY_BYTES,
    STATE_BYTES,
    TOKENS,
    graph,
    kept_bytes,
)
from experiments.oobleck.systems import MOST_NODES
from experiments.paper import Outcome
from experiments.printed import PrintedRow, is_true, printed_rows

COPIES = {"bamboo": 2, "varuna": 1, "oobleck": 1}


def least_peak_bytes(model: str, system: str, microbatch: int) -> int:
    """Bytes on the busiest GPU, for the depth of pipeline at which they are least."""
    depths = (BAMBOO_DEPTH,) if system == "bamboo" else range(1, MOST_NODES + 1)
    return min(_peak_bytes(model, system, microbatch, depth) for depth in depths)


def _peak_bytes(model: str, system: str, microbatch: int, depth: int) -> int:
    """The first stage of an even cut: it has `depth` microbatches in flight (1F1B)."""
    layers = graph(model).modules[0].layers
    recomputes = system != "bamboo"
    held = kept_bytes(model, microbatch)
    each = -(-len(layers) // min(depth, len(layers)))
    stages = [range(first, min(first + each, len(layers))) for first in range(0, len(layers), each)]
    peak = 0
    for place, mine in enumerate(stages):
        states = sum(layers[layer].num_parameters for layer in mine) * STATE_BYTES
        boundary = microbatch * TOKENS[model] * layers[0].out_width * ELEMENT_BYTES
        whole = sum(held[layer] for layer in mine)
        in_flight = min(len(stages) - place, GLOBAL_BATCH[model] // microbatch)
        if recomputes:
            activations = in_flight * boundary * len(mine) + max(held[layer] for layer in mine)
        else:
            activations = in_flight * whole
        peak = max(peak, COPIES[system] * (states + activations))
    return peak


def cell(row: PrintedRow) -> tuple[str, bool, float]:
    """Name of a cell, whether ours runs it as printed, and the bytes of ours."""
    model, system = row["model"], row["system"]
    microbatch = int(row["microbatch_samples"] or 1)
    num_bytes = least_peak_bytes(model, system, microbatch)
    return f"{model}, {system}, microbatch {microbatch}", num_bytes <= MEMORY_BYTES, num_bytes


def memory_evidence() -> Evidence:
    """One claim per cell: fits or does not, as printed."""
    evidence = Evidence()
    for row in printed_rows("oobleck_table2_1"):
        name, fits, num_bytes = cell(row)
        runnable = is_true(row["runnable"])
        key = f"modelled/{row['model'].replace(' ', '-')}/{row['system']}/peak_bytes"
        evidence.ours[key] = num_bytes
        verb = "fits" if runnable else "does not fit"
        evidence.claim(f"{name} {verb} into 40 GB (ours {num_bytes / 1e9:.1f} GB);", fits is runnable)
        if is_true(row["largest_runnable_microbatch"]):
            more = 2 * int(row["microbatch_samples"])
            double = least_peak_bytes(row["model"], row["system"], more)
            evidence.claim(
                f"{name} is the largest, {more} does not fit (ours {double / 1e9:.1f} GB);",
                double > MEMORY_BYTES,
            )
    return evidence


def run() -> Outcome:
    """All evidence of the table."""
    return outcome_of("oobleck/table2_1", [memory_evidence()])


def main() -> int:
    return paper.command(run)


if __name__ == "__main__":
    raise SystemExit(main())
