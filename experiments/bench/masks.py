"""Time and memory to compute the tiles of a mask, up to a million tokens.

Setup:   Causal, and the EP, EE and MP masks of Cornstarch (v1 Figure 11) from a fixed seed; 128 x 128 tiles;
         a byte for each pair of tokens would be 1 TiB at a million.
Ours:    `workbench.masks.tiles`: as runs of equal tiles, and listed one by one; the fastest of several
         repeats on one thread, after compiling. Memory is the peak growth of a fresh process, without the
         bitfield itself (Linux with glibc).
Also:    PyTorch's `create_block_mask`, eager on the CPU, of the same mask at 4,096 tokens, in the same run.
Run:     python -m experiments.bench.masks [--json]
"""

import ctypes
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from torch.nn.attention.flex_attention import create_block_mask

from experiments.harness.command import Found, bench, fastest_s, print_rows
from workbench.masks.bitfield import Bitfield
from workbench.masks.builders import DRAWN, causal
from workbench.masks.tiles import FULL, Tiles, area, classify, classify_runs
from workbench.units import KIB, MIB, MS_PER_S

MASKS: dict[str, Callable[[int], Bitfield]] = {
    "causal": causal,
    **{name: partial(draw, seed=0) for name, draw in DRAWN.items()},
}
PLANS: dict[str, Callable[[Bitfield], object]] = {
    "runs": lambda field: classify_runs(field, field),
    "listed": lambda field: classify(field, field),
}
LENGTHS = {"64k": 2**16, "1m": 2**20}
FLEX_LENGTH = 4096
REPEATS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskRow:
    """Plan of one mask: milliseconds, and for the longest the memory growth of a process in MiB."""

    mask: str
    length: str
    density: float
    num_tiles: int
    num_runs: int
    runs_ms: float
    listed_ms: float
    area_ms: float
    runs_peak_mib: float | None
    listed_peak_mib: float | None


def measure(mask: str, length: str) -> MaskRow:
    field = MASKS[mask](LENGTHS[length])
    runs = classify_runs(field, field)
    peaks = [peak_mib(mask, length, plan) if length == "1m" else None for plan in ("runs", "listed")]
    return MaskRow(
        mask=mask,
        length=length,
        density=area(field, field) / len(field) ** 2,
        num_tiles=runs.num_tiles,
        num_runs=len(runs.runs),
        runs_ms=_fastest_ms(lambda: classify_runs(field, field)),
        listed_ms=_fastest_ms(lambda: classify(field, field)),
        area_ms=_fastest_ms(lambda: area(field, field)),
        runs_peak_mib=peaks[0],
        listed_peak_mib=peaks[1],
    )


def peak_mib(mask: str, length: str, plan: str) -> float:
    """Peak memory growth of a fresh process that makes this plan."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
        return fresh.submit(_growth_mib, mask, length, plan).result()


def _growth_mib(mask: str, length: str, plan: str) -> float:
    field = MASKS[mask](LENGTHS[length])
    PLANS[plan](causal(1000))  # compiled, or read from the cache, before the count starts
    ctypes.CDLL(None).malloc_trim(0)  # freed memory that the process still holds would hide growth
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # Linux: forget the highest so far
    before_kib = _highest_kib()
    tiles_plan = PLANS[plan](field)
    growth_kib = _highest_kib() - before_kib
    del tiles_plan
    return growth_kib * KIB / MIB


def _highest_kib() -> int:
    """Peak of this process alone; `getrusage` would include what it was forked from."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def against_flex(mask: str) -> tuple[float, float, bool]:
    """Return (our ms, PyTorch's ms, whether the tiles are equal) at 4,096 tokens."""
    field = MASKS[mask](FLEX_LENGTH)
    t = {name: torch.tensor(array.astype(np.int64)) for name, array in field.arrays()}

    def rule(b: object, h: object, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        same_segment = (t["segment"][q] == t["segment"][k]) & (t["allow"][q] & t["own"][k] != 0)
        return same_segment & ((t["causal"][q] == 0) | (t["position"][k] <= t["position"][q]))

    def flex() -> object:
        return create_block_mask(rule, None, None, FLEX_LENGTH, FLEX_LENGTH, device="cpu")

    block_mask = create_block_mask(rule, None, None, FLEX_LENGTH, FLEX_LENGTH, device="cpu")
    counts, columns = block_mask.full_kv_num_blocks, block_mask.full_kv_indices
    assert counts is not None
    assert columns is not None
    our_kinds = _kinds(classify(field, field))
    flex_dense = block_mask.to_dense()[0, 0].numpy()
    full = np.zeros_like(our_kinds)
    for row, count in enumerate(counts[0, 0].tolist()):
        full[row, columns[0, 0, row, :count].numpy()] = 1
    same = bool(((our_kinds != 0) == (flex_dense != 0)).all() and ((our_kinds == FULL) == (full == 1)).all())
    return _fastest_ms(lambda: classify(field, field)), _fastest_ms(flex), same


def _kinds(tiles: Tiles) -> np.ndarray:
    kinds = np.zeros((tiles.num_row_blocks, tiles.num_col_blocks), np.uint8)
    rows = np.repeat(np.arange(tiles.num_row_blocks), np.diff(tiles.row_offsets))
    kinds[rows, tiles.columns] = tiles.kinds
    return kinds


def _fastest_ms(call: Callable[[], object]) -> float:
    return fastest_s(call, REPEATS) * MS_PER_S


def _line(row: MaskRow) -> str:
    peaks = [f"{p:10.0f}" if p is not None else " " * 10 for p in (row.runs_peak_mib, row.listed_peak_mib)]
    return (
        f"{row.mask:6s} {row.length:>6s} {row.density:7.3f} {row.num_tiles:10d} {row.num_runs:9d} "
        f"{row.runs_ms:9.2f} {row.listed_ms:9.2f} {row.area_ms:9.2f}{''.join(peaks)}"
    )


@bench()
def run() -> Found:
    torch.set_num_threads(1)
    head = "mask   tokens density      tiles      runs   runs ms listed ms   area ms  runs MiB listed MiB"
    rows = print_rows(head, (measure(mask, length) for length in LENGTHS for mask in MASKS), _line)
    flex = {mask: against_flex(mask) for mask in MASKS}
    for mask, (ours_ms, theirs_ms, _) in flex.items():
        print(f"{mask:6s} {FLEX_LENGTH} tokens: ours {ours_ms:.2f} ms, create_block_mask {theirs_ms:.1f} ms")
    longest = [row for row in rows if row.length == "1m"]
    result = {
        "tile_plan_64k_ms": max(row.listed_ms for row in rows if row.length == "64k"),
        "tile_plan_1m_ms": max(row.listed_ms for row in longest),
        "tile_plan_1m_peak_mib": max(row.listed_peak_mib or 0.0 for row in longest),
        "tile_plan_1m_runs_ms": max(row.runs_ms for row in longest),
        "tile_plan_1m_runs_peak_mib": max(row.runs_peak_mib or 0.0 for row in longest),
        "over_create_block_mask_4k": min(theirs / ours for ours, theirs, _ in flex.values()),
        "rows": [asdict(row) for row in rows],
    }
    claims = {f"{mask}: the tiles of create_block_mask": same for mask, (_, _, same) in flex.items()}
    return Found(result, claims)
