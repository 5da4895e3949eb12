"""Every strategy and schedule on gloo with NCCL's behaviour: does the runtime cope with it?

Setup:   gloo ranks of this machine, in float64; device, communicators and futures behave as NCCL's
         (`experiments.nccl.manners`). Compared with one process on the whole batch.
Ours:    the outcome of each case as built; of 1F1B and GPipe with receives posted first and a wait for the
         device after each action; of each behaviour alone with an executor that lacks what it requires; and
         the seconds until a job ends of which one rank was killed, or stopped, in the middle of a step.
Differs: no GPU and no NCCL takes part. Behaviours follow NCCL's documentation and torch's source.
Run:     python -m experiments.bench.nccl_manners [--json] [--only TEXT] [--out PATH]
"""

import signal
import sys
import time
from pathlib import Path

import torch

from experiments.harness.command import Found, bench
from experiments.harness.record import commit
from experiments.nccl.cases import cases
from experiments.nccl.run import HUNG, SAME, caught, dead_rank, hangs_of_before, run_all
from runtime.world.pool import Pool
from workbench.whole_file import check_writable

MOST_RANKS = 8


def executed(only: str) -> dict[str, object]:
    """Run the cases whose name contains `only`; returns all figures."""
    start_s = time.perf_counter()
    chosen = [case for case in cases() if only in case.name]
    if not chosen:
        raise ValueError(f"no case has {only!r} in its name; nearest: '1f1b'")
    rows, failures = [], []
    with Pool(MOST_RANKS) as pool:
        for done, (case, outcome) in enumerate(run_all(chosen, pool), 1):
            rows.append(
                {"case": case.name, "ranks": len(case.plan.ranks), "seconds": round(outcome.seconds, 2)}
            )
            if outcome.what != SAME:
                failures.append(f"{case.name}: {outcome.what}")
                sys.stderr.write(f"\n{failures[-1][:300]}\n")
            sys.stderr.write(f"\r{done} of {len(chosen)}, {len(failures)} failed: {case.name:<50.50}")
        sys.stderr.write("\n")
        old = {case.name: outcome.what for case, outcome in hangs_of_before(chosen, pool)}
        first = chosen[0].plan
        dead, stopped = (dead_rank(first, pool, number) for number in (signal.SIGKILL, signal.SIGSTOP))
        manners = caught(first, pool)
    return {
        "nccl_manners_cases": len(rows),
        "nccl_manners_failures": len(failures),
        "failures": failures,
        "nccl_manners_old_hangs": sum(what == HUNG for what in old.values()),
        "old": old,
        "manners_alone": manners,
        "dead_rank_s": round(dead.seconds, 2),
        "dead_rank_says": dead.what,
        "stopped_rank_s": round(stopped.seconds, 2),
        "stopped_rank_says": stopped.what,
        "seconds": round(time.perf_counter() - start_s, 1),
        "rows": rows,
    }


@bench(only="cases with this in their name", out="JSON file to write")
def run(only: str = "", out: Path | None = None) -> Found:
    if out is not None:
        check_writable(out)
    result = executed(only)
    for name, value in result.items():
        if name != "rows":
            print(f"{name}: {value}")
    record = {"script": "bench/nccl_manners", "commit": commit(), "torch": torch.__version__} | result
    return Found(record, holds=not result["nccl_manners_failures"], out=out)
