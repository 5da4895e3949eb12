"""Simulated attention against the list-scheduling optimum and against ratios that papers print.

Setup:   one attention forward, 32 query and 8 key/value heads of 128, units and rates of the H200 profile.
         Launches: all heads of a whole sequence; one key/value head with a group of 4, and of 1, on one
         rank of 8 under the policy that plans use. Causal, EP, EE and MP masks, 5 draws.
Ours:    the makespan divided by the optimum. With whole rows the optimum is max(work / units, longest row).
         Where rows may be cut it is work / units, a lower bound that small grids cannot reach, because a
         merge costs a launch. Everything is computed, nothing is timed.
Papers:  ratios between methods of Cornstarch v1 Table 4 and ICML Tables 3 to 5 and 7 to 10, from the
         result files of their scripts.
Differs: no GPU was available, so the simulation has not been compared with kernels on one; that part of
         `experiments.bench.kernels` is not measured.
Run:     python -m experiments.bench.attention [--json] [--out PATH]; plots: python -m experiments.plots
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from experiments.bench.kernel_cells import MASKS
from experiments.bench.tokens import LENGTHS, POLICIES
from experiments.bench.tokens import MASKS as MULTIMODAL
from experiments.cornstarch.attention_policies import FOUR, MAIN, a40_testbed, llm_of, run_policy
from experiments.harness.command import Found, bench
from experiments.harness.record import RESULTS
from sim.attention.gpu import compute_units, makespan_bounds
from sim.attention.pieces import Order, Split, UnitTiming, cut, run_launch, whole_rows
from sim.attention.price import gpu_of, row_tiles
from workbench.balance.tokens.exchange import longest_first_exchanged
from workbench.balance.tokens.policies import max_over_mean
from workbench.cost.model import CostModel
from workbench.cost.profile import load_profile
from workbench.masks.tiles import classify, row_work
from workbench.model.layer import Attention

OUT = RESULTS / "bench_attention.json"
PROFILE = "H200"
BLOCK = 128
NUM_RANKS = 8
SEEDS = range(5)
SIMULATED_LENGTHS = {"16k": 16_384, "64k": 65_536}
KERNELS = {
    "static": (Order.STATIC, Split.NONE),
    "longest_first": (Order.LONGEST_FIRST, Split.NONE),
    "where_it_pays": (Order.LONGEST_FIRST, Split.WHERE_IT_PAYS),
}
GRAHAM = 4 / 3  # longest first over the optimum, at most
NEAR = 1.30  # merging and the last wave remain
PUBLISHED = (
    "cornstarch_v1_table4",
    *(f"cornstarch_icml_table{number}" for number in (3, 4, 5, 7, 8, 9, 10)),
)
NUM_BINS = 120
ATTENTION = Attention(name="attention", num_heads=32, num_kv_heads=8, head_dim=128, causal=True)

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Launch:
    """The heads of one kernel launch, and whose queries it computes."""

    heads: int
    local: bool


LAUNCHES = {
    "all heads": Launch(32, local=False),
    "cp g=4": Launch(4, local=True),
    "cp g=1": Launch(1, local=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Simulated makespan over the optimum, mean and worst over the draws; seconds are means."""

    mask: str
    length: str
    launch: str
    kernel: str
    seconds: float
    over_optimum: float
    worst: float


def rows_of(mask: str, length: int, seed: int, *, local: bool) -> Floats:
    """Return [rows] the tiles of each block of queries: of all ranks, or of rank 0."""
    field = MASKS[mask](length, seed=seed)
    tiles = classify(field, field, BLOCK, BLOCK)
    rows = row_tiles(tiles)
    return rows[longest_first_exchanged(row_work(tiles), NUM_RANKS) == 0] if local else rows


def makespan(rows: Floats, launch: Launch, timing: UnitTiming, kernel: str) -> tuple[float, float]:
    """Return the simulated seconds and their ratio to a lower bound of any schedule."""
    order, split = KERNELS[kernel]
    units = compute_units(PROFILE)
    pieces = cut(rows, split, launch.heads, units, timing, order)
    run = run_launch(pieces, launch.heads, units, timing, order)
    durations = np.tile(whole_rows(rows).durations_s(timing), launch.heads)
    whole_s, _ = makespan_bounds(durations, units)
    optimum_s = whole_s if split is Split.NONE else float(durations.sum()) / units
    return run.end_s, run.end_s / optimum_s


def simulated() -> list[Cell]:
    """Simulate every mask, length, launch and kernel."""
    cost = CostModel(load_profile(PROFILE))
    timing = gpu_of(cost, ATTENTION, precision="bfloat16", num_units=compute_units(PROFILE)).timing
    cells = []
    for mask in MASKS:
        for length, tokens in SIMULATED_LENGTHS.items():
            for name, launch in LAUNCHES.items():
                seeds = range(1) if mask == "causal" else SEEDS
                draws = [rows_of(mask, tokens, seed, local=launch.local) for seed in seeds]
                for kernel in KERNELS:
                    runs = [makespan(rows, launch, timing, kernel) for rows in draws]
                    cells.append(
                        Cell(
                            mask=mask,
                            length=length,
                            launch=name,
                            kernel=kernel,
                            seconds=statistics.fmean(seconds for seconds, _ in runs),
                            over_optimum=statistics.fmean(ratio for _, ratio in runs),
                            worst=max(ratio for _, ratio in runs),
                        )
                    )
    return cells


