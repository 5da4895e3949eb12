"""Why gradient sums take longer in a step than alone: the transport's thread shares a core with the passes.

Setup:   two gloo ranks, each pinned to a core as the runtime pins them; the gradient groups of one stage
         (six of 143,000 float32 elements) are summed by six collectives started one after the other.
Ours:    seconds until the last one ends, first quartile over the rounds: with existing buffers; with buffers
         filled from gradients first, as `runtime.step.gradients` does; the same while the rank keeps
         computing, as passes during a REDUCE_GRAD do; and one collective over all elements, alone and during
         computation. `shared` is the slowdown from sharing the core.
Run:     python -m experiments.bench.reduction [--rounds 60] [--json]
"""

import sys
import threading
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from experiments.harness.command import command_line, finish
from runtime.world.pool import Place, Pool

NUM_RANKS, NUM_GROUPS, ELEMENTS, PIECES = 2, 6, 143_000, 8
PRODUCT = 256  # rows of the product that a rank goes on with
TIMEOUT_S = 300.0


def seconds(place: Place, rounds: int) -> dict[str, list[float]]:
    """Seconds of every round on one rank, by way of summing."""
    del place
    torch.set_num_threads(1)
    buffers = [torch.zeros(ELEMENTS) for _ in range(NUM_GROUPS)]
    gradients = [[torch.randn(ELEMENTS // PIECES) for _ in range(PIECES)] for _ in range(NUM_GROUPS)]
    whole = [torch.zeros(NUM_GROUPS * ELEMENTS)]
    x = torch.randn(PRODUCT, PRODUCT)

    def compute() -> None:
        torch.mm(x, x)

    variants: dict[str, tuple[Callable[[], Sequence[Tensor]], Callable[[], None] | None]] = {
        "there": (lambda: buffers, None),
        "made": (lambda: [torch.cat(pieces) for pieces in gradients], None),
        "beside": (lambda: [torch.cat(pieces) for pieces in gradients], compute),
        "one": (lambda: whole, None),
        "one_beside": (lambda: whole, compute),
    }
    seconds_by_way: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, (make, meanwhile) in variants.items():
            dist.barrier()
            seconds_by_way[name].append(_sum_s(make, meanwhile))
    return seconds_by_way


def _sum_s(make: Callable[[], Sequence[Tensor]], meanwhile: Callable[[], None] | None) -> float:
    """Seconds until the last of the collectives has completed, whichever thread observes it."""
    ended = threading.Event()
    ends_s: list[float] = []
    start_s = time.perf_counter()
    buffers = make()

    def note(_: Future[list[Tensor]]) -> None:
        ends_s.append(time.perf_counter())
        if len(ends_s) == len(buffers):
            ended.set()

    works = [dist.all_reduce(buffer, async_op=True) for buffer in buffers]
    for work in works:
        assert work is not None, "this rank is in the group"
        work.get_future().add_done_callback(note)
    while meanwhile is not None and not ended.is_set():
        meanwhile()
        if time.perf_counter() - start_s > TIMEOUT_S:
            break
    if not ended.wait(TIMEOUT_S):
        raise TimeoutError(f"{len(ends_s)} of {len(buffers)} sums have ended within {TIMEOUT_S:g} s")
    return max(ends_s) - start_s


def summarised(by_rank: Sequence[dict[str, list[float]]]) -> dict[str, float]:
    """Lower quartile of the slower rank in seconds, and the cost of sharing a core."""
    figures = {}
    for name in by_rank[0]:
        rounds = sorted(max(times) for times in zip(*(of_rank[name] for of_rank in by_rank), strict=True))
        figures[f"{name}_s"] = rounds[len(rounds) // 4]
    figures["shared"] = figures["beside_s"] / figures["made_s"]
    figures["one_shared"] = figures["one_beside_s"] / figures["one_s"]
    return figures


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    arguments = parser.parse_args()
    with Pool(NUM_RANKS) as pool:
        by_rank = pool.run(seconds, NUM_RANKS, arguments.rounds, timeout_s=TIMEOUT_S)
    result = summarised(by_rank)
    for name in ("there", "made", "beside", "one", "one_beside"):
        print(f"{name:12} {result[f'{name}_s'] * 1e3:8.2f} ms")
    print(
        f"beside computing {result['shared']:.2f} times as long; as one collective {result['one_shared']:.2f}"
    )
    return finish(dict(sorted(result.items())), as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
