"""One mixture of experts, forward and backward: the runtime's grouped experts against transformers' own.

Setup:   Qwen3's mixture (width 256, experts of 128, 8 a token) of 32 and of 128 experts, 256 tokens, float32,
         on one CPU thread, with the same weights and rows. transformers indexes its experts one after the
         other (eager), or calls PyTorch's grouped product (grouped_mm). Implementations alternate in every
         round. Its third one, batched_mm, copies the matrix of every row and takes too long for this table.
Ours:    seconds of a forward and backward (median of the rounds), and by how much the most bytes that the
         backward has at once exceed those from before it, without weights; both as multiples of ours.
Differs: not measured on a GPU, where ours calls PyTorch's grouped product in bfloat16.
Run:     python -m experiments.bench.mixture [--rounds 5] [--json]
"""

import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen3_moe

from experiments.harness.command import Found, bench, want_at_least
from runtime.models.mixture import Experts, MixtralMixture, MixtureForward, WideRouter
from runtime.step.activations import Allocations

WIDTH, INNER, CHOSEN, TOKENS = 256, 128, 8, 256
NUM_EXPERTS = (32, 128)
OURS = "ours"
THEIRS = ("eager", "grouped_mm")


def mixture_of(num_experts: int, implementation: str) -> nn.Module:
    """Make Qwen3's mixture with the same weights for every implementation."""
    config = qwen3_moe.Qwen3MoeConfig(
        hidden_size=WIDTH,
        moe_intermediate_size=INNER,
        num_experts=num_experts,
        num_experts_per_tok=CHOSEN,
        norm_topk_prob=True,
    )
    config._experts_implementation = "eager" if implementation == OURS else implementation
    mixture: Any = qwen3_moe.Qwen3MoeSparseMoeBlock(config)
    draw = torch.Generator().manual_seed(0)
    for parameter in mixture.parameters():
        nn.init.normal_(parameter, std=0.02, generator=draw)
    if implementation == OURS:
        mixture.gate, mixture.experts = WideRouter(mixture.gate), Experts(mixture.experts)
        mixture.forward = MixtureForward(MixtralMixture(mixture))
    return mixture


def step(mixture: nn.Module, x: Tensor) -> tuple[float, int]:
    """Seconds of a forward and backward, and the most bytes that the backward adds to those before it."""
    mixture.zero_grad(set_to_none=True)
    with Allocations(mixture.parameters()) as memory:
        y: Tensor = mixture(x[None])
        before = memory.num_bytes
        memory.take_peak()
        y.square().sum().backward()
        peak = memory.take_peak().num_bytes
    mixture.zero_grad(set_to_none=True)
    started_s = time.perf_counter()
    mixture(x[None]).square().sum().backward()
    return time.perf_counter() - started_s, peak - before


def measured(num_experts: int, rounds: int) -> dict[str, float]:
    """By implementation: median seconds and peak bytes, as they are and over ours."""
    x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()
    mixtures = {name: mixture_of(num_experts, name) for name in (OURS, *THEIRS)}
    runs: dict[str, list[tuple[float, int]]] = {name: [] for name in mixtures}
    for _ in range(rounds + 1):
        for name, mixture in mixtures.items():
            runs[name].append(step(mixture, x))
    values: dict[str, float] = {}
    for name, own in runs.items():
        key = f"{num_experts}.{name}"
        values[f"{key}.step_s"] = statistics.median(seconds for seconds, _ in own[1:])  # the first warms up
        values[f"{key}.peak_bytes"] = own[-1][1]
    for name in THEIRS:
        for of in ("step_s", "peak_bytes"):
            ours = values[f"{num_experts}.{OURS}.{of}"]
            values[f"{num_experts}.{name}.{of}_over_ours"] = values[f"{num_experts}.{name}.{of}"] / ours
    return values


@bench()
def run(rounds: int = 5) -> Found:
    """Print times, bytes and ratios; the claim is that eager experts are slower and larger."""
    want_at_least(1, rounds=rounds)
    torch.set_num_threads(1)
    record: dict[str, float] = {}
    for num_experts in NUM_EXPERTS:
        record |= measured(num_experts, rounds)
        for name in (OURS, *THEIRS):
            key = f"{num_experts}.{name}"
            step_s, peak_bytes = record[f"{key}.step_s"], record[f"{key}.peak_bytes"]
            slower, larger = (record.get(f"{key}.{of}_over_ours", 1.0) for of in ("step_s", "peak_bytes"))
            print(
                f"{num_experts:4} experts, {name:10} {step_s * 1e3:8.1f} ms ({slower:.2f} of ours), "
                f"{peak_bytes / 1e6:8.1f} MB ({larger:.2f})"
            )
    most = max(NUM_EXPERTS)
    eager = [record[f"{most}.eager.{of}_over_ours"] for of in ("step_s", "peak_bytes")]
    claims = {f"{most} experts: transformers' eager experts take longer and more memory": min(eager) > 1}
    return Found(record, claims)
