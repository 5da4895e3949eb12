"""The bars that the attention kernels are held against, K1 to K13, from measured times alone."""

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product

from experiments.bench.kernel_cells import Contender as Who

MULTIMODAL = ("EP", "EE", "MP")
JUDGED = (16384, 65536)  # tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One contender on one cell: medians in seconds; None where the pass was not measured.

    `modelled` is the list-scheduling time of the forward in units of a FULL tile, for ours. Spreads are
    (third quartile - first quartile) / median.
    """

    mask: str
    length: int
    kind: str  # "full", "cp g=4", "cp g=1", "hd64", "hd256"
    seed: int
    who: Who
    forward_s: float
    backward_s: float | None
    forward_flop: float
    modelled: float | None = None
    forward_spread: float = 0.0
    backward_spread: float = 0.0

    @property
    def cell(self) -> tuple[str, int, str, int]:
        return self.mask, self.length, self.kind, self.seed

    def seconds(self, what: str) -> float | None:
        """ "forward", "backward" or "both"."""
        if what == "forward":
            return self.forward_s
        if self.backward_s is None:
            return None
        return self.backward_s if what == "backward" else self.forward_s + self.backward_s


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedForward:
    """Our forward on one mask and launch shape, by list scheduling and by the clock."""

    mask: str
    length: int
    kind: str
    seed: int
    simulated_s: float
    measured_s: float

    @property
    def error(self) -> float:
        return self.simulated_s / self.measured_s - 1


def simulated_forwards(timings: Iterable[Timing]) -> list[SimulatedForward]:
    """Every cell of width 128; the model's unit, a FULL tile, is the median over causal cells."""
    modelled = [x for x in timings if x.modelled and not x.kind.startswith("hd")]
    units = [x.forward_s / x.modelled for x in modelled if x.mask == "causal" and x.modelled]
    if not units:
        return []
    unit_s = statistics.median(units)
    return [
        SimulatedForward(
            mask=x.mask,
            length=x.length,
            kind=x.kind,
            seed=x.seed,
            simulated_s=unit_s * (x.modelled or 0.0),
            measured_s=x.forward_s,
        )
        for x in modelled
    ]


@dataclass(frozen=True, slots=True)
class Bar:
    """One row: `value` None means not measured."""

    key: str
    meaning: str
    must: float
    value: float | None
    at_most: bool = False

    @property
    def verdict(self) -> str:
        if self.value is None:
            return "MISSING"
        return "ok" if (self.value <= self.must if self.at_most else self.value >= self.must) else "OFF"


def bars(timings: Iterable[Timing], extra: Mapping[str, float]) -> list[Bar]:
    """K1 to K13. `extra` has what is no pass of a cell: plan times in seconds, equality of bits."""
    t = _Table(timings)
    flex_forward = t.ratios("forward", Who.FLEX, Who.OURS, "full", MULTIMODAL)
    flex_backward = t.ratios("backward", Who.FLEX, Who.OURS, "full", MULTIMODAL)
    tuned = t.ratios("both", Who.FLEX_TUNED, Who.OURS, "full", MULTIMODAL)
    whole = t.ratios("forward", Who.WHOLE, Who.OURS, "full", ("causal", *MULTIMODAL))
    ordered = t.ratios("both", Who.DETERMINISTIC, Who.OURS, "full", ("causal", *MULTIMODAL))
    flash = {
        what: _geomean(t.ratios(what, Who.FLEX_FLASH, Who.OURS, "full", MULTIMODAL))
        for what in ("forward", "backward")
    }
    local = t.ratios("forward", Who.FLEX, Who.OURS, "cp g=4", ("EE", "MP"))
    local_split = t.ratios("forward", Who.WHOLE, Who.OURS, "cp g=4", ("EE", "MP"))
    single_split = t.ratios("forward", Who.WHOLE, Who.OURS, "cp g=1", ("EE", "MP"))
    plan_s, flex_plan_s = extra.get("plan_s"), extra.get("flex_plan_s")
    made = None if plan_s is None or flex_plan_s is None else flex_plan_s / plan_s
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
        Bar("K7", "compiled create_block_mask / plan of 64k tokens", 10.0, made),
        Bar("K7 time", "plan of 64k tokens, seconds", 0.5e-3, plan_s, at_most=True),
        Bar("K8", "one rank of 8, one KV head, group of 4: FlexAttention / ours", 1.40, _geomean(local)),
        Bar("K8 split", "the same: no split / split where it pays", 1.15, _geomean(local_split)),
        Bar("K9", "the same, group of 1: no split / split where it pays", 2.50, _geomean(single_split)),
        Bar("K10", "whole launches: no split / split where it pays, worst", 0.99, min(whole, default=None)),
        Bar("K11 bits", "deterministic mode: 5 runs with equal bits", 1.0, extra.get("equal_bits")),
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


