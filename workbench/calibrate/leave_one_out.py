"""Validation of rescaling by data sheets: each measured device is predicted from every other."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache

import numpy as np

from workbench.calibrate.data_sheet import DataSheet
from workbench.calibrate.device_sheet import DeviceSheet, shipped_sheet
from workbench.calibrate.public import attention_table, matmul_table
from workbench.calibrate.tables import rounded
from workbench.calibrate.transfer import rescaled
from workbench.cost.collectives import by_ranks
from workbench.cost.interpolate import Surface
from workbench.cost.profile import BYTES_AXES, CollectiveTable, Fit, Profile, Table, load_profile

PROFILES = ("A40", "A100-80GB", "H100", "H200")
L40S = "L40S"  # only its products and attention were measured
LARGE = 1e9  # FLOP of a product, from which it is typical of training
LONG = 1024  # likewise, tokens of a sequence
LARGE_BYTES = 2.0**20  # likewise, of a message or a tensor


class Rule(StrEnum):
    """What is rescaled, as named in fits."""

    PRODUCTS = "matmul, scaled by data sheets"
    PEAKS = "matmul, scaled by peaks alone"
    ATTENTION = "attention, scaled by data sheets"
    MEMORY = "memory-bound kernels, scaled by data sheets"
    COLLECTIVES = "collectives, scaled by data sheets"


RULES = (Rule.PRODUCTS, Rule.ATTENTION, Rule.MEMORY, Rule.COLLECTIVES)
"""Rules used for derived profiles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleErrors:
    """Errors of one device predicted from another.

    Args:
        rule: that was applied.
        device: that was left out.
        like: the one whose tables were rescaled.
        alike: whether both are of one architecture.
        num_points: measured sizes that are typical of training.
        median, p90: of the absolute relative errors of seconds.
        signed: median of the relative errors; negative: predicted too fast.
    """

    rule: Rule
    device: str
    like: str
    alike: bool
    num_points: int
    median: float
    p90: float
    signed: float


@cache
def rule_errors() -> tuple[RuleErrors, ...]:
    """Errors of every rule on every ordered pair of measured devices, at sizes typical of training.

    Complexity: O(pairs x points); if two tables have different points, O(points^2).
    """
    machines = _measured()
    summaries: list[RuleErrors] = []
    for sheet, truth in machines:
        for like_sheet, like in machines:
            if like is truth:
                continue
            guess = rescaled(sheet, like, like_sheet)
            by_peaks = _by_peaks(sheet, like, like_sheet)
            for rule in Rule:
                prediction = by_peaks if rule is Rule.PEAKS else guess
                errors = [
                    error for pair in _tables(rule, prediction, truth, like) for error in _errors(*pair)
                ]
                if errors:
                    summaries.append(_summary(rule, sheet, like_sheet, errors))
    return tuple(summaries)


def fits_of(sheet: DeviceSheet, like_sheet: DeviceSheet, rules: Sequence[Rule]) -> tuple[Fit, ...]:
    """Errors of rules between devices as similar as these two: of one architecture, or of different ones.

    Median and 90th percentile are means over the pairs; a rule without a pair of one architecture uses the
    others.
    """
    alike = sheet.architecture == like_sheet.architecture
    fits = []
    for rule in rules:
        pairs = [each for each in rule_errors() if each.rule is rule]
        pairs = [each for each in pairs if each.alike is alike] or pairs
        median, p90 = (float(np.mean([getattr(each, name) for each in pairs])) for name in ("median", "p90"))
        num_points = sum(each.num_points for each in pairs)
        fits.append(Fit(table=rule, num_points=num_points, median=rounded(median), p90=rounded(p90)))
    return tuple(fits)


def _measured() -> list[tuple[DeviceSheet, Profile]]:
    """Data sheet and measured profile of every device that has both."""
    profiles = [(shipped_sheet(name), load_profile(name)) for name in PROFILES]
    sheet = shipped_sheet(L40S)
    published = DataSheet(sheet=sheet, aiconfigurator=L40S, vidur=None)
    empty = Table()
    partial = replace(
        profiles[0][1],
        name=L40S,
        device=L40S,
        matmul=matmul_table(published),
        attention=attention_table(published),
        pointwise=empty,
        normalization=empty,
        collectives=(),
    )
    return [*profiles, (sheet, partial)]


def _by_peaks(sheet: DeviceSheet, like: Profile, like_sheet: DeviceSheet) -> Profile:
    """Products rescaled by the ratio of peaks alone: the baseline of the other rules."""
    ratio = sheet.bfloat16_flop_per_s / like_sheet.bfloat16_flop_per_s
    points = tuple((*point[:-1], point[-1] * ratio) for point in like.matmul.points)
    return replace(like, matmul=replace(like.matmul, points=points))


def _tables(rule: Rule, guess: Profile, truth: Profile, like: Profile) -> Iterator[tuple[Table, Table]]:
    """Pairs of a rescaled and a measured table, where the one was rescaled from a measured one."""
    if rule is Rule.COLLECTIVES:
        for scaled, measured in zip(guess.collectives, truth.collectives, strict=False):
            yield from zip(_lines(scaled), _lines(measured), strict=True)
        return
    names = {
        Rule.PRODUCTS: ("matmul",),
        Rule.PEAKS: ("matmul",),
        Rule.ATTENTION: ("attention",),
        Rule.MEMORY: ("pointwise", "normalization"),
    }[rule]
    for name in names:
        scaled, measured, source = (getattr(each, name) for each in (guess, truth, like))
        if measured.measured and source.measured:
            yield scaled, measured


def _lines(collective: CollectiveTable) -> list[Table]:
    return [
        Table(axes=BYTES_AXES, points=tuple(points))
        for _, points in sorted(by_ranks(collective.table).items())
    ]


def _errors(scaled: Table, truth: Table) -> list[float]:
    """Relative errors of seconds at the measured sizes of training."""
    known = {point[:-1]: point[-1] for point in scaled.points}
    surface = Surface(scaled.points)
    wanted = [point for point in truth.points if _is_of_training(truth, point)]
    guesses = [known.get(point[:-1]) or surface.read(*point[:-1]).rate for point in wanted]
    return [point[-1] / guess - 1 for point, guess in zip(wanted, guesses, strict=True)]


def _is_of_training(table: Table, point: tuple[float, ...]) -> bool:
    if table.axes[0] == "m":
        return 2.0 * point[0] * point[1] * point[2] >= LARGE
    return point[0] >= (LONG if table.axes[0] == "length" else LARGE_BYTES)


def _summary(rule: Rule, sheet: DeviceSheet, like_sheet: DeviceSheet, errors: Sequence[float]) -> RuleErrors:
    absolute = np.abs(errors)
    return RuleErrors(
        rule=rule,
        device=sheet.device,
        like=like_sheet.device,
        alike=sheet.architecture == like_sheet.architecture,
        num_points=len(errors),
        median=float(np.median(absolute)),
        p90=float(np.quantile(absolute, 0.9)),
        signed=float(np.median(errors)),
    )
