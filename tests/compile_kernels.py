"""Compile the attention kernels for GPUs that need not be there; prints what the compiler made of them.

Run as a program: Triton decides on import whether it interprets.
"""

import json
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from runtime.kernels.bitfield_attention.backward_keys import keys_kernel
from runtime.kernels.bitfield_attention.backward_queries import queries_kernel
from runtime.kernels.bitfield_attention.forward import forward_kernel
from runtime.kernels.bitfield_attention.tilings import AMPERE, HOPPER, Pass, Tiling

KERNELS = {
    Pass.FORWARD: forward_kernel,
    Pass.FUSED: keys_kernel,
    Pass.KEYS: keys_kernel,
    Pass.QUERIES: queries_kernel,
}
INPUTS = ("q_ptr", "k_ptr", "v_ptr", "do_ptr", "out_ptr", "dk_ptr", "dv_ptr")
WORDS = ("query_words", "key_words")
NUMBERS = ("query_limits", "key_places", "tasks", "offsets", "partial_start", "others")
LIST = 128


def pointer(name: str, which: Pass) -> str:
    """Triton's type of an argument."""
    if name in INPUTS or (name == "dq_ptr" and which is Pass.QUERIES):
        return "*bf16"
    if name in WORDS or name in NUMBERS:
        return "*i32"
    if name.endswith("_ptr"):
        return "*fp32"
    return "fp32" if name.endswith("scale") else "i32"


def compiled(which: Pass, tile: Tiling, width: int, capability: int) -> dict[str, object]:
    """Shared memory and matrix instructions of one kernel at bf16."""
    kernel = KERNELS[which]
    constants = {
        "D": width,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "LIST_Q": LIST,
        "LIST_K": LIST,
        "WITH_DQ": which is Pass.FUSED,
        "HAS_WINDOW": True,
        "HAS_SEGMENTS": True,
        "PRECISION": "ieee",
    }
    names = [parameter.name for parameter in kernel.params]
    signature = {name: "constexpr" if name in constants else pointer(name, which) for name in names}
    aligned = [name for name in names if signature[name].startswith("*") or name.startswith("stride")]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items() if name in names},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    made = triton.compile(
        source,
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": tile.num_warps, "num_stages": tile.num_stages, "enable_fp_fusion": True},
    )
    text = made.asm["ptx"]
    return {
        "pass": which.name,
        "capability": capability,
        "width": width,
        "shared_bytes": made.metadata.shared,
        "wgmma": text.count("wgmma.mma_async"),
        "mma": text.count("mma.sync"),
        "async_copies": text.count("cp.async"),
    }


def main(capability: str, width: str, *passes: str) -> None:
    """One JSON line per pass; all passes where none is named."""
    table = HOPPER if int(capability) >= 90 else AMPERE
    for which in [Pass[name] for name in passes] or Pass:
        tile = table[which, int(width)]
        sys.stdout.write(json.dumps(compiled(which, tile, int(width), int(capability))) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
