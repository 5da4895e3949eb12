"""Part: attention kernels against float64, fresh seeds, sizes that are no multiples, poisoned memory."""

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from experiments.gpu_day.campaign import Cell, Extent, Measured, Session
from runtime.kernels.bitfield_attention.attention import Backward, Options, attention_with_lse
from runtime.kernels.bitfield_attention.mask import kernel_mask
from runtime.kernels.bitfield_attention.plan import BLOCK, make_plan
from runtime.kernels.bitfield_attention.reference import attends, attention
from runtime.kernels.bitfield_attention.tasks import FixedSplit, Split
from runtime.models.attention_mask import token_fields
from runtime.world.device import device_of
from workbench.masks.bitfield import Bitfield
from workbench.masks.builders import DRAWN, causal, causal_document, full, lambda_shaped
from workbench.plan.kernel_heads import HEAD_DIMS

ALLOWED = 2.0  # times the error of torch's operators in the same type
INTERPRETED_BLOCK = 32
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
MASKS: dict[str, Callable[..., Bitfield]] = {
    "causal": lambda length, seed: causal(length),
    "full": lambda length, seed: full(length),
    **DRAWN,
    "window": lambda length, seed: lambda_shaped(length, sinks=4, window=max(1, length // 5)),
    "documents": lambda length, seed: causal_document(
        [length // 3, length // 4, length - length // 3 - length // 4]
    ),
}
OPTIONS = {
    "fused": Options(),
    "split": Options(split=FixedSplit(1)),
    "whole": Options(split=Split.NEVER),
    "deterministic": Options(backward=Backward.DETERMINISTIC),
    "engine": Options(backward=Backward.ENGINE),
}


@dataclass(frozen=True, slots=True)
class Case:
    """One comparison."""

    mask: str
    length: int
    head_dim: int = 128
    dtype: str = "bf16"
    options: str = "fused"
    heads: int = 8
    kv_heads: int = 2
    batch: int = 1

    @property
    def name(self) -> str:
        shape = f"{self.batch}x{self.heads}:{self.kv_heads}x{self.head_dim}"
        return f"{self.mask} {self.length} {shape} {self.dtype} {self.options}"


def cases(extent: Extent) -> tuple[Case, ...]:
    """Every mask, length, width, type, option and grouping; one thing is changed at a time."""
    if extent is Extent.SMALL:
        tiny = Case("EE", 45, head_dim=64, dtype="fp32", heads=2, kv_heads=1)
        return (tiny, replace(tiny, mask="causal", length=33, options="deterministic"))
    usual = Case("EE", 1027)
    varied = [replace(usual, mask=mask, length=length) for mask in MASKS for length in (1027, 2048)]
    varied += [replace(usual, mask="causal", length=length) for length in (5, 127, 129, 640)]
    varied += [replace(usual, head_dim=width) for width in HEAD_DIMS if width != usual.head_dim]
    varied += [replace(usual, dtype=dtype) for dtype in ("fp16", "fp32")]
    varied += [replace(usual, options=options) for options in ("split", "whole", "deterministic")]
    # A width of 72: what the copy engine leaves alone beyond it, no interpreter tells.
    varied += [replace(usual, head_dim=width, options="engine") for width in (usual.head_dim, 72)]
    varied += [replace(usual, heads=heads, kv_heads=kv) for heads, kv in ((4, 4), (6, 1))]
    varied.append(replace(usual, batch=3, length=333))
    return tuple(varied)


def cells(session: Session) -> tuple[Cell, ...]:
    """One for each case; a first one of its kind compiles."""
    return tuple(Cell(case.name, bound_s=180.0) for case in cases(session.extent))


def measure(session: Session, key: str) -> Measured:
    """Errors of output, log-sums and gradients beside those of torch in the same type.

    Raises:
        ValueError: one of ours is more than twice torch's; the message has the seed.
    """
    case = next(case for case in cases(session.extent) if case.name == key)
    device = device_of(session.device)
    seed = secrets.randbelow(2**31)
    block = BLOCK if device.type == "cuda" else INTERPRETED_BLOCK
    tokens = MASKS[case.mask](case.length, seed=seed)
    data = _tensors(case, seed, device)
    with poisoned_memory():
        ours = _ours(case, tokens, data, block)
    seen = attends(token_fields(tokens, device), token_fields(tokens, device))
    exact = _reference([x.double() for x in data], seen)
    same = _reference(data, seen)
    errors = {name: distance(value, exact[name]) for name, value in ours.items()}
    torchs = {name: distance(same[name], exact[name]) for name in ours}
    values: dict[str, Any] = {"seed": seed, "errors": errors, "torch": torchs, "allowed": ALLOWED}
    wrong = [name for name in ours if not errors[name] <= ALLOWED * torchs[name]]
    if wrong:
        name = wrong[0]
        raise ValueError(
            f"{name} is {errors[name]:.2e} off, want at most {ALLOWED:g} x {torchs[name]:.2e}; seed {seed}"
        )
    worst = max((errors[name] / torchs[name] for name in ours if torchs[name] > 0), default=0.0)
    return Measured(values, f"at most {worst:.2f} of torch's error", -worst)


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """`torch.empty` and `empty_like` of floats hand out NaN: what no kernel writes shows up."""
    empty, empty_like = torch.empty, torch.empty_like

    def filled(tensor: Tensor) -> Tensor:
        return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

    torch.empty = lambda *a, **k: filled(empty(*a, **k))
    torch.empty_like = lambda *a, **k: filled(empty_like(*a, **k))
    try:
        yield
    finally:
        torch.empty, torch.empty_like = empty, empty_like


def distance(x: Tensor, exact: Tensor) -> float:
    """Norm of the difference over the norm of `exact`; infinity where other elements are not finite."""
    x, exact = x.double(), exact.double()
    finite = exact.isfinite()
    if not torch.equal(x.isfinite(), finite) or not torch.equal(x[~finite], exact[~finite]):
        return float("inf")
    return float((x - exact)[finite].norm() / exact[finite].norm().clamp(min=1e-30))


def _tensors(case: Case, seed: int, device: torch.device) -> list[Tensor]:
    """q, k, v and the gradient that comes back, normal, token-major like a model's."""
    generator = torch.Generator(device).manual_seed(seed)
    shapes = [(case.length, heads) for heads in (case.heads, case.kv_heads, case.kv_heads, case.heads)]
    return [
        torch.randn(case.batch, tokens, heads, case.head_dim, generator=generator, device=device)
        .to(DTYPES[case.dtype])
        .transpose(1, 2)
        for tokens, heads in shapes
    ]


def _ours(case: Case, tokens: Bitfield, data: list[Tensor], block: int) -> dict[str, Tensor]:
    fields = token_fields(tokens, data[0].device)
    mask = kernel_mask(fields, fields)
    plan = make_plan(mask, block_q=block, block_k=block)
    q, k, v = (x.detach().requires_grad_() for x in data[:3])
    out, lse = attention_with_lse(q, k, v, mask, plan, options=OPTIONS[case.options])
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), data[3])
    return {"out": out.detach(), "lse": lse, "dq": dq, "dk": dk, "dv": dv}


def _reference(data: list[Tensor], seen: Tensor) -> dict[str, Tensor]:
    q, k, v = (x.detach().requires_grad_() for x in data[:3])
    out, lse = attention(q, k, v, seen)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), data[3])
    return {"out": out.detach(), "lse": lse.detach(), "dq": dq, "dk": dk, "dv": dv}
