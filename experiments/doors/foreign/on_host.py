"""Runs a program of megatron-core on a host without GPUs: the CPU replaces CUDA, gloo replaces NCCL.

Run: torchrun --nproc-per-node N on_host.py PROGRAM [ARGUMENT ...]
"""

import contextlib
import importlib
import runpy
import sys
import typing
from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
import typing_extensions

Make = Callable[..., Any]
TRACKER = "get_cuda_rng_tracker"


class Tracker:
    """A tracker of random states with a single generator."""

    def fork(self, *_: object, **__: object) -> contextlib.AbstractContextManager[None]:
        """Does nothing."""
        return contextlib.nullcontext()


def on_cpu(make: Make) -> Make:
    """A maker of tensors that makes them on the CPU."""

    def make_on_cpu(*args: Any, **words: Any) -> Any:
        is_cuda = str(words.get("device", "")).startswith("cuda")
        return make(*args, **words | ({"device": "cpu"} if is_cuda else {}))

    return make_on_cpu


def by_gloo(make: Make) -> Make:
    """A maker of process groups that makes them of gloo."""
    return lambda *args, **words: make(*args, **words | {"backend": "gloo"})


def with_lists(exchange: Make) -> Make:
    """An exchange whose split sizes may be tensors, which the library turns into lists only on CUDA."""

    def exchange_lists(*args: Any, **words: Any) -> Any:
        sizes = {name: words.get(name) for name in ("input_split_sizes", "output_split_sizes")}
        lists = {name: size.tolist() for name, size in sizes.items() if torch.is_tensor(size)}
        return exchange(*args, **words | lists)

    return exchange_lists


type_of: Make = torch.Tensor.type
STAND_INS: list[tuple[Any, str, Any]] = [
    (typing, "override", typing_extensions.override),  # the wheels are for Python 3.12
    *((torch, name, on_cpu(getattr(torch, name))) for name in ("tensor", "zeros", "empty", "ones", "full")),
    (dist, "new_group", by_gloo(dist.new_group)),
    (dist, "new_subgroups_by_enumeration", by_gloo(dist.new_subgroups_by_enumeration)),
    (dist, "all_to_all_single", with_lists(dist.all_to_all_single)),
    (torch.cuda, "current_device", lambda: torch.device("cpu")),
    (torch.cuda, "synchronize", lambda *_: None),
    (torch.cuda, "current_stream", MagicMock()),
    (torch.cuda, "Stream", MagicMock),
    (torch.cuda, "stream", lambda _: contextlib.nullcontext()),
    (torch.Tensor, "cuda", lambda self, *_, **__: self),
    (
        torch.Tensor,
        "type",
        lambda self, *to: type_of(self, *to) if to else type_of(self).replace("torch.", "torch.cuda."),
    ),
]
for owner, name, value in STAND_INS:
    setattr(owner, name, value)

packages = ("megatron.core.tensor_parallel", "megatron.core.tensor_parallel.layers")
chances: Any = importlib.import_module("megatron.core.tensor_parallel.random")
for module in (chances, *map(importlib.import_module, packages)):
    setattr(module, TRACKER, Tracker)
chances.model_parallel_cuda_manual_seed = lambda seed, tp_rank, **_: torch.manual_seed(seed + 100 * tp_rank)

sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
