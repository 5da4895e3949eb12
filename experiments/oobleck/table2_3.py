"""Table 2.3: planning time.

Paper:   I. Jang, dissertation, section 2.7.4.1, Table 2.3, 0.28 to 3,297.92 s.
Setup:   chains of 24 to 96 layers on 8 to 24 nodes of 1 to 8 GPUs, one template each.
Differs: another machine's seconds are no target. The claims are the order of magnitude, and that the exact
         search is never worse than divide and conquer, which is compared on the cells of up to 32 layers
         here, on all of them by `experiments.bench.planner`.
Ours:    both searches on one CPU core, compiled beforehand.
"""

from experiments.bench.planner import measure, printed_cell, warm_up
from experiments.harness.outcome import Evidence
from experiments.harness.printed import printed_rows
from experiments.harness.script import script

MOST_LAYERS_DIVIDED, LIMIT_S = 32, 30.0


@script()
def run() -> Evidence:
    """Evidence: objectives of every cell, and claims about the seconds."""
    evidence = Evidence()
    warm_up()
    cells = [
        measure(layers, nodes, gpus, printed_s, LIMIT_S if layers <= MOST_LAYERS_DIVIDED else 0.0)
        for layers, nodes, gpus, printed_s in map(printed_cell, printed_rows("oobleck_table2_3"))
    ]
    for cell in cells:
        key = f"itself/{cell.num_layers}x{cell.num_nodes}x{cell.num_gpus}/objective_s"
        evidence.ours[key] = cell.objective_s
    compared = [cell for cell in cells if cell.divided_s is not None]
    faster = [cell for cell in cells if cell.paper_s is not None and cell.ours_s < cell.paper_s]
    evidence.claim(
        f"planning takes less than printed on {len(faster)} of 36 cells;", len(faster) == len(cells)
    )
    evidence.claim(
        f"the exact objective is never worse than divide and conquer's ({len(compared)} cells);",
        bool(compared) and all(cell.never_worse for cell in compared),
    )
    evidence.claim(
        "the largest cell, 96 layers on 24 nodes of 8 GPUs, takes less than 2 s;", cells[-1].ours_s < 2
    )
    return evidence
