"""A backward in two passes: input gradients first, weight gradients later.

Every trained `nn.Linear`, convolution, `nn.Embedding`, GPT-2's `Conv1D` and grouped linear map of experts
runs through one autograd function. While its backward is split, it computes only the gradient of its input
and keeps the two tensors from which the weight's gradient follows: its input, and the gradient of its output.
The rest of the graph is freed during that backward. Weights and biases of these operators get their gradient
in the second pass. Parameters of norms and routers, and tables that a layer reads without calling their
module, get theirs in the first: they are small, unlike the tensors that would have to be kept.

Source: Qi et al. 2024, "Zero Bubble Pipeline Parallelism", section 2 (B and W, our I and W).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from runtime.models.grouped import GroupedLinear, grouped
from runtime.models.mixture import Experts

# Shape suffixes: N = all dims of an activation but its last, I = features in, O = features out.


class _Operator(ABC):
    """A function of one input and a weight, with separate input and weight gradients."""

    @property
    @abstractmethod
    def weight(self) -> nn.Parameter:
        """The weight."""

    @property
    def bias(self) -> nn.Parameter | None:
        """The bias, if any."""
        return None

    @abstractmethod
    def run(self, x: Tensor) -> Tensor:
        """The module's output."""

    @abstractmethod
    def input_gradient(self, gradient: Tensor, x: Tensor) -> Tensor:
        """Gradient of x, from that of the output."""

    @abstractmethod
    def add_weight_gradient(self, gradient: Tensor, x: Tensor) -> None:
        """Add to the gradients of weight and bias."""


class _ModuleOperator(_Operator):
    """The function of a module with a weight."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    @property
    def weight(self) -> nn.Parameter:
        weight: nn.Parameter = self._module.weight  # type: ignore[assignment]
        return weight

    @property
    def bias(self) -> nn.Parameter | None:
        return getattr(self._module, "bias", None)


class _Linear(_ModuleOperator):
    def run(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)

    def input_gradient(self, gradient: Tensor, x: Tensor) -> Tensor:
        del x
        return gradient @ self.weight

    def add_weight_gradient(self, gradient: Tensor, x: Tensor) -> None:
        gradient_NO, x_NI = gradient.flatten(0, -2), x.flatten(0, -2)
        weight, bias = self.weight, self.bias
        if weight.grad is None:
            weight.grad = gradient_NO.t() @ x_NI
        else:  # `grad += product` without a temporary tensor
            weight.grad.addmm_(gradient_NO.t(), x_NI)
        if bias is not None:
            _add(bias, gradient_NO.sum(0))


class _Transposed(_ModuleOperator):
    """GPT-2's `Conv1D`: a linear map whose weight is [features in, features out]."""

    def run(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight.t(), self.bias)

    def input_gradient(self, gradient: Tensor, x: Tensor) -> Tensor:
        del x
        return gradient @ self.weight.t()

    def add_weight_gradient(self, gradient: Tensor, x: Tensor) -> None:
        gradient_NO, x_NI = gradient.flatten(0, -2), x.flatten(0, -2)
        _add(self.weight, x_NI.t() @ gradient_NO)
        if self.bias is not None:
            _add(self.bias, gradient_NO.sum(0))


class _Convolution(_ModuleOperator):
    def __init__(self, module: nn.Conv1d | nn.Conv2d | nn.Conv3d) -> None:
        super().__init__(module)
        padding = (0,) * len(module.stride) if isinstance(module.padding, str) else module.padding
        self._geometry = (module.stride, padding, module.dilation)
        self._groups = module.groups

    def run(self, x: Tensor) -> Tensor:
        by_ndim = {3: functional.conv1d, 4: functional.conv2d, 5: functional.conv3d}
        convolve: Callable[..., Tensor] = by_ndim[self.weight.ndim]
        return convolve(x, self.weight, self.bias, *self._geometry, self._groups)

    def input_gradient(self, gradient: Tensor, x: Tensor) -> Tensor:
        return self._backward(gradient, x, [True, False, False])[0]

    def add_weight_gradient(self, gradient: Tensor, x: Tensor) -> None:
        bias = self.bias
        _, of_weight, of_bias = self._backward(gradient, x, [False, True, bias is not None])
        _add(self.weight, of_weight)
        if bias is not None:
            _add(bias, of_bias)

    def _backward(self, gradient: Tensor, x: Tensor, wanted: list[bool]) -> tuple[Tensor, Tensor, Tensor]:
        bias = self.bias
        gradients: tuple[Tensor, Tensor, Tensor] = torch.ops.aten.convolution_backward(
            gradient,
            x,
            self.weight,
            None if bias is None else list(bias.shape),
            *self._geometry,
            transposed=False,
            output_padding=[0] * len(self._geometry[0]),
            groups=self._groups,
            output_mask=wanted,
        )
        return gradients


