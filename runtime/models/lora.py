"""Low-rank adapters inside transformers' own linear layers, under PEFT's names."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from runtime.models.initialise import Fill, constant
from workbench.model.layer import Layer, Matmul
from workbench.model.lora import ADAPTED_BY_NAME, DOWN, UP

ATTENTIONS = frozenset({"self_attn", "attn", "attention"})  # names of a block's attention


def add_adapters(layer: nn.Module, planned: Layer, where: str) -> None:
    """Put the adapters of a planned layer into the modules of its products.

    Raises:
        ValueError: a product that is no linear layer of its own.
    """
    for operator in planned.operators:
        if isinstance(operator, Matmul) and operator.lora is not None:
            linear = _linear(layer, operator, where)
            down, up = operator.adapter
            for name, product in ((DOWN, down), (UP, up)):
                linear.add_module(name, nn.Linear(product.in_features, product.out_features, bias=False))
            linear.register_forward_hook(partial(_add, operator.lora.scale))


def is_adapter(name: str) -> bool:
    """Whether a module of that name is A or B of an adapter."""
    return name.endswith((f".{DOWN}", f".{UP}"))


def adapter_fill(name: str, owner: nn.Module) -> Fill | None:
    """First values of an adapter's parameter, as PEFT draws them; None: it is of no adapter.

    A is uniform within 1 / sqrt(in), torch's Kaiming bound for a slope of sqrt(5); B is 0.
    """
    if name.endswith(f".{UP}.weight"):
        return constant(0.0)
    if not name.endswith(f".{DOWN}.weight"):
        return None
    assert isinstance(owner, nn.Linear), "A is a linear layer"
    bound = owner.in_features**-0.5
    return lambda shape, generator: torch.empty(*shape, dtype=torch.float32).uniform_(
        -bound, bound, generator=generator
    )


def _add(scale: float, linear: Any, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """y + scale (x A^T) B^T."""
    return torch.add(output, linear.lora_B(linear.lora_A(args[0])), alpha=scale)


def _linear(layer: nn.Module, operator: Matmul, where: str) -> nn.Linear:
    """The linear layer of a product."""
    shape = operator.out_features, operator.in_features
    found = [each for each in _named(layer, operator.name) if tuple(each.weight.shape) == shape]
    if len(found) != 1:
        raise ValueError(
            f"{where}: lora wants a linear layer of its own for {operator.name!r}, there is none"
        )
    return found[0]


def _named(layer: nn.Module, product: str) -> Iterator[nn.Linear]:
    """Linear layers that may be a product: inside an attention, or, of an MLP, outside all."""
    is_of_attention = not product.startswith("mlp")
    for name, module in layer.named_modules():
        parents, _, own = name.rpartition(".")
        in_attention = not ATTENTIONS.isdisjoint(parents.split("."))
        is_inside = in_attention is is_of_attention
        if isinstance(module, nn.Linear) and is_inside and own in ADAPTED_BY_NAME.get(product, ()):
            yield module
