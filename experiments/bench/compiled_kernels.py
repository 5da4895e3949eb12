"""Compile the attention kernels for a GPU that need not be present, and report the compiler's output.

The real launchers run on small CPU tensors, with a driver in place of CUDA's that only names its target. So
every kernel is compiled with the arguments, tiles and options of a real launch, and none is started. Only
torch, triton, numpy and the kernels are imported, so any interpreter with Triton can run it.

Run: python -m experiments.bench.compiled_kernels [--head-dims 64 128] [--masks PLAIN ...]; one JSON object
"""

import argparse
import contextlib
import io
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.runtime.jit import JITFunction

from experiments.bench.sass import Loop, tile_loops
from runtime.kernels.bitfield_attention.attention import (
    Backward,
    Options,
    attention_backward,
    attention_forward,
)
from runtime.kernels.bitfield_attention.combine import combine_softmax, combine_sum
from runtime.kernels.bitfield_attention.mask import KernelMask, TokenFields, kernel_mask
from runtime.kernels.bitfield_attention.plan import BLOCK, launched_plan
from runtime.kernels.bitfield_attention.tasks import Tasks

HOPPER = GPUTarget("cuda", 90, 32)
HEADS, KV_HEADS = 32, 8
TOKENS, SHORT_OF_A_BLOCK, SEGMENTS, WINDOW = 1024, 24, 10, 50
NAMES = {"forward_kernel": "forward", "queries_kernel": "queries", "row_kernel": "row sums"}
MERGES = {"softmax_kernel": "merge outputs", "sum_kernel": "merge gradients"}


class Mask(Enum):
    """The mask properties the kernels are specialised for besides the head width; all are causal."""

    PLAIN = "one segment, lengths of whole blocks"
    RAGGED = "one segment, lengths that end within a block"
    SEGMENTS = "several segments, lengths of whole blocks"
    WINDOW = "several segments and a window, lengths of whole blocks"


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """One compiled kernel; instruction counts are those a warp executes per tile.

    Fields about tiles are None for a kernel that multiplies none. `async_wait` is the number of copies
    that every wait within the loops leaves in flight; 0: the loop waits for all.
    """

    registers: int
    spilled_bytes: int
    shared_bytes: int
    instructions_full: int | None
    instructions_partial: int | None
    async_wait: int | None
    tile_queries: int | None
    tile_keys: int | None
    num_warps: int
    wgmma: int
    mma: int
    async_copies: int


class OfflineDriver:
    """A Triton driver that can compile but launches nothing."""

    def get_current_target(self) -> GPUTarget:
        """The GPU to compile for."""
        return HOPPER

    def get_current_device(self) -> int:
        """The only device."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """The only stream."""
        return device


@contextlib.contextmanager
def offline() -> Iterator[dict[str, Compiled]]:
    """Context in which launches compile instead of run; yields the compiled kernels by name."""
    compiled_of: dict[str, Compiled] = {}
    launch = JITFunction.run

    def compile_only(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        del warmup
        log = io.StringIO()
        with contextlib.redirect_stdout(log):
            compiled = launch(kernel, *arguments, grid=grid, warmup=True, **options)
        name = kernel_name(kernel.__name__, options)
        if log.getvalue() and name not in compiled_of:  # not for an earlier launch
            compiled_of[name] = read(compiled, options, log.getvalue())
        return compiled

    triton.runtime.driver.set_active(OfflineDriver())
    with tempfile.TemporaryDirectory() as folder, knobs.cache.scope(), knobs.nvidia.scope():
        knobs.cache.dir = folder
        knobs.nvidia.dump_ptxas_log = True
        JITFunction.run = compile_only
        try:
            yield compiled_of
        finally:
            JITFunction.run = launch


def kernel_name(function: str, options: dict[str, Any]) -> str:
    """Name a kernel by what it computes, with its head width if it has one."""
    if "D" not in options:
        return function.removesuffix("_kernel")
    if function == "keys_kernel":
        adds = "engine" if options["ENGINE"] else "fused"
        name = adds if options["WITH_DQ"] else "keys"
    else:
        name = (NAMES | MERGES)[function]
    return f"{name} {options['D']}"


def read(compiled: Any, options: dict[str, Any], log: str) -> Compiled:
    """Parse registers and spills from the assembler's log, and instructions from the disassembly."""
    loops = tile_loops(disassembled(compiled.asm["cubin"]))
    lengths = [len(loop.body) for loop in loops] if loops else [None, None]
    waits = [copies_in_flight(loop, compiled.asm["ttgir"]) for loop in loops or ()]
    ptx = compiled.asm["ptx"]
    return Compiled(
        registers=_number(r"Used (\d+) registers", log),
        spilled_bytes=_number(r"(\d+) bytes spill stores", log),
        shared_bytes=compiled.metadata.shared,
        instructions_full=lengths[0],
        instructions_partial=lengths[1],
        async_wait=min(waits, default=None),
        tile_queries=options["BLOCK_M"] if loops else None,
        tile_keys=options["BLOCK_N"] if loops else None,
        num_warps=compiled.metadata.num_warps,
        wgmma=ptx.count("wgmma.mma_async"),
        mma=ptx.count("mma.sync"),
        async_copies=ptx.count("cp.async"),
    )


