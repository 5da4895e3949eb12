"""Rescale the tables of a measured device to another by their two data sheets.

Every rule is a ratio of physical times on the two devices, so that the measured kernels' losses beyond
physics are kept. `leave_one_out.rule_errors` gives each rule's error on pairs of measured devices.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from workbench.calibrate.device_sheet import DeviceSheet
from workbench.calibrate.tables import rounded
from workbench.cost.device_limits import NarrowRate, PowerLimit
from workbench.cost.power import clock_share
from workbench.cost.profile import (
    CollectiveTable,
    MachineLink,
    Profile,
    Provenance,
    SustainedHeads,
    SustainedProducts,
    Table,
)

# The fastest kernels of cuBLAS work on tiles of 256 x 128 or 128 x 256 (NVIDIA, "Matrix Multiplication
# Background User's Guide", section on tile quantization).
TILE = (128, 256)
ELEMENT_BYTES = 2


def power_share(sheet: DeviceSheet) -> float:
    """Share of the rate of compute-bound kernels that the board's power limit leaves."""
    if sheet.full_power_w is None:
        return 1.0
    full = PowerLimit(rated_w=sheet.full_power_w, source=f"data sheet of {sheet.device}")
    return clock_share(sheet.power_w, full)


def compute_rates(sheet: DeviceSheet, like_sheet: DeviceSheet) -> tuple[float, float]:
    """FLOP/s of products on either device: the fastest measured if both sheets have it, else the peaks."""
    rate, rate_of_like = sheet.reached_bfloat16_flop_per_s, like_sheet.reached_bfloat16_flop_per_s
    if rate is None or rate_of_like is None:
        rate, rate_of_like = sheet.bfloat16_flop_per_s, like_sheet.bfloat16_flop_per_s
    return rate * power_share(sheet), rate_of_like * power_share(like_sheet)


def product_seconds(sheet: DeviceSheet, at: NDArray[np.float64], flop_per_s: float) -> NDArray[np.float64]:
    """Seconds of products y[m, n] = x[m, k] w[k, n] by roofline and waves of tiles.

    Compute and memory overlap except near the corner of the roofline, where neither finishes early: the
    root of the sum of their squares. Tiles fill the processors wave after wave; of the loss in a partly
    empty last wave, kernels that split tiles recover half (the root). Fewer tiles than processors split
    their inner dimension. Memory is read once.

    Args:
        sheet: of the device.
        at: [N, 3] of m, n and k.
        flop_per_s: of all processors together.
    """
    m, n, k = at.T
    tiles = np.ceil(m / TILE[0]) * np.ceil(n / TILE[1])
    waves = np.ceil(tiles / sheet.processors) * sheet.processors / tiles
    lost = np.where(tiles < sheet.processors, 1.0, waves)
    computed_s = 2.0 * m * n * k * np.sqrt(lost) / flop_per_s
    moved_s = ELEMENT_BYTES * (m * k + k * n + m * n) / sheet.memory_bytes_per_s
    return np.asarray(np.hypot(computed_s, moved_s))


def memory_seconds(
    seconds: NDArray[np.float64],
    num_bytes: NDArray[np.float64],
    best_bytes_per_s: float,
    sheet: DeviceSheet,
    like_sheet: DeviceSheet,
) -> NDArray[np.float64]:
    """Seconds of memory-bound kernels, from those on another device.

    Bytes at its best rate scale with bandwidth; the rest is launch time and stays.
    """
    moved_s = np.minimum(seconds, num_bytes / best_bytes_per_s)
    return np.asarray(seconds - moved_s + moved_s * like_sheet.memory_bytes_per_s / sheet.memory_bytes_per_s)


PCIE_LATENCY_S = 10e-6  # assumed, as of the measured profiles without NVLink
NEARLY = 0.9  # of a peak: boards that power holds back reach 0.78 to 0.87 of theirs
INTRA, INTER = "intra", "inter"
CARD = "line rate of a device's network card; latency typical"

Rescale = Callable[[NDArray[np.float64]], NDArray[np.float64]]  # points' coordinates -> factors on rates


