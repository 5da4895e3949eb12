"""Read Nsight Systems' kernel statistics as a breakdown of GPU time.

Format: `nsys stats --report cuda_gpu_kern_sum --format csv REPORT`; tables of NVTX ranges and of API calls
have the same columns.
"""

import csv
import io
import math
import re
from dataclasses import dataclass
from pathlib import Path

from workbench.trace_files.exchanges import collective_of
from workbench.trace_files.packed_file import read_packed

MOST_BYTES = 2**26
_TOTAL, _NAMES = "Total Time (ns)", ("Name", "Range", "Operation")
_COUNTS = ("Instances", "Num Calls", "Count")
_NS_PER_S = 1e9
_ATTENTION = re.compile(r"flash|fmha|attention|attn", re.IGNORECASE)
_MATMUL = re.compile(r"gemm|cutlass|matmul|nvjet|wgmma|xmma|cublas", re.IGNORECASE)
_OPTIMIZER = re.compile(r"adam|multi_tensor_apply|optimizer", re.IGNORECASE)
_NORM = re.compile(r"norm", re.IGNORECASE)
_COPY = re.compile(r"memcpy|memset|copy|\bcat", re.IGNORECASE)
# The first match counts: a fused kernel is named after its main part.
_WORK = (
    ("attention", _ATTENTION),
    ("products", _MATMUL),
    ("optimizer", _OPTIMIZER),
    ("norms", _NORM),
    ("copies", _COPY),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRow:
    """All launches of one kernel.

    Args:
        name: of the kernel.
        work: "communication", "attention", "products", "optimizer", "norms", "copies" or "other".
        count: launches.
        seconds: of all of them.
    """

    name: str
    work: str
    count: int
    seconds: float


def looks_like_nsys(head: str) -> bool:
    """Whether a file starts like such statistics."""
    return _TOTAL in head and not head.lstrip().startswith(("{", "["))


def read_nsys(path: Path) -> tuple[KernelRow, ...]:
    """Rows of such a file, longest first; ValueError if it has none."""
    return parse_nsys(read_packed(path, MOST_BYTES).decode("utf-8", errors="replace"), path)


def parse_nsys(text: str, path: Path) -> tuple[KernelRow, ...]:
    """Rows of such a text, longest first; lines before the header are nsys's messages.

    Raises:
        ValueError: no header, no rows, or a row with an invalid number.
    """
    lines = text.splitlines()
    header = next((i for i, line in enumerate(lines) if _TOTAL in line and "," in line), None)
    if header is None:
        raise ValueError(
            f"{path}: want a header with {_TOTAL!r}: nsys stats --report cuda_gpu_kern_sum --format csv"
        )
    try:
        table = [row for row in csv.DictReader(io.StringIO("\n".join(lines[header:]))) if row.get(_TOTAL)]
    except csv.Error as error:
        raise ValueError(f"{path}: not CSV: {error}") from None
    if not table:
        raise ValueError(f"{path}: want at least one kernel below the header")
    name = next((column for column in _NAMES if column in table[0]), None)
    count = next((column for column in _COUNTS if column in table[0]), None)
    if name is None or count is None:
        raise ValueError(f"{path}: want columns {' or '.join(_NAMES)}, and {' or '.join(_COUNTS)}")
    rows = [
        KernelRow(
            name=row[name] or "",
            work=work_of(row[name] or ""),
            count=int(_number(row, count, path)),
            seconds=_number(row, _TOTAL, path) / _NS_PER_S,
        )
        for row in table
    ]
    return tuple(sorted(rows, key=lambda row: -row.seconds))


def work_of(kernel: str) -> str:
    """What a kernel does, by its name.

    >>> work_of("void flash::flash_fwd_kernel<...>(flash::Flash_fwd_params)")
    'attention'
    """
    if collective_of(kernel) is not None:
        return "communication"
    return next((work for work, pattern in _WORK if pattern.search(kernel)), "other")


def seconds_by_work(rows: tuple[KernelRow, ...]) -> dict[str, float]:
    """Work -> seconds, longest first."""
    seconds: dict[str, float] = {}
    for row in rows:
        seconds[row.work] = seconds.get(row.work, 0.0) + row.seconds
    return dict(sorted(seconds.items(), key=lambda pair: -pair[1]))


def _number(row: dict[str, str], column: str, path: Path) -> float:
    text = row.get(column) or ""
    try:
        value = float(text.replace(",", ""))
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise ValueError(f"{path}: column {column!r}: want a number >= 0, got {text!r:.40}")
    return value
