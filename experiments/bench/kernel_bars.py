"""The bars for the attention kernels, K1 to K13, computed from measured times alone."""

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

from experiments.bench.kernel_cells import Contender as Who
from experiments.bench.kernel_rows import BITS, PLAN, KernelRow
from experiments.harness.command import reaches
from workbench.float_sum import float_sum

MULTIMODAL = ("EP", "EE", "MP")
BAR_TOKENS = (16384, 65536)  # tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedForward:
    """Our forward on one mask and launch shape: list-scheduled and measured time."""

    mask: str
    length: int
    kind: str
    seed: int
    simulated_s: float
    measured_s: float

    @property
    def error(self) -> float:
        return self.simulated_s / self.measured_s - 1


def simulated_forwards(rows: Iterable[KernelRow]) -> list[SimulatedForward]:
    """Simulate every cell of width 128; the unit, a FULL tile, is the median over causal cells."""
    modelled = [
        (row, row.modelled, row.seconds)
        for row in rows
        if row.modelled and row.seconds and not row.kind.startswith("hd")
    ]
    units = [seconds / span for row, span, seconds in modelled if row.mask == "causal"]
    if not units:
        return []
    unit_s = statistics.median(units)
    return [
        SimulatedForward(
            mask=row.mask,
            length=row.length,
            kind=row.kind,
            seed=row.seed,
            simulated_s=unit_s * span,
            measured_s=seconds,
        )
        for row, span, seconds in modelled
    ]


@dataclass(frozen=True, slots=True)
class Bar:
    """One goal with its value; `value` None means not measured."""

    key: str
    meaning: str
    must: float
    value: float | None
    at_most: bool = False

    @property
    def verdict(self) -> str:
        if self.value is None:
            return "MISSING"
        return "ok" if reaches(self.value, self.must, at_most=self.at_most) else "OFF"


def bars(rows: Iterable[KernelRow]) -> list[Bar]:
    """Return the goals K1 to K13 with their values."""
    t = _Table(rows)
    flex_forward = t.ratios("forward", Who.FLEX, "full", MULTIMODAL)
    flex_backward = t.ratios("backward", Who.FLEX, "full", MULTIMODAL)
    tuned = t.ratios("both", Who.FLEX_TUNED, "full", MULTIMODAL)
    whole = t.ratios("forward", Who.WHOLE, "full", ("causal", *MULTIMODAL))
    ordered = t.ratios("both", Who.DETERMINISTIC, "full", ("causal", *MULTIMODAL))
    flash = {
        what: _geomean(t.ratios(what, Who.FLEX_FLASH, "full", MULTIMODAL)) for what in ("forward", "backward")
    }
    local = t.ratios("forward", Who.FLEX, "cp g=4", ("EE", "MP"))
    local_split = t.ratios("forward", Who.WHOLE, "cp g=4", ("EE", "MP"))
    single_split = t.ratios("forward", Who.WHOLE, "cp g=1", ("EE", "MP"))
    plan_s, flex_plan_s = t.plan_s.get(Who.OURS.name), t.plan_s.get(Who.FLEX.name)
    plan_ratio = None if plan_s is None or flex_plan_s is None else flex_plan_s / plan_s
    return [
        Bar("K1", "forward: FlexAttention / ours, geomean of EP, EE, MP", 1.10, _geomean(flex_forward)),
        Bar("K1 worst", "the same, worst cell", 1.00, min(flex_forward, default=None)),
        Bar("K2", "backward: FlexAttention / ours, geomean", 1.10, _geomean(flex_backward)),
        Bar("K2 worst", "the same, worst cell", 1.00, min(flex_backward, default=None)),
        Bar("K3", "forward + backward: FlexAttention max-autotune / ours, geomean", 1.05, _geomean(tuned)),
        Bar("FLASH fwd", "forward: FlexAttention's FLASH backend / ours, geomean", 0.65, flash["forward"]),
        Bar("FLASH bwd", "the same, backward", 0.55, flash["backward"]),
        Bar("K4 fwd", "FLOP/s on EE, EP / SDPA flash causal", 1.00, t.rate_ratio("forward", Who.FLASH)),
        Bar("K4 bwd", "the same, backward", 0.85, t.rate_ratio("backward", Who.FLASH)),
        Bar("K5 fwd", "FLOP/s on EE, EP / SDPA cuDNN causal", 0.60, t.rate_ratio("forward", Who.CUDNN)),
        Bar("K5 bwd", "the same, backward", 0.50, t.rate_ratio("backward", Who.CUDNN)),
        Bar("K6 EE", "FLOP/s on EE at 64k / own causal", 0.85, t.retained("EE", 65536)),
        Bar("K6 MP", "FLOP/s on MP at 16k / own causal", 0.60, t.retained("MP", 16384)),
        Bar("K7", "create_block_mask / plan of 64k tokens", 10.0, plan_ratio),
        Bar("K7 time", "plan of 64k tokens, seconds", 0.5e-3, plan_s, at_most=True),
        Bar("K8", "one rank of 8, one KV head, group of 4: FlexAttention / ours", 1.40, _geomean(local)),
        Bar("K8 split", "the same: no split / split where it pays", 1.15, _geomean(local_split)),
        Bar("K9", "the same, group of 1: no split / split where it pays", 2.50, _geomean(single_split)),
        Bar("K10", "whole launches: no split / split where it pays, worst", 0.99, min(whole, default=None)),
        Bar("K11 bits", "deterministic mode: 5 runs with equal bits", 1.0, t.equal_bits),
        Bar(
            "K11",
            "deterministic / fused, forward + backward, worst",
            1.60,
            max(ordered, default=None),
            at_most=True,
        ),
        Bar("K12 hd64", "forward + backward: FlexAttention / ours", 1.0, t.width_ratio("hd64")),
        Bar("K12 hd256", "forward + backward: FlexAttention / ours", 1.0, t.width_ratio("hd256")),
        Bar(
            "K13",
            "list-scheduling model against measured forward, median error",
            0.12,
            t.model_error(),
            at_most=True,
        ),
    ]