def rescaled(sheet: DeviceSheet, like: Profile, like_sheet: DeviceSheet) -> Profile:
    """The profile of an unmeasured device, derived from a measured one; without fits.

    Products: rate times the ratio of roofline times with waves of tiles (`product_seconds`), at the rates
    of the fastest measured products if both sheets have them, else at the peaks. Attention: times the ratio
    of bfloat16 peaks; it computes on tiles that stay on a processor. Under a power limit both lose
    `power_share`. Memory-bound kernels: launch time stays, the rest scales with bandwidth. Collectives over
    NVLink or similar: latency stays, the rest scales with bandwidth; a device without uses the ring formula
    over PCIe. Layers measured as a whole, and measurements in pipelines, are left out.

    Args:
        sheet: of the device.
        like: a measured profile; the device's kernels are assumed to be as good.
        like_sheet: its sheet.

    Complexity: O(points).
    """
    products, heads = _products(sheet, like_sheet), _attention(sheet, like_sheet)
    fastest, _ = compute_rates(sheet, like_sheet)
    links, collectives = _links(sheet, like, like_sheet), _collectives(sheet, like, like_sheet)
    return replace(
        like,
        name=sheet.device,
        device=sheet.device,
        memory_bytes=int(sheet.memory_bytes),
        peak_flop_per_s=sheet.peaks,
        peak_bytes_per_s=sheet.memory_bytes_per_s,
        provenance=_provenance(sheet, like),
        matmul=_rescaled(like.matmul, products, like, fastest),
        attention=_rescaled(like.attention, heads, like),
        pointwise=_rescaled(like.pointwise, _memory_factors(like.pointwise, sheet, like_sheet), like),
        normalization=_rescaled(
            like.normalization, _memory_factors(like.normalization, sheet, like_sheet), like
        ),
        sustained_products=tuple(
            SustainedProducts(direction=each.direction, table=_rescaled(each.table, products, like, fastest))
            for each in like.sustained_products
        ),
        sustained_attention=tuple(
            SustainedHeads(
                head_dim=each.head_dim,
                causal=each.causal,
                forward=_rescaled(each.forward, heads, like),
                backward=_rescaled(each.backward, heads, like),
            )
            for each in like.sustained_attention
        ),
        power=_power(sheet, like),
        narrow_rates=_narrow(sheet),
        in_pipeline=(),
        without_messages=(),
        optimizer_s_per_parameter=(),
        layers=(),
        links=links,
        collectives=collectives,
        node_ranks=sheet.link_ranks,
        like=like.name,
        presumed=sheet.presumed,
        unmeasured=_unmeasured(sheet, like, collectives),
        fits=(),
    )


def _power(sheet: DeviceSheet, like: Profile) -> PowerLimit | None:
    """The sheet's power limit, for which the rescaled rates hold; sustained shares as on the other device.

    A board whose fastest product nearly reaches its peak has power to spare: training sustains its rates.
    """
    if like.power is None:
        return None
    power = replace(like.power, rated_w=sheet.power_w, source="its data sheet")
    reached = sheet.reached_bfloat16_flop_per_s
    if reached is None or reached < NEARLY * sheet.bfloat16_flop_per_s:
        return power
    return replace(power, sustained_products=1.0, sustained_source="its fastest product is near its peak")


def _narrow(sheet: DeviceSheet) -> tuple[NarrowRate, ...]:
    """Rate of FP8 over bfloat16 products, if the sheet has the fastest of both."""
    wide, narrow = sheet.reached_bfloat16_flop_per_s, sheet.reached_fp8_flop_per_s
    if wide is None or narrow is None:
        return ()
    source = dict(sheet.sources)["reached_fp8_tflop_per_s"]
    is_measured = "reached_fp8_tflop_per_s" not in sheet.presumed
    return (
        NarrowRate(product_format="fp8", rate=rounded(narrow / wide), measured=is_measured, source=source),
    )


def _products(sheet: DeviceSheet, like_sheet: DeviceSheet) -> Rescale:
    rate, rate_of_like = compute_rates(sheet, like_sheet)
    return lambda at: product_seconds(like_sheet, at, rate_of_like) / product_seconds(sheet, at, rate)


def _attention(sheet: DeviceSheet, like_sheet: DeviceSheet) -> Rescale:
    ratio = sheet.bfloat16_flop_per_s * power_share(sheet)
    ratio /= like_sheet.bfloat16_flop_per_s * power_share(like_sheet)
    return lambda at: np.full(len(at), ratio)


