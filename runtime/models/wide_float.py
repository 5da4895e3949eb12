"""Keeps float64 in float64 where transformers' code converts to float32."""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode


class KeepsFloat64(TorchFunctionMode):
    """Inside, conversions of float64 tensors to float32 leave them as they are, also before a softmax.

    Narrower tensors are converted as always. So transformers' own code runs in the wider of float32 and its
    input's type, as `WideRMSNorm` does.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        del types
        options = dict(kwargs or {})
        if func in (Tensor.to, Tensor.float, functional.softmax) and args[0].dtype is torch.float64:
            if func is Tensor.float:
                return args[0]
            args = tuple(map(_wide, args))
            options = {key: _wide(value) for key, value in options.items()}
        return func(*args, **options)


def _wide(option: Any) -> Any:
    return torch.float64 if option is torch.float32 else option


def in_float64(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The function with float64 kept."""

    @wraps(forward)
    def kept(*args: Any, **kwargs: Any) -> Any:
        with KeepsFloat64():
            return forward(*args, **kwargs)

    return kept
