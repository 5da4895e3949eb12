"""The GPU day: tables out of the rows that were measured on one GPU."""

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from docs.generate.markdown import code, one_line, table
from docs.generate.results import percent
from experiments.gpu_day.report import STORED, report

COMMAND = "python -m experiments.gpu_day.report"
RIVALS = {"FLEX": "FlexAttention", "CUDNN": "cuDNN", "FLASH": "SDPA flash"}
OURS = "OURS"
GOALS = {  # key -> (what, limit, whether it is the most)
    "flex_forward_min": ("forward: least speedup over FlexAttention on EP, EE, MP", 1.2, False),
    "flex_backward_min": ("backward: the same", 1.25, False),
    "cudnn_causal_min": ("forward and backward: least speedup over cuDNN on causal", 0.75, False),
    "mean_error": ("predicted step times, mean error", 0.03, True),
    "worst_error": ("predicted step times, worst error", 0.08, True),
    "tau": ("order of plans: Kendall's tau over pairs that runs can tell apart", 0.95, False),
    "memory_error": ("predicted peak memory of one rank, worst error", 0.02, True),
}


@cache
def _report() -> dict[str, Any]:
    return report(STORED)


def gpu_in_short() -> Iterator[tuple[str, str, str]]:
    """Rows of the summary: (what was tested, result, command)."""
    found = _report()
    device, run = found["device"], code(COMMAND)
    correct = found["parts"]["correctness"]
    ranges = {
        (who, way): _range(found["kernels"], who, way) for who in RIVALS for way in ("forward", "backward")
    }
    yield (
        f"**Attention kernels** on an {device} (bf16, head dimension 128)",
        f"error at most twice PyTorch's in {correct['rows'] - correct['failed']} of {correct['rows']} cases; "
        f"speed over FlexAttention (causal and multimodal masks, 16k and 64k tokens): forward "
        f"{ranges['FLEX', 'forward']}x, backward {ranges['FLEX', 'backward']}x; over cuDNN (causal): forward "
        f"{ranges['CUDNN', 'forward']}x, backward {ranges['CUDNN', 'backward']}x",
        run,
    )
    yield (
        "**Peak memory on this GPU**, predicted before the run",
        f"worst error {percent(found['memory_error'], 2)} over {len(found['memory'])} plans of "
        "SigLIP-so400m, Whisper-large-v3 and Llama-3.2-1B on one rank",
        run,
    )
    yield (
        "**Step time on this GPU**, predicted before the run; one GPU executes all ranks in turn",
        f"mean error {percent(found['mean_error'])}, worst {percent(found['worst_error'])} over "
        f"{found['plans_judged']} plans of these models; steps of one plan vary by up to "
        f"{percent(max(plan['spread'] for plan in found['plans']), 0)}; order of plans: Kendall's tau "
        f"{found['tau']:.2f}",
        run,
    )
    yield (
        "**Several GPUs**: NCCL, overlap of computation and communication",
        "not measured: needs more than one GPU",
        code("python -m experiments.gpu_day"),
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
        {versions["triton"]}. The raw rows and the commit that measured each file are in
        `experiments/results/gpu_day/h100`."""
    )
    yield table(
        ("goal, set before the runs", "target", "measured", "result"),
        (_goal(found[key], *goal) for key, goal in GOALS.items()),
    )
    yield one_line(
        """**Attention kernels.** Times are medians; the L2 cache is flushed before each run. The last columns
        are our speedup: the other kernel's time over ours. A backward pass counts as 2.5 forward passes of
        FLOP. [Attention](#attention) explains EP, EE and MP."""
    )
    rivals = (f"over {name}" for name in RIVALS.values())
    yield table(("mask, tokens", "pass", "ours", *rivals), _kernel_rows(found["kernels"]))
    yield one_line(
        """**Step times.** One GPU executes all ranks in turn, and the step is composed of their times. A
        batch is eight samples, each with 1,024 text tokens, an image and 30 s of audio. The numbers at the
        end of a plan's name are the samples of each microbatch."""
    )
    yield table(
        ("plan", "predicted", "executed", "error", "spread of steps"),
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
    yield "**Shipped H100 profile** against measurements made after it:"
    yield table(
        ("kernels", "rows", "mean error", "worst"),
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
