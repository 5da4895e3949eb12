"""Figure 17: stalls for preprocessing by number and size of images, with and without disaggregation.

Paper:   Z. Zhang et al., "DistTrain", section 7.3; bars without values. The text: seconds without,
         milliseconds with disaggregation, one data-parallel group.
Setup:   `experiments.bench.preprocess` on this machine: JPEG images decoded, resized and cut into patches;
         the training step is an idle wait of 1.5 times the decode; server and producer on one core.
Ours:    read from the benchmark's result file; nothing is executed here.
Differs: image counts and sizes are ours: the paper gives its own only in the drawing.
Run:     python -m experiments.bench.preprocess, then python -m experiments.disttrain.figure17 [--json]
"""

import json
from collections.abc import Mapping
from pathlib import Path

from experiments.disttrain.preprocessing import MEASURED, MILLISECONDS, SECONDS
from experiments.harness.outcome import Evidence
from experiments.harness.script import script
from workbench.units import ms

STARVED = "starved"
KINDS = ("colocated", "disaggregated")
QUANTILES = ("p50", "p99")

Stalls = Mapping[str, Mapping[str, float]]


def executed(path: Path = MEASURED) -> Stalls:
    """Bar -> milliseconds, for steps as long as the decode; ValueError where nothing was executed."""
    if not path.exists():
        raise ValueError(f"{path} does not exist; run python -m experiments.bench.preprocess first")
    record = json.loads(path.read_text(encoding="utf-8"))
    return {name: cell for name, cell in record.get("executed", {}).items() if STARVED not in name}


def evidence_of(stalls: Stalls) -> Evidence:
    """Evidence comparing seconds with milliseconds."""
    evidence = Evidence()
    for name, cell in stalls.items():
        for kind in KINDS:
            for quantile in QUANTILES:
                key = f"{kind}_ms_{quantile}"
                evidence.ours[f"executed/{name}/{key}"] = cell[key]
        evidence.notes.append(
            f"{name}: {cell['colocated_ms_p50']:.4g} ms colocated, {cell['disaggregated_ms_p50']:.3g} apart "
            f"(99th percentiles {cell['colocated_ms_p99']:.4g} and {cell['disaggregated_ms_p99']:.3g})"
        )
    evidence.claim(f"stalls of {len(stalls)} bars were executed on this machine", bool(stalls))
    longest = max((cell["colocated_ms_p50"] for cell in stalls.values()), default=0.0)
    evidence.claim(
        f"without disaggregation the largest bar is seconds: {longest / 1000:.2f} s", longest >= ms(SECONDS)
    )
    apart = max((cell["disaggregated_ms_p50"] for cell in stalls.values()), default=float("inf"))
    evidence.claim(f"with it all medians are milliseconds: {apart:.3g} ms at most", apart <= ms(MILLISECONDS))
    return evidence


@script()
def run() -> Evidence:
    return evidence_of(executed())