def least_ratios(timings: Iterable[Timing]) -> dict[str, float | None]:
    """The smallest rival's time over ours of whole launches: None unless all masks and lengths have both.

    FlexAttention on EP, EE and MP, each pass by itself; cuDNN on causal, both passes.
    """
    t = _Table(timings)
    return {
        "flex_forward_min": t.least_ratio(("forward",), Who.FLEX, MULTIMODAL),
        "flex_backward_min": t.least_ratio(("backward",), Who.FLEX, MULTIMODAL),
        "cudnn_causal_min": t.least_ratio(("forward", "backward"), Who.CUDNN, ("causal",)),
    }


class _Table:
    """Timings by cell and contender."""

    def __init__(self, timings: Iterable[Timing]) -> None:
        self.all = list(timings)
        self.by = {(*timing.cell, timing.who): timing for timing in self.all}

    def ratios(self, what: str, other: Who, ours: Who, kind: str, masks: tuple[str, ...]) -> list[float]:
        """Time of `other` over time of `ours`, for every cell that has both."""
        found = []
        for timing in self.all:
            if timing.who is not ours or timing.kind != kind or timing.mask not in masks:
                continue
            rival = self.by.get((*timing.cell, other))
            mine, theirs = timing.seconds(what), None if rival is None else rival.seconds(what)
            if mine is not None and theirs is not None:
                found.append(theirs / mine)
        return found

    def least_ratio(self, passes: tuple[str, ...], other: Who, masks: tuple[str, ...]) -> float | None:
        """Over passes, masks, JUDGED lengths and draws."""
        found = []
        for what, mask, length in product(passes, masks, JUDGED):
            cells = [timing for timing in self.all if (timing.mask, timing.length) == (mask, length)]
            ratios = _Table(cells).ratios(what, other, Who.OURS, "full", (mask,))
            if not ratios:
                return None
            found += ratios
        return min(found)

    def rate_ratio(self, what: str, baseline: Who) -> float | None:
        """Our FLOP/s on EE and EP over the baseline's on the causal mask, geomean over cells."""
        found = []
        for timing in self.all:
            if timing.who is not Who.OURS or timing.kind != "full" or timing.mask not in ("EE", "EP"):
                continue
            other = self.by.get(("causal", timing.length, "full", 0, baseline))
            mine, theirs = timing.seconds(what), None if other is None else other.seconds(what)
            if mine and theirs and other is not None:
                found.append((timing.forward_flop / mine) / (other.forward_flop / theirs))
        return _geomean(found)

    def retained(self, mask: str, length: int) -> float | None:
        """Our forward FLOP/s on a mask over our own on the causal mask of that length."""
        own = self.by.get(("causal", length, "full", 0, Who.OURS))
        cells = [
            timing
            for timing in self.all
            if timing.who is Who.OURS and (timing.mask, timing.length, timing.kind) == (mask, length, "full")
        ]
        if own is None:
            return None
        rate = own.forward_flop / own.forward_s
        return _geomean([timing.forward_flop / timing.forward_s / rate for timing in cells])

    def width_ratio(self, kind: str) -> float | None:
        return _geomean(self.ratios("both", Who.FLEX, Who.OURS, kind, ("causal", *MULTIMODAL)))

    def model_error(self) -> float | None:
        """Median relative error of the model but for the causal cells that give its unit."""
        errors = [abs(row.error) for row in simulated_forwards(self.all) if row.mask != "causal"]
        return statistics.median(errors) if errors else None


def _geomean(values: list[float]) -> float | None:
    return math.exp(statistics.fmean(math.log(value) for value in values)) if values else None
