"""Times single operators on one device: products, memory-bound operators, copies to and from the host."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from runtime.measure.clock import Clock, summary
from workbench.calibrate.measurement import CopyRow, HostCopyRow, MatmulRow, OverheadRow

# Shape suffixes: N = tokens, D = width, V = words.

LAUNCH = "LAUNCH"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of measured operators.

    Args:
        products: (m, n, k) of products.
        moved_bytes: traffic of memory-bound operators.
        width: of their rows.
        words: rows of the embedding's table, and classes of the head.
        host_bytes: of copies between host and device.
        budget_s: per size; at least five calls are timed.
    """

    products: tuple[tuple[int, int, int], ...]
    moved_bytes: tuple[int, ...]
    width: int
    words: int
    host_bytes: tuple[int, ...]
    budget_s: float


def sizes_of(device: torch.device | str) -> Sizes:
    """Sizes that keep such a device busy without filling its memory."""
    if torch.device(device).type == "cuda":
        wide: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16384)
        return Sizes(
            products=tuple((2**m, n, k) for m in range(4, 15) for n in wide for k in wide),
            moved_bytes=tuple(2**i for i in range(16, 31)),
            width=4096,
            words=32768,
            host_bytes=tuple(2**i for i in range(16, 29, 2)),
            budget_s=0.02,
        )
    wide = (128, 256, 512, 1024)
    return Sizes(
        products=tuple((m, n, k) for m in (32, 64, 128, 256, 512, 1024) for n in wide for k in wide),
        moved_bytes=tuple(2**i for i in range(14, 26)),
        width=512,
        words=4096,
        host_bytes=tuple(2**i for i in range(16, 25, 2)),
        budget_s=0.01,
    )


def name_of(dtype: torch.dtype) -> str:
    """Name of a dtype, such as "float32"."""
    return str(dtype).removeprefix("torch.")


def time_products(
    clock: Clock, dtype: torch.dtype, shapes: Sequence[tuple[int, int, int]], budget_s: float
) -> list[MatmulRow]:
    """Time the product y[m, n] = x[m, k] w[k, n] for each (m, n, k)."""
    rows = []
    for m, n, k in shapes:
        x = torch.randn(m, k, dtype=dtype, device=clock.device)
        w = torch.randn(k, n, dtype=dtype, device=clock.device)
        seconds = clock.repeat(lambda x=x, w=w: x @ w, budget_s)  # type: ignore[misc]
        rows.append(MatmulRow(precision=name_of(dtype), m=m, n=n, k=k, **summary(seconds)))
    return rows


@dataclass(frozen=True, slots=True)
class _Operator:
    """A memory-bound operator.

    Args:
        passes: number of passes over [N, D] that its forward counts as.
        call: the operator, of its tensors; those of tokens come first.
        num_tensors: number of tensors [N, D].
        num_weights: number of weights [D].
    """

    passes: int
    call: Callable[..., Tensor]
    num_tensors: int = 1
    num_weights: int = 0


OPERATORS: dict[str, _Operator] = {
    "add": _Operator(3, lambda x, y: x + y, 2),
    "gelu": _Operator(2, functional.gelu),
    "swiglu": _Operator(3, lambda x, y: functional.silu(x) * y, 2),
    "layer_norm": _Operator(2, lambda x, w, b: functional.layer_norm(x, x.shape[-1:], w, b), num_weights=2),
    "rms_norm": _Operator(2, lambda x, w: functional.rms_norm(x, x.shape[-1:], w), num_weights=1),
}


@dataclass(frozen=True, slots=True, eq=False)
class _Timed:
    """A call, and the tensors that its backward computes gradients of."""

    call: Callable[[], Tensor]
    inputs: Sequence[Tensor]


def time_operator(clock: Clock, sizes: Sizes, dtype: torch.dtype, name: str) -> list[CopyRow]:
    """Time a norm, an activation or a sum over [N, D]: forward, and backward to all its inputs."""
    operator = OPERATORS[name]

    def call(tokens: int) -> _Timed:
        inputs = [_trained(clock, dtype, tokens, sizes.width) for _ in range(operator.num_tensors)]
        inputs += [_trained(clock, dtype, sizes.width) for _ in range(operator.num_weights)]
        return _Timed(partial(operator.call, *inputs), inputs)

    return _over_sizes(clock, sizes, name, operator.passes * dtype.itemsize * sizes.width, call, least=2)


