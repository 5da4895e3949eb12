"""The GPU day: tables out of the rows that were measured on one GPU."""

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from docs.generate.markdown import code, one_line, table
from docs.generate.results import percent
from experiments.gpu_day.report import STORED, report

COMMAND = "python -m experiments.gpu_day.report"
RIVALS = {"FLEX": "FlexAttention", "CUDNN": "cuDNN", "FLASH": "flash"}
OURS = "OURS"
GOALS = {  # key -> (what, limit, whether it is the most)
    "flex_forward_min": ("FlexAttention's time over ours, forward, least of EP, EE, MP", 1.2, False),
    "flex_backward_min": ("the same, backward", 1.25, False),
    "cudnn_causal_min": ("cuDNN's time over ours on causal, least of both passes", 0.75, False),
    "mean_error": ("predicted plans, mean error", 0.03, True),
    "worst_error": ("predicted plans, worst error", 0.08, True),
    "tau": ("their order, Kendall's tau over pairs that runs tell apart", 0.95, False),
    "memory_error": ("peak memory of plans of one rank, worst error", 0.02, True),
}


@cache
def _report() -> dict[str, Any]:
    return report(STORED)


def gpu_in_short() -> Iterator[tuple[str, str, str]]:
    """Rows of the summary: (what, command, figures)."""
    found = _report()
    device, run = found["device"], code(COMMAND)
    correct = found["parts"]["correctness"]
    ranges = {
        (who, way): _range(found["kernels"], who, way) for who in RIVALS for way in ("forward", "backward")
    }
    yield (
        f"attention kernels on an {device}, bf16, heads of 128",
        run,
        f"{correct['rows'] - correct['failed']} of {correct['rows']} cases within twice torch's error "
        f"against float64; times of FlexAttention over ours on causal, EP, EE, MP at 16k and 64k: "
        f"{ranges['FLEX', 'forward']} forward, {ranges['FLEX', 'backward']} backward; of cuDNN on causal "
        f"{ranges['CUDNN', 'forward']} and {ranges['CUDNN', 'backward']}",
    )
    yield (
        "peak memory on it, predicted",
        run,
        f"{len(found['memory'])} plans of SigLIP-so400m, Whisper-large-v3 and Llama-3.2-1B on one rank: "
        f"at most {percent(found['memory_error'], 2)} off",
    )
    yield (
        "steps on it, predicted before, all ranks played by one GPU",
        run,
        f"{found['plans_judged']} plans of the same: {percent(found['mean_error'])} off in the mean, worst "
        f"{percent(found['worst_error'])}, where steps of one plan spread by up to "
        f"{percent(max(plan['spread'] for plan in found['plans']), 0)}; tau {found['tau']:.2f}",
    )
    yield (
        "NCCL between GPUs, overlap of passes with communication",
        code("python -m experiments.gpu_day"),
        ("not measured: needs more than one GPU"),
    )


def _range(kernels: list[Mapping[str, Any]], who: str, direction: str) -> str:
    ratios = [row["ratio"] for row in kernels if (row["who"], row["direction"]) == (who, direction)]
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


def gpu_section() -> Iterator[str]:
    """Goals, kernels, plans, and what the shipped profile had said."""
    found = _report()
    versions = found["versions"]
    yield one_line(
        f"""{code(COMMAND)}, {found["dates"][1]}, {found["device"]}, torch {versions["torch"]}, Triton
        {versions["triton"]}; raw rows lie in `experiments/results/gpu_day/h100`, which says of each file what
        commit measured it."""
    )
    yield table(
        ("goal, set before", "must be", "is", ""),
        (_goal(found[key], *goal) for key, goal in GOALS.items()),
    )
    yield one_line(
        """Seconds of kernels are medians of turns, with the L2 cache flushed before each; a ratio is the
        rival's time over that of our kernels. A backward counts 2.5 forwards of FLOP."""
    )
    yield table(("mask", "pass", "ours", *RIVALS.values()), _kernel_rows(found["kernels"]))
    yield one_line(
        """Plans are of eight samples with 1,024 text tokens, an image and 30 s of sound each. Numbers at the
        end of a name are samples of each microbatch."""
    )
    yield table(
        ("plan", "predicted", "executed", "error", "steps spread by"),
        (
            (
                plan["plan"],
                f"{plan['predicted_s'] * 1e3:.0f} ms",
                f"{plan['executed_s'] * 1e3:.0f} ms",
                f"{plan['error']:+.1%}",
                percent(plan["spread"], 0),
            )
            for plan in found["plans"]
        ),
    )
    yield "What the shipped profile of an H100 says of rows that were not there when it was made:"
    yield table(
        ("", "rows", "mean error", "worst"),
        (
            (row["what"], row["count"], percent(row["mean_error"]), percent(row["worst_error"]))
            for row in found["unseen"]
        ),
    )


def _goal(value: float | None, what: str, limit: float, at_most: bool) -> tuple[str, str, str, str]:  # noqa: FBT001
    sign = "<=" if at_most else ">="
    if value is None:
        return what, f"{sign} {limit:g}", "not measured", ""
    holds = value <= limit if at_most else value >= limit
    return what, f"{sign} {limit:g}", f"{value:.3g}", "holds" if holds else "missed"


def _kernel_rows(kernels: list[Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    by = {(row["mask"], row["length"], row["direction"], row["who"]): row for row in kernels}
    for (mask, length, direction, who), row in by.items():
        if who == OURS:
            rivals = (by.get((mask, length, direction, rival)) for rival in RIVALS)
            ours = f"{row['seconds'] * 1e3:.2f} ms, {row['flop_per_s'] / 1e12:.0f} TFLOP/s"
            yield (
                f"{mask}, {length // 1024}k",
                direction,
                ours,
                *("" if rival is None else f"{rival['ratio']:.2f}" for rival in rivals),
            )
