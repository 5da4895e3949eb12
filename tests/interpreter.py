"""Triton's interpreter with the bfloat16 and the adding copies of hardware, and memory never zero by luck."""

from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton._C.libtriton import ir
from triton.runtime.interpreter import InterpreterBuilder, TensorDescHandle, TensorHandle

from runtime.kernels.bitfield_attention.forward import forward_kernel

INTERPRETED = not isinstance(forward_kernel, triton.runtime.JITFunction)
DEVICE = "cpu" if INTERPRETED else "cuda"


def round_like_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter keeps bfloat16 as uint16 bits: it truncates casts and multiplies the bits in dot.

    Hardware rounds to nearest even and multiplies the numbers. Without this, bfloat16 could not
    be tested off the GPU.
    """
    cast, dot = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot

    def cast_impl(self: Any, src: TensorHandle, dst_type: Any) -> TensorHandle:
        if src.dtype.scalar == tl.float32 and dst_type.scalar == tl.bfloat16:
            rounded = torch.from_numpy(np.array(src.data)).to(torch.bfloat16)
            return TensorHandle(rounded.view(torch.uint16).numpy(), tl.bfloat16)
        if src.dtype.scalar == tl.bfloat16 and dst_type.scalar == tl.float32:
            return TensorHandle(_widen(src), tl.float32)
        return cast(self, src, dst_type)

    def create_dot(self: Any, a: TensorHandle, b: TensorHandle, *rest: Any) -> TensorHandle:
        a, b = (TensorHandle(_widen(x), tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return dot(self, a, b, *rest)

    for name in ("create_si_to_fp", "create_ui_to_fp", "create_fp_ext", "create_fp_trunc", "cast_impl"):
        monkeypatch.setattr(InterpreterBuilder, name, cast_impl)
    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


def _widen(x: TensorHandle) -> np.ndarray:
    return (np.asarray(x.data).astype(np.uint32) << 16).view(np.float32)


def add_by_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter loads and stores by descriptor, but knows no `atomic_add` of one.

    Here it is a masked atomic add at the addresses and within the bounds that the interpreter gives the
    descriptor's own `store`. The kernel is as it is: wrong rows, values or shapes are wrong here too.
    What stays for hardware: that the engine, too, leaves alone what lies outside of the tensor, and that
    a tile's buffer is not written while it is read, which the compiler sees to.
    """

    def create_descriptor_reduce(
        self: Any, kind: Any, tiles: TensorDescHandle, value: TensorHandle, offsets: list[TensorHandle]
    ) -> TensorHandle:
        assert kind == ir.DESCRIPTOR_REDUCE_KIND.ADD
        pointers, inside = tiles.materialize_pointers(offsets)
        order, scope = ir.MEM_SEMANTIC.RELAXED, ir.MEM_SYNC_SCOPE.GPU
        return self.create_atomic_rmw(ir.ATOMIC_OP.FADD, pointers, value, inside, order, scope)

    if not hasattr(InterpreterBuilder, "create_descriptor_reduce"):
        monkeypatch.setattr(
            InterpreterBuilder, "create_descriptor_reduce", create_descriptor_reduce, raising=False
        )


def poison_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.empty` and `empty_like` of floats hand out NaN: what nobody writes shows up."""
    empty, empty_like = torch.empty, torch.empty_like

    def poisoned(made: torch.Tensor) -> torch.Tensor:
        return made.fill_(torch.nan) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", lambda *a, **k: poisoned(empty(*a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: poisoned(empty_like(*a, **k)))
