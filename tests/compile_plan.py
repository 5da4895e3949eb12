"""Compile the kernels that plan a mask for a GPU that need not be there; prints what they need.

Run as a program: Triton decides on import whether it interprets.
"""

import json
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from runtime.kernels.bitfield_attention.task_kernels import cut_kernel, order_kernel, weigh_kernel
from runtime.kernels.bitfield_attention.tasks import CHUNK as TASK_CHUNK
from runtime.kernels.bitfield_attention.tiles import (
    CHUNK,
    COLUMNS,
    STEP,
    classify_kernel,
    count_kernel,
    list_kernel,
)

BLOCK = 128
POINTERS = {"kinds": "*u8", "query_words": "*word", "key_words": "*word", "spans": "*fp32"}
NUMBERS = (
    *("query_limits", "key_places", "counts", "offsets", "partial_start", "others"),
    *("num_full", "num_partial", "pieces", "pieces_out", "tasks", "split_block", "split_start"),
)


def compiled(kernel: Any, capability: int, word: str, **constants: object) -> dict[str, object]:
    """Registers' overflow and shared memory of one kernel."""
    names = [parameter.name for parameter in kernel.params]
    types = POINTERS | dict.fromkeys(NUMBERS, "*i32")
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32").replace("word", word)
        for name in names
    }
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={
            (names.index(name),): [["tt.divisibility", 16]] for name in names if signature[name][0] == "*"
        },
    )
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    return {
        "kernel": kernel.fn.__name__,
        "word": word,
        **constants,
        "shared_bytes": made.metadata.shared,
        "cubin_bytes": len(made.asm["cubin"]),
    }


def main(capability: str) -> None:
    """One JSON line per kernel and variant."""
    made = [compiled(kernel, int(capability), "i32", CHUNK=CHUNK) for kernel in (count_kernel, list_kernel)]
    made += [
        compiled(kernel, int(capability), "i32", CHUNK=TASK_CHUNK) for kernel in (weigh_kernel, order_kernel)
    ]
    for flag in (False, True):
        made.append(compiled(cut_kernel, int(capability), "i32", WHERE_IT_PAYS=flag, CHUNK=TASK_CHUNK))
    for word in ("i32", "i64"):
        for flag in (False, True):
            sizes = {"BLOCK_Q": BLOCK, "BLOCK_K": BLOCK, "COLUMNS": COLUMNS, "STEP": STEP}
            facts = {"HAS_WINDOW": flag, "HAS_SEGMENTS": flag}
            made.append(compiled(classify_kernel, int(capability), word, **sizes, **facts))
    for line in made:
        sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
