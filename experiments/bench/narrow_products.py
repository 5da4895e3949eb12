"""Products of few columns beside their transposed, and beside the narrowest column count of a table.

Setup:   y[m, n] = x[m, k] w[k, n] on one CPU core in float32, the least of several runs.
Ours:    `transposed`: seconds of y^T = w^T x^T over those of the product; the cost model reads one for the
         other. `narrowest`: seconds with `NARROWEST` columns over those of the product, by which such
         products were priced before. Nothing was measured on a GPU.
Run:     python -m experiments.bench.narrow_products [--json]
"""

import statistics
import time

import torch

from experiments.harness.command import Found, bench

SHAPES = ((4096, 32, 256), (2048, 64, 256), (1024, 32, 512), (512, 16, 256), (8192, 64, 1024), (4096, 64, 64))
NARROWEST = 128  # columns, of the tables that `workbench calibrate` measures on a CPU
RUNS, WARM_UP = 30, 5


def product_s(m: int, n: int, k: int) -> float:
    """Seconds of one product."""
    x, w = torch.randn(m, k), torch.randn(n, k)
    runs_s = []
    for run in range(WARM_UP + RUNS):
        began_s = time.perf_counter()
        torch.nn.functional.linear(x, w)
        if run >= WARM_UP:
            runs_s.append(time.perf_counter() - began_s)
    return min(runs_s)


@bench()
def run() -> Found:
    """Measure all shapes and print ratios."""
    torch.set_num_threads(1)
    record: dict[str, float] = {}
    for m, n, k in SHAPES:
        own_s = product_s(m, n, k)
        transposed, narrowest = product_s(n, m, k) / own_s, product_s(m, NARROWEST, k) / own_s
        record |= {f"{m}x{n}x{k}/transposed": transposed, f"{m}x{n}x{k}/narrowest": narrowest}
        print(f"{m:>5} x {n:>3} x {k:>4}: transposed {transposed:.2f}, {NARROWEST} columns {narrowest:.2f}")
    for kind in ("transposed", "narrowest"):
        record[f"{kind}_median"] = statistics.median(
            value for name, value in record.items() if name.endswith(f"/{kind}")
        )
    return Found(record)
