"""What PyTorch's eager attention, autocast and optimizers move, counted while they run."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.models.bert.modeling_bert import eager_attention_forward

from sim.predict import iteration_s
from tests.test_kernel_prices import machine, times
from tests.test_predict import row
from workbench.cost.autocast import Autocast, calls_of, weight_cast_bytes
from workbench.cost.eager_scores import HEAD_COPIES, eager_scores
from workbench.cost.eager_traffic import (
    EAGER_UPDATE_TENSORS,
    Calls,
    EagerOperator,
    OptimizerKernels,
    PointwiseKernels,
    eager_operator,
)
from workbench.cost.execution import AttentionKernel, Execution
from workbench.cost.traffic import Dropout
from workbench.llm_table.predict import RowPredictor
from workbench.model.layer import Attention, Matmul
from workbench.model.transformer import Norm, norm, residual

BATCH, HEADS, TOKENS, HEAD = 2, 4, 64, 16
WIDTH = HEADS * HEAD
SCORES = BATCH * HEADS * TOKENS * TOKENS
VIEWS = ("view", "expand", "transpose", "t", "detach", "_unsafe_view", "device", "ones_like")


class Call(NamedTuple):
    """A kernel that was called: its name, and the distinct tensors that it reads and writes."""

    name: str
    moved: tuple[tuple[int, int], ...]  # elements and bytes of each

    def num_bytes(self, least: int) -> int:
        """Bytes of its tensors with at least so many elements."""
        return sum(size for elements, size in self.moved if elements >= least)


class Recorded(TorchDispatchMode):
    """Records the kernels that run."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name not in VIEWS:
            read = {id(each): each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
            written = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
            sizes = [
                (each.numel(), each.numel() * each.element_size()) for each in (*read.values(), *written)
            ]
            self.calls.append(Call(name, tuple(sizes)))
        return result

    def of(self, *names: str, but: tuple[str, ...] = (), least: int = 1) -> tuple[int, int]:
        """Number and bytes of the calls with these names, or of all but others."""
        chosen = [
            each
            for each in self.calls
            if (each.name in names if names else each.name not in but) and each.num_bytes(least)
        ]
        return len(chosen), sum(each.num_bytes(least) for each in chosen)


class WideSoftmax(TorchFunctionMode):
    """Softmax in float32, as autocast runs it on GPUs but not on CPUs."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.softmax:
            args = (args[0].float(), *args[1:])
        return func(*args, **(kwargs or {}))


@contextmanager
def autocast() -> Iterator[None]:
    with torch.autocast("cpu", torch.bfloat16), WideSoftmax():
        yield


@pytest.fixture
def _gpu_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout as the one kernel that runs on GPUs."""

    def dropped(values: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
        return torch.native_dropout(values, p, training)[0] if p else values

    monkeypatch.setattr(functional, "dropout", dropped)


def mode(cast: Autocast) -> AbstractContextManager[None]:
    return autocast() if cast is Autocast.ON else nullcontext()


def attention(*, causal: bool) -> Attention:
    return Attention(name="attention", num_heads=HEADS, num_kv_heads=HEADS, head_dim=HEAD, causal=causal)


def moved_of(calls: Calls, elements: int) -> float:
    return elements * calls.bytes_per_element(2)


@pytest.mark.usefixtures("_gpu_dropout")
@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize(
    ("cast", "causal"), [(Autocast.OFF, False), (Autocast.OFF, True), (Autocast.ON, True)]
)
def test_stored_scores_take_the_calls_of_transformers(cast: Autocast, causal: bool, p: float):
    dropout = Dropout.MASKED if p else Dropout.NONE
    expected = eager_scores(attention(causal=causal), dropout, cast)
    shape = BATCH, TOKENS, HEADS, HEAD
    inputs = [torch.randn(shape, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    mask_type = torch.float32 if cast is Autocast.ON else torch.bfloat16  # of the weights
    mask = torch.zeros(BATCH, 1, TOKENS, TOKENS, dtype=mask_type) if causal else None
    with mode(cast), Recorded() as forward:
        heads = (each.transpose(1, 2) for each in inputs)
        result, _ = eager_attention_forward(SimpleNamespace(training=True), *heads, mask, HEAD**-0.5, p)
        flat = result.reshape(BATCH, TOKENS, WIDTH)
    with Recorded() as backward:
        torch.autograd.grad(flat, inputs, torch.ones_like(flat))
    for direction, recorded in zip(expected[:2], (forward, backward), strict=True):
        other = recorded.of(but=("bmm", "clone"), least=SCORES)
        assert other == (direction.kernels + direction.casts, moved_of(direction, SCORES))
    assert forward.of("clone") == (HEAD_COPIES.kernels, moved_of(HEAD_COPIES, BATCH * TOKENS * WIDTH))


def test_softmax_casts_scores_in_float16():
    """On GPUs, in the two directions; between the cast of the gradient and the scale."""
    expected = eager_scores(attention(causal=False), Dropout.NONE, Autocast.ON)
    with FakeTensorMode(), torch.no_grad(), _gpu_autocast(torch.float16):
        scores = torch.empty(BATCH, HEADS, TOKENS, TOKENS, device="cuda", dtype=torch.float16)
        with Recorded() as forward:
            wide = functional.softmax(scores * 0.5, dim=-1)
            wide.half()
        with Recorded() as backward:
            gradient = torch.ops.aten._softmax_backward_data(scores.float(), wide, -1, torch.float16)
            gradient * 0.5
    for calls, recorded in zip(expected[:2], (forward, backward), strict=True):
        assert recorded.of(but=()) == (calls.kernels + calls.casts, moved_of(calls, SCORES))


def test_autocast_runs_norms_and_softmax_in_float32_on_gpus():
    with FakeTensorMode(), torch.no_grad(), _gpu_autocast(torch.float16):
        values = torch.empty(TOKENS, WIDTH, device="cuda")
        narrow = functional.linear(values, torch.empty(WIDTH, WIDTH, device="cuda"))
        kept = [functional.gelu(narrow), torch.native_dropout(narrow, 0.1, train=True)[0]]
        wide = [functional.layer_norm(narrow, (WIDTH,)), functional.softmax(narrow, -1), narrow + values]
    assert {each.dtype for each in (narrow, *kept)} == {torch.float16}
    assert {each.dtype for each in wide} == {torch.float32}


@contextmanager
def _gpu_autocast(dtype: torch.dtype) -> Iterator[None]:
    """`torch.autocast("cuda")`, which turns itself off where there is no GPU."""
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", dtype)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if not torch.autocast_decrement_nesting():
            torch.clear_autocast_cache()
        torch.set_autocast_enabled("cuda", False)


@pytest.mark.usefixtures("_gpu_dropout")
@pytest.mark.parametrize("p", [0.0, 0.1])
def test_norm_product_and_sum_move_what_autocast_casts(p: float):
    """A branch that leaves the stream, is normed, multiplied with weights, dropped and added."""
    dropout, elements = (Dropout.MASKED if p else Dropout.NONE), TOKENS * WIDTH
    operators = norm("mlp_norm", WIDTH, Norm.LAYER), residual("mlp_residual", WIDTH)
    calls = [calls_of(each, PointwiseKernels.EAGER, dropout, Autocast.ON) for each in operators]
    stream = torch.randn(TOKENS, WIDTH, requires_grad=True)
    layer, linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
    with mode(Autocast.ON), Recorded() as forward:
        result = functional.dropout(linear(layer(stream)), p) + stream
    with Recorded() as backward:
        torch.autograd.grad(result, [stream, linear.weight], torch.ones_like(result))
    cast = weight_cast_bytes(WIDTH * WIDTH, 2)
    for index, recorded in enumerate((forward, backward)):
        directions = [each[index] for each in calls if each is not None]
        moved = sum(moved_of(each, elements) for each in directions)
        num_kernels = sum(each.kernels + each.casts for each in directions)
        assert recorded.of(but=("mm",), least=elements) == (num_kernels + 1, moved + cast)


def test_rms_norm_of_a_stream_in_float32_casts_once():
    rms, steps = norm("mlp_norm", WIDTH, Norm.RMS), eager_operator(norm("mlp_norm", WIDTH, Norm.RMS))
    cast = calls_of(rms, PointwiseKernels.EAGER, Dropout.NONE, Autocast.ON)
    assert isinstance(steps, EagerOperator)
    assert isinstance(cast, EagerOperator)
    for each, own in zip(cast[:2], steps[:2], strict=True):
        assert (each.own, each.casts, each.kernels) == (0, 1, own.kernels)
        assert each.bytes_per_element(2) == own.bytes_per_element(4) + 6


def test_optimizer_of_pytorch_moves_twenty_tensors():
    weight = torch.randn(4096, requires_grad=True)
    weight.grad = torch.randn(4096)
    optimizer = torch.optim.AdamW([weight], foreach=False)
    optimizer.step()
    with Recorded() as update:
        optimizer.step()
    _, moved = update.of(but=(), least=4096)
    assert moved == EAGER_UPDATE_TENSORS * 4096 * 4


def test_casts_are_launched_beside_other_kernels():
    product = Matmul(name="qkv", in_features=WIDTH, out_features=3 * WIDTH, bias=True)
    run = Execution(autocast=Autocast.ON, pointwise=PointwiseKernels.EAGER)
    assert (run.num_kernels(product), *run.num_casts(product)) == (2, 2, 2)
    stored = Execution(attention=AttentionKernel.STORED, pointwise=PointwiseKernels.EAGER)
    seen = attention(causal=True)
    assert stored.num_kernels(seen) == 2 + 3  # products, scale, mask, softmax
    assert stored.num_casts(seen).forward == HEAD_COPIES.kernels
    assert times(machine(), stored).execution.eager_scores(seen) is not None
    assert Execution(pointwise=PointwiseKernels.EAGER).eager_scores(seen) is None


@pytest.mark.parametrize("precision", ["fp32", "fp8"])
def test_autocast_is_for_two_byte_products(precision: str):
    with pytest.raises(ValueError, match=f"^autocast: want no with precision {precision}, got yes"):
        row(autocast="yes", precision=precision)


def test_blocks_of_diffusion_know_one_activation():
    with pytest.raises(ValueError, match=r"^activation: want gelu with architecture dit, got gelu_new"):
        row(architecture="dit", patch=2, activation="gelu_new")


def test_columns_lengthen_a_row():
    predictor = RowPredictor(iteration_s)
    seconds = [
        predictor.predict(row(**cells)).iteration_s
        for cells in ({}, {"autocast": "yes"}, {"optimizer_kernels": OptimizerKernels.EAGER})
    ]
    assert seconds[0] < min(seconds[1:])