def copies_in_flight(loop: Loop, ttgir: str) -> int:
    """Number of copies that every wait of the loop leaves in flight.

    The assembler gives it for ordinary asynchronous copies. Those of the copy engine are issued at the end
    of a step, into the buffer that it freed, and awaited through a ring of barriers, one per buffer: a
    step that waits for one has all buffers in flight but that one and the one just used.
    """
    left = [] if loop.groups_in_flight is None else [loop.groups_in_flight]
    if loop.engine_copies:
        ring = min(int(buffers) for buffers in re.findall(r"memdesc<(\d+)x1xi64", ttgir))
        left.append((ring - 2) * loop.engine_copies)
    return min(left, default=0)


def _number(pattern: str, log: str) -> int:
    match = re.search(pattern, log)
    if match is None:
        raise ValueError(f"assembler's log: want {pattern!r}, got {log!r}")
    return int(match[1])


def disassembled(cubin: bytes) -> str:
    """Return the output of `nvdisasm -c`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        command = [knobs.nvidia.nvdisasm.path, "-c", str(path)]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def fields_of(mask: Mask) -> TokenFields:
    """Build a causal mask of one group with the named specialisation."""
    num_tokens = TOKENS - SHORT_OF_A_BLOCK if mask is Mask.RAGGED else TOKENS
    position = torch.arange(num_tokens, dtype=torch.int32)
    word = torch.ones(num_tokens, dtype=torch.int64)
    several = mask in (Mask.SEGMENTS, Mask.WINDOW)
    return TokenFields(
        allow=word,
        own=word,
        causal=torch.ones(num_tokens, dtype=torch.bool),
        segment=(position * SEGMENTS // num_tokens if several else position * 0).to(torch.int32),
        position=position,
        first=(position - WINDOW).clamp(min=0) * (mask is Mask.WINDOW),
        always=word * 0,
    )


def launch_all(mask: KernelMask, head_dim: int) -> None:
    """Launch plan, forward and both backwards through their launchers."""
    plan = launched_plan(mask, BLOCK, BLOCK)

    def tensor(heads: int) -> torch.Tensor:
        return torch.zeros(1, mask.num_queries, heads, head_dim, dtype=torch.bfloat16).transpose(1, 2)

    q, k, v = tensor(HEADS), tensor(KV_HEADS), tensor(KV_HEADS)
    scale = head_dim**-0.5
    out, lse = attention_forward(q, k, v, mask, plan, scale)
    for backward in Backward:
        attention_backward(q, k, v, out, lse, q, mask, plan, scale, Options(backward=backward))


def launch_merges(head_dim: int) -> None:
    """Launch the kernels that merge partial results: one block of one head in two pieces."""
    table = torch.zeros(4, 2, dtype=torch.int32)
    launch = Tasks(table=table, split_block=table[0, :1], split_start=table[1], num_slots=2)
    part = torch.zeros(1, 2, BLOCK, head_dim)
    out = torch.zeros(1, 1, BLOCK, head_dim, dtype=torch.bfloat16)
    combine_softmax(part, part[..., 0].contiguous(), launch, out, torch.zeros(1, 1, BLOCK))
    combine_sum(part, launch, out)


def compiled_kernels(head_dims: Sequence[int], masks: Sequence[Mask]) -> dict[str, Compiled]:
    """Compile every kernel for every width and mask; returns them by name."""
    kernels: dict[str, Compiled] = {}
    for mask in masks:
        fields = fields_of(mask)
        for head_dim in head_dims:
            with offline() as compiled_of:
                launch_all(kernel_mask(fields, fields), head_dim)
                launch_merges(head_dim)
            kernels |= {f"{name} {mask.name.lower()}": kernel for name, kernel in compiled_of.items()}
    return kernels


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--masks", nargs="+", default=[mask.name for mask in Mask], metavar="MASK")
    arguments = parser.parse_args(argv)
    masks = [Mask[name] for name in arguments.masks]
    kernels = compiled_kernels(arguments.head_dims, masks)
    assembler = get_ptxas(HOPPER.arch)
    record = {
        "versions": {"triton": triton.__version__, "ptxas": assembler.version, "torch": torch.__version__},
        "kernels": {name: asdict(kernel) for name, kernel in kernels.items()},
    }
    print(json.dumps(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
