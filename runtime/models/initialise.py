"""Initial weights from a seed: each depends only on (seed, module, parameter name), on any rank."""

import hashlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Fill = Callable[[Sequence[int], torch.Generator], Tensor]  # (shape, generator) -> float32 values


def generator_of(*key: object) -> torch.Generator:
    """A CPU generator whose stream depends only on the key, on any machine and in any process."""
    digest = hashlib.blake2b("\x1f".join(map(str, key)).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)


def normal(std: float) -> Fill:
    """Values drawn from N(0, std^2)."""
    return lambda shape, generator: torch.empty(*shape, dtype=torch.float32).normal_(
        0.0, std, generator=generator
    )


def constant(value: float) -> Fill:
    """One value everywhere."""
    return lambda shape, _: torch.full(tuple(shape), value, dtype=torch.float32)


def initial_value(fill: Fill, shape: Sequence[int], *, seed: int, module: str, name: str) -> Tensor:
    """A parameter's first value, drawn in float32 so that every precision starts from the same numbers.

    Args:
        fill: its distribution.
        shape: of the whole parameter.
        seed: of the run.
        module: name of the module in the plan.
        name: Hugging Face name of the parameter (of a tied one, in its first layer).
    """
    return fill(shape, generator_of("weights", seed, module, name))