def _memory_factors(table: Table, sheet: DeviceSheet, like_sheet: DeviceSheet) -> Rescale:
    """Factors on rates: of each point's seconds, the bytes at the table's best rate scale with bandwidth."""

    def factors(at: NDArray[np.float64]) -> NDArray[np.float64]:
        rates = np.asarray([point[-1] for point in table.points])
        seconds = at[:, 0] / rates
        moved_s = memory_seconds(seconds, at[:, 0], float(rates.max()), sheet, like_sheet)
        return np.asarray(seconds / moved_s)

    return factors


def _rescaled(table: Table, rescale: Rescale, like: Profile, fastest: float = math.inf) -> Table:
    if not table.points:
        return table
    at = np.asarray(table.points, dtype=np.float64)[:, :-1]
    points = tuple(
        (*point[:-1], rounded(min(fastest, point[-1] * factor)))
        for point, factor in zip(table.points, rescale(at), strict=True)
    )
    source = f"{table.source}, {like.name} scaled by data sheets"
    return replace(table, points=points, measured=False, source=source)


def _links(sheet: DeviceSheet, like: Profile, like_sheet: DeviceSheet) -> tuple[MachineLink, MachineLink]:
    inter = MachineLink(
        scope=INTER,
        name="network card",
        bytes_per_s=sheet.card_bytes_per_s,
        latency_s=like.machine_link(INTER).latency_s,
        measured=False,
        source=CARD,
    )
    if sheet.link_bytes_per_s is None:
        intra = MachineLink(
            scope=INTRA,
            name="pcie",
            bytes_per_s=sheet.pcie_bytes_per_s,
            latency_s=PCIE_LATENCY_S,
            measured=False,
            source="PCIe line rate; latency assumed",
        )
        return intra, inter
    measured = like.machine_link(INTRA)
    share = 1.0 if like_sheet.link_bytes_per_s is None else measured.bytes_per_s / like_sheet.link_bytes_per_s
    intra = MachineLink(
        scope=INTRA,
        name=measured.name,
        bytes_per_s=rounded(share * sheet.link_bytes_per_s),
        latency_s=measured.latency_s,
        measured=False,
        source=f"{like.name} scaled by data sheets",
    )
    return intra, inter


def _collectives(sheet: DeviceSheet, like: Profile, like_sheet: DeviceSheet) -> tuple[CollectiveTable, ...]:
    if sheet.link_bytes_per_s is None or like_sheet.link_bytes_per_s is None:
        return ()
    share = like_sheet.link_bytes_per_s / sheet.link_bytes_per_s
    return tuple(
        replace(
            collective, table=_rescaled(collective.table, _message_factors(collective.table, share), like)
        )
        for collective in like.collectives
        if collective.scope == INTRA
    )


def _message_factors(table: Table, share: float) -> Rescale:
    """Factors on rates: seconds beyond those of the smallest message among equally many ranks scale with
    bandwidth.
    """

    def factors(at: NDArray[np.float64]) -> NDArray[np.float64]:
        seconds = at[:, 1] / np.asarray([point[-1] for point in table.points])
        start = np.asarray([seconds[at[:, 0] == ranks].min() for ranks in at[:, 0]])
        return np.asarray(seconds / (start + (seconds - start) * share))

    return factors


def _provenance(sheet: DeviceSheet, like: Profile) -> Provenance:
    sources = dict.fromkeys(f"{source}" for _, source in sheet.sources)
    return Provenance(
        date=like.provenance.date,
        clocks="not measured: scaled by data sheets",
        sources=(*like.provenance.sources, *sources),
    )


def _unmeasured(
    sheet: DeviceSheet, like: Profile, collectives: tuple[CollectiveTable, ...]
) -> tuple[str, ...]:
    scaled = f"{like.name} scaled by data sheets"
    sources, costs = dict(sheet.sources), ("matmul", "attention", "memory-bound kernels", "intra link")
    kept = (reason for reason in like.unmeasured if not reason.startswith((*costs, INTER)))
    return (
        *(f"{cost}: {scaled}" for cost in costs[:-1]),
        f"collectives: {scaled}" if collectives else "collectives: ring formula over PCIe",
        f"inter link: {CARD}",
        *(f"{cell} presumed: {sources[cell]}" for cell in sheet.presumed),
        *kept,
    )
