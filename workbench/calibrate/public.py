"""Builds the shipped profiles of A40, A100-80GB, H100, H200 and L20 from published tables.

`python -m workbench.calibrate.public [FOLDER] [--json]` writes them, the same bytes every time, and
prints each table's error when every point is predicted from the others.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from workbench.calibrate.data_sheet import A40, A100, H100, HOPPER, SHEETS, DataSheet
from workbench.calibrate.public_limits import BEST, LAUNCH, attention_heads, narrow_rates, power_limit
from workbench.calibrate.tables import collective_fits, quality, relative_fit, rounded, table_fits
from workbench.cost.interpolate import Surface
from workbench.cost.profile import (
    ATTENTION_AXES,
    BYTES_AXES,
    COLLECTIVE_AXES,
    PRODUCT_AXES,
    PROFILES,
    CollectiveTable,
    Fit,
    MachineLink,
    Profile,
    Provenance,
    Table,
    load_profile,
    write_profile,
)
from workbench.units import GB

_DATA = Path(__file__).parent / "measured"

_AICONFIGURATOR = "ai-dynamo/aiconfigurator @095f58a (Apache-2.0)"
_VIDUR = "microsoft/vidur @7d47513 (MIT), float16 operators of decoder layers"
_TFLOP = 1e12

# FlashAttention-2 (Dao 2023), section 4.1: up to 73 % of the A100's peak forward, 63 % backward.
ATTENTION_BACKWARD_RATE = 0.63 / 0.73
ATTENTION_HEAD_DIM = 128
SMALLEST_MOVE_BYTES = 2**18  # below, a kernel's time does not depend on its size
SMALLEST_MESSAGE_BYTES = 2**18  # below, latency dominates
LARGE_TOKENS = 256
# Share of the memory's peak in large kernels: sums of two tensors reach 84 % on A100 and 82 % on A40 (vidur's
# rows), a copy 89 % on A800 (mli/transformers-benchmarks, issue 4), casts 85 % on B300 (`cost.products`).
SUSTAINED_BANDWIDTH = 0.85
# Rows of the operator tables that become matmul points. Kernels work in tiles of 64 or 128 tokens,
# so rates between powers of two rise and fall; powers alone left a median error of 5.1 %.
MATMUL_TOKENS = (32, *range(64, 4097, 64))


# (operator column, passes over the tensor, tensor width) of the memory-bound operators.
_MemoryBound = tuple[str, int, Callable[[pd.DataFrame], pd.Series]]
# Sums of two tensors stream as training kernels do; an inference engine's activation and rotation reach half.
_STREAMED: _MemoryBound = ("add_ms", 3, lambda row: row.n_embd)
_SMALL: tuple[_MemoryBound, ...] = (
    _STREAMED,
    ("mlp_act_ms", 3, lambda row: row.n_expanded_embd / row.num_tensor_parallel_workers),
    ("attn_rope_ms", 2, lambda row: _head_width(row) * (row.n_head + row.n_kv_head) / _tp(row)),
)


def build_profile(sheet: DataSheet) -> Profile:
    """Build the profile of one machine from the published tables, deterministically.

    Complexity: O(points^2) for the leave-one-out errors, seconds.
    """
    matmul, attention = matmul_table(sheet), attention_table(sheet)
    pointwise = streamed_table(sheet)
    links, link_fits = machine_links(sheet)
    collectives = collective_tables(sheet)
    named = (("matmul", matmul), ("attention", attention), ("bytes moved by sums", pointwise))
    table_errors = table_fits([(name, table) for name, table in named if table.measured])
    others = [fit for fit in table_errors if fit.table != "matmul"]
    fits = [*(fit for fit in table_errors if fit not in others), *decoder_layer_fit(sheet, matmul), *others]
    fits += [*link_fits, *collective_fits(collectives)]
    return Profile(
        name=sheet.device,
        device=sheet.device,
        memory_bytes=int(sheet.sheet.memory_bytes),
        peak_flop_per_s=sheet.sheet.peaks,
        peak_bytes_per_s=float(sheet.sheet.memory_bytes_per_s),
        provenance=_provenance(sheet),
        matmul=matmul,
        attention=attention,
        pointwise=pointwise,
        sustained_attention=attention_heads(sheet, attention, ATTENTION_BACKWARD_RATE),
        flash_generation=3 if sheet in HOPPER else 2,
        attention_backward_rate=rounded(ATTENTION_BACKWARD_RATE),
        attention_head_dim=ATTENTION_HEAD_DIM,
        power=power_limit(sheet),
        launch=LAUNCH,
        narrow_rates=narrow_rates(sheet),
        kernel_floor_s=kernel_floor_s(sheet),
        links=links,
        collectives=collectives,
        unmeasured=_unmeasured(matmul, attention, pointwise, links),
        fits=tuple(replace(fit, median=rounded(fit.median), p90=rounded(fit.p90)) for fit in fits),
    )


def matmul_table(sheet: DataSheet) -> Table:
    """FLOP/s by (m, n, k); else from decoder layers; else the A40's, of similar memory, scaled by the
    peaks.
    """
    axes = PRODUCT_AXES
    if sheet.aiconfigurator is None and sheet.vidur is None:
        table, scale = matmul_table(A40), sheet.sheet.bfloat16_flop_per_s / A40.sheet.bfloat16_flop_per_s
        points = tuple((*at, rounded(rate * scale)) for *at, rate in table.points)
        return replace(table, points=points, measured=False, source=f"{_VIDUR}, A40 scaled by bfloat16 peaks")
    if sheet.aiconfigurator is None:
        return Table(axes=axes, points=_layer_matmuls(sheet), measured=True, source=_VIDUR)
    frame = pd.read_parquet(_DATA / "aiconfigurator_gemm_bf16.parquet")
    frame = frame[frame.gpu == sheet.aiconfigurator]
    shapes = frame[["m", "n", "k"]].to_numpy(dtype=np.float64)
    rates = 2.0 * shapes.prod(axis=1) / (frame.ms.to_numpy(dtype=np.float64) / 1e3)
    most = sheet.sheet.reached_bfloat16_flop_per_s or sheet.sheet.bfloat16_flop_per_s
    points = _points(shapes, np.minimum(rates, most))
    source = f"{_AICONFIGURATOR}; at most {most / _TFLOP:g} TFLOP/s, the best of any shape in {BEST}"
    return Table(axes=axes, points=points, measured=True, source=source)


def _layer_matmuls(sheet: DataSheet) -> tuple[tuple[float, ...], ...]:
    """Shapes of the four projections of Llama-2-7B and 70B at each tensor-parallel degree."""
    rows = _projections(sheet)
    median = rows[rows.m.isin(MATMUL_TOKENS)].groupby(["m", "n", "k"], sort=True).s.median().reset_index()
    shapes = median[["m", "n", "k"]].to_numpy(dtype=np.float64)
    return _points(shapes, 2.0 * shapes.prod(axis=1) / median.s.to_numpy())


def _projections(sheet: DataSheet) -> pd.DataFrame:
    """m, n, k, seconds of the four projections of every measured decoder layer."""
    frame = _decoder_rows(sheet)
    tp, width, inner = frame.num_tensor_parallel_workers, frame.n_embd, frame.n_expanded_embd
    qkv = width // frame.n_head * (frame.n_head + 2 * frame.n_kv_head)
    parts = (
        ("attn_pre_proj_ms", qkv // tp, width),
        ("attn_post_proj_ms", width, width // tp),
        ("mlp_up_proj_ms", 2 * inner // tp, width),
        ("mlp_down_proj_ms", width, inner // tp),
    )
    return pd.concat(
        pd.DataFrame({"m": frame.num_tokens, "n": n, "k": k, "s": frame[column].astype("float64") / 1e3})
        for column, n, k in parts
    )


def decoder_layer_fit(sheet: DataSheet, matmul: Table) -> tuple[Fit, ...]:
    """Errors of the matmul table on independently measured projections, or on sizes left out of it.

    Uses every eleventh row of at least `LARGE_TOKENS` tokens, so that it takes seconds.
    """
    if sheet.vidur is None:
        return ()
    rows, surface = _projections(sheet), Surface(matmul.points)
    kept = rows[(rows.m >= LARGE_TOKENS) & ~rows.m.isin(MATMUL_TOKENS)].iloc[::11]
    errors = [
        abs(2.0 * m * n * k / surface.read(float(m), float(n), float(k)).rate / seconds - 1)
        for m, n, k, seconds in kept.itertuples(index=False)
    ]
    return (quality("matmul, held against other decoder layers", errors),)


def attention_table(sheet: DataSheet) -> Table:
    """FLOP/s by (length, heads of all sequences, queries per key), causal forward.

    A machine without rows gets the A100's, scaled by the peaks: on both, matmuls reach the
    same share of theirs (73 and 74 %).
    """
    owner = sheet if sheet.aiconfigurator is not None else A100
    frame = pd.read_parquet(_DATA / "aiconfigurator_attention_fwd_causal_bf16.parquet")
    frame = frame[frame.gpu == owner.aiconfigurator].astype("float64", errors="ignore")
    heads = frame.batch * frame.heads
    pairs = frame.seq * (frame.seq + 1) / 2
    rate = 4.0 * frame.head_dim * pairs * heads / (frame.ms / 1e3)
    rate *= sheet.sheet.bfloat16_flop_per_s / owner.sheet.bfloat16_flop_per_s
    long = pd.DataFrame(
        {"length": frame.seq, "heads": heads, "group": frame.heads / frame.kv_heads, "rate": rate}
    )
    median = long.groupby(["length", "heads", "group"], sort=True).rate.median().reset_index()
    points = _points(median[["length", "heads", "group"]].to_numpy(), median.rate.to_numpy())
    scaled = "" if owner is sheet else f", {owner.device} scaled by the bfloat16 peaks"
    return Table(
        axes=ATTENTION_AXES,
        points=points,
        measured=owner is sheet,
        source=_AICONFIGURATOR + scaled,
    )


def streamed_table(sheet: DataSheet) -> Table:
    """Bytes/s by bytes moved, by octave, of sums of two tensors: at most what memory sustains.

    Tensors of a few megabytes stay in the last-level cache between launches of a benchmark; in training
    they are evicted.
    """
    owner = sheet if sheet.vidur is not None else H100
    scale = sheet.sheet.memory_bytes_per_s / owner.sheet.memory_bytes_per_s
    most = SUSTAINED_BANDWIDTH * sheet.sheet.memory_bytes_per_s
    points = tuple(
        (num_bytes, rounded(min(most, rate * scale)))
        for num_bytes, rate in _octaves(_memory_bound_rows(owner, (_STREAMED,)))
    )
    scaled = "" if owner is sheet else f", {owner.device} scaled by memory bandwidth"
    source = f"{_VIDUR}, sums of two tensors{scaled}; at most {SUSTAINED_BANDWIDTH:.0%} of the peak"
    return Table(axes=BYTES_AXES, points=points, measured=owner is sheet, source=source)


def _memory_bound_rows(sheet: DataSheet, operators: tuple[_MemoryBound, ...]) -> pd.DataFrame:
    """operator, bytes moved, seconds of measured memory-bound operators."""
    frame = _decoder_rows(sheet)
    parts = []
    for column, passes, width in operators:
        num_bytes = passes * 2.0 * frame.num_tokens * width(frame)
        seconds = frame[column].astype("float64") / 1e3
        part = pd.DataFrame({"operator": column, "num_bytes": num_bytes, "seconds": seconds})
        parts.append(part[part.seconds > 0])
    return pd.concat(parts)


def _octaves(rows: pd.DataFrame) -> list[tuple[float, float]]:
    rows = rows[rows.num_bytes >= SMALLEST_MOVE_BYTES]
    octave = np.floor(np.log2(rows.num_bytes))
    rate = (rows.num_bytes / rows.seconds).groupby(octave).median()
    return [(float(2.0 ** (index + 0.5)), float(value)) for index, value in rate.items()]


def kernel_floor_s(sheet: DataSheet) -> float:
    """Minimum time of a kernel: the median of operators too small to be bound by memory."""
    rows = _memory_bound_rows(sheet if sheet.vidur is not None else H100, _SMALL)
    small = rows[rows.num_bytes < SMALLEST_MOVE_BYTES]
    return rounded(float(small.seconds.median()))


def machine_links(sheet: DataSheet) -> tuple[tuple[MachineLink, ...], tuple[Fit, ...]]:
    """NVLink from measured all-reduces, if any; everything else by data sheet."""
    server = sheet.aiconfigurator is not None  # those with NVLink have a card for each GPU
    inter = MachineLink(
        scope="inter",
        name="infiniband",
        bytes_per_s=float(sheet.sheet.card_bytes_per_s),
        latency_s=5e-6,
        measured=False,
        source="line rate, HDR 200 Gb/s or NDR 400 Gb/s; latency typical"
        + ("" if server else "; one card a node presumed"),
        per_node=None if server else 1,
    )
    if not server:
        intra = MachineLink(
            scope="intra",
            name="pcie4 x16",
            bytes_per_s=31.5 * GB,
            latency_s=10e-6,
            measured=False,
            source="PCIe 4.0 x16 line rate; latency assumed",
        )
        return (intra, inter), ()
    frame = pd.read_parquet(_DATA / "aiconfigurator_nccl_intranode.parquet")
    frame = frame[(frame.gpu == sheet.aiconfigurator) & (frame.collective == "all_reduce")]
    frame = frame[frame.message_bytes >= SMALLEST_MESSAGE_BYTES]
    n = frame.n_gpus.to_numpy(dtype=np.float64)
    steps = 2 * (n - 1)
    seconds = frame.ms.to_numpy(dtype=np.float64) / 1e3
    features = np.stack([steps, steps / n * frame.message_bytes.to_numpy(dtype=np.float64)], axis=1)
    latency_s, s_per_byte = relative_fit(features, seconds)
    errors = []
    for index in range(len(seconds)):
        kept = np.arange(len(seconds)) != index
        solution = relative_fit(features[kept], seconds[kept])
        errors.append(abs(float(features[index] @ solution) / seconds[index] - 1))
    intra = MachineLink(
        scope="intra",
        name="nvlink",
        bytes_per_s=rounded(1 / s_per_byte),
        latency_s=rounded(latency_s),
        measured=True,
        source=f"{_AICONFIGURATOR}, ring formula fitted to all-reduces of 2, 4 and 8",
    )
    return (intra, inter), (quality("intra link", errors),)


def collective_tables(sheet: DataSheet) -> tuple[CollectiveTable, ...]:
    """Bytes/s by (ranks, bytes) of the collectives measured within a node."""
    frame = pd.read_parquet(_DATA / "aiconfigurator_nccl_intranode.parquet")
    frame = frame[frame.gpu == sheet.aiconfigurator]
    tables = []
    for name in ("all_reduce", "all_gather", "reduce_scatter"):
        rows = frame[frame.collective == name]
        if len(rows):
            at = rows[["n_gpus", "message_bytes"]].to_numpy(dtype=np.float64)
            rates = at[:, 1] / (rows.ms.to_numpy(dtype=np.float64) / 1e3)
            table = Table(
                axes=COLLECTIVE_AXES, points=_points(at, rates), measured=True, source=_AICONFIGURATOR
            )
            tables.append(CollectiveTable(collective=name, scope="intra", table=table))
    return tuple(tables)


def _decoder_rows(sheet: DataSheet) -> pd.DataFrame:
    frame = pd.read_parquet(_DATA / "vidur_layer_ops_fwd_fp16.parquet")
    return frame[frame.gpu == sheet.vidur]


def _head_width(rows: pd.DataFrame) -> pd.Series:
    return rows.n_embd / rows.n_head


def _tp(rows: pd.DataFrame) -> pd.Series:
    return rows.num_tensor_parallel_workers


def _points(coordinates: np.ndarray, rates: np.ndarray) -> tuple[tuple[float, ...], ...]:
    rows = [
        (*(float(value) for value in at), rounded(float(rate)))
        for at, rate in zip(coordinates, rates, strict=True)
    ]
    return tuple(sorted(rows))


def _unmeasured(
    matmul: Table, attention: Table, pointwise: Table, links: Sequence[MachineLink]
) -> tuple[str, ...]:
    tables = (("matmul", matmul), ("attention", attention), ("memory-bound kernels", pointwise))
    missing = [f"{name}: {table.source}" for name, table in tables if not table.measured]
    missing += [f"{link.scope} link: {link.source}" for link in links if not link.measured]
    missing += [
        "backward of matmul: forward rates at the transposed shapes",
        f"backward of attention: 2.5 x FLOP at {ATTENTION_BACKWARD_RATE:.2f} x the forward rate (Dao 2023)",
        "backward of memory-bound kernels: 1.5 x bytes",
        "executor overhead per action: taken as 0",
        "float32 and float64: bfloat16 rates scaled by the peaks",
    ]
    return tuple(missing)


def _provenance(sheet: DataSheet) -> Provenance:
    return Provenance(
        date="not stated by the sources",
        clocks="not stated by the sources",
        sources=(_AICONFIGURATOR, _VIDUR, f"NVIDIA {sheet.device} data sheet"),
    )


def shipped_errors(folder: Path = PROFILES) -> dict[str, dict[str, dict[str, float]]]:
    """Profile -> table -> points and leave-one-out error (median, 90th percentile), as shipped."""
    return {
        sheet.device: {
            fit.table: {"points": fit.num_points, "median": fit.median, "p90": fit.p90}
            for fit in load_profile(folder / f"{sheet.device}.json").fits
        }
        for sheet in SHEETS
    }


def main(arguments: Sequence[str]) -> None:
    """Write all profiles into the folder given, by default the one they ship in, and print their errors."""
    parser = argparse.ArgumentParser(prog="workbench.calibrate.public", description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=PROFILES)
    parser.add_argument("--json", action="store_true", help="print the errors as one JSON object")
    options = parser.parse_args(arguments)
    for sheet in SHEETS:
        write_profile(build_profile(sheet), options.folder / f"{sheet.device}.json")
    errors_by_profile = shipped_errors(options.folder)
    if options.json:
        sys.stdout.write(json.dumps(errors_by_profile, indent=1) + "\n")
        return
    for name, tables in errors_by_profile.items():
        for table, error in tables.items():
            sys.stdout.write(
                f"{name:10} {table:80} {error['points']:6} points, "
                f"leave-one-out {error['median']:6.1%} median, {error['p90']:6.1%} at p90\n"
            )


if __name__ == "__main__":
    main(sys.argv[1:])