def published(folder: Path = RESULTS) -> dict[str, dict[str, float]]:
    """Compare with the papers' ratios: per script the count, the median and largest deviation."""
    deviations = {}
    for name in PUBLISHED:
        path = folder / f"{name}.json"
        rows = json.loads(path.read_text())["rows"] if path.is_file() else []
        errors = [abs(row["ours"] / row["paper"] - 1) for row in rows if row["unit"] == "x" and row["ours"]]
        if errors:
            deviations[name] = {
                "ratios": len(errors),
                "median": statistics.median(errors),
                "most": max(errors),
            }
    return deviations


def evenness() -> dict[str, dict[str, dict[str, float]]]:
    """Return [mask][length][policy] the busiest of 8 ranks over the mean, averaged over the draws."""
    evenness_by_mask: dict[str, dict[str, dict[str, float]]] = {}
    for mask, draw in MULTIMODAL.items():
        for length, tokens in LENGTHS.items():
            fields = [draw(tokens, seed=seed) for seed in SEEDS]
            works = [row_work(classify(field, field, BLOCK, BLOCK)) for field in fields]
            evenness_by_mask.setdefault(mask, {})[length] = {
                policy: statistics.fmean(max_over_mean(w, assign(w, NUM_RANKS), NUM_RANKS) for w in works)
                for policy, assign in POLICIES.items()
            }
    return evenness_by_mask


def activities() -> dict[str, dict[str, Any]]:
    """Return [policy] the busy share of every GPU over one layer of ICML Figure 6."""
    bed, llm = a40_testbed(), llm_of("LLM-L")
    activity_by_policy: dict[str, dict[str, Any]] = {}
    for policy in FOUR:
        run = run_policy(bed, llm, LENGTHS["64k"], MAIN, policy)
        edges = np.linspace(0.0, run.makespan_s, NUM_BINS + 1)
        shares = [run.activity(rank, edges).round(3).tolist() for rank in range(len(run.launches))]
        activity_by_policy[policy] = {"seconds": run.makespan_s, "share": shares}
    return activity_by_policy


def claims(cells: Sequence[Cell]) -> dict[str, bool]:
    """Return the claims that have to hold on every draw of every cell."""

    def worst(kernel: str, launch: str = "", length: str = "") -> float:
        return max(
            cell.worst
            for cell in cells
            if cell.kernel == kernel and launch in cell.launch and length in cell.length
        )

    by_kernel = {kernel: [cell.seconds for cell in cells if cell.kernel == kernel] for kernel in KERNELS}
    pairs = zip(by_kernel["where_it_pays"], by_kernel["longest_first"], strict=True)
    ratios = [cell.over_optimum for cell in cells if cell.kernel == "longest_first"]
    return {
        "longest first is within Graham's 4/3 of the optimum": worst("longest_first") <= GRAHAM,
        "longest first is within 8 % of the optimum in the median": statistics.median(ratios) <= 1.08,
        "cutting rows where it pays never takes longer": all(cut_s <= whole_s for cut_s, whole_s in pairs),
        f"cut rows of a group of 4 at 64k: at most {NEAR} of an even spread": worst(
            "where_it_pays", "g=4", "64k"
        )
        <= NEAR,
        "static order on a group of 4 at 64k loses more than 1.25": worst("static", "g=4", "64k") > 1.25,
        "static order on all heads loses less than 1.15": worst("static", "all heads") < 1.15,
    }


def show(record: Mapping[str, Any]) -> None:
    print(f"{'mask':8}{'length':8}{'launch':12}" + "".join(f"{kernel:>16}" for kernel in KERNELS))
    cells = {(c["mask"], c["length"], c["launch"], c["kernel"]): c for c in record["simulated"]}
    for mask, length, launch, _ in [key for key in cells if key[3] == "static"]:
        values = "".join(f"{cells[mask, length, launch, kernel]['over_optimum']:16.3f}" for kernel in KERNELS)
        print(f"{mask:8}{length:8}{launch:12}{values}")
    for name, errors in record["published"].items():
        print(
            f"{name}: {errors['ratios']:.0f} printed ratios, ours off by {errors['median']:.1%} in the "
            f"median, {errors['most']:.1%} at most"
        )


@bench(out="JSON file that plots read")
def run(out: Path = OUT) -> Found:
    cells = simulated()
    record: dict[str, Any] = {
        "script": "bench/attention",
        "simulated": [asdict(cell) for cell in cells],
        "published": published(),
        "max_over_mean": evenness(),
        "activity": activities(),
        "claims": claims(cells),
    }
    show(record)
    return Found(record, record["claims"], out=out)