def least_ratios(rows: Iterable[KernelRow]) -> dict[str, float | None]:
    """Smallest ratio of a rival's time to ours over whole launches; None unless all cells have both.

    FlexAttention on EP, EE and MP, each pass by itself; cuDNN on causal, both passes.
    """
    t = _Table(rows)
    return {
        "flex_forward_min": t.least_ratio(("forward",), Who.FLEX, MULTIMODAL),
        "flex_backward_min": t.least_ratio(("backward",), Who.FLEX, MULTIMODAL),
        "cudnn_causal_min": t.least_ratio(("forward", "backward"), Who.CUDNN, ("causal",)),
    }


class _Table:
    """The measurements: passes of cells by contender, plans, and whether bits repeat."""

    def __init__(self, rows: Iterable[KernelRow]) -> None:
        all_rows = list(rows)
        timed = [row for row in all_rows if row.seconds is not None]
        bits = [row.error is None for row in all_rows if row.kind == BITS]
        self.plan_s = {row.who: row.seconds for row in timed if row.kind == PLAN}
        self.equal_bits = float(all(bits)) if bits else None
        self.forwards = [row for row in timed if row.direction == "forward"]
        self.by = {(*row.cell, row.who, row.direction): row for row in timed}

    def seconds(self, cell: tuple[str, int, str, int], who: Who, what: str) -> float | None:
        """Seconds of "forward", "backward" or "both"; None where one was not measured."""
        passes = ("forward", "backward") if what == "both" else (what,)
        rows = [self.by.get((*cell, who.name, direction)) for direction in passes]
        times = [row.seconds for row in rows if row is not None and row.seconds is not None]
        return float_sum(times) if len(times) == len(passes) else None

    def ours(self, kind: str, masks: tuple[str, ...]) -> list[KernelRow]:
        """Our forward times on cells of a kind."""
        forwards = [row for row in self.forwards if row.who == Who.OURS.name]
        return [row for row in forwards if row.kind == kind and row.mask in masks]

    def ratios(self, what: str, other: Who, kind: str, masks: tuple[str, ...]) -> list[float]:
        """Time of `other` over ours, for every cell that has both."""
        both = [
            (self.seconds(row.cell, other, what), self.seconds(row.cell, Who.OURS, what))
            for row in self.ours(kind, masks)
        ]
        return [other_s / ours_s for other_s, ours_s in both if other_s is not None and ours_s is not None]

    def least_ratio(self, passes: tuple[str, ...], other: Who, masks: tuple[str, ...]) -> float | None:
        """The smallest ratio over passes, masks, lengths of `BAR_TOKENS` and draws."""
        all_ratios = []
        for what, mask, length in product(passes, masks, BAR_TOKENS):
            cells = [row for row in self.by.values() if (row.mask, row.length) == (mask, length)]
            ratios = _Table(cells).ratios(what, other, "full", (mask,))
            if not ratios:
                return None
            all_ratios += ratios
        return min(all_ratios)

    def rate(self, cell: tuple[str, int, str, int], who: Who, what: str) -> float | None:
        """FLOP/s of a pass, with a backward counted as one forward."""
        row, seconds = self.by.get((*cell, who.name, what)), self.seconds(cell, who, what)
        return (row.flop or 0.0) / seconds if row is not None and seconds else None

    def rate_ratio(self, what: str, baseline: Who) -> float | None:
        """Our FLOP/s on EE and EP over the baseline's on the causal mask: geometric mean over cells."""
        both = [
            (self.rate(row.cell, Who.OURS, what), self.rate(causal_cell(row.length), baseline, what))
            for row in self.ours("full", ("EE", "EP"))
        ]
        return _geomean([ours / baseline for ours, baseline in both if ours and baseline])

    def retained(self, mask: str, length: int) -> float | None:
        """Our forward FLOP/s on a mask over our own on the causal mask of the same length."""
        own = self.rate(causal_cell(length), Who.OURS, "forward")
        mine = [row for row in self.ours("full", (mask,)) if row.length == length]
        rates = [self.rate(row.cell, Who.OURS, "forward") for row in mine]
        return _geomean([rate / own for rate in rates if rate]) if own else None

    def width_ratio(self, kind: str) -> float | None:
        return _geomean(self.ratios("both", Who.FLEX, kind, ("causal", *MULTIMODAL)))

    def model_error(self) -> float | None:
        """Median relative error of the model, without the causal cells that calibrate its unit."""
        errors = [abs(row.error) for row in simulated_forwards(self.forwards) if row.mask != "causal"]
        return statistics.median(errors) if errors else None


def causal_cell(length: int) -> tuple[str, int, str, int]:
    """The whole causal launch that rates are compared with."""
    return "causal", length, "full", 0


def _geomean(values: list[float]) -> float | None:
    return math.exp(statistics.fmean(math.log(value) for value in values)) if values else None