def time_embedding(clock: Clock, sizes: Sizes, dtype: torch.dtype) -> list[CopyRow]:
    """Time an embedding: looking up rows, and adding their gradients into a dense one."""
    table_VD = _trained(clock, dtype, sizes.words, sizes.width)

    def call(tokens: int) -> _Timed:
        index_N = torch.randint(sizes.words, (tokens,), device=clock.device)
        return _Timed(partial(functional.embedding, index_N, table_VD), [table_VD])

    return _over_sizes(clock, sizes, "embedding", 2 * dtype.itemsize * sizes.width, call, least=1)


def time_head(clock: Clock, sizes: Sizes, dtype: torch.dtype) -> list[CopyRow]:
    """Time cross-entropy over [N, V] scores; the product before it is one of the products."""

    def call(tokens: int) -> _Timed:
        score_NV = _trained(clock, dtype, tokens, sizes.words)
        label_N = torch.randint(sizes.words, (tokens,), device=clock.device)
        return _Timed(partial(functional.cross_entropy, score_NV, label_N, reduction="sum"), [score_NV])

    return _over_sizes(clock, sizes, "cross_entropy", 2 * dtype.itemsize * sizes.words, call, least=0)


def _trained(clock: Clock, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=dtype, device=clock.device, requires_grad=True)


def _over_sizes(
    clock: Clock,
    sizes: Sizes,
    name: str,
    token_bytes: int,
    make: Callable[[int], _Timed],
    *,
    least: int,
) -> list[CopyRow]:
    """Time calls on as many tokens as move the bytes of each size, at least `least`; none where that is 0."""
    counts = [max(least, num_bytes // token_bytes) for num_bytes in sizes.moved_bytes]
    return [_moved(clock, sizes, name, token_bytes * tokens, make(tokens)) for tokens in counts if tokens]


def _moved(clock: Clock, sizes: Sizes, name: str, num_bytes: int, timed: _Timed) -> CopyRow:
    """Time a call; gradients are new ones, as accumulating them is no part of the operator."""
    with torch.no_grad():
        forward_s = clock.repeat(timed.call, sizes.budget_s)
    output = timed.call()
    gradient = torch.randn_like(output)
    backward_s = clock.repeat(
        lambda: torch.autograd.grad([output], timed.inputs, [gradient], retain_graph=True), sizes.budget_s
    )
    return CopyRow(
        operator=name,
        precision=name_of(output.dtype),
        num_bytes=num_bytes,
        **summary(forward_s),
        backward_s=statistics.median(backward_s),
    )


def time_launch(clock: Clock, sizes: Sizes) -> list[OverheadRow]:
    """Time a kernel of one element: on a GPU, the device time per kernel when the host is ahead."""
    x = torch.zeros(1, device=clock.device)
    batch = 100

    def many() -> None:
        for _ in range(batch):
            x.add_(1.0)

    seconds = [second / batch for second in clock.repeat(many, sizes.budget_s)]
    return [OverheadRow(action=LAUNCH, **summary(seconds))]


def time_host_copies(clock: Clock, sizes: Sizes) -> list[HostCopyRow]:
    """Time copies between pinned host memory and the device, both ways: the cost of activation offload."""
    rows = []
    for num_bytes in sizes.host_bytes:
        host = torch.randint(256, (num_bytes,), dtype=torch.uint8, pin_memory=clock.is_cuda)
        there = torch.empty(num_bytes, dtype=torch.uint8, device=clock.device)
        for direction, target, source in (("to_device", there, host), ("to_host", host, there)):
            seconds = clock.repeat(
                lambda t=target, s=source: t.copy_(s, non_blocking=True),  # type: ignore[misc]
                sizes.budget_s,
            )
            rows.append(HostCopyRow(direction=direction, num_bytes=num_bytes, **summary(seconds)))
    return rows