class _Embedding(_ModuleOperator):
    def __init__(self, module: nn.Embedding) -> None:
        super().__init__(module)
        self._padding = -1 if module.padding_idx is None else module.padding_idx

    def run(self, x: Tensor) -> Tensor:
        return functional.embedding(x, self.weight, None if self._padding < 0 else self._padding)

    def input_gradient(self, gradient: Tensor, x: Tensor) -> Tensor:
        raise TypeError("indices have no gradient")

    def add_weight_gradient(self, gradient: Tensor, x: Tensor) -> None:
        weight = self.weight
        added: Tensor = torch.ops.aten.embedding_dense_backward(
            gradient, x, weight.shape[0], self._padding, scale_grad_by_freq=False
        )
        _add(weight, added)


class _Grouped(_Operator):
    """The linear maps of all experts; the numbers of their rows are those of one use."""

    def __init__(self, linear: GroupedLinear) -> None:
        self._linear = linear

    @property
    def weight(self) -> nn.Parameter:
        return self._linear.weight

    def run(self, x: Tensor) -> Tensor:
        return grouped(x, self._linear)

    def input_gradient(self, gradient: Tensor, x: Tensor) -> Tensor:
        del x
        return self._linear.input_gradient(gradient)

    def add_weight_gradient(self, gradient: Tensor, x: Tensor) -> None:
        if self.weight.grad is None:
            self.weight.grad = self._linear.weight_gradient(gradient, x)
        else:  # without a temporary tensor of all experts
            self._linear.add_weight_gradient(self.weight.grad, gradient, x)


def _add(parameter: Tensor, gradient: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)


_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def _operator_of(module: nn.Module) -> _Operator | None:
    """The operator of a module; None for others, such as subclasses, which may compute other functions."""
    if type(module) is nn.Linear:
        return _Linear(module)
    if type(module) is Conv1D:
        return _Transposed(module)
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) and type(module) in _CONVOLUTIONS:
        plain = module.padding_mode == "zeros" and module.padding != "same"
        return _Convolution(module) if plain else None
    if type(module) is nn.Embedding:
        plain = module.max_norm is None and not (module.sparse or module.scale_grad_by_freq)
        return _Embedding(module) if plain else None
    return None


class _Part(NamedTuple):
    """A weight gradient to be computed, of one use of the weight."""

    operator: _Operator
    gradient: Tensor
    x: Tensor


class WeightWork:
    """The weight gradients that one split backward has deferred."""

    def __init__(self) -> None:
        self._parts: list[_Part] = []

    def __len__(self) -> int:
        """Number of deferred weight gradients."""
        return len(self._parts)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Its tensors, in the order of the backward: gradient and input of each use."""
        return tuple(tensor for part in self._parts for tensor in (part.gradient, part.x))

    def note(self, part: _Part) -> None:
        self._parts.append(part)

    def run(self) -> None:
        """Compute and accumulate all weight gradients, freeing tensors on the way."""
        with torch.no_grad():
            while self._parts:
                operator, gradient, x = self._parts.pop()
                operator.add_weight_gradient(gradient, x)
                del operator, gradient, x


class SplitBackward:
    """Lets backwards of a module defer weight gradients; several backwards may be deferred at a time.

    A forward keeps the same tensors for split and whole backwards, so the choice is made in the backward: it
    is split within `leaving`, and whole elsewhere. The forward may be recomputed (`torch.utils.checkpoint`),
    weights may be used twice, some may be frozen.

    Args:
        module: the forwards of its operators with weights are replaced permanently.
    """

    def __init__(self, module: nn.Module) -> None:
        self._work: WeightWork | None = None
        for child in module.modules():
            if isinstance(child, Experts):
                child.linear = self._grouped
            elif (operator := _operator_of(child)) is not None:
                child.forward = partial(self._forward, operator)

    @contextmanager
    def leaving(self) -> Iterator[WeightWork]:
        """Context in which backwards defer weight gradients to the yielded work; its `run` computes them."""
        assert self._work is None, "one backward after the other"
        self._work = work = WeightWork()
        try:
            yield work
        finally:
            self._work = None

    def note(self, part: _Part) -> None:
        """Defer a weight gradient, or compute it at once; called by backwards."""
        if self._work is not None:
            self._work.note(part)
        else:
            part.operator.add_weight_gradient(part.gradient, part.x)

    def _grouped(self, x: Tensor, linear: GroupedLinear) -> Tensor:
        return self._forward(_Grouped(linear), x)

    def _forward(self, operator: _Operator, x: Tensor) -> Tensor:
        if not (operator.weight.requires_grad and torch.is_grad_enabled()):
            return operator.run(x)
        output: Tensor = _Apart.apply(x, operator.weight, operator.bias, operator, self)
        return output


class _Apart(torch.autograd.Function):
    """An operator whose weights get their gradients from a `SplitBackward`.

    Weights are arguments so that the output requires a gradient; the graph itself gives them none.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, operator: _Operator, split: SplitBackward
    ) -> Tensor:
        del weight, bias
        ctx.save_for_backward(x)
        ctx.operator, ctx.split = operator, split
        return operator.run(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        (x,) = ctx.saved_tensors
        x = x.detach()  # without its history, which would keep the graph alive
        operator: _Operator = ctx.operator
        ctx.split.note(_Part(operator, gradient.detach(), x))
        wanted = operator.input_gradient(gradient, x) if ctx.needs_input_grad[0] else None
        return wanted, None, None, None, None
